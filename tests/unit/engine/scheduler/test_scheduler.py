import pytest

from baton.engine.cache.page_pool import PageState
from baton.engine.scheduler.plan import Advance
from baton.engine.scheduler.sequence import Sequence, SequenceStatus
from baton.errors import IntegrityError, InvalidRequest
from baton.request import FilledPages, FinishReason, Request, SamplingParams
from tests.scheduling import PROMPT, Harness, make_harness


def sample(harness: Harness, token_id: int) -> list[Advance]:
    """One step in which every sampling chunk yields `token_id`."""
    batch = harness.scheduler.apply(harness.scheduler.plan())
    return harness.scheduler.commit(batch, [token_id if chunk.samples else None for chunk in batch.chunks])


def test_sequence_ends_with_its_last_token_and_gives_everything_back() -> None:
    harness = make_harness()
    (sequence,) = harness.add("a", PROMPT, SamplingParams(max_tokens=3))
    harness.run()
    assert sequence.status is SequenceStatus.FINISHED and sequence.finish_reason is FinishReason.LENGTH
    assert sequence.num_generated_tokens == 3 and harness.num_steps == 3


def test_advances_count_generated_tokens() -> None:
    harness = make_harness()
    harness.add("a", PROMPT, SamplingParams(max_tokens=2))
    assert [(a.token_id, a.index, a.finish_reason) for a in sample(harness, 8)] == [(8, 0, None)]
    assert [(a.index, a.finish_reason) for a in sample(harness, 8)] == [(1, FinishReason.LENGTH)]


def test_stop_id_ends_a_sequence_but_not_before_min_tokens() -> None:
    harness = make_harness()
    harness.add("a", PROMPT, SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=(8,)))
    reasons = [sample(harness, 8)[0].finish_reason for _ in range(3)]
    assert reasons == [None, None, FinishReason.STOP]
    assert not harness.scheduler.has_work()


def test_stop_id_at_the_last_token_is_a_stop() -> None:
    harness = make_harness()
    harness.add("a", PROMPT, SamplingParams(max_tokens=1, stop_token_ids=(8,)))
    assert sample(harness, 8)[0].finish_reason is FinishReason.STOP


def test_sequence_that_fills_the_pool_ends_by_length() -> None:
    harness = make_harness(num_pages=4)
    (sequence,) = harness.add("a", PROMPT, SamplingParams(max_tokens=1_000))
    harness.run()
    assert sequence.num_tokens == 16


@pytest.mark.parametrize("num_tokens", [0, 16, 100])
def test_prompt_that_can_never_run_is_refused(num_tokens: int) -> None:
    harness = make_harness(num_pages=4)
    with pytest.raises(InvalidRequest, match="request a"):
        harness.add("a", range(num_tokens))
    assert not harness.scheduler.has_work()


def test_same_key_twice_is_a_bug() -> None:
    harness = make_harness()
    harness.add("a", PROMPT)
    with pytest.raises(ValueError, match="already here"):
        harness.add("a", PROMPT)


def test_stale_plan_is_refused() -> None:
    harness = make_harness()
    harness.add("a", PROMPT)
    plan = harness.scheduler.plan()
    harness.add("b", PROMPT)
    with pytest.raises(ValueError, match="stale"):
        harness.scheduler.apply(plan)


def test_plan_is_applied_once() -> None:
    harness = make_harness()
    harness.add("a", PROMPT)
    plan = harness.scheduler.plan()
    harness.scheduler.apply(plan)
    with pytest.raises(ValueError, match="stale"):
        harness.scheduler.apply(plan)


def test_missing_sample_is_a_bug() -> None:
    harness = make_harness()
    harness.add("a", PROMPT)
    batch = harness.scheduler.apply(harness.scheduler.plan())
    with pytest.raises(IntegrityError, match="no token at position 10"):
        harness.scheduler.commit(batch, [None])


def test_repeated_prompt_comes_from_the_cache() -> None:
    harness = make_harness()
    harness.add("a", PROMPT)
    harness.run()
    (again,) = harness.add("b", PROMPT)
    plan, batch, _ = harness.step()
    assert again.num_cached_tokens == 8
    assert plan.page_needs == {again.key: 1} and batch.chunks[0].start == 8
    harness.run()


def test_generated_tokens_are_cached_too() -> None:
    harness = make_harness()
    (first,) = harness.add("a", PROMPT, SamplingParams(max_tokens=12))
    harness.run()
    (second,) = harness.add("b", [*first.token_ids, 5])
    harness.step()
    assert second.num_cached_tokens == 20  # 21 tokens have KV: the last one was never computed
    harness.run()


