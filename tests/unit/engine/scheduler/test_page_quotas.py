"""A tenant at its quota of pages takes from itself and waits; others notice nothing."""

import pytest

from baton.engine.scheduler.sequence import SequenceStatus
from baton.errors import InvalidRequest
from baton.request import SamplingParams
from tests.accounts import AccountHarness, scheduling_key

LONG = SamplingParams(max_tokens=100)
TIGHT = scheduling_key(max_kv_pages=10)  # 40 tokens


def make_harness(*, prefix_caching: bool = False, policy: str = "continuous") -> AccountHarness:
    return AccountHarness.of(200, prefix_caching=prefix_caching, max_num_batched_tokens=256, policy=policy)


def test_quota_preempts_only_sequences_of_its_own_key() -> None:
    harness = make_harness()
    for name in ("first", "second"):
        harness.add(name, range(8), LONG, tenant="tight", scheduling_key=TIGHT)
    harness.add("other", range(8), LONG, tenant="other")
    (first, *_), other = harness.live.values(), harness.live["other", 0]
    while harness.scheduler.has_work():
        plan, _, _ = harness.step()
        assert set(plan.preempted) <= {("second", 0)}
        if ("other", 0) in harness.live:
            assert harness.num_steps == 1 or plan.scheduled["other", 0] == 1
    assert (first.num_preemptions, other.num_preemptions) == (0, 0)
    assert max(each.num_preemptions for each in harness.finished) > 0
    harness.check_answers()


def test_sequence_without_room_in_its_quota_delays_no_other_key() -> None:
    harness = make_harness()
    harness.add("first", range(30), LONG, tenant="tight", scheduling_key=TIGHT)
    harness.step()
    (held,) = harness.add("held", range(30), LONG, tenant="tight", scheduling_key=TIGHT)
    (small,) = harness.add("small", range(2), LONG, tenant="tight", scheduling_key=TIGHT)
    (other,) = harness.add("other", range(30), LONG, tenant="other")
    harness.step()
    assert other.status is SequenceStatus.RUNNING
    assert held.status is small.status is SequenceStatus.WAITING  # nothing overtakes on its own account
    harness.run()


def test_seat_that_a_quota_frees_goes_to_no_later_sequence() -> None:
    harness = AccountHarness.of(200, prefix_caching=False, max_num_seqs=3, max_num_batched_tokens=17)
    tight = scheduling_key(max_kv_pages=11, rank=1)
    harness.add(
        "wide", range(5), LONG, tenant="tight", scheduling_key=scheduling_key(max_kv_pages=60, rank=1)
    )
    (last,) = harness.add("last", range(36), LONG, tenant="tight", scheduling_key=tight)
    harness.step()
    harness.add("first", range(36), LONG, tenant="tight", scheduling_key=tight, priority=-1)
    for _ in range(2):
        harness.step()
    harness.abort("wide")  # from here on, both together may have 11 pages
    for name, rank in (("seated", 0), ("next", 0), ("later", 2)):
        harness.add(name, range(2), LONG, tenant=name, scheduling_key=scheduling_key(rank=rank))
    plan, _, _ = harness.step()
    assert set(plan.preempted) == {last.key}  # its seat is free after "next" has found none
    assert plan.admitted == (("seated", 0),)


def test_pages_that_two_sequences_share_count_once() -> None:
    harness = make_harness(prefix_caching=True)
    short = SamplingParams(max_tokens=2)
    harness.add("first", range(33), LONG, tenant="t", scheduling_key=scheduling_key(max_kv_pages=18))
    harness.step()
    (second,) = harness.add(
        "second", range(34), short, tenant="t", scheduling_key=scheduling_key(max_kv_pages=18)
    )
    harness.step()
    assert second.status is not SequenceStatus.WAITING and second.num_cached_tokens == 32
    harness.run()


def test_prompt_beyond_its_quota_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="quota max_kv_pages of 10 pages, and the model, hold 40"):
        make_harness().add("a", range(40), LONG, tenant="tight", scheduling_key=TIGHT)


def test_lower_quota_preempts_pages_beyond_it() -> None:
    harness = make_harness()
    harness.add(
        "wide",
        range(60),
        SamplingParams(max_tokens=3),
        tenant="t",
        scheduling_key=scheduling_key(max_kv_pages=60),
    )
    for name in ("b", "c"):
        harness.add(name, range(30), LONG, tenant="t", scheduling_key=TIGHT)
    harness.step()
    assert harness.pool.accounts.num_pages["t"] > 10
    while ("wide", 0) in harness.live:
        harness.step()
    plan, _, _ = harness.step()
    assert plan.preempted == (("c", 0),) and harness.pool.accounts.num_pages["t"] <= 10
    harness.run()


def test_pages_that_are_expected_leave_no_room_for_others() -> None:
    harness = make_harness()
    harness.pool.accounts.expect("tight", 8)
    (sequence,) = harness.add("a", range(10), LONG, tenant="tight", scheduling_key=TIGHT)
    assert not harness.step()[0].scheduled
    harness.pool.accounts.expect("tight", -8)
    harness.run()
    assert sequence.num_tokens == 40
