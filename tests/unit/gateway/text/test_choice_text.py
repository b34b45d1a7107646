from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.gateway.text.detokenizer import ByteLevelDetokenizer, ChoiceText
from baton.request import FinishReason, SamplingParams

TEXTS = {1: b"one ", 2: b"two ", 3: b"three", 4: b"\xe2\x82", 9: b"<end>"}


def choice_text(*stops: str, **sampling: Any) -> ChoiceText:
    return ChoiceText(ByteLevelDetokenizer(TEXTS), stops, SamplingParams(**sampling))


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


def test_what_might_have_been_a_stop_string_is_shown_at_the_end() -> None:
    text = choice_text("two t!")
    assert text.accept(2, None) == ""
    assert text.accept(9, FinishReason.STOP) == "two "


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        choice_text("")
