"""The books of a plan, without a policy."""

import pytest

from baton.engine.cache.page_pool import PagePool
from baton.engine.cache.prefix_cache import HostTier, PrefixCache
from baton.engine.scheduler.sequence import PreemptMode, Sequence, SequenceQueues
from baton.engine.scheduler.step_planner import StepPlanner
from baton.pages import PageKeys
from baton.request import Request

PAGE_SIZE = 4


class Desk:
    """Queues and ledgers in which sequences are put by hand."""

    def __init__(self, num_pages: int, num_host_pages: int = 0) -> None:
        keys = PageKeys(model_fingerprint="m", dtype="float32", page_size=PAGE_SIZE)
        self.cache = PrefixCache(PagePool(num_pages, PAGE_SIZE), keys, HostTier(num_host_pages))
        self.queues = SequenceQueues()

    def waiting(self, name: str, num_tokens: int) -> Sequence:
        token_ids = tuple(ord(name) + position for position in range(num_tokens))
        sequence = Sequence.from_request(
            Request(request_id=name, token_ids=token_ids), 0, max_model_len=1_000
        )
        sequence.rank = (0, 0, 0.0, 0.0, len(self.queues.by_key))
        self.queues.wait(sequence)
        return sequence

    def running(self, name: str, num_tokens: int, num_computed_tokens: int) -> Sequence:
        sequence = self.waiting(name, num_tokens)
        num_pages = self.cache.pool.pages_for(num_computed_tokens)
        sequence.page_table += self.cache.pool.allocate(num_pages, sequence.key)
        sequence.num_computed_tokens = num_computed_tokens
        self.queues.run(sequence)
        return sequence

    def planner(self, *, num_seqs: int = 8, budget: int = 64) -> StepPlanner:
        return StepPlanner(self.queues, self.cache, max_num_seqs=num_seqs, max_num_batched_tokens=budget)


def test_decode_needs_a_page_only_when_its_last_one_is_full() -> None:
    desk = Desk(10)
    desk.running("a", 9, 8)
    desk.running("b", 8, 7)
    planner = desk.planner()
    assert planner.schedule_decodes() == 2
    plan = planner.finish(0, None)
    assert plan.page_needs == {("a", 0): 1} and plan.num_decodes == 2 and planner.budget == 62


def test_decodes_beyond_the_budget_wait_for_those_of_better_rank() -> None:
    desk = Desk(10)
    for name in "abc":
        desk.running(name, 3, 2)
    planner = desk.planner(budget=2)
    planner.schedule_decodes()
    assert list(planner.finish(0, None).scheduled) == [("a", 0), ("b", 0)]


def test_worst_decode_gives_its_pages_and_its_token_up() -> None:
    desk = Desk(4)
    desk.running("a", 5, 4)
    desk.running("b", 12, 11)
    planner = desk.planner()
    planner.schedule_decodes()
    plan = planner.finish(0, None)
    assert dict(plan.scheduled) == {("a", 0): 1}
    assert plan.preempted == {("b", 0): PreemptMode.RECOMPUTE}
    assert planner.budget == 63


def test_sequence_never_preempts_a_better_one() -> None:
    desk = Desk(4)
    desk.running("a", 12, 11)
    desk.running("b", 5, 4)
    planner = desk.planner()
    planner.schedule_decodes()
    plan = planner.finish(0, None)
    assert dict(plan.scheduled) == {("a", 0): 1} and not plan.preempted


def test_preempted_pages_that_others_share_are_not_counted() -> None:
    desk = Desk(4)
    first, second = desk.running("a", 9, 8), desk.running("b", 9, 8)
    desk.cache.pool.share(first.page_table, "reader")
    planner = desk.planner()
    planner.preempt(first, PreemptMode.RECOMPUTE)
    assert planner.grant(second, 1) == 0
    desk.cache.pool.release(first.page_table, "reader")
    planner = desk.planner()
    planner.preempt(first, PreemptMode.RECOMPUTE)
    assert planner.grant(second, 1) == 1


@pytest.mark.parametrize(("num_host_pages", "expected"), [(1, PreemptMode.RECOMPUTE), (2, PreemptMode.SWAP)])
def test_swap_needs_host_pages_for_all_that_is_computed(num_host_pages: int, expected: PreemptMode) -> None:
    desk = Desk(4, num_host_pages)
    planner = desk.planner()
    planner.preempt(desk.running("a", 9, 8), PreemptMode.SWAP)
    assert planner.finish(0, None).preempted == {("a", 0): expected}


def test_chunk_is_cut_to_the_pages_that_are_left() -> None:
    desk = Desk(4)
    sequence = desk.running("a", 30, 4)
    planner = desk.planner()
    assert planner.grant(sequence, 20) == 12
    assert planner.finish(0, None).page_needs == {("a", 0): 3}


def test_admission_counts_the_whole_prompt_not_the_first_chunk() -> None:
    desk = Desk(6)
    first, second = desk.waiting("a", 20), desk.waiting("b", 8)
    planner = desk.planner(budget=4)
    assert planner.admit(first)
    assert planner.grant(first, 4) == 4
    assert not planner.admit(second)
    assert planner.finish(0, None).admitted == (first.key,)


def test_admission_leaves_headroom_only_when_something_runs() -> None:
    desk = Desk(5)
    assert desk.planner().admit(desk.waiting("a", 19))
    desk = Desk(5)
    desk.running("a", 2, 1)
    assert not desk.planner().admit(desk.waiting("b", 4))


def test_seats_are_counted() -> None:
    desk = Desk(50)
    desk.running("a", 2, 1)
    planner = desk.planner(num_seqs=2)
    assert planner.admit(desk.waiting("b", 4))
    assert not planner.admit(desk.waiting("c", 4))


def test_chunks_of_one_token_come_before_longer_ones() -> None:
    desk = Desk(50)
    long, single, decode = desk.running("a", 9, 4), desk.running("b", 9, 4), desk.running("c", 9, 8)
    planner = desk.planner()
    planner.schedule_decodes()
    planner.grant(long, 5)
    planner.grant(single, 1)
    plan = planner.finish(0, None)
    assert list(plan.scheduled.items()) == [(decode.key, 1), (single.key, 1), (long.key, 5)]
    assert plan.num_decodes == 2


def test_wait_is_reported_only_when_nothing_is_scheduled() -> None:
    desk = Desk(50)
    assert desk.planner().finish(3, 0.5).wait_s == 0.5
    desk.running("a", 2, 1)
    planner = desk.planner()
    planner.schedule_decodes()
    assert planner.finish(3, 0.5).wait_s is None
