import pytest

from baton.config import SchedulerConfig
from baton.engine.pages import PageState
from baton.engine.plan import Advance, PreemptMode
from baton.engine.preemption import PreemptionRates
from baton.engine.sequence import Sequence, SequenceStatus
from baton.errors import IntegrityError, InvalidRequest
from baton.request import FinishReason, Request, SamplingParams
from tests.scheduling import Harness, Settings

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def make(
    *, num_pages: int = 64, num_host_pages: int = 0, budget: int = 64, prefix_caching: bool = True
) -> Harness:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget)
    return Harness(
        Settings(
            num_pages=num_pages,
            page_size=4,
            num_host_pages=num_host_pages,
            prefix_caching=prefix_caching,
            scheduler=config,
        )
    )


def sample(harness: Harness, token_id: int) -> list[Advance]:
    """One step in which every sampling chunk yields `token_id`."""
    batch = harness.scheduler.apply(harness.scheduler.plan())
    return harness.scheduler.commit(batch, [token_id if chunk.samples else None for chunk in batch.chunks])


def test_sequence_ends_with_its_last_token_and_gives_everything_back() -> None:
    harness = make()
    (sequence,) = harness.add("a", PROMPT, SamplingParams(max_tokens=3))
    harness.run()
    assert sequence.status is SequenceStatus.FINISHED and sequence.finish_reason is FinishReason.LENGTH
    assert sequence.num_generated_tokens == 3 and harness.num_steps == 3


def test_advances_count_generated_tokens() -> None:
    harness = make()
    harness.add("a", PROMPT, SamplingParams(max_tokens=2))
    assert [(a.token_id, a.index, a.finish_reason) for a in sample(harness, 8)] == [(8, 0, None)]
    assert [(a.index, a.finish_reason) for a in sample(harness, 8)] == [(1, FinishReason.LENGTH)]


def test_stop_id_ends_a_sequence_but_not_before_min_tokens() -> None:
    harness = make()
    harness.add("a", PROMPT, SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=(8,)))
    reasons = [sample(harness, 8)[0].finish_reason for _ in range(3)]
    assert reasons == [None, None, FinishReason.STOP]
    assert not harness.scheduler.has_work()


def test_stop_id_at_the_last_token_is_a_stop() -> None:
    harness = make()
    harness.add("a", PROMPT, SamplingParams(max_tokens=1, stop_token_ids=(8,)))
    assert sample(harness, 8)[0].finish_reason is FinishReason.STOP


def test_sequence_that_fills_the_pool_ends_by_length() -> None:
    harness = make(num_pages=4)
    (sequence,) = harness.add("a", PROMPT, SamplingParams(max_tokens=1_000))
    harness.run()
    assert sequence.num_tokens == 16


@pytest.mark.parametrize("num_tokens", [0, 16, 100])
def test_prompt_that_can_never_run_is_refused(num_tokens: int) -> None:
    harness = make(num_pages=4)
    with pytest.raises(InvalidRequest, match="request a"):
        harness.add("a", range(num_tokens))
    assert not harness.scheduler.has_work()


def test_same_key_twice_is_a_bug() -> None:
    harness = make()
    harness.add("a", PROMPT)
    with pytest.raises(ValueError, match="already here"):
        harness.add("a", PROMPT)


def test_stale_plan_is_refused() -> None:
    harness = make()
    harness.add("a", PROMPT)
    plan = harness.scheduler.plan()
    harness.add("b", PROMPT)
    with pytest.raises(ValueError, match="stale"):
        harness.scheduler.apply(plan)


def test_plan_is_applied_once() -> None:
    harness = make()
    harness.add("a", PROMPT)
    plan = harness.scheduler.plan()
    harness.scheduler.apply(plan)
    with pytest.raises(ValueError, match="stale"):
        harness.scheduler.apply(plan)


def test_missing_sample_is_a_bug() -> None:
    harness = make()
    harness.add("a", PROMPT)
    batch = harness.scheduler.apply(harness.scheduler.plan())
    with pytest.raises(IntegrityError, match="no token at position 10"):
        harness.scheduler.commit(batch, [None])


def test_repeated_prompt_comes_from_the_cache() -> None:
    harness = make()
    harness.add("a", PROMPT)
    harness.run()
    (again,) = harness.add("b", PROMPT)
    plan, batch, _ = harness.step()
    assert again.num_cached_tokens == 8
    assert plan.page_needs == {again.key: 1} and batch.chunks[0].start == 8
    harness.run()


