"""Pipeline stages: each computes its layers of a step, and the tokens are those of one rank."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.config.engine import EngineConfig, RankSidecar
from baton.engine.engine import Engine, load_engine
from baton.engine.runner import model_runner
from baton.engine.runner.replica_rank import PendingTensor
from baton.engine.runner.step_inputs import StepArrays
from baton.errors import ConfigError, WorkerLost
from baton.request import FinishReason, Request, SamplingParams, TokenIds
from tests.disturbed_requests import Answers, answers
from tests.tiny_models import add, generate, run_to_end, tiny_config, tiny_engine, token_ids, write_config

pytestmark = pytest.mark.usefixtures("ranks_are_forked")
STEPS = {"max_num_batched_tokens": 24}
CACHE = {"host_cache_memory_bytes": 2**16, "kv_cache_memory_bytes": 2**17}


@pytest.fixture(scope="module")
def two_stages(tiny_model: Path) -> Iterator[Engine]:
    with closing(tiny_engine(tiny_model, pipeline_parallel_size=2, scheduler=STEPS, cache=CACHE)) as made:
        yield made


@pytest.fixture
def engine(two_stages: Engine) -> Iterator[Engine]:
    yield two_stages
    assert not two_stages.has_work() and two_stages.load().pages["active"] == 0
    two_stages.scheduler.check_integrity()


def disturbed_answers(engine: Engine) -> list[Answers]:
    """On the way prompts are cut into chunks, share prefixes, are preempted, and stop early."""
    found = [answers(engine, seed) for seed in range(3)]
    assert engine.load().num_preemptions > 0 and engine.load().prefix_hits_tokens > 0
    assert not engine.has_work() and engine.load().pages["active"] == 0
    return found


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "keys"),
    [(2, 2, {}), (1, 3, {"num_hidden_layers": 4, "tie_word_embeddings": True})],
)
def test_more_ranks_give_the_tokens_and_logprobs_of_one(
    tp_size: int, pp_size: int, keys: dict[str, object], tmp_path: Path
) -> None:
    directory = write_config(tmp_path / "model", **keys)
    settings: dict[str, Any] = {"scheduler": STEPS, "cache": CACHE}
    ranks: dict[str, Any] = {"tensor_parallel_size": tp_size, "pipeline_parallel_size": pp_size}
    with (
        closing(tiny_engine(directory, **settings)) as alone,
        closing(tiny_engine(directory, **settings, **ranks)) as together,
    ):
        assert disturbed_answers(together) == disturbed_answers(alone)


def test_stage_has_the_weights_and_pages_of_its_layers_alone(tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model", num_hidden_layers=3)
    sidecar = RankSidecar(factory="tests.recording_sidecar:RecordingSidecar", arguments=str(tmp_path))
    config = tiny_config(directory, pipeline_parallel_size=2)
    read: list[tuple[int, int]] = []
    with closing(
        load_engine(config, progress=lambda done, total: read.append((done, total)), sidecar=sidecar)
    ) as engine:
        num_pages, *page = engine.runner.pool.device.shape
        assert page == [2, 2, 2, 4, 16], "layers, keys and values, heads, tokens, elements"
        *_, (done, total) = read
        generate(engine, [1, 2, 3])
    notes = (tmp_path / "rank").read_text().splitlines()
    assert f"start 1 {[num_pages, 1, *page[1:]]}" in notes
    assert "close, steps have written: True" in notes
    whole: list[tuple[int, int]] = []
    load_engine(tiny_config(directory), progress=lambda done, total: whole.append((done, total))).close()
    assert done == total < whole[-1][1]


def test_killed_stage_is_reported_and_the_engine_still_closes(tiny_model: Path) -> None:
    before = psutil.Process().children(recursive=True)
    engine = tiny_engine(tiny_model, pipeline_parallel_size=2)
    (stage,) = set(psutil.Process().children(recursive=True)) - set(before)
    stage.kill()
    with pytest.raises(WorkerLost, match="rank 1: the (peer is gone|connection is closed)"):
        generate(engine, [1, 2, 3])
    with pytest.raises(WorkerLost, match="the engine must be loaded again"):
        generate(engine, [1, 2, 3])
    engine.close()
    assert psutil.Process().children(recursive=True) == before


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def test_engine_that_has_lost_a_stage_while_idle_closes_without_a_wait(tmp_path: Path) -> None:
    """The last stage hears of no end: without a kill, its process would be waited for in vain."""
    directory = write_config(tmp_path / "model", num_hidden_layers=3)
    before = psutil.Process().children(recursive=True)
    engine = tiny_engine(directory, pipeline_parallel_size=3)
    stages = sorted(set(psutil.Process().children(recursive=True)) - set(before), key=lambda each: each.pid)
    stages[0].kill()
    threading.Event().wait(0.3)  # until rank 0 has heard of it
    began_s = time.monotonic()
    engine.close()
    assert time.monotonic() - began_s < 8.0 and not any(each.is_running() for each in stages)


def test_running_sequences_are_spread_over_the_steps_in_flight(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    monkeypatch.setattr(engine, "on_batch", batches.append)
    for number in range(5):
        add(engine, str(number), [number], max_tokens=4)
    assert engine.step() == [] and batches == [5], "prompts share a step"
    assert len(engine.step()) == 5, "no other sequence has work"
    run_to_end(engine)
    assert batches == [5, 3, 2, 3, 2, 3, 2]


def test_chunks_of_a_prompt_follow_one_another(engine: Engine) -> None:
    """The second chunk is launched before the first one has come back."""
    (progress,) = engine.add(
        Request(
            request_id="long", token_ids=TokenIds.of(list(range(60))), sampling=SamplingParams(max_tokens=1)
        )
    )
    found = []
    while engine.has_work():
        engine.step()
        found.append((progress.num_computed_tokens, len(engine._in_flight)))
    assert found[:3] == [(24, 1), (48, 1), (48, 1)] and len(found) == 4


def test_request_that_is_aborted_in_flight_gets_no_further_token(engine: Engine) -> None:
    expected = token_ids(generate(engine, PROMPT, max_tokens=5))
    for name in ("first", "second"):
        add(engine, name, PROMPT, max_tokens=5)
    outputs = engine.step() + engine.step() + engine.step()
    (last,) = engine.abort("first")
    told = [output for output in outputs if output.request_id == "first"]
    assert (last.finish_reason, last.index, last.token_id) == (FinishReason.ABORT, len(told), None)
    add(engine, "first", PROMPT, max_tokens=5)  # the key again, while the old step is in flight
    outputs = run_to_end(engine)
    assert token_ids([output for output in outputs if output.request_id == "first"]) == expected


def test_request_that_is_aborted_within_its_prompt_leaves_no_prompt_logprobs(engine: Engine) -> None:
    add(engine, "first", list(range(60)), prompt_logprobs=0)
    assert engine.step() == [] and engine.step() == []
    assert len(engine.abort("first")) == 1
    assert run_to_end(engine) == [] and not engine._sampler._prompts


def test_last_stage_draws_unless_rank_0_has_more_to_do(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_drawn: list[bool] = []
    answer = engine.runner.answer

    def note(arrays: StepArrays) -> PendingTensor:
        is_drawn.append(arrays.sampling is not None)
        return answer(arrays)

    monkeypatch.setattr(engine.runner, "answer", note)
    generate(engine, PROMPT, max_tokens=2, temperature=1.0, top_p=0.9, seed=3)
    assert is_drawn == [True, True]
    is_drawn.clear()
    generate(engine, PROMPT, max_tokens=2, logprobs=1)
    generate(engine, PROMPT, max_tokens=2, repetition_penalty=1.5)
    assert is_drawn == [False] * 4


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_other_policies_give_the_same_tokens(policy: str, tiny_model: Path) -> None:
    found = []
    for num_stages in (1, 2):
        scheduler = {**STEPS, "policy": policy}
        with closing(
            tiny_engine(tiny_model, pipeline_parallel_size=num_stages, scheduler=scheduler)
        ) as engine:
            found.append(answers(engine, 0))
    assert found[0] == found[1]


def test_every_stage_has_a_layer(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="2 layers cannot be split over 3 pipeline stages"):
        tiny_engine(tiny_model, pipeline_parallel_size=3)


def test_model_that_is_no_stage_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "build_model", lambda *given: object())
    with pytest.raises(ConfigError, match="pipeline_parallel_size: LlamaForCausalLM cannot be split"):
        tiny_engine(tiny_model, pipeline_parallel_size=2)


def test_disk_tier_of_stages_on_several_nodes_is_refused(tiny_model: Path) -> None:
    cache = {"kv_disk_path": "pages", "host_cache_memory_bytes": 2**16}
    with pytest.raises(ConfigError, match="cache.kv_disk_path: .* expected nnodes 1, got 2"):
        tiny_config(tiny_model, pipeline_parallel_size=2, nnodes=2, cache=cache)


def test_ranks_are_counted() -> None:
    assert EngineConfig(model="m", tensor_parallel_size=2, pipeline_parallel_size=3).num_ranks == 6
