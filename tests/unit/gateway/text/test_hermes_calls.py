import json
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.text.tools import HermesCalls

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TIME = '<tool_call>{"arguments":{},"name":"time"}</tool_call>'


def read(*parts: str, is_parallel: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """The text that is shown, and the calls by name and arguments."""
    numbers = count()
    calls = HermesCalls(is_parallel=is_parallel, new_id=lambda: f"call_{next(numbers)}")
    shown = "".join([calls.push(part) for part in parts]) + calls.finish()
    assert [(call.index, call.id) for call in calls.found] == [
        (index, f"call_{index}") for index in range(len(calls.found))
    ]
    return shown, [(call.name, call.arguments) for call in calls.found]


def test_a_call_is_taken_out_of_the_text_before_it() -> None:
    assert read(f"I will look.\n{WEATHER}") == ("I will look.", [("weather", '{"city":"Paris"}')])
    assert read(WEATHER) == ("", [("weather", '{"city":"Paris"}')])


def test_calls_follow_each_other() -> None:
    both = [("weather", '{"city":"Paris"}'), ("time", "{}")]
    assert read(f"{WEATHER}\n{TIME}") == ("", both)
    assert read(f"{WEATHER}{TIME} Done.\n") == (" Done.\n", both)
    assert read(f"{WEATHER}\n{TIME}", is_parallel=False) == ("", both[:1])


@pytest.mark.parametrize(
    "text",
    [
        "no call\n",
        "a < b, <tool_cal, <tool_call",
        "<tool_call>nothing</tool_call> and more",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "argum',
        "<tool_call>" + "[" * 3000 + "</tool_call>",
        "</tool_call>  ",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert read(text) == (text, [])


def test_a_tag_within_a_string_ends_nothing() -> None:
    written = json.dumps({"name": "write", "arguments": {"text": "see </tool_call> and <tool_call>"}})
    found = [("write", '{"text":"see </tool_call> and <tool_call>"}')]
    assert read(f"<tool_call>{written}</tool_call>!") == ("!", found)


def test_a_call_whose_tag_is_missing_at_the_end_is_one() -> None:
    assert read(WEATHER.removesuffix("</tool_call>")) == ("", [("weather", '{"city":"Paris"}')])


def test_a_string_without_an_end_is_not_waited_for_forever() -> None:
    text = '<tool_call>{"name": "' + "</tool_call>" * 20
    calls = HermesCalls()
    assert calls.push(text) == text
    assert read(text) == (text, [])


def test_nothing_of_a_call_is_shown_before_it_is_whole() -> None:
    calls, shown = HermesCalls(), []
    for character in f"Well: {WEATHER}":
        shown.append(calls.push(character))
        assert "".join(shown) in "Well:"
    assert len(calls.found) == 1 and calls.finish() == ""


PIECES = st.lists(
    st.sampled_from(
        [WEATHER, TIME, "<tool_call>", "</tool_call>", " ", "\n", "a", "<", "{", '{"name": "f"}', '"']
    )
)


@given(PIECES, st.data())
def test_how_the_text_is_cut_changes_nothing(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(*parts) == read(text)
