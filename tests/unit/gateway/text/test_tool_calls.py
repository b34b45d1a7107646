import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.text.tool_calls import ToolForm, form_of, reader_of

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TIME = '<tool_call>{"arguments":{},"name":"time"}</tool_call>'
LLAMA_WEATHER = '{"name": "weather", "parameters": {"city": "Paris; {France}"}}'
LLAMA_TIME = '{"name": "time", "parameters": {}}'
FOUND = [("weather", '{"city":"Paris"}'), ("time", "{}")]
LLAMA_FOUND = [("weather", '{"city":"Paris; {France}"}'), ("time", "{}")]
QUOTED = json.dumps({"name": "write", "arguments": {"text": "see </tool_call> and <tool_call>"}})


def read(form: ToolForm, *parts: str, is_parallel: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Return the text that is shown, and the calls by name and arguments."""
    numbers = iter(range(1000))
    reader = reader_of(form, is_parallel=is_parallel, new_id=lambda: f"call_{next(numbers)}")
    shown = "".join([reader.push(part) for part in parts]) + reader.finish()
    assert [(call.index, call.id) for call in reader.found] == [
        (index, f"call_{index}") for index in range(len(reader.found))
    ]
    return shown, [(call.name, call.arguments) for call in reader.found]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", f"I will look.\n{WEATHER}", ("I will look.", FOUND[:1])),
        ("hermes", WEATHER, ("", FOUND[:1])),
        ("hermes", f"{WEATHER}\n{TIME}", ("", FOUND)),
        ("hermes", f"{WEATHER}{TIME} Done.\n", (" Done.\n", FOUND)),
        ("hermes", WEATHER.removesuffix("</tool_call>"), ("", FOUND[:1])),  # cut off after the whole call
        (
            "hermes",  # a tag in a string ends nothing
            f"<tool_call>{QUOTED}</tool_call>!",
            ("!", [("write", '{"text":"see </tool_call> and <tool_call>"}')]),
        ),
        ("llama", f"\n {LLAMA_WEATHER}\n", ("", LLAMA_FOUND[:1])),
        ("llama", f"{LLAMA_WEATHER}; {LLAMA_TIME}", ("", LLAMA_FOUND)),
        ("llama", f"<|python_tag|>{LLAMA_WEATHER};{LLAMA_TIME}", ("", LLAMA_FOUND)),
    ],
)
def test_calls_are_taken_out_of_the_text(form: ToolForm, text: str, expected: object) -> None:
    assert read(form, text) == expected


@pytest.mark.parametrize("text", [WEATHER + TIME, f"{LLAMA_WEATHER};{LLAMA_TIME}"])
def test_without_parallel_calls_the_first_call_counts(text: str) -> None:
    shown, calls = read("hermes" if text.startswith("<") else "llama", text, is_parallel=False)
    assert shown == "" and [name for name, _ in calls] == ["weather"]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "no call\n"),
        ("hermes", "a < b, <tool_cal, <tool_call"),
        ("hermes", "<tool_call>nothing</tool_call> and more"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argum'),
        ("hermes", "<tool_call>" + "[" * 3000 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "' + "</tool_call>" * 20),  # a string without an end
        ("hermes", "</tool_call>  "),
        ("llama", "It rains."),
        ("llama", f"I look: {LLAMA_WEATHER}"),
        ("llama", f"{LLAMA_WEATHER} and more"),
        ("llama", f"{LLAMA_WEATHER}; nothing"),  # all parts are calls, or none is
        ("llama", '{"city": "Paris"}'),
        ("llama", '{"name": "weather", "param'),
        ("llama", "<|python_tag|>print(1)"),
        ("llama", "<|pyth"),
        ("llama", " \n"),
        ("llama", ""),
    ],
)
def test_text_that_is_no_call_is_shown_unchanged(form: ToolForm, text: str) -> None:
    assert read(form, text) == (text, [])


PIECES = {
    "hermes": [WEATHER, TIME, "<tool_call>", "</tool_call>", " ", "\n", "a", "<", "{", '{"name": "f"}', '"'],
    "llama": [LLAMA_WEATHER, LLAMA_TIME, "<|python_tag|>", ";", " ", "\n", "a", "<", "{", "}"],
}


@pytest.mark.parametrize("form", ["hermes", "llama"])
@given(data=st.data())
def test_cutting_the_text_into_parts_changes_nothing(form: ToolForm, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES[form]))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, *parts) == read(form, text)


def test_text_is_shown_once_it_cannot_belong_to_a_call() -> None:
    hermes, shown = reader_of("hermes", is_parallel=True, new_id=str), ""
    for character in f"Well: {WEATHER}":
        shown += hermes.push(character)
        assert shown in "Well:"
    assert len(hermes.found) == 1 and hermes.finish() == ""
    endless = '<tool_call>{"name": "' + "</tool_call>" * 20
    assert reader_of("hermes", is_parallel=True, new_id=str).push(endless) == endless
    llama = reader_of("llama", is_parallel=True, new_id=str)
    assert [llama.push(part) for part in (" ", "<", "b", ">", "{")] == ["", "", " <b", ">", "{"]


TOLD = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (TOLD + '<tool_call>{"name": ..., "arguments": ...}</tool_call>', "hermes"),
        (TOLD + '{"name": function name, "parameters": dictionary of argument name and its value}', "llama"),
        (TOLD + "<tool_call><function=name></function></tool_call>", None),
        (TOLD + "[TOOL_CALLS]", None),
        ("<tool_call>", None),
        ("{{ messages }}", None),
    ],
)
def test_chat_template_tells_the_form_of_calls(template: str, form: ToolForm | None) -> None:
    assert form_of(template) == form
