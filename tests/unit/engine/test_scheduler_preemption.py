"""Sequences that lose their pages and get them back: recomputed, or swapped to the host and in again."""

import pytest

from baton.engine.scheduler.sequence import PreemptMode, SequenceStatus
from baton.engine.scheduler.step_planner import PreemptionRates
from baton.request import SamplingParams
from tests.scheduling import PROMPT, make_harness


def test_abort_of_a_swapped_sequence_frees_its_host_pages() -> None:
    harness = make_harness(num_host_pages=8)
    (sequence,) = harness.add("a", PROMPT)
    harness.step()
    harness.scheduler.preempt(sequence.key, PreemptMode.SWAP)
    harness.step()
    assert sequence.status is SequenceStatus.SWAPPED
    harness.abort("a")
    assert harness.host.num_available == 8
    harness.run()


def test_recompute_drops_pages_and_computes_the_same_answer() -> None:
    harness = make_harness(prefix_caching=False)
    (sequence,) = harness.add("a", PROMPT)
    harness.step()
    harness.scheduler.preempt(sequence.key, PreemptMode.RECOMPUTE)
    plan, batch, _ = harness.step()
    assert plan.preempted == {sequence.key: PreemptMode.RECOMPUTE} and batch.chunks == ()
    plan, _, _ = harness.step()
    assert dict(plan.scheduled) == {sequence.key: 11}
    harness.run()
    assert sequence.num_preemptions == 1


def test_prefix_found_after_a_preemption_does_not_count_as_cached() -> None:
    harness = make_harness()
    (sequence,) = harness.add("a", PROMPT)
    harness.step()
    version = sequence.table_version
    harness.scheduler.preempt(sequence.key, PreemptMode.RECOMPUTE)
    harness.step()
    assert sequence.table_version > version and not sequence.page_table
    _, batch, _ = harness.step()
    assert batch.chunks[0].start == 8 and sequence.num_cached_tokens == 0
    harness.run()


def test_swap_copies_out_and_back_and_computes_nothing_twice() -> None:
    harness = make_harness(num_host_pages=8, prefix_caching=False)
    (sequence,) = harness.add("a", PROMPT)
    harness.step()
    harness.scheduler.preempt(sequence.key, PreemptMode.SWAP)
    _, out, _ = harness.step()
    _, back, _ = harness.step()
    assert len(out.copies_to_host) == 3 and len(back.copies_to_device) == 3
    assert [host for _, host in out.copies_to_host] == [host for _, host in back.copies_to_device]
    assert (back.num_decodes, back.chunks[0].start) == (1, 10)
    harness.run()
    assert harness.model.num_computed_tokens == len(PROMPT) + 3


def test_swap_brings_back_only_what_the_device_has_lost() -> None:
    harness = make_harness(num_host_pages=8)
    (sequence,) = harness.add("a", PROMPT)
    harness.step()
    harness.scheduler.preempt(sequence.key, PreemptMode.SWAP)
    harness.step()
    _, back, _ = harness.step()
    assert len(back.copies_to_device) == 1  # the two full pages are still cached on the device
    harness.run()


def test_swap_without_host_pages_recomputes() -> None:
    harness = make_harness(num_host_pages=2)
    (sequence,) = harness.add("a", PROMPT)
    harness.step()
    harness.scheduler.preempt(sequence.key, PreemptMode.SWAP)
    plan, _, _ = harness.step()
    assert plan.preempted == {sequence.key: PreemptMode.RECOMPUTE}
    harness.run()


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (None, {PreemptMode.RECOMPUTE}),
        (PreemptionRates(recompute_s_per_token=1.0, swap_s_per_page=0.1), {PreemptMode.SWAP}),
        (PreemptionRates(recompute_s_per_token=0.001, swap_s_per_page=0.1), {PreemptMode.RECOMPUTE}),
    ],
)
def test_shortage_preempts_by_measured_cost(
    rates: PreemptionRates | None, expected: set[PreemptMode]
) -> None:
    harness = make_harness(num_pages=12, num_host_pages=20)
    harness.scheduler.rates = rates
    for name in "ab":
        harness.add(name, [ord(name) % 50] * 4, SamplingParams(max_tokens=35))
    modes = set[PreemptMode]()
    while harness.scheduler.has_work():
        modes.update(harness.step()[0].preempted.values())
    assert modes == expected
    harness.check_answers()


@pytest.mark.parametrize("mode", list(PreemptMode))
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption_of_everything_before_every_step_changes_no_token(
    mode: PreemptMode, prefix_caching: bool
) -> None:
    harness = make_harness(num_host_pages=64, prefix_caching=prefix_caching)
    for name in "abc":
        harness.add(name, PROMPT * 2 + [ord(name) % 50], SamplingParams(max_tokens=6))
    while harness.scheduler.has_work():
        for sequence in harness.live.values():
            if sequence.status is SequenceStatus.RUNNING:
                harness.scheduler.preempt(sequence.key, mode)
        harness.step()
    assert all(sequence.num_preemptions >= 5 for sequence in harness.finished)
    harness.check_answers()


def test_only_a_running_sequence_can_be_preempted() -> None:
    harness = make_harness()
    (sequence,) = harness.add("a", PROMPT)
    with pytest.raises(ValueError, match="is waiting, not running"):
        harness.scheduler.preempt(sequence.key, PreemptMode.SWAP)
