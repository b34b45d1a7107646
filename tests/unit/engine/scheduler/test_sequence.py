import pytest

from baton.engine.scheduler.sequence import Sequence
from baton.request import Request, SamplingParams


def sequence_of(
    sampling: SamplingParams, *, choice: int = 1, num_prompt_tokens: int = 3, max_model_len: int = 100
) -> Sequence:
    request = Request(
        request_id="r", token_ids=tuple(range(num_prompt_tokens)), sampling=sampling, priority=2
    )
    return Sequence.from_request(request, choice, max_model_len=max_model_len, eos_token_ids=(9,))


def test_sequence_starts_from_its_request() -> None:
    sequence = sequence_of(SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=(4,)))
    assert (sequence.request_id, sequence.choice, sequence.priority) == ("r", 1, 2)
    assert (sequence.num_tokens, sequence.num_uncomputed_tokens, sequence.num_generated_tokens) == (3, 3, 0)
    assert (sequence.min_num_tokens, sequence.max_num_tokens) == (5, 8)
    assert sequence.stop_ids == {4, 9}


def test_ignored_eos_does_not_stop_but_stop_ids_do() -> None:
    assert sequence_of(SamplingParams(ignore_eos=True, stop_token_ids=(4,))).stop_ids == {4}


@pytest.mark.parametrize(("max_tokens", "expected"), [(5, 8), (50, 10), (None, 10)])
def test_model_length_caps_the_answer(max_tokens: int | None, expected: int) -> None:
    assert sequence_of(SamplingParams(max_tokens=max_tokens), max_model_len=10).max_num_tokens == expected


def test_prompt_logprobs_are_needed_until_the_first_token() -> None:
    sequence = sequence_of(SamplingParams(prompt_logprobs=0), choice=0)
    assert sequence.needs_prompt_logprobs
    sequence.token_ids.append(1)
    assert not sequence.needs_prompt_logprobs


def test_prompt_logprobs_are_the_first_choices_alone() -> None:
    sampling = SamplingParams(n=3, prompt_logprobs=0)
    assert [sequence_of(sampling, choice=choice).needs_prompt_logprobs for choice in range(3)] == [
        True,
        False,
        False,
    ]