def test_generated_tokens_are_cached_too() -> None:
    harness = make()
    (first,) = harness.add("a", PROMPT, SamplingParams(max_tokens=12))
    harness.run()
    (second,) = harness.add("b", [*first.token_ids, 5])
    harness.step()
    assert second.num_cached_tokens == 20  # 21 tokens have KV: the last one was never computed
    harness.run()


def test_prompt_logprobs_compute_the_whole_prompt_and_share_it_afterwards() -> None:
    harness = make()
    (first,) = harness.add("a", PROMPT, SamplingParams(max_tokens=5))
    harness.step()
    (second,) = harness.add("b", PROMPT, SamplingParams(prompt_logprobs=0, max_tokens=5))
    plan, _, _ = harness.step()
    assert plan.scheduled[second.key] == len(PROMPT) and second.num_cached_tokens == 0
    assert second.page_table[:2] == first.page_table[:2]
    harness.run()


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    harness = make(prefix_caching=False)
    harness.add("a", PROMPT, SamplingParams(n=2))
    harness.run()
    assert harness.pool.num_free == harness.pool.num_pages
    assert all(sequence.num_cached_tokens == 0 for sequence in harness.finished)


@pytest.mark.parametrize("num_steps", range(4))
def test_abort_is_legal_at_any_step(num_steps: int) -> None:
    harness = make(budget=6)
    harness.add("a", PROMPT, SamplingParams(n=2))
    harness.add("b", PROMPT)
    for _ in range(num_steps):
        harness.step()
    aborted = harness.scheduler.abort("a")
    assert {sequence.finish_reason for sequence in aborted} == {FinishReason.ABORT}
    for sequence in aborted:
        del harness.live[sequence.key]
    assert harness.scheduler.abort("a") == []
    harness.run()


def test_abort_while_the_batch_runs_drops_its_token() -> None:
    harness = make()
    harness.add("a", PROMPT)
    harness.add("b", PROMPT[::-1])
    batch = harness.scheduler.apply(harness.scheduler.plan())
    harness.abort("a")
    advances = harness.scheduler.commit(batch, [7, 8])
    assert [advance.sequence.request_id for advance in advances] == ["b"]
    assert harness.pool.count(PageState.ACTIVE) == 3


def test_abort_of_a_swapped_sequence_frees_its_host_pages() -> None:
    harness = make(num_host_pages=8)
    (sequence,) = harness.add("a", PROMPT)
    harness.step()
    harness.scheduler.preempt(sequence.key, PreemptMode.SWAP)
    harness.step()
    assert sequence.status is SequenceStatus.SWAPPED
    harness.abort("a")
    assert harness.host.num_available == 8
    harness.run()


def test_recompute_drops_pages_and_computes_the_same_answer() -> None:
    harness = make(prefix_caching=False)
    (sequence,) = harness.add("a", PROMPT)
    harness.step()
    harness.scheduler.preempt(sequence.key, PreemptMode.RECOMPUTE)
    plan, batch, _ = harness.step()
    assert plan.preempted == {sequence.key: PreemptMode.RECOMPUTE} and batch.chunks == ()
    plan, _, _ = harness.step()
    assert dict(plan.scheduled) == {sequence.key: 11}
    harness.run()
    assert sequence.num_preemptions == 1


def test_swap_copies_out_and_back_and_computes_nothing_twice() -> None:
    harness = make(num_host_pages=8, prefix_caching=False)
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
    harness = make(num_host_pages=8)
    (sequence,) = harness.add("a", PROMPT)
    harness.step()
    harness.scheduler.preempt(sequence.key, PreemptMode.SWAP)
    harness.step()
    _, back, _ = harness.step()
    assert len(back.copies_to_device) == 1  # the two full pages are still cached on the device
    harness.run()


def test_swap_without_host_pages_recomputes() -> None:
    harness = make(num_host_pages=2)
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
    harness = make(num_pages=12, num_host_pages=20)
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
    harness = make(num_host_pages=64, prefix_caching=prefix_caching)
    for name in "abc":
        harness.add(name, PROMPT * 2 + [ord(name) % 50], SamplingParams(max_tokens=6))
    while harness.scheduler.has_work():
        for sequence in harness.live.values():
            if sequence.status is SequenceStatus.RUNNING:
                harness.scheduler.preempt(sequence.key, mode)
        harness.step()
    assert all(sequence.num_preemptions >= 5 for sequence in harness.finished)
    harness.check_answers()


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_chunk_size_changes_no_token(budget: int) -> None:
    harness = make(budget=budget)
    for name in "abc":
        harness.add(name, [*PROMPT, ord(name) % 50])
    harness.run()


