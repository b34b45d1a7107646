"""The simulated replica answers as its model says, whatever its scheduler does, and checks its pages."""

from collections.abc import Callable
from typing import Any

import pytest

from baton.clock import Clock, ManualClock
from baton.request import FinishReason, Request, SamplingParams, TokenIds
from baton.sim.engine import (
    ENTRY_BYTES,
    NUM_WORDS,
    POISON,
    KvMemory,
    SimEngine,
    entry_of,
    fingerprint_of,
    golden,
    sample,
)
from baton.sim.process import Crash
from tests.node_peers import a_worker, id_of

MAX_MODEL_LEN = 64


def an_engine(clock: Clock, spend: Callable[[float], None], **sizes: int) -> SimEngine:
    usual: dict[str, Any] = {"page_size": 4, "num_pages": 48, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    worker = a_worker("w", fingerprint=fingerprint_of(""), max_model_len=MAX_MODEL_LEN, **{**usual, **sizes})
    return SimEngine(worker, clock, spend, step_s=0.01, token_s=0.001)


def a_request(
    name: str,
    *token_ids: int,
    salt: bytes = b"",
    choice: int = 0,
    max_tokens: int | None = 5,
    **sampling: Any,
) -> Request:
    fields = {"seed": 3, "max_tokens": max_tokens, **sampling}
    params = SamplingParams(**fields)
    return Request(
        request_id=id_of(name),
        token_ids=TokenIds.of(token_ids),
        sampling=params,
        cache_salt=salt,
        choice=choice,
    )


def answer(request: Request) -> list[int]:
    return golden(request, request.sampling.seed, MAX_MODEL_LEN)[0]


class Running:
    """An engine and the seconds that it spent."""

    def __init__(self, **sizes: int) -> None:
        self.spent_s = 0.0
        self.engine = an_engine(ManualClock(), self._spend, **sizes)

    def _spend(self, seconds: float) -> None:
        self.spent_s += seconds

    def answers(self, *requests: Request) -> list[list[int]]:
        answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work():
            for output in self.engine.step():
                assert output.token_id is not None
                answers[output.request_id].append(output.token_id)
        return list(answers.values())


def test_tokens_salt_choice_and_seed_change_the_answer() -> None:
    requests = [
        a_request("r", 1, 2, 3),
        a_request("r", 9, 2, 3),
        a_request("r", 1, 2, 9),
        a_request("r", 1, 3, 2),
        a_request("r", 1, 2, 3, salt=b"tenant"),
        a_request("r", 1, 2, 3, choice=1),
        a_request("r", 1, 2, 3, seed=2),
    ]
    assert len({tuple(answer(request)) for request in requests}) == len(requests)


def test_greedy_answer_does_not_depend_on_the_seed() -> None:
    one, other = (a_request("r", 1, 2, temperature=0.0, seed=seed) for seed in (None, 7))
    assert answer(one) == answer(other)


def test_answer_ends_at_a_stop_token_or_at_the_limit() -> None:
    free = answer(a_request("r", 1))
    assert len(free) == 5 and len(answer(a_request("r", 1, 2, max_tokens=None))) == MAX_MODEL_LEN - 2
    stopping = a_request("r", 1, stop_token_ids=(free[1],))
    assert golden(stopping, 3, MAX_MODEL_LEN) == (free[:2], FinishReason.STOP)
    longer = answer(a_request("r", 1, stop_token_ids=(free[1],), min_tokens=4))
    assert longer[0] == free[0] and free[1] not in longer[:3] and len(longer) >= 4


def test_only_harmless_tokens_are_sampled() -> None:
    sampled = {sample(context, 0, 0, 0, ()) for context in range(2000)}
    assert sampled == set(range(NUM_WORDS))


@pytest.mark.parametrize(("token", "byte"), [(0, 0), (3, 0), (7, 5)])
def test_every_byte_before_the_last_token_is_read_in_order(token: int, byte: int) -> None:
    memory = KvMemory(num_pages=4, page_size=4)
    context = 0
    for position in range(9):
        memory.write((2, 0, 3)[position // 4], position % 4, entry_of(context, position, position))
    whole = memory.read((2, 0, 3), 8, context)
    place = memory.place((2, 0, 3), token, 1)[1].start + byte
    memory.bytes[place] ^= 1
    assert memory.read((2, 0, 3), 8, context) != whole
    memory.bytes[place] ^= 1
    memory.write(3, 0, b"\xff" * ENTRY_BYTES)
    assert memory.read((2, 0, 3), 8, context) == whole
    assert memory.read((0, 2, 3), 8, context) != whole


def test_batches_chunks_prefixes_and_preemption_change_no_token() -> None:
    running = Running(num_pages=MAX_MODEL_LEN // 4)
    known = tuple(range(24))
    requests = [a_request(str(number), *known[: 4 * number], number, max_tokens=30) for number in range(8)]
    assert running.answers(*requests) == list(map(answer, requests))
    load = running.engine.load()
    assert load.num_preemptions and load.prefix_hits_tokens
    assert load.pages["free"] + load.pages["cached"] == running.engine.pages.num_pages


def test_steps_take_longer_with_more_tokens() -> None:
    running = Running()
    running.engine.add(a_request("r", *range(20)))
    running.engine.step()
    assert running.spent_s == pytest.approx(0.01 + 16 * 0.001)
    running.engine.step()
    assert running.spent_s == pytest.approx(0.02 + 20 * 0.001)


def test_write_to_a_shared_page_is_an_error() -> None:
    running = Running()
    (progress,) = running.engine.add(a_request("r", *range(10)))
    running.engine.step()
    running.engine.pages.hold([progress.page_table[-1]], "reader")
    with pytest.raises(AssertionError, match="writes page"):
        running.engine.step()


def test_poison_crashes_the_process_and_names_its_request() -> None:
    running = Running()
    running.engine.add(a_request("good", 1, 2))
    running.engine.add(a_request("bad", 1, POISON))
    with pytest.raises(Crash) as crash:
        running.engine.step()
    assert crash.value.culprit == id_of("bad")
