"""Preemption: the order of candidates against a slow oracle, and sequences that come back."""

import random
from collections import deque
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.cache.page_pool import PagePool, PageState
from baton.engine.scheduler.preemption import HeldPages, PreemptionCandidates
from baton.engine.scheduler.sequence import (
    Batch,
    Sequence,
    SequenceKey,
    SequenceQueues,
    SequenceStatus,
)
from baton.request import Request, SamplingParams, TokenIds
from tests.accounts import scheduling_key
from tests.scheduling import PROMPT, BareScheduler, Harness

PAGE_SIZE = 4
NUM_PAGES = 40


class Member(NamedTuple):
    tenant: str
    rank: int  # of its class
    num_pages: int
    runs: bool = True


class Room:
    """Sequences that hold pages, in the order of their arrival."""

    def __init__(self, members: list[Member], weights: dict[str, float]) -> None:
        self.pool, self.queues = PagePool(NUM_PAGES, PAGE_SIZE), SequenceQueues(PAGE_SIZE)
        self.weights = weights
        self.sequences = [self._seat(number, member) for number, member in enumerate(members)]
        self.preempted: dict[SequenceKey, None] = {}
        self.held = HeldPages(self.queues, self.pool)
        self.candidates = PreemptionCandidates(self.queues, self.pool, self.held, (), self.preempted)

    def _seat(self, number: int, member: Member) -> Sequence:
        num_tokens = member.num_pages * PAGE_SIZE
        request = Request(
            request_id=str(number),
            token_ids=TokenIds.of((1,) * (num_tokens + 1)),
            tenant=member.tenant,
            scheduling_key=scheduling_key(self.weights.get(member.tenant, 1.0), member.rank),
        )
        sequence = Sequence.from_request(request, 0, max_model_len=1000)
        sequence.rank = (member.rank, 0, 0.0, 0.0, number)
        self.queues.wait(sequence)
        self.pool.accounts.book(sequence.key, member.tenant)
        sequence.page_table += self.pool.allocate(member.num_pages, sequence.key)
        sequence.num_computed_tokens = num_tokens
        if member.runs:
            self.queues.run(sequence)
        return sequence

    def excess(self, sequence: Sequence, num_lost: int = 0) -> float:
        """Pages for its weight that the tenant has beyond its share, by looking at the tables."""
        name, live = sequence.scheduling_key, {each.scheduling_key: each for each in self.sequences}
        held = sum(len(each.page_table) for each in self.sequences if each.scheduling_key == name)
        total = sum(each.share.weight for each in live.values())
        share = NUM_PAGES * sequence.share.weight / total
        return max(0.0, held - num_lost - share) / sequence.share.weight

    def numbers(self, candidates: list[Sequence]) -> list[int]:
        return [self.sequences.index(victim) for victim in candidates]


members = st.lists(
    st.builds(Member, st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 6), st.booleans()).filter(
        lambda member: member.runs or member.num_pages > 0
    ),
    min_size=1,
    max_size=6,
)
weights = st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 3.0]) for name in "abc"})


def goes_before(room: Room, one: Sequence, other: Sequence) -> bool:
    """The order in words: lowest class, then the key most over its share, then the worst rank."""
    if one.rank[0] != other.rank[0]:
        return one.rank[0] > other.rank[0]
    if len({each.scheduling_key for each in room.sequences}) > 1 and one.share is not other.share:
        return room.excess(one) > room.excess(other)
    return one.rank > other.rank


@given(members, weights, st.data())
def test_candidates_follow_the_order_of_the_oracle(
    made: list[Member], weighs: dict[str, float], data: st.DataObject
) -> None:
    room = Room(made, weighs)
    running = room.queues.running()
    if not running:
        return
    taker = data.draw(st.sampled_from(running))
    candidates = room.candidates.of_running(taker, may_wait=True)
    assert taker not in candidates and len(set(map(id, candidates))) == len(candidates)
    for victim in candidates:
        is_last_resort = not room.held.are_several and victim.status is SequenceStatus.WAITING
        assert is_last_resort or not goes_before(room, taker, victim), "it took from a better one"
        if victim.rank[0] == taker.rank[0] and victim.share is not taker.share:
            assert room.excess(victim) >= room.excess(taker), "a key further over its share took pages"
    for earlier, later in pairwise(candidates):
        assert not goes_before(room, later, earlier), "a better one was to go first"
    holders = [each for each in room.sequences if each.page_table and each is not taker]
    for other in holders:
        assert other in candidates or not goes_before(room, other, taker), "a worse one keeps its pages"


