"""Sequences that start with pages filled outside the scheduler."""

import pytest

from baton.engine.cache.page_pool import PageState
from baton.engine.scheduler.sequence import SequenceStatus
from baton.errors import IntegrityError
from baton.request import FilledPages, Request, SamplingParams, TokenIds
from tests.outside import Delivery, OpenHarness
from tests.scheduling import PROMPT


def begin(harness: OpenHarness, name: str, prompt: list[int], num_new: int = 4) -> Delivery:
    """A decode: its whole prompt comes, one token has been given, `num_new` are to follow."""
    delivery = harness.begin(harness.begun(name, prompt, 1, 1 + num_new), len(prompt))
    assert delivery is not None
    return delivery


def test_full_pages_that_came_are_known_to_the_next_sequence_before_any_step() -> None:
    harness = OpenHarness.of(16)
    harness.arrive(begin(harness, "a", PROMPT))
    (second,) = harness.add("b", [*PROMPT[:9], 7])
    harness.step()
    assert second.num_cached_tokens == 8
    assert second.page_table[:2] == harness.live["a", 0].page_table[:2]
    harness.run()


def test_sequences_that_wait_with_all_the_pages_do_not_block_each_other() -> None:
    harness = OpenHarness.of(4)
    deliveries = [begin(harness, name, [ord(name)] * 8) for name in "ab"]
    for delivery in deliveries:
        harness.arrive(delivery)
    assert harness.pool.num_available == 0
    plan, _, _ = harness.step()
    assert list(plan.preempted) == [("b", 0)] and not plan.scheduled
    plan, _, _ = harness.step()
    assert plan.admitted == (("a", 0),)
    harness.run()


def test_running_sequence_is_not_held_up_by_one_that_waits_with_pages() -> None:
    harness = OpenHarness.of(5, max_num_seqs=1)
    runs = begin(harness, "a", [1] * 8, num_new=9)
    waits = begin(harness, "b", [2] * 8)
    waits.sequence.rank = (0, -1, 0.0, 0.0, 0)
    harness.arrive(runs)
    harness.step()
    harness.arrive(waits)
    while runs.sequence.status is not SequenceStatus.FINISHED:
        plan, _, _ = harness.step()
        assert plan.scheduled
    assert waits.sequence.num_preemptions == 1
    harness.run()


def test_no_pages_are_taken_from_the_waiting_when_they_would_not_do() -> None:
    harness = OpenHarness.of(8)
    first, second, third = (begin(harness, name, [ord(name)] * 8) for name in "abc")
    harness.pool.reserve(2, "another")
    harness.leased["another"] = set(range(8)) - {p for d in (first, second, third) for p in d.pages}
    harness.arrive(first)
    harness.arrive(second)
    long = harness.begun("long", [9] * 25, 0, 2)
    sequence = harness.sequence_of(long)
    sequence.rank = (0, -1, 0.0, 0.0, 0)
    harness.scheduler.add(sequence)
    harness.live[sequence.key] = sequence
    plan, _, _ = harness.step()
    assert not plan.preempted and not plan.scheduled
    harness.cancel(third)
    harness.pool.release(sorted(harness.leased.pop("another")), "another")
    harness.run()


@pytest.mark.parametrize(
    ("num_pages", "num_tokens", "message"),
    [
        (3, 0, "KV of 1 to 10 of them can be brought, got 0"),
        (3, 11, "KV of 1 to 10 of them can be brought, got 11"),
        (2, 10, "10 tokens are in 3 different pages, got 2 in a table of 2"),
        (4, 10, "10 tokens are in 3 different pages, got 4 in a table of 4"),
    ],
)
def test_pages_that_cannot_be_a_beginning_stay_the_callers(
    num_pages: int, num_tokens: int, message: str
) -> None:
    harness = OpenHarness.of(16)
    pages = tuple(harness.pool.allocate(num_pages, "caller"))
    sequence = harness.sequence_of(harness.begun("a", PROMPT, 1, 4))
    with pytest.raises(ValueError, match=message):
        harness.scheduler.add(sequence, FilledPages(pages, num_tokens, "caller"))
    assert not harness.scheduler.has_work() and not sequence.page_table
    harness.scheduler.holds.release(pages, "caller")
    assert harness.pool.num_free == 16


def test_table_with_a_page_twice_or_of_nowhere_is_refused() -> None:
    harness = OpenHarness.of(16)
    page, other = harness.pool.allocate(2, "caller")
    sequence = harness.sequence_of(harness.begun("a", PROMPT[:8], 1, 4))
    with pytest.raises(ValueError, match="got 1 in a table of 2"):
        harness.scheduler.add(sequence, FilledPages((page, page), 8, "caller"))
    with pytest.raises(ValueError, match="the pool has 16 pages"):
        harness.scheduler.add(sequence, FilledPages((page, -1), 8, "caller"))
    assert harness.pool.owners(page) == harness.pool.owners(other) == {"caller"}


def test_prompt_logprobs_and_brought_pages_exclude_each_other() -> None:
    harness = OpenHarness.of(16)
    pages = tuple(harness.pool.allocate(2, "caller"))
    request = Request(
        request_id="a",
        token_ids=TokenIds.of(PROMPT),
        sampling=SamplingParams(prompt_logprobs=0, max_tokens=4),
    )
    with pytest.raises(ValueError, match="prompt_logprobs need the whole prompt"):
        harness.scheduler.add(harness.sequence_of(request), FilledPages(pages, 8, "caller"))


@pytest.mark.parametrize("trouble", ["another's", "only leased", "still written", "shared"])
def test_pages_that_the_owner_does_not_use_alone_are_refused(trouble: str) -> None:
    harness = OpenHarness.of(16)
    pool = harness.pool
    pages = tuple(pool.allocate(2, "caller"))
    (last,) = pool.reserve(1, "lease") if trouble == "only leased" else pool.allocate(1, "third")
    if trouble in ("still written", "shared"):
        pool.share([last], "caller")
    if trouble == "still written":
        pool.add_writer([last], "writer")
    before = [pool.owners(page) for page in (*pages, last)]
    sequence = harness.sequence_of(harness.begun("a", PROMPT, 1, 4))
    with pytest.raises(IntegrityError, match=f"page {last}"):
        harness.scheduler.add(sequence, FilledPages((*pages, last), 10, "caller"))
    assert [pool.owners(page) for page in (*pages, last)] == before
    assert not harness.scheduler.has_work()


def test_refused_release_releases_nothing() -> None:
    harness = OpenHarness.of(16)
    pages = tuple(harness.pool.allocate(2, "caller"))
    (foreign,) = harness.pool.allocate(1, "third")
    with pytest.raises(IntegrityError, match=f"page {foreign}"):
        harness.scheduler.holds.release((*pages, foreign), "caller")
    assert harness.pool.count(PageState.ACTIVE) == 3
