"""A generation fed by hand with what an engine could say."""

import pytest

from baton.cluster.offline.generation import Generation, TextDelta
from baton.gateway.text.model_files import TokenizerConfig
from baton.gateway.text.tokenizer import Tokenizer
from baton.request import FinishReason, Request, SamplingParams, StepOutput, TokenLogprobs
from tests.unit.gateway import tiny_tokenizers

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level(), TokenizerConfig(eos_token="</s>"))
END = TOKENIZER.encode("</s>")[0]


def start(*stops: str, sampling: SamplingParams | None = None) -> Generation:
    request = Request(
        request_id="r",
        token_ids=tuple(TOKENIZER.encode("the ")),
        sampling=sampling or SamplingParams(max_tokens=100),
    )
    return Generation(request, "the ", 3, tokenizer=TOKENIZER, stops=stops)


def output(
    token_id: int | None, index: int, reason: FinishReason | None = None, choice: int = 0
) -> StepOutput:
    return StepOutput(request_id="r", choice=choice, index=index, token_id=token_id, finish_reason=reason)


def feed(generation: Generation, text: str, reason: FinishReason, choice: int = 0) -> list[TextDelta]:
    """All tokens of `text`, the last with `reason`; the deltas that were not dropped."""
    token_ids = TOKENIZER.encode(text)
    last = len(token_ids) - 1
    deltas = [
        generation.accept(output(token_id, index, reason if index == last else None, choice))
        for index, token_id in enumerate(token_ids)
    ]
    return [delta for delta in deltas if delta is not None]


def test_no_delta_shows_half_a_character() -> None:
    generation = start()
    deltas = feed(generation, "日本の首都 😀 👨‍👩‍👧", FinishReason.LENGTH)
    assert "".join(delta.text for delta in deltas) == "日本の首都 😀 👨‍👩‍👧"
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert any(delta.text == "" for delta in deltas)  # some tokens are only part of a character


def test_deltas_add_up_to_the_completion() -> None:
    generation = start()
    deltas = feed(generation, "quick brown fox", FinishReason.LENGTH)
    (answer,) = generation.completion().outputs
    assert "".join(delta.text for delta in deltas) == answer.text == "quick brown fox"
    assert sum((delta.token_ids for delta in deltas), ()) == answer.token_ids
    assert [delta.finish_reason for delta in deltas][-1] is answer.finish_reason is FinishReason.LENGTH
    assert {delta.prompt_index for delta in deltas} == {3}


def test_the_token_that_stops_has_an_id_and_no_text() -> None:
    generation = start()
    assert generation.accept(output(TOKENIZER.encode("a")[0], 0)) is not None
    delta = generation.accept(output(END, 1, FinishReason.STOP))
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("", (END,), None)


def test_a_stop_token_that_was_asked_for_is_the_reason() -> None:
    comma = TOKENIZER.encode(",")[0]
    generation = start(sampling=SamplingParams(stop_token_ids=(comma,)))
    delta = generation.accept(output(comma, 0, FinishReason.STOP))
    assert delta is not None
    assert (delta.text, delta.stop_reason) == ("", comma)


def test_a_stop_string_ends_the_choice_before_the_engine_does() -> None:
    generation = start("brown")
    deltas = feed(generation, "quick brown fox", FinishReason.LENGTH)
    assert "".join(delta.text for delta in deltas) == "quick "
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason == "brown"
    assert generation.is_finished


def test_a_stop_string_that_did_not_end_is_shown_at_the_end() -> None:
    generation = start("fox!")
    deltas = feed(generation, "quick fox", FinishReason.LENGTH)
    assert "".join(delta.text for delta in deltas) == "quick fox"
    assert deltas[-1].stop_reason is None


def test_a_choice_that_stopped_waits_for_the_others() -> None:
    generation = start(",", sampling=SamplingParams(n=2))
    ended = []
    for text, choice in [("a, b", 1), ("fox", 0)]:
        feed(generation, text, FinishReason.LENGTH, choice)
        ended.append(generation.is_finished)
    assert ended == [False, True]
    assert [answer.text for answer in generation.completion().outputs] == ["fox", "a"]


def test_an_abort_ends_the_choice_without_a_token() -> None:
    generation = start()
    delta = generation.accept(output(None, 0, FinishReason.ABORT))
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", (), FinishReason.ABORT)
    assert generation.is_finished


@pytest.mark.parametrize("asked", [None, 1])
def test_logprobs_are_kept_when_asked_for(asked: int | None) -> None:
    generation = start(sampling=SamplingParams(logprobs=asked))
    logprobs = TokenLogprobs(token_id=END, logprob=-0.5, rank=1)
    generation.accept(
        StepOutput(
            request_id="r",
            choice=0,
            index=0,
            token_id=END,
            logprobs=None if asked is None else logprobs,
            prompt_logprobs=(None, logprobs),
            finish_reason=FinishReason.STOP,
            num_cached_tokens=1,
        )
    )
    completion = generation.completion()
    assert completion.outputs[0].logprobs == (None if asked is None else (logprobs,))
    assert completion.prompt_logprobs == (None, logprobs)
    assert completion.num_cached_tokens == 1
