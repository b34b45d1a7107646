import pytest

from baton.engine.cache.page_pool import PageState
from baton.errors import IntegrityError, InvalidRequest
from baton.request import FinishReason, SamplingParams, StepOutput
from tests.scheduling import PROMPT, Harness


def sample(harness: Harness, token_id: int) -> list[StepOutput]:
    """One step in which every sampling chunk yields `token_id`."""
    batch = harness.scheduler.apply(harness.scheduler.plan())
    return harness.scheduler.commit(batch, [token_id if chunk.samples else None for chunk in batch.chunks])


def test_stop_id_at_the_last_token_is_a_stop() -> None:
    harness = Harness.of()
    harness.add("a", PROMPT, SamplingParams(max_tokens=1, stop_token_ids=(8,)))
    assert sample(harness, 8)[0].finish_reason is FinishReason.STOP


def test_sequence_that_fills_the_pool_ends_by_length() -> None:
    harness = Harness.of(num_pages=4)
    (sequence,) = harness.add("a", PROMPT, SamplingParams(max_tokens=1_000))
    harness.run()
    assert sequence.num_tokens == 16


@pytest.mark.parametrize("num_tokens", [0, 16, 100])
def test_prompt_that_can_never_run_is_refused(num_tokens: int) -> None:
    harness = Harness.of(num_pages=4)
    with pytest.raises(InvalidRequest, match="request a"):
        harness.add("a", range(num_tokens))
    assert not harness.scheduler.has_work()


@pytest.mark.parametrize("change", ["add", "apply"])
def test_stale_plan_is_refused(change: str) -> None:
    harness = Harness.of()
    harness.add("a", PROMPT)
    plan = harness.scheduler.plan()
    if change == "add":
        harness.add("b", PROMPT)
    else:
        harness.scheduler.apply(plan)
    with pytest.raises(ValueError, match="stale"):
        harness.scheduler.apply(plan)


def test_missing_sample_is_an_integrity_error() -> None:
    harness = Harness.of()
    harness.add("a", PROMPT)
    batch = harness.scheduler.apply(harness.scheduler.plan())
    with pytest.raises(IntegrityError, match="no token at position 10"):
        harness.scheduler.commit(batch, [None])


def test_prompt_logprobs_compute_the_whole_prompt_and_share_it_afterwards() -> None:
    harness = Harness.of()
    (first,) = harness.add("a", PROMPT, SamplingParams(max_tokens=5))
    harness.step()
    (second,) = harness.add("b", PROMPT, SamplingParams(prompt_logprobs=0, max_tokens=5))
    plan, _, _ = harness.step()
    assert plan.scheduled[second.key] == len(PROMPT) and second.num_cached_tokens == 0
    assert second.page_table[:2] == first.page_table[:2]
    harness.run()


def test_abort_while_the_batch_runs_drops_its_token() -> None:
    harness = Harness.of()
    harness.add("a", PROMPT)
    harness.add("b", PROMPT[::-1])
    batch = harness.scheduler.apply(harness.scheduler.plan())
    harness.abort("a")
    outputs = harness.scheduler.commit(batch, [7, 8])
    assert [output.request_id for output in outputs] == ["b"]
    assert harness.pool.count(PageState.ACTIVE) == 3


def test_evicted_pages_return_from_the_host_for_a_hit() -> None:
    harness = Harness.of(num_pages=6, num_host_pages=12)
    harness.add("a", PROMPT + PROMPT)
    harness.run()
    harness.add("b", [40 + token for token in PROMPT + PROMPT])
    harness.run()
    (again,) = harness.add("c", PROMPT + PROMPT)
    _, batch, _ = harness.step()
    assert again.num_cached_tokens == 16 and len(batch.copies_to_device) >= 1
    harness.run()


def test_leased_pages_delay_sequences_until_the_lease_expires() -> None:
    harness = Harness.of(num_pages=4)
    harness.pool.reserve(3, "transfer", deadline_s=1.0)
    harness.add("a", PROMPT)
    assert not harness.scheduler.plan().scheduled
    harness.pool.expire(1.0)
    harness.run()


def test_table_versions_of_different_sequences_never_meet() -> None:
    harness = Harness.of()
    (first,) = harness.add("a", PROMPT)
    harness.run()
    (second,) = harness.add("a", PROMPT)
    assert second.table_version > first.table_version
    harness.run()


def test_wrong_page_is_noticed() -> None:
    harness = Harness.of()
    (first,) = harness.add("a", PROMPT)
    (second,) = harness.add("b", PROMPT[::-1])
    harness.step()
    first.page_table, second.page_table = second.page_table, first.page_table
    batch = harness.scheduler.apply(harness.scheduler.plan())
    with pytest.raises(AssertionError):
        harness.model.run(batch)
    with pytest.raises(IntegrityError, match="without owning it"):
        harness.scheduler.check_integrity()