def test_pages_of_a_preempted_sequence_are_not_counted_twice_for_a_newcomer() -> None:
    harness = make(num_pages=4)
    harness.pool.reserve(1, "transfer", deadline_s=1.0)
    (first,) = harness.add("a", PROMPT)
    batch = harness.scheduler.apply(harness.scheduler.plan())
    harness.scheduler.commit(batch, harness.model.run(batch))
    harness.scheduler.preempt(first.key, PreemptMode.RECOMPUTE)
    (second,) = harness.add("b", [*PROMPT, *PROMPT[:4]])  # 2 pages of "a" and 2 more; 1 is left
    plan = harness.scheduler.plan()
    assert plan.preempted and second.key not in plan.admitted
    harness.scheduler.apply(plan)
    harness.pool.expire(1.0)
    harness.run()


def test_only_a_running_sequence_can_be_preempted() -> None:
    harness = make()
    (sequence,) = harness.add("a", PROMPT)
    with pytest.raises(ValueError, match="is waiting, not running"):
        harness.scheduler.preempt(sequence.key, PreemptMode.SWAP)


def test_evicted_pages_return_from_the_host_for_a_hit() -> None:
    harness = make(num_pages=6, num_host_pages=12)
    harness.add("a", PROMPT + PROMPT)
    harness.run()
    harness.add("b", [40 + token for token in PROMPT + PROMPT])
    harness.run()
    (again,) = harness.add("c", PROMPT + PROMPT)
    _, batch, _ = harness.step()
    assert again.num_cached_tokens == 16 and len(batch.copies_to_device) >= 1
    harness.run()


def test_sequence_that_brings_its_pages_starts_decoding_at_once() -> None:
    harness = make()
    deadline_s = 5.0
    pages = harness.pool.reserve(3, "transfer", deadline_s)
    request = Request(request_id="a", token_ids=tuple(PROMPT), sampling=SamplingParams(max_tokens=4))
    sequence = Sequence.from_request(request, 0, max_model_len=100)
    sequence.token_ids.append(7)
    sequence.page_table, sequence.num_computed_tokens = pages, len(PROMPT)
    harness.pool.adopt(pages, "transfer", sequence.key)
    harness.scheduler.add(sequence)
    batch = harness.scheduler.apply(harness.scheduler.plan())
    assert [(chunk.start, chunk.num_tokens) for chunk in batch.chunks] == [(10, 1)] and batch.num_decodes == 1
    assert harness.scheduler.commit(batch, [8])[0].index == 1
    while harness.scheduler.has_work():
        sample(harness, 8)
        harness.scheduler.check_integrity()
    assert harness.pool.num_available == harness.pool.num_pages


def test_leased_pages_hold_work_up_without_harm_until_they_expire() -> None:
    harness = make(num_pages=4)
    harness.pool.reserve(3, "transfer", deadline_s=1.0)
    harness.add("a", PROMPT)
    assert not harness.scheduler.plan().scheduled
    harness.pool.expire(1.0)
    harness.run()


def test_leased_pages_outlive_their_sequence() -> None:
    harness = make()
    (sequence,) = harness.add("a", PROMPT, SamplingParams(max_tokens=1))
    batch = harness.scheduler.apply(harness.scheduler.plan())
    pages = list(sequence.page_table)
    harness.pool.lease(pages, "transfer", 5.0)
    harness.scheduler.commit(batch, [7])
    assert harness.pool.count(PageState.LEASED) == 3
    harness.pool.expire(5.0)
    assert harness.pool.num_available == harness.pool.num_pages
    harness.scheduler.check_integrity()


def test_table_versions_of_different_sequences_never_meet() -> None:
    harness = make()
    (first,) = harness.add("a", PROMPT)
    harness.run()
    (second,) = harness.add("a", PROMPT)
    assert second.table_version > first.table_version
    harness.run()


def test_wrong_page_is_noticed() -> None:
    harness = make()
    (first,) = harness.add("a", PROMPT)
    (second,) = harness.add("b", PROMPT[::-1])
    harness.step()
    first.page_table, second.page_table = second.page_table, first.page_table
    batch = harness.scheduler.apply(harness.scheduler.plan())
    with pytest.raises(AssertionError):
        harness.model.run(batch)
    with pytest.raises(IntegrityError, match="without owning it"):
        harness.scheduler.check_integrity()
