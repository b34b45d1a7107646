"""The pages of a prompt that may be sent before and after it is computed."""

from typing import Any

import pytest

from baton.engine.scheduler.sequence import Sequence
from baton.kvtransfer.protocol.handoff import GrantedTransfer
from baton.prefill_worker.worker import PrefillJob
from baton.request import FinishReason
from baton.rpc.worker_node import PromptTimer
from tests.worker_pair import prefill_of
from tests.worker_pair_cases import PROMPT, a_request


def a_job(
    *, position: int = 0, page_size: int = 4, unit_tokens: int = 4, **fields: Any
) -> tuple[PrefillJob, Sequence]:
    """A job whose pages are granted from the token `position` on."""
    request = a_request(**fields)
    job = PrefillJob(prefill_of(request, b"t" * 16), page_size, PromptTimer(request, 0.0))
    num_units = -(-(request.num_tokens - position) // unit_tokens)
    job.granted = GrantedTransfer(job.transfer, position, num_units, unit_tokens, num_layer_groups=1)
    job.sequence = sequence = Sequence.from_request(request, 0, max_model_len=100)
    sequence.page_table = list(range(100, 200))
    return job, sequence


def test_only_whole_pages_leave_before_the_end() -> None:
    job, sequence = a_job()  # 41 tokens
    offers = []
    for sequence.num_computed_tokens in (0, 3, 4, 11, 11, 40, 41, 41):
        offer = job.take_offer()
        offers.append(None if offer is None else (list(offer[0]), offer[1]))
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
    job, sequence = a_job()
    sequence.num_computed_tokens = 10
    assert job.take_offer() == ((100, 101), 2)
    sequence.num_computed_tokens, sequence.page_table = 0, []
    assert job.take_offer() is None
    sequence.num_computed_tokens, sequence.page_table = 8, [50, 51]
    assert job.take_offer() is None
    sequence.num_computed_tokens, sequence.page_table = 41, list(range(50, 61))
    assert job.take_offer() == (tuple(range(52, 61)), 11)


def test_units_may_be_smaller_than_pages() -> None:
    job, sequence = a_job(page_size=16, unit_tokens=4)
    sequence.num_computed_tokens = 33
    assert job.take_offer() == ((100, 101), 8)
    sequence.num_computed_tokens = 41
    assert job.take_offer() == ((102,), 11)


def test_pages_that_the_decode_worker_holds_are_not_offered() -> None:
    job, sequence = a_job(position=16)
    sequence.num_computed_tokens = 15  # less than is held: perhaps it found less in its own cache
    assert job.take_offer() is None
    sequence.num_computed_tokens = 24
    assert job.take_offer() == ((104, 105), 2)
    sequence.num_computed_tokens = 41
    assert job.take_offer() == ((106, 107, 108, 109, 110), 7)


@pytest.mark.parametrize(
    ("position", "num_units", "is_accepted"),
    [(0, 11, True), (16, 7, True), (6, 9, False), (44, 1, False), (400, 1, False), (16, 6, False)],
)
def test_grant_of_another_range_is_not_accepted(position: int, num_units: int, is_accepted: bool) -> None:
    job, _ = a_job()
    granted = GrantedTransfer(job.transfer, position, num_units, unit_tokens=4, num_layer_groups=1)
    assert job.accepts(granted) == is_accepted


def test_nothing_leaves_before_pages_are_granted() -> None:
    job, sequence = a_job()
    granted, job.granted = job.granted, None
    sequence.num_computed_tokens = 41
    assert job.take_offer() is None
    job.granted = granted
    assert job.take_offer() == (tuple(range(100, 111)), 11)


def test_the_answer_so_far_leaves_with_the_prompt() -> None:
    job, sequence = a_job(attempt=1, generated_token_ids=(1, 2, 3, 4))
    assert job.request.num_tokens == 45
    sequence.num_computed_tokens = 41
    assert job.take_offer() == (tuple(range(100, 110)), 10)


@pytest.mark.parametrize(
    ("num_generated", "min_tokens", "expected"), [(0, 0, 0), (0, 6, 1), (4, 6, 5), (4, 3, 3)]
)
def test_the_engine_is_asked_for_one_token(num_generated: int, min_tokens: int, expected: int) -> None:
    job, _ = a_job(generated_token_ids=PROMPT[:num_generated], min_tokens=min_tokens)
    request = job.engine_request
    assert request.sampling.max_tokens == num_generated + 1
    assert request.sampling.min_tokens == expected
    assert request.request_id != job.request.request_id


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
    job, _ = a_job(**fields)
    assert job.finish_reason(reason, max_model_len) is expected
