"""With asynchronous scheduling a step is planned while one runs; the tokens are those without."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.engine.engine import Engine
from baton.request import FinishReason, Request, SamplingParams, TokenIds
from tests.disturbed_requests import Answers, answers
from tests.tiny_models import add, generate, run_to_end, tiny_engine, token_ids

pytestmark = pytest.mark.usefixtures("ranks_are_forked")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    made = tiny_engine(tiny_model, ManualClock(), scheduler={"async_scheduling": True})
    yield made
    assert not made.has_work() and made.load().pages["active"] == 0
    made.scheduler.check_integrity()


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Answers]:
    """The answers without asynchronous scheduling, by seed."""
    engine = tiny_engine(tiny_model)
    found = [answers(engine, seed) for seed in range(4)]
    engine.close()
    return found


@pytest.mark.parametrize(
    ("policy", "tp_size"), [("continuous", 1), ("continuous", 2), ("static", 1), ("dynamic", 1)]
)
def test_tokens_and_logprobs_are_those_without(
    policy: str, tp_size: int, plain: list[Answers], tiny_model: Path
) -> None:
    """On the way sequences stop early, are preempted, and leave tokens that nobody wants in the next step."""
    num_seeds = 4 if tp_size == 1 else 1
    engine = tiny_engine(
        tiny_model,
        tensor_parallel_size=tp_size,
        scheduler={"max_num_batched_tokens": 24, "policy": policy, "async_scheduling": True},
        cache={"host_cache_memory_bytes": 2**16, "kv_cache_memory_bytes": 2**17},
    )
    assert [answers(engine, seed) for seed in range(num_seeds)] == plain[:num_seeds]
    assert engine.load().num_preemptions > 0
    engine.close()


def test_tokens_come_with_the_next_step(engine: Engine) -> None:
    add(engine, "r", PROMPT, max_tokens=3)
    assert engine.step() == []
    assert [len(engine.step()) for _ in range(3)] == [1, 1, 1], "the last step has nothing to launch"
    assert not engine.has_work()


def test_last_token_is_not_computed_beyond(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that ends by its length is known to end before its last token is there."""
    batches: list[int] = []
    engine.on_batch = batches.append
    generate(engine, PROMPT, max_tokens=3)
    assert batches == [len(PROMPT), 1, 1]


def test_stop_token_leaves_one_token_that_nobody_gets(engine: Engine) -> None:
    batches: list[int] = []
    engine.on_batch = batches.append
    whole = token_ids(generate(engine, PROMPT, max_tokens=8))
    stop = next(token for token in whole[2:] if token not in whole[:2])
    num_tokens = whole.index(stop) + 1
    assert num_tokens < 8
    batches.clear()
    outputs = generate(engine, PROMPT[:], max_tokens=8, stop_token_ids=(stop,))
    assert token_ids(outputs) == whole[:num_tokens] and outputs[-1].finish_reason is FinishReason.STOP
    assert batches[-num_tokens:] == [1] * num_tokens


def test_request_that_is_aborted_in_flight_gets_no_further_token(engine: Engine) -> None:
    expected = token_ids(generate(engine, PROMPT, max_tokens=5))
    add(engine, "only", PROMPT, max_tokens=5)
    outputs = engine.step() + engine.step()
    (last,) = engine.abort("only")
    assert (last.finish_reason, last.index, last.token_id) == (FinishReason.ABORT, len(outputs), None)
    add(engine, "only", PROMPT, max_tokens=5)  # the key again, while the old step is in flight
    assert token_ids(run_to_end(engine)) == expected


def test_engine_has_work_until_the_step_in_flight_has_ended(engine: Engine) -> None:
    add(engine, "r", PROMPT)
    engine.step()
    engine.abort("r")
    assert engine.has_work() and engine.step() == [] and not engine.has_work()


def test_kept_pages_have_all_that_was_computed_with_a_step_in_flight(engine: Engine) -> None:
    request = Request(
        request_id="r", token_ids=TokenIds.of(PROMPT), sampling=SamplingParams(max_tokens=2, temperature=0.0)
    )
    (progress,) = engine.add(request, keeps_pages=True)
    engine.step()
    assert progress.num_computed_tokens == len(PROMPT) and len(progress.page_table) == 3
    run_to_end(engine)
    assert progress.num_computed_tokens == len(PROMPT) + 1 and len(progress.page_table) == 3
    engine.release_kept("r")


def test_step_that_cannot_be_launched_loses_the_one_in_flight(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = token_ids(generate(engine, PROMPT))
    add(engine, "lost", PROMPT)
    engine.step()

    def fail(*arguments: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", fail)
        with pytest.raises(MemoryError):
            engine.step()
    assert not engine.has_work()
    assert token_ids(generate(engine, PROMPT)) == expected


def test_time_of_a_step_is_counted_once(engine: Engine) -> None:
    """A prompt's own time is that of its steps, although the next step begins before."""
    request = Request(
        request_id="r", token_ids=TokenIds.of(PROMPT), sampling=SamplingParams(max_tokens=4, temperature=0.0)
    )
    (progress,) = engine.add(request)
    engine.step()
    assert progress.own_s == 0.0 and engine.last_step() is None
    engine.step()
    prompt_step = engine.last_step()
    assert prompt_step is not None and prompt_step.num_new_tokens == len(PROMPT)
    assert 0 < prompt_step.step_s <= progress.own_s
    own_s = progress.own_s
    run_to_end(engine)
    assert progress.own_s == own_s
