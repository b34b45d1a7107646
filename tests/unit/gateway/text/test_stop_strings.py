from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.gateway.text.detokenizer import StopStrings

TEXTS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def shown(parts: Sequence[str], stops: Sequence[str]) -> tuple[list[str], str | None]:
    """What comes out part by part, the end included, and what it stopped at."""
    stream = StopStrings(stops)
    return [*(stream.push(part) for part in parts), stream.finish()], stream.matched


def oracle(text: str, stops: Sequence[str]) -> str:
    """The text as it is when the first stop string becomes whole, without it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(text=TEXTS, stops=STOPS)
def test_text_is_cut_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    parts, matched = shown([text], stops)
    assert "".join(parts) == oracle(text, stops)
    assert (matched is not None) == any(stop in text for stop in stops)


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 30)))
def test_how_the_text_is_cut_into_parts_changes_nothing(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[start:end] for start, end in pairwise(edges)]
    whole_parts, whole_match = shown([text], stops)
    cut_parts, cut_match = shown(parts, stops)
    assert ("".join(cut_parts), cut_match) == ("".join(whole_parts), whole_match)


@given(text=TEXTS, stops=STOPS)
def test_only_what_may_still_be_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    text_so_far = given_out = ""
    for character in text:
        given_out += stream.push(character)
        text_so_far += character
        if stream.matched is not None:
            return
        held = text_so_far[len(given_out) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_over_three_parts_never_shows() -> None:
    assert shown(["one <", "|e", "nd|> two"], ["<|end|>"]) == (["one ", "", "", ""], "<|end|>")


def test_what_only_began_like_a_stop_string_is_shown() -> None:
    assert shown(["one <|", "em", "pty"], ["<|end|>"]) == (["one ", "<|em", "pty", ""], None)
    assert shown(["one <|e"], ["<|end|>"]) == (["one ", "<|e"], None)


def test_nothing_is_shown_after_a_match() -> None:
    assert shown(["a.b", "c"], ["."]) == (["a", "", ""], ".")


def test_the_longest_of_the_strings_that_end_together_wins() -> None:
    assert shown(["xabc"], ["c", "abc", "bc"]) == (["x", ""], "abc")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must not be empty"):
        StopStrings(["a", ""])