@pytest.mark.parametrize(
    ("others", "newcomer", "lacking", "expected"),
    [
        # Within its share, which is 20 of the 40 pages.
        ([Member("noisy", 0, 10)] * 4, Member("quiet", 0, 0), (8, 8, 0), [3]),
        ([Member("noisy", 0, 10)] * 4, Member("quiet", 0, 0), (12, 12, 0), [3, 2]),
        ([Member("noisy", 0, 10)] * 4, Member("quiet", 0, 0), (21, 21, 0), []),
        # With headroom.
        ([Member("noisy", 0, 10)] * 4, Member("quiet", 0, 0), (8, 24, 4), [3, 2]),
        ([Member("noisy", 0, 10)] * 4, Member("quiet", 0, 0), (8, 29, 4), []),
        # The second sequence would be of 12 of the 20 pages that its key is due.
        ([Member("noisy", 0, 12)] * 2, Member("quiet", 0, 0), (18, 18, 0), []),
        # Of a better class.
        ([Member("low", 1, 10)] * 3, Member("high", 0, 0), (25, 25, 0), [2, 1, 0]),
        # Of the key that is over its share.
        ([Member("quiet", 0, 0), *[Member("noisy", 0, 10)] * 3], Member("noisy", 0, 10), (8, 8, 0), []),
    ],
)
def test_newcomer_gets_the_pages_that_it_lacks_within_its_share(
    others: list[Member], newcomer: Member, lacking: tuple[int, int, int], expected: list[int]
) -> None:
    room = Room([*others, newcomer], {})
    assert room.numbers(room.candidates.of_newcomer(room.sequences[-1], *lacking)) == expected


@pytest.mark.parametrize(("num_lacking", "expected"), [(1, [1]), (9, [1, 2]), (99, [1, 2, 0])])
def test_longest_sequences_of_the_lowest_class_make_room(num_lacking: int, expected: list[int]) -> None:
    room = Room([Member("l", 2, 3), Member("l", 2, 8), Member("l", 2, 5), Member("h", 1, 20)], {})
    assert room.numbers(room.candidates.of_lowest_class(num_lacking)) == expected


def test_single_class_makes_no_room() -> None:
    assert Room([Member("a", 1, 9), Member("b", 1, 20)], {}).candidates.of_lowest_class(5) == []


# Sequences that lose their pages and come back.


def test_prefix_found_after_a_preemption_does_not_count_as_cached() -> None:
    harness = Harness.of()
    (sequence,) = harness.add("a", PROMPT)
    harness.step()
    version = sequence.table_version
    harness.scheduler.preempt(sequence.key)
    harness.step()
    assert sequence.table_version > version and not sequence.page_table
    _, batch, _ = harness.step()
    assert batch.chunks[0].start == 8 and sequence.num_cached_tokens == 0
    harness.run()


def test_preempted_sequence_gets_the_pages_back_that_others_took_from_the_host() -> None:
    harness = Harness.of(num_pages=5, num_host_pages=8)
    (sequence,) = harness.add("a", PROMPT)
    harness.step()
    harness.scheduler.preempt(sequence.key)
    harness.step()
    assert not sequence.page_table and harness.pool.count(PageState.CACHED) == 2
    harness.cache.make_room(5)  # for others
    _, out_and_back, _ = harness.step()
    assert len(out_and_back.copies_to_host) == len(out_and_back.copies_to_device) == 2
    assert out_and_back.chunks[0].start == 8
    harness.run()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption_of_everything_before_every_step_changes_no_token(prefix_caching: bool) -> None:
    harness = Harness.of(num_host_pages=64, prefix_caching=prefix_caching)
    for name in "abc":
        harness.add(name, PROMPT * 2 + [ord(name) % 50], SamplingParams(max_tokens=6))
    while harness.scheduler.has_work():
        for sequence in harness.live.values():
            if sequence.status is SequenceStatus.RUNNING:
                harness.scheduler.preempt(sequence.key)
        harness.step()
    assert all(sequence.num_preemptions >= 5 for sequence in harness.finished)
    harness.check_answers()


def test_only_a_running_sequence_can_be_preempted() -> None:
    harness = Harness.of()
    (sequence,) = harness.add("a", PROMPT)
    with pytest.raises(ValueError, match="is waiting, not running"):
        harness.scheduler.preempt(sequence.key)


@pytest.mark.parametrize("seed", range(30))
def test_steps_in_flight_end_although_pages_are_short(seed: int) -> None:
    """In a pipeline of two stages: the decode that has waited longest may find no page, and no victim."""
    rng = random.Random(seed)
    made = BareScheduler(24, num_pages=rng.randint(12, 20), page_size=2)
    scheduler, in_flight = made.scheduler, deque[Batch]()
    scheduler.num_batches = 2
    for _ in range(4):
        made.ask(rng.randint(1, 10), max_tokens=rng.randint(1, 13))
    for _ in range(200):
        batch = scheduler.apply(scheduler.plan())
        if not batch.is_empty:
            scheduler.launch(batch)
            in_flight.append(batch)
        if in_flight and (batch.is_empty or len(in_flight) == 2):
            oldest = in_flight.popleft()
            scheduler.commit(oldest, [7 if each else None for each in oldest.placeholders()])
    assert not in_flight and not scheduler.has_work()
    scheduler.check_integrity()