def test_prompt_logprobs_compute_the_whole_prompt_and_share_it_afterwards() -> None:
    harness = make_harness()
    (first,) = harness.add("a", PROMPT, SamplingParams(max_tokens=5))
    harness.step()
    (second,) = harness.add("b", PROMPT, SamplingParams(prompt_logprobs=0, max_tokens=5))
    plan, _, _ = harness.step()
    assert plan.scheduled[second.key] == len(PROMPT) and second.num_cached_tokens == 0
    assert second.page_table[:2] == first.page_table[:2]
    harness.run()


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    harness = make_harness(prefix_caching=False)
    harness.add("a", PROMPT, SamplingParams(n=2))
    harness.run()
    assert harness.pool.num_free == harness.pool.num_pages
    assert all(sequence.num_cached_tokens == 0 for sequence in harness.finished)


@pytest.mark.parametrize("num_steps", range(4))
def test_abort_is_legal_at_any_step(num_steps: int) -> None:
    harness = make_harness(budget=6)
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
    harness = make_harness()
    harness.add("a", PROMPT)
    harness.add("b", PROMPT[::-1])
    batch = harness.scheduler.apply(harness.scheduler.plan())
    harness.abort("a")
    advances = harness.scheduler.commit(batch, [7, 8])
    assert [advance.sequence.request_id for advance in advances] == ["b"]
    assert harness.pool.count(PageState.ACTIVE) == 3


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_chunk_size_changes_no_token(budget: int) -> None:
    harness = make_harness(budget=budget)
    for name in "abc":
        harness.add(name, [*PROMPT, ord(name) % 50])
    harness.run()


def test_evicted_pages_return_from_the_host_for_a_hit() -> None:
    harness = make_harness(num_pages=6, num_host_pages=12)
    harness.add("a", PROMPT + PROMPT)
    harness.run()
    harness.add("b", [40 + token for token in PROMPT + PROMPT])
    harness.run()
    (again,) = harness.add("c", PROMPT + PROMPT)
    _, batch, _ = harness.step()
    assert again.num_cached_tokens == 16 and len(batch.copies_to_device) >= 1
    harness.run()


def test_sequence_that_brings_its_pages_starts_decoding_at_once() -> None:
    harness = make_harness()
    deadline_s = 5.0
    pages = harness.pool.reserve(3, "transfer", deadline_s)
    request = Request(request_id="a", token_ids=tuple(PROMPT), sampling=SamplingParams(max_tokens=4))
    sequence = Sequence.from_request(request, 0, max_model_len=100)
    sequence.token_ids.append(7)
    harness.pool.adopt(pages, "transfer", "caller")
    harness.scheduler.add(sequence, FilledPages(tuple(pages), len(PROMPT), "caller"))
    batch = harness.scheduler.apply(harness.scheduler.plan())
    assert [(chunk.start, chunk.num_tokens) for chunk in batch.chunks] == [(10, 1)] and batch.num_decodes == 1
    assert harness.scheduler.commit(batch, [8])[0].index == 1
    while harness.scheduler.has_work():
        sample(harness, 8)
        harness.scheduler.check_integrity()
    assert harness.pool.num_available == harness.pool.num_pages


def test_leased_pages_hold_work_up_without_harm_until_they_expire() -> None:
    harness = make_harness(num_pages=4)
    harness.pool.reserve(3, "transfer", deadline_s=1.0)
    harness.add("a", PROMPT)
    assert not harness.scheduler.plan().scheduled
    harness.pool.expire(1.0)
    harness.run()


def test_leased_pages_outlive_their_sequence() -> None:
    harness = make_harness()
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
    harness = make_harness()
    (first,) = harness.add("a", PROMPT)
    harness.run()
    (second,) = harness.add("a", PROMPT)
    assert second.table_version > first.table_version
    harness.run()


def test_wrong_page_is_noticed() -> None:
    harness = make_harness()
    (first,) = harness.add("a", PROMPT)
    (second,) = harness.add("b", PROMPT[::-1])
    harness.step()
    first.page_table, second.page_table = second.page_table, first.page_table
    batch = harness.scheduler.apply(harness.scheduler.plan())
    with pytest.raises(AssertionError):
        harness.model.run(batch)
    with pytest.raises(IntegrityError, match="without owning it"):
        harness.scheduler.check_integrity()
