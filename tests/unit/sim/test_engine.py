"""A simulated replica answers as its model says, whatever its scheduler does; and it looks at its pages."""

import pytest

from baton.clock import ManualClock
from baton.engine.cache.page_pool import PageState
from baton.request import FinishReason, Request
from baton.sim.engine import POISON, UNSAMPLEABLE, SimEngine, golden
from baton.sim.process import Crash
from tests.unit.sim.machines import MAX_MODEL_LEN, a_machine, a_request


class Running:
    """An engine and the seconds that it spent."""

    def __init__(self, **machine: int) -> None:
        self.spent_s = 0.0
        self.engine = SimEngine(a_machine(**machine), ManualClock(), self._spend)

    def _spend(self, seconds: float) -> None:
        self.spent_s += seconds

    def answers(self, *requests: Request) -> dict[str, list[int]]:
        answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work():
            for output in self.engine.step():
                assert output.token_id is not None
                answers[output.request_id].append(output.token_id)
        return answers


def golden_of(*requests: Request) -> dict[str, list[int]]:
    return {each.request_id: golden(each, each.sampling.seed, MAX_MODEL_LEN)[0] for each in requests}


def test_batches_chunks_prefixes_and_preemption_change_no_token() -> None:
    running = Running(num_pages=MAX_MODEL_LEN // 4)
    known = tuple(range(24))
    requests = [a_request(str(number), *known[: 4 * number], number, max_tokens=30) for number in range(8)]
    assert running.answers(*requests) == golden_of(*requests)
    stats = running.engine.stats()
    assert stats.total_preemptions and stats.total_hit_tokens
    assert stats.num_free_pages + stats.num_cached_pages == running.engine.pages.num_pages


def test_steps_take_longer_the_more_they_compute() -> None:
    running = Running()
    running.engine.add(a_request("r", *range(20)))
    running.engine.step()
    assert running.spent_s == pytest.approx(0.01 + 16 * 0.001)
    running.engine.step()
    assert running.spent_s == pytest.approx(0.02 + 20 * 0.001)


def test_damaged_page_shows_in_the_answer() -> None:
    running = Running()
    request = a_request("r", *range(10))
    (progress,) = running.engine.add(request)
    outputs = running.engine.step()
    running.engine.memory.bytes[running.engine.memory.unit(progress.page_table[1], 0, 1)] = b"\0" * 8
    while running.engine.has_work():
        outputs += running.engine.step()
    found, expected = [output.token_id for output in outputs], golden_of(request)[request.request_id]
    assert found[0] == expected[0] and found != expected


def test_page_of_another_is_not_written() -> None:
    running = Running()
    (progress,) = running.engine.add(a_request("r", *range(10)))
    running.engine.step()
    running.engine.pages.lease([progress.page_table[-1]], "reader", 1000.0)
    with pytest.raises(AssertionError, match="writes page"):
        running.engine.step()


def test_poison_kills_its_process_and_is_named() -> None:
    running = Running()
    running.engine.add(a_request("good", 1, 2))
    running.engine.add(a_request("bad", 1, POISON))
    with pytest.raises(Crash) as crash:
        running.engine.step()
    assert crash.value.culprit == a_request("bad", 1).request_id


def test_request_that_cannot_be_sampled_ends_alone() -> None:
    running = Running()
    good, bad = a_request("good", 1, 2, max_tokens=1), a_request("bad", 1, UNSAMPLEABLE)
    running.engine.add(good)
    running.engine.add(bad)
    outputs = {output.request_id: output for output in running.engine.step()}
    assert outputs[bad.request_id].finish_reason is FinishReason.ERROR
    assert outputs[good.request_id].finish_reason is FinishReason.LENGTH
    assert not running.engine.has_work()
    assert not running.engine.pages.count(PageState.ACTIVE)
