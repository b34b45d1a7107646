"""What of a prompt can leave, and when."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.engine.scheduler.sequence import SequenceStatus
from baton.errors import ProtocolError
from baton.messages.control import Prefill
from baton.prefill_worker.prefill_job import PrefillJob
from baton.request import FinishReason
from tests.worker_pair import DECODE, GATEWAY
from tests.worker_pair_cases import PROMPT, a_request


@dataclass
class Computed:
    """A Progress that a test moves on."""

    key: tuple[str, int] = ("", 0)
    num_computed_tokens: int = 0
    page_table: list[int] = field(default_factory=lambda: list(range(100, 200)))
    table_version: int = 0
    status: SequenceStatus = SequenceStatus.RUNNING
    finish_reason: FinishReason | None = None
    own_s: float = 0.0


def a_departure(
    *, num_held_tokens: int = 0, page_size: int = 4, unit_tokens: int = 4, **fields: Any
) -> tuple[PrefillJob, Computed]:
    request = a_request(**fields)
    prefill = Prefill(
        request=request, gateway=GATEWAY.id, transfer=b"t" * 16, num_held_tokens=num_held_tokens
    )
    prefill_job = PrefillJob(prefill, DECODE, page_size, unit_tokens)
    prefill_job.progress = progress = Computed()
    return prefill_job, progress


def test_only_whole_pages_leave_before_the_end() -> None:
    prefill_job, progress = a_departure()  # 41 tokens
    offers = []
    for progress.num_computed_tokens in (0, 3, 4, 11, 11, 40, 41, 41):
        offer = prefill_job.take_offer()
        offers.append(None if offer is None else (list(offer.pages), offer.num_units))
    assert offers == [
        None,
        None,
        ([100], 1),
        ([101], 2),
        None,
        (list(range(102, 110)), 10),
        ([110], 11),
        None,
    ]


def test_a_preempted_prompt_leaves_with_its_new_pages() -> None:
    prefill_job, progress = a_departure()
    progress.num_computed_tokens = 10
    assert prefill_job.take_offer() == ((100, 101), 2)
    progress.num_computed_tokens, progress.page_table = 0, []
    assert prefill_job.take_offer() is None
    progress.num_computed_tokens, progress.page_table = 8, [50, 51]
    assert prefill_job.take_offer() is None
    progress.num_computed_tokens, progress.page_table = 41, list(range(50, 61))
    assert prefill_job.take_offer() == (tuple(range(52, 61)), 11)


def test_units_may_be_smaller_than_pages() -> None:
    prefill_job, progress = a_departure(page_size=16, unit_tokens=4)
    progress.num_computed_tokens = 33
    assert prefill_job.take_offer() == ((100, 101), 8)
    progress.num_computed_tokens = 41
    assert prefill_job.take_offer() == ((102,), prefill_job.num_units) == ((102,), 11)


def test_what_the_decode_worker_holds_stays() -> None:
    prefill_job, progress = a_departure(num_held_tokens=16)
    progress.num_computed_tokens = 15  # less than is held: perhaps it found less in its own cache
    assert prefill_job.take_offer() is None
    progress.num_computed_tokens = 24
    assert prefill_job.take_offer() == ((104, 105), 2)
    progress.num_computed_tokens = 41
    assert prefill_job.take_offer() == ((106, 107, 108, 109, 110), 7)
    assert prefill_job.num_units == 7


@pytest.mark.parametrize("num_held_tokens", [6, 44, 41, 400])
def test_what_no_decode_worker_can_hold_is_an_offence(num_held_tokens: int) -> None:
    with pytest.raises(ProtocolError, match=f"{num_held_tokens} of 41 tokens are held, in pages of 4"):
        a_departure(num_held_tokens=num_held_tokens)


def test_the_answer_so_far_leaves_with_the_prompt() -> None:
    prefill_job, progress = a_departure(attempt=1, generated_token_ids=(1, 2, 3, 4))
    assert (prefill_job.num_tokens, prefill_job.num_units) == (45, 12)
    progress.num_computed_tokens = 41
    assert prefill_job.take_offer() == (tuple(range(100, 110)), 10)


@pytest.mark.parametrize(
    ("num_generated", "min_tokens", "expected"), [(0, 0, 0), (0, 6, 1), (4, 6, 5), (4, 3, 3)]
)
def test_the_engine_is_asked_for_one_token(num_generated: int, min_tokens: int, expected: int) -> None:
    prefill_job, _ = a_departure(generated_token_ids=PROMPT[:num_generated], min_tokens=min_tokens)
    request = prefill_job.engine_request
    assert request.sampling.max_tokens == num_generated + 1
    assert request.sampling.min_tokens == expected
    assert request.request_id != prefill_job.request.request_id


@pytest.mark.parametrize(
    ("reason", "fields", "max_model_len", "expected"),
    [
        (None, {}, 96, None),
        (FinishReason.STOP, {}, 96, FinishReason.STOP),
        (FinishReason.LENGTH, {}, 96, None),
        (FinishReason.LENGTH, {"max_tokens": 1}, 96, FinishReason.LENGTH),
        (FinishReason.LENGTH, {"max_tokens": None}, 96, None),
        (FinishReason.LENGTH, {}, 42, FinishReason.LENGTH),
        (FinishReason.LENGTH, {}, 43, None),
        (FinishReason.LENGTH, {"generated_token_ids": (1,) * 7}, 96, FinishReason.LENGTH),
        (FinishReason.LENGTH, {"generated_token_ids": (1,) * 6}, 96, None),
        (FinishReason.LENGTH, {"generated_token_ids": (1,) * 6}, 48, FinishReason.LENGTH),
    ],
)
def test_the_first_token_ends_the_answer_only_where_one_engine_would(
    reason: FinishReason | None, fields: dict[str, Any], max_model_len: int, expected: FinishReason | None
) -> None:
    prefill_job, _ = a_departure(**fields)
    assert prefill_job.finish_reason(reason, max_model_len) is expected
