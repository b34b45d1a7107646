import pytest

from baton.engine.cache.page_pool import PageState
from baton.request import FinishReason, SamplingParams
from tests.outside import OpenHarness
from tests.scheduling import PROMPT

# Claims.


def test_claim_holds_whole_pages_without_the_last_token() -> None:
    harness = OpenHarness.of(16)
    harness.add("a", PROMPT[:8], SamplingParams(max_tokens=6))
    harness.run()
    claims = [harness.scheduler.holds.claim(PROMPT[:length], b"", length) for length in range(1, 11)]
    assert [claim.num_tokens for claim in claims] == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert harness.pool.count(PageState.ACTIVE) == 2
    for claim in claims:
        harness.scheduler.holds.release(claim.pages, claim.owner)
    assert harness.pool.count(PageState.ACTIVE) == 0
    assert harness.pool.count(PageState.CACHED) == 3


def test_claim_is_cut_to_a_multiple_that_both_sides_can_start_at() -> None:
    harness = OpenHarness.of(16)
    harness.add("a", PROMPT * 2)
    harness.run()
    taken = [
        harness.scheduler.holds.claim(PROMPT * 2, b"", multiple, multiple_of=multiple).num_tokens
        for multiple in (1, 2, 4, 8, 16, 32)
    ]
    assert taken == [16, 16, 16, 16, 16, 0]


def test_owner_has_one_claim() -> None:
    harness = OpenHarness.of(16)
    harness.add("a", PROMPT)
    harness.run()
    claim = harness.scheduler.holds.claim(PROMPT, b"", "owner")
    with pytest.raises(ValueError, match="owner has claimed pages already"):
        harness.scheduler.holds.claim(PROMPT, b"", "owner")
    harness.scheduler.holds.release(claim.pages[1:], "owner")
    with pytest.raises(ValueError, match="owner has claimed"):
        harness.scheduler.holds.claim(PROMPT, b"", "owner")
    harness.scheduler.holds.release(claim.pages[:1], "owner")
    assert harness.scheduler.holds.claim(PROMPT, b"", "owner") == claim


# Pages kept after the end.


@pytest.mark.parametrize("budget", [3, 64])
def test_kept_pages_hold_everything_computed_until_they_are_let_go(budget: int) -> None:
    harness = OpenHarness.of(16, max_num_batched_tokens=budget)
    (sequence,) = harness.add("a", PROMPT, SamplingParams(max_tokens=1))
    sequence.keeps_pages = True
    while harness.scheduler.has_work():
        harness.step()
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.num_computed_tokens == len(PROMPT) and len(sequence.page_table) == 3
    with pytest.raises(ValueError, match="already here"):
        harness.add("a", PROMPT)
    harness.release_kept(sequence)
    assert sequence.page_table == []
    harness.scheduler.holds.release_kept(sequence.key)  # once more is no matter
    assert harness.pool.num_available == 16
    harness.add("a", PROMPT)
    harness.run()


def test_failed_sequence_leaves_no_page_to_be_found() -> None:
    harness = OpenHarness.of(16)
    (sequence,) = harness.add("a", PROMPT, SamplingParams(max_tokens=9))
    harness.step()
    harness.scheduler.fail(sequence)
    del harness.live[sequence.key]
    assert sequence.finish_reason is FinishReason.ERROR and harness.pool.num_free == 16
    assert harness.cache.find(PROMPT, b"") == []
    harness.scheduler.check_integrity()
