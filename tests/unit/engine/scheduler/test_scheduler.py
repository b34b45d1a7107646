import pytest

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


@pytest.mark.parametrize("num_tokens", [0, 16, 100])
def test_prompt_that_can_never_run_is_refused(num_tokens: int) -> None:
    harness = Harness.of(num_pages=4)
    with pytest.raises(InvalidRequest, match="request a"):
        harness.add("a", range(num_tokens))
    assert not harness.scheduler.has_work()


def test_missing_sample_is_an_integrity_error() -> None:
    harness = Harness.of()
    harness.add("a", PROMPT)
    batch = harness.scheduler.apply(harness.scheduler.plan())
    with pytest.raises(IntegrityError, match="no token at position 10"):
        harness.scheduler.commit(batch, [None])


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
