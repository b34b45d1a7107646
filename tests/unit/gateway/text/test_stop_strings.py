from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

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
