"""Calls of tools in the text of answers, in each form that models write."""

import json
from typing import Any

import minijinja
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.gateway.text.answer_grammar import AskedCalls, CallableTool, CallForm, Tags
from baton.gateway.text.answer_parsing import ModelParsers, frame_of
from baton.gateway.text.answer_reader import AnswerReader, ReaderOptions, ReasoningState, Steps
from baton.gateway.text.tool_calls import TOOL_CALL_PARSERS, ToolCallParser, parser_of_template
from baton.request import StructuredOutputs
from baton.structured_output import check_form

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TIME = '<tool_call>{"arguments":{},"name":"time"}</tool_call>'
LLAMA_WEATHER = '{"name": "weather", "parameters": {"city": "Paris; {France}"}}'
LLAMA_TIME = '{"name": "time", "parameters": {}}'
FOUND = [("weather", '{"city":"Paris"}'), ("time", "{}")]
LLAMA_FOUND = [("weather", '{"city":"Paris; {France}"}'), ("time", "{}")]
QUOTED = json.dumps({"name": "write", "arguments": {"text": "see </tool_call> and <tool_call>"}})
CODER_WEATHER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
)
CODER_TIME = "<tool_call>\n<function=time>\n</function>\n</tool_call>"
MISTRAL = (
    '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "time", "arguments": {}}]'
)
MISTRAL_NAMED = '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]time[CALL_ID]abc[ARGS]{}'
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
ANALYSIS = "<|channel|>analysis<|message|>Where is it? <|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>In Paris."
HARMONY_CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
    '<|message|>{"city": "Paris"}<|call|>'
)
HARMONY_FIRST = "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{ }"


