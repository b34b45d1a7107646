from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.gateway.text.detokenizer import ByteLevelDetokenizer, ChoiceText
from baton.gateway.text.model_files import TokenizerConfig
from baton.gateway.text.tokenizer import Tokenizer
from baton.request import FinishReason, SamplingParams
from tests.unit.gateway import tiny_tokenizers

TEXTS = {1: b"one ", 2: b"two ", 3: b"three", 4: b"\xe2\x82", 9: b"<end>"}
TOKENIZER = Tokenizer(tiny_tokenizers.byte_level(), TokenizerConfig())


def choice_text(*stops: str, **sampling: Any) -> ChoiceText:
    return ChoiceText(ByteLevelDetokenizer(TEXTS), stops, SamplingParams(**sampling))


def shown(
    text: str, *stops: str, num_cut: int = 0, min_tokens: int = 0
) -> tuple[str, FinishReason | None, Any]:
    """The text of a choice that generates `text`, less its last `num_cut` tokens, and how it ends."""
    sampling = SamplingParams(min_tokens=min_tokens, max_tokens=1000)
    choice, token_ids = ChoiceText(TOKENIZER.detokenizer(), stops, sampling), TOKENIZER.encode(text)
    parts = [choice.accept(token_id, None) for token_id in token_ids[: len(token_ids) - num_cut]]
    if choice.finish_reason is None:
        parts.append(choice.accept(None, FinishReason.LENGTH))
    return "".join(parts), choice.finish_reason, choice.stop_reason


def test_text_comes_token_by_token() -> None:
    text = choice_text()
    assert [text.accept(1, None), text.accept(2, None)] == ["one ", "two "]
    assert text.accept(3, FinishReason.LENGTH) == "three"
    assert (text.finish_reason, text.stop_reason) == (FinishReason.LENGTH, None)


def test_the_token_that_stops_is_not_shown() -> None:
    text = choice_text(stop_token_ids=(9,))
    assert text.accept(1, None) == "one "
    assert text.accept(9, FinishReason.STOP) == ""
    assert (text.finish_reason, text.stop_reason) == (FinishReason.STOP, 9)


def test_an_end_without_a_token() -> None:
    text = choice_text()
    text.accept(4, None)
    assert text.accept(None, FinishReason.LENGTH) == "\ufffd"
    assert text.finish_reason is FinishReason.LENGTH


def test_a_stop_string_ends_before_the_engine_does() -> None:
    text = choice_text("wo th")
    assert [text.accept(1, None), text.accept(2, None), text.accept(3, None)] == ["one ", "t", ""]
    assert (text.finish_reason, text.stop_reason) == (FinishReason.STOP, "wo th")


def test_a_stop_string_that_ends_with_the_last_token_wins() -> None:
    text = choice_text("three")
    assert text.accept(3, FinishReason.LENGTH) == ""
    assert (text.finish_reason, text.stop_reason) == (FinishReason.STOP, "three")


def test_the_beginning_of_a_stop_string_is_shown_at_the_end() -> None:
    text = choice_text("two t!")
    assert text.accept(2, None) == ""
    assert text.accept(9, FinishReason.STOP) == "two "


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        choice_text("")


@pytest.mark.parametrize(
    ("text", "stops", "expected", "stop_reason"),
    [
        ("the quick brown fox 日本 😀", (), "the quick brown fox 日本 😀", None),
        ("日本語のテキスト😀 and more", ("ト😀",), "日本語のテキス", "ト😀"),
    ],
)
def test_characters_of_several_tokens(
    text: str, stops: tuple[str, ...], expected: str, stop_reason: str | None
) -> None:
    reason = FinishReason.LENGTH if stop_reason is None else FinishReason.STOP
    assert shown(text, *stops) == (expected, reason, stop_reason)


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    num_tokens = len(TOKENIZER.encode("the fox,"))
    found = shown("the fox, again, again", ",", min_tokens=num_tokens)
    assert found == ("the fox, again", FinishReason.STOP, ",")


def test_half_a_character_at_the_end_may_complete_a_stop_string() -> None:
    assert shown("ab漢", "b\ufffd", num_cut=1) == ("a", FinishReason.STOP, "b\ufffd")