def read(
    parser: str, *parts: str, is_parallel: bool = True, texts: dict[str, frozenset[str]] | None = None
) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the text, the reasoning, and the calls by name and arguments."""
    numbers = iter(range(1000))
    options = ReaderOptions(
        is_parallel=is_parallel, new_id=lambda: f"call_{next(numbers)}", text_arguments=texts or {}
    )
    reader = TOOL_CALL_PARSERS[parser].reader(options)
    read = [*(reader.push(part) for part in parts), reader.finish()]
    calls: list[list[str]] = []
    for part in [each for one in read for each in one.tool_calls]:
        if part.is_first:
            assert (part.index, part.id, part.arguments) == (len(calls), f"call_{len(calls)}", "")
            calls.append([part.name, ""])
        else:
            assert part.index == len(calls) - 1 and part.arguments
            calls[-1][1] += part.arguments
    assert reader.num_calls == len(calls)
    text, reasoning = ("".join(getattr(each, name) for each in read) for name in ("text", "reasoning"))
    return text, reasoning, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("hermes", f"I will look.\n{WEATHER}", ("I will look.", FOUND[:1])),
        ("hermes", WEATHER, ("", FOUND[:1])),
        ("hermes", f"{WEATHER}\n{TIME}", ("", FOUND)),
        ("hermes", f"{WEATHER}{TIME} Done.\n", (" Done.\n", FOUND)),
        ("hermes", WEATHER.removesuffix("</tool_call>"), ("", FOUND[:1])),  # cut off after the whole call
        ("hermes", WEATHER.removesuffix("_call>"), ("", FOUND[:1])),  # cut off within the tag after it
        ("hermes", f"<tool_call>{WEATHER}", ("<tool_call>", FOUND[:1])),
        (
            "hermes",  # a tag in a string ends nothing
            f"<tool_call>{QUOTED}</tool_call>!",
            ("!", [("write", '{"text":"see </tool_call> and <tool_call>"}')]),
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, "x', ("", [("f", '{"a":[1,"x')])),
        (
            "hermes",  # broken within the arguments: the client sees what the model wrote
            '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> and',
            (" and", [("f", '{"a":1')]),
        ),
        ("llama3_json", f"\n {LLAMA_WEATHER}\n", ("", LLAMA_FOUND[:1])),
        ("llama3_json", f"{LLAMA_WEATHER}; {LLAMA_TIME}", ("", LLAMA_FOUND)),
        ("llama3_json", f"<|python_tag|>{LLAMA_WEATHER};{LLAMA_TIME}", ("", LLAMA_FOUND)),
        ("llama3_json", f"{LLAMA_WEATHER}\n{LLAMA_TIME}", ("", LLAMA_FOUND)),
        ("llama3_json", f"{LLAMA_WEATHER};{{", (";{", LLAMA_FOUND[:1])),
        ("llama3_json", f"{LLAMA_WEATHER} and more", (" and more", LLAMA_FOUND[:1])),
        ("llama3_json", f"{LLAMA_WEATHER}; nothing", ("; nothing", LLAMA_FOUND[:1])),
        ("qwen3_coder", f"I look.\n{CODER_WEATHER}\n{CODER_TIME}", ("I look.", FOUND)),
        ("qwen3_coder", CODER_WEATHER.removesuffix("_call>"), ("", FOUND[:1])),
        ("qwen3_coder", CODER_WEATHER.partition("s\n")[0], ("", [("weather", '{"city":"Pari"')])),
        ("pythonic", '[weather(city="Paris"), time()]', ("", FOUND)),
        ("pythonic", "[weather(city=Paris)]\n", ("", FOUND[:1])),
        ("llama4_pythonic", "<|python_start|>[weather(city='Paris')]<|python_end|>", ("", FOUND[:1])),
        (
            "pythonic",
            "[f(a=[1, (2.5, True)], b={'x': None, 'y': 'it\\'s'}, c=-1e3)]",
            ("", [("f", '{"a":[1,[2.5,true]],"b":{"x":null,"y":"it\'s"},"c":-1000.0}')]),
        ),
        (
            "pythonic",
            r"""[f(a='\x41\u00e9\U0001f600\n\"\'\q\ud83d')]""",
            ("", [("f", '{"a":"A\u00e9\U0001f600\\n\\"\'q\\ud83d"}')]),
        ),
        ("pythonic", '[weather(city="Par', ("", [("weather", '{"city":"Par')])),
        ("mistral", f"I look. {MISTRAL}", ("I look.", FOUND)),
        ("mistral", MISTRAL_NAMED, ("", FOUND)),
        ("deepseek_v3", f"I look.{V3}", ("I look.", FOUND)),
        ("deepseek_v3", V31, ("", FOUND)),
        ("deepseek_v31", V31 + "!", ("!", FOUND)),
        ("deepseek_v31", V31[:-3], ("", FOUND)),
        ("openai", "<|channel|>final<|message|>In Paris.<|return|>", ("In Paris.", [])),
        ("openai", HARMONY_CALL, ("", FOUND[:1])),
        ("openai", "no header", ("no header", [])),
    ],
)
def test_calls_are_taken_out_of_the_text(parser: str, text: str, expected: tuple[str, Any]) -> None:
    shown, _, calls = read(parser, text)
    assert (shown, calls) == expected


def test_harmony_has_reasoning_text_and_calls() -> None:
    text = f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>{HARMONY_CALL}"
    assert read("openai", text + HARMONY_FIRST) == ("I look.", "Where is it? ", FOUND)
    assert read("openai", ANALYSIS + FINAL) == ("In Paris.", "Where is it? ", [])


def test_values_between_tags_are_text_or_json_as_the_tool_says() -> None:
    def call(*parameters: str) -> str:
        values = "".join(f"<parameter={each}</parameter>\n" for each in parameters)
        return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"

    text = call('a>\n42\n"\n', "b>\n42\n", "c>[1, 2]", "d>\nTrue\n", "e>\nhalf a\nline\n")
    shown, _, found = read("qwen3_coder", text, texts={"f": frozenset("a")})
    assert shown == ""
    assert found == [("f", '{"a":"42\\n\\"","b":42,"c":[1,2],"d":true,"e":"half a\\nline"}')]


TWO_CALLS = {
    "hermes": WEATHER + TIME,
    "llama3_json": f"{LLAMA_WEATHER};{LLAMA_TIME}",
    "pythonic": "[weather(city='a'), time()]",
    "mistral": MISTRAL,
    "deepseek_v3": V3,
    "qwen3_coder": CODER_WEATHER + CODER_TIME,
    "openai": HARMONY_CALL + HARMONY_FIRST,
}


@pytest.mark.parametrize("parser", TWO_CALLS)
def test_without_parallel_calls_the_first_call_counts(parser: str) -> None:
    assert [name for name, _ in read(parser, TWO_CALLS[parser])[2]] == ["weather", "time"]
    shown, _, calls = read(parser, TWO_CALLS[parser], is_parallel=False)
    assert shown == "" and [name for name, _ in calls] == ["weather"]


@pytest.mark.parametrize(
    ("parser", "text"),
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
        ("llama3_json", "It rains."),
        ("llama3_json", f"I look: {LLAMA_WEATHER}"),
        ("llama3_json", '{"city": "Paris"}'),
        ("llama3_json", '{"name": "Ada", "age": 5}'),
        ("llama3_json", '{"name": "weather", "param'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", "<|pyth"),
        ("llama3_json", " \n"),
        ("llama3_json", ""),
        ("pythonic", "[1](https://example.org) and [link](a)"),
        ("pythonic", "[weather("),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[]"),
        ("mistral", "[TOOL_CALLS"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("mistral", "[TOOL_CALLS] [5]"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜> none"),
        ("qwen3_coder", WEATHER),
        ("openai", "<|channel|>fin"),
        ("openai", "a <|message|> b"),
    ],
)
def test_text_that_is_no_call_is_shown_unchanged(parser: str, text: str) -> None:
    assert read(parser, text) == (text, "", [])


HERMES_PIECES = [
    *(WEATHER, TIME, "<tool_call>", "</tool_call>", " ", "\n", "a", "<", "{", '{"name": "f"}', '"'),
    *('<tool_call>{"name": "f", "arguments": {', "\\", "}"),
]
PIECES = {
    "hermes": HERMES_PIECES,
    "qwen3_coder": [
        CODER_WEATHER,
        CODER_TIME,
        *HERMES_PIECES,
        "<parameter=a>",
        "<function=f>",
        "</parameter>",
    ],
    "llama3_json": [LLAMA_WEATHER, LLAMA_TIME, "<|python_tag|>", ";", " ", "\n", "a", "<", "{", "}"],
    "pythonic": [
        "[",
        "f(",
        "a=",
        "b=",
        "1",
        "'x'",
        '"',
        "'",
        "(",
        ")",
        "]",
        ",",
        " ",
        "{",
        ":",
        "}",
        "\\",
        "u00e9",
    ],
    "mistral": [MISTRAL, MISTRAL_NAMED, "[TOOL_CALLS]", "[", "]", ",", "f", "[ARGS]", "{", "}", " ", '"'],
    "deepseek_v3": [
        *(V3, V31, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "f", "<｜tool▁sep｜>", "{", "}", "\n"),
        *("```json", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", " "),
    ],
    "openai": [
        *(ANALYSIS, FINAL, HARMONY_CALL, HARMONY_FIRST, "<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        *(" ", "a", "<", "{", "}", "to=", "commentary"),
    ],
}


@pytest.mark.parametrize("parser", PIECES)
@settings(max_examples=40)
@given(data=st.data())
def test_cutting_the_text_into_parts_changes_nothing(parser: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES[parser]))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(parser, *parts) == read(parser, text) == read(parser, *text)


def test_text_is_shown_once_it_cannot_belong_to_a_call() -> None:
    hermes, shown = TOOL_CALL_PARSERS["hermes"].reader(ReaderOptions()), ""
    for character in f"Well: {WEATHER}":
        shown += hermes.push(character).text
        assert shown in "Well:"
    assert hermes.num_calls == 1 and hermes.finish().text == ""
    endless = '<tool_call>{"name": "' + "</tool_call>" * 20
    assert TOOL_CALL_PARSERS["hermes"].reader(ReaderOptions()).push(endless).text == endless
    llama = TOOL_CALL_PARSERS["llama3_json"].reader(ReaderOptions())
    assert [llama.push(part).text for part in (" ", "<", "b", ">", "{")] == ["", "", " <b", ">", "{"]


class PlainReader(AnswerReader):
    """Reads `CALL name {...}`."""

    def _read(self) -> Steps[None]:
        while (yield from self._pass_until("CALL ", self._show)):
            yield from self._take_after_space("CALL ")
            name = yield from self._take_name()
            yield from self._take_space()
            yield from self._json_arguments(name or "")


def test_parser_from_outside_is_chosen_reads_and_constrains(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = ToolCallParser(
        reader=PlainReader,
        form=CallForm(before="CALL {name} ", trigger="CALL "),
        is_of=lambda template: "CALL name" in template,
    )
    monkeypatch.setitem(TOOL_CALL_PARSERS, "plain", outside)
    parsers = ModelParsers.chosen(TOLD + "CALL name {}")
    assert parsers.tool_call_parser == "plain"
    text = 'I look. CALL weather {"city": "Paris"} CALL time {}'
    assert read("plain", *text) == ("I look.", "", FOUND)
    tool = CallableTool(name="time", schema={"type": "object", "maxProperties": 0}, key="tools[0]")
    calls = AskedCalls(tools=[tool], is_required=True, is_parallel=False)
    frame = frame_of(parsers, ReasoningState.AFTER, Tags({}), calls=calls, has_form=False)
    assert frame is not None and '"CALL time "' in frame
    check_form(StructuredOutputs(frame=frame))


# Each parser reads what a template of its form renders.

JSON_CALL = '{{ {"name": f.name, "arguments": f.arguments} | tojson }}'
CALLS = "{% for call in calls %}{% set f = call.function %}"
END = "{% endfor %}"
TEMPLATES = {
    "hermes": f"{CALLS}\n<tool_call>\n{JSON_CALL}\n</tool_call>{END}",
    "qwen3_coder": (
        f"{CALLS}\n<tool_call>\n<function={{{{ f.name }}}}>\n{{% for key, value in f.arguments | items %}}"
        "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n"
        f"{{% endfor %}}</function>\n</tool_call>{END}"
    ),
    "llama3_json": (
        f'{CALLS}{{{{ {{"name": f.name, "parameters": f.arguments}} | tojson }}}}'
        f"{{{{ '; ' if not loop.last }}}}{END}"
    ),
    "mistral": f"[TOOL_CALLS] [{CALLS}{JSON_CALL}{{{{ ', ' if not loop.last }}}}{END}]",
    "deepseek_v3": (
        f"<｜tool▁calls▁begin｜>{CALLS}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{{{ f.name }}}}\n```json\n"
        f"{{{{ f.arguments | tojson }}}}\n```<｜tool▁call▁end｜>\n{END}<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜>{CALLS}<｜tool▁call▁begin｜>{{{{ f.name }}}}<｜tool▁sep｜>"
        f"{{{{ f.arguments | tojson }}}}<｜tool▁call▁end｜>{END}<｜tool▁calls▁end｜>"
    ),
    "pythonic": (
        f"[{CALLS}{{{{ f.name }}}}({{% for key, value in f.arguments | items %}}{{{{ key }}}}="
        f"{{{{ value | pyrepr }}}}{{{{ ', ' if not loop.last }}}}{{% endfor %}})"
        "{{ ', ' if not loop.last }}"
        f"{END}]"
    ),
    "openai": (
        f"{CALLS}{{{{ '<|start|>assistant' if not loop.first }}}}<|channel|>commentary to=functions."
        f"{{{{ f.name }}}} <|constrain|>json<|message|>{{{{ f.arguments | tojson }}}}<|call|>{END}"
    ),
}
NAMES = st.text("abcdefgh_", min_size=1, max_size=8)
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


@pytest.mark.parametrize("parser", TEMPLATES)
@settings(max_examples=40)
@given(calls=st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3))
def test_rendered_calls_are_read_back(parser: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    environment = minijinja.Environment()
    environment.add_filter("tojson", lambda value: json.dumps(value, ensure_ascii=False))
    environment.add_filter("pyrepr", repr)
    functions = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    text = environment.render_str(TEMPLATES[parser], calls=functions)
    texts = {
        name: frozenset(key for key, value in arguments.items() if isinstance(value, str))
        for name, arguments in calls
    }
    if parser == "qwen3_coder" and len(texts) < len(calls):
        return  # one tool with two schemas
    shown, reasoning, found = read(parser, text, texts=texts)
    assert (shown, reasoning) == ("", "")
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


TOLD = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (TOLD + '<tool_call>{"name": ..., "arguments": ...}</tool_call>', "hermes"),
        (
            TOLD + '{"name": function name, "parameters": dictionary of argument name and its value}',
            "llama3_json",
        ),
        (TOLD + "<tool_call><function=name></function></tool_call>", "qwen3_coder"),
        (TOLD + "[TOOL_CALLS]", "mistral"),
        (TOLD + "[func_name1(params_name1=params_value1)]", "pythonic"),
        (TOLD + "<|header_start|>[func_name1(params_name1=params_value1)]", "llama4_pythonic"),
        (TOLD + V3, "deepseek_v3"),
        (TOLD + V31, "deepseek_v31"),
        (TOLD + ANALYSIS, "openai"),
        (TOLD + "<tool_call>name<arg_key>a</arg_key>", None),
        (TOLD, None),
        ("<tool_call>", None),
        ("{{ messages }}", None),
    ],
)
def test_chat_template_tells_the_form_of_calls(template: str, parser: str | None) -> None:
    assert parser_of_template(template) == parser
