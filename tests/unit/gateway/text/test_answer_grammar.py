"""Grammars of answers: the texts that they take, and the texts that they refuse."""

import functools
import json
import random
from collections.abc import Mapping
from typing import Any, Final

import jsonschema
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from baton.cluster.model_directory import resolve_model
from baton.errors import InvalidRequest
from baton.gateway.text.answer_grammar import AskedCalls, CallableTool, Tags, arguments_schema, text_arguments
from baton.gateway.text.answer_parsing import ModelParsers, frame_of
from baton.gateway.text.answer_reader import Delta, ReaderOptions, ReasoningState
from baton.gateway.text.tokenizer import Tokenizer
from baton.gateway.text.tool_calls import TOOL_CALL_PARSERS
from baton.request import StructuredOutputs
from baton.structured_output import check_form, grammar_of

END: Final = 0  # <|pad|>: <|end|> is a tag of harmony
TAGS: Final = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|channel|>", "<|message|>"),
    *("<|start|>", "<|constrain|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
]
CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "'s name"},
        "days": {"type": "integer"},
        "is_short": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
CALLS: Final[
    Mapping[str, tuple[str, str]]
] = {  # calls of `weather` with its city: their text, and one that breaks
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"town": "Paris"}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n</function>\n</tool_call>",
    ),
    "llama3_json": (
        '{"name": "weather", "parameters": {"city": "Paris"}}',
        '{"name": "weather", "parameters": {}}',
    ),
    "pythonic": ('[weather(city="Paris", is_short=True)]', "[weather(city=5)]"),
    "llama4_pythonic": ('[weather(city="Paris", days=3)]', "[weather(days=3)]"),
    "mistral": (
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]',
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": 1}}]',
    ),
    "deepseek_v3": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Paris"}'
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}",
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>[",
    ),
    "openai": (
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}',
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": 1}',
    ),
}


@functools.cache
def tokenizer(has_tags: bool) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_file(str(resolve_model("tiny") / "tokenizer.json"))
    made.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in TAGS if has_tags])
    return made


@functools.cache
def matcher_tokenizer(has_tags: bool) -> Any:
    made = tokenizer(has_tags)
    return LLTokenizer(made.to_str(), n_vocab=made.get_vocab_size(), eos_token=[END])


def takes(form: StructuredOutputs, text: str, has_tags: bool = False) -> bool:
    """Return whether the answer may be this text, and then end."""
    check_form(form)
    matcher = LLMatcher(matcher_tokenizer(has_tags), grammar_of(form), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer(has_tags).encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def asked(
    *, is_required: bool = True, is_parallel: bool = True, is_strict: bool = True, names: str = "weather time"
) -> AskedCalls:
    schemas = {"weather": arguments_schema(CITY), "time": arguments_schema(None)}
    tools = [
        CallableTool(name=name, schema=schemas[name] if is_strict or is_required else None, key="tools[0]")
        for name in names.split()
    ]
    return AskedCalls(tools=tools, is_required=is_required, is_parallel=is_parallel)


def framed(
    parser: str | None,
    calls: AskedCalls | None,
    *,
    has_tags: bool = False,
    reasoning: str | None = None,
    state: ReasoningState = ReasoningState.BEFORE,
    form: Mapping[str, Any] | None = None,
) -> StructuredOutputs:
    tags = Tags(Tokenizer(tokenizer(has_tags)).added_tokens)
    parsers = ModelParsers(tool_call_parser=parser, reasoning_parser=reasoning)
    frame = frame_of(parsers, state, tags, calls=calls, has_form=form is not None)
    return StructuredOutputs(frame=frame, **(form or {}))


@pytest.mark.parametrize("has_tags", [False, True])
@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_required_calls_follow_the_form_and_the_schema(parser: str, has_tags: bool) -> None:
    good, broken = CALLS[parser]
    form = framed(parser, asked(), has_tags=has_tags)
    assert takes(form, good, has_tags)
    for text in (broken, "No.", "", f"I look. {good}", good.replace("weather", "climate")):
        assert not takes(form, text, has_tags), text


TWO: Final = {
    "hermes": "{0}\n{0}",
    "qwen3_coder": "{0}\n{0}",
    "llama3_json": "{0}; {0}",
    "pythonic": '[weather(city="a"), time()]',
    "mistral": '[TOOL_CALLS][{{"name": "time", "arguments": {{}}}}, {{"name": "time", "arguments": {{}}}}]',
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}


MAX_STEPS: Final = 400
SHORT: Final[dict[str, Any]] = {
    **CITY,
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "is_short": {"type": "boolean"},
    },
    "required": ["city", "days"],
}


def random_text(form: StructuredOutputs, has_tags: bool, rng: random.Random) -> str | None:
    """Return a text of the grammar, of random tokens; None when MAX_STEPS tokens do not end one."""
    matcher, token_ids = LLMatcher(matcher_tokenizer(has_tags), grammar_of(form), log_level=0), list[int]()
    while not matcher.is_stopped():
        if len(token_ids) == MAX_STEPS:
            return None
        allowed = [token_id for token_id, bias in enumerate(matcher.compute_logit_bias()) if bias]
        token_ids.append(rng.choice(allowed))
        assert matcher.consume_token(token_ids[-1]), matcher.get_error()
    text = [token_id for token_id in token_ids if token_id != END]
    return str(tokenizer(has_tags).decode(text, skip_special_tokens=False))


@pytest.mark.parametrize("has_tags", [False, True])
@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_reader_finds_calls_that_follow_the_schema_in_each_text_of_the_grammar(
    parser: str, has_tags: bool
) -> None:
    schemas = {"weather": SHORT, "time": {"maxProperties": 0}}
    tools = [
        CallableTool(name="weather", schema=arguments_schema(SHORT), key="tools[0]"),
        CallableTool(name="time", schema=arguments_schema(None), key="tools[1]"),
    ]
    names = set[str]()
    for seed in range(12):
        is_parallel = seed % 3 == 0
        calls = AskedCalls(tools=tools, is_required=True, is_parallel=is_parallel)
        text = random_text(framed(parser, calls, has_tags=has_tags), has_tags, random.Random(seed))
        assert text is not None or is_parallel
        found = calls_in(parser, text) if text is not None else []
        assert len(found) == 1 or is_parallel, text
        for name, arguments in found:
            jsonschema.validate(json.loads(arguments), schemas[name])
            names.add(name)
    assert names == {"weather", "time"}


def calls_in(parser: str, text: str) -> list[tuple[str, str]]:
    """Return the calls that the whole text consists of, by name and arguments."""
    texts = {"weather": text_arguments(SHORT)}
    reader = TOOL_CALL_PARSERS[parser].reader(ReaderOptions(text_arguments=texts))
    read = Delta.joined([reader.push(text), reader.finish()])
    assert read.text == "", text
    first = [part for part in read.tool_calls if part.is_first]
    return [
        (call.name, "".join(part.arguments for part in read.tool_calls if part.index == call.index))
        for call in first
    ]


@pytest.mark.parametrize("is_required", [True, False])
@pytest.mark.parametrize("parser", TWO)
def test_parallel_calls_only_where_they_are_allowed(parser: str, is_required: bool) -> None:
    text = TWO[parser].format(CALLS[parser][0])
    assert takes(framed(parser, asked(is_required=is_required)), text)
    assert not takes(framed(parser, asked(is_required=is_required, is_parallel=False)), text)


@pytest.mark.parametrize("has_tags", [False, True])
@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_strict_arguments_follow_their_schema_and_text_is_free(parser: str, has_tags: bool) -> None:
    good, broken = CALLS[parser]
    reasoning, begin = ("openai_gptoss", "<|channel|>final<|message|>") if parser == "openai" else (None, "")
    form = framed(parser, asked(is_required=False), has_tags=has_tags, reasoning=reasoning)
    assert takes(form, good, has_tags)
    assert takes(form, begin, has_tags) and takes(form, f"{begin}It rains.\n", has_tags)
    assert not takes(form, broken, has_tags)
    if TOOL_CALL_PARSERS[parser].form.trigger:
        assert takes(form, f"I look.\n{good}", has_tags) and not takes(form, f"I look. {broken}", has_tags)


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_tools_that_are_not_strict_keep_free_arguments(parser: str) -> None:
    calls = asked(is_required=False)
    loose = CallableTool(name="weather", schema=None, key="tools[0]")
    calls = AskedCalls(tools=[loose, calls.tools[1]], is_required=False, is_parallel=True)
    form = framed(parser, calls)
    assert takes(form, CALLS[parser][0])
    assert takes(form, CALLS[parser][0].replace("city", "town"))


JSON_FORM: Final = {"json": json.dumps(CITY)}


@pytest.mark.parametrize("has_tags", [False, True])
@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_form_begins_after_the_reasoning(reasoning: str, has_tags: bool) -> None:
    def form(state: ReasoningState) -> StructuredOutputs:
        return framed(None, None, has_tags=has_tags, reasoning=reasoning, state=state, form=JSON_FORM)

    answer, thought = '{"city": "Paris"}', 'It is {"city": 5}, or <b>.\n'
    for end in ("</think>", "</think>\n\n"):
        assert takes(form(ReasoningState.WITHIN), f"{thought}{end}{answer}", has_tags)
        assert takes(form(ReasoningState.BEFORE), f"<think>\n{thought}{end}{answer}", has_tags)
        assert not takes(form(ReasoningState.WITHIN), f'{thought}{end}{{"city": 5}}', has_tags)
    assert takes(form(ReasoningState.BEFORE), answer, has_tags)
    assert not takes(form(ReasoningState.WITHIN), answer, has_tags)
    assert not takes(form(ReasoningState.WITHIN), thought, has_tags)
    assert form(ReasoningState.AFTER).frame is None


def test_model_that_always_reasons_may_leave_the_tag_out() -> None:
    form = framed(None, None, reasoning="deepseek_r1", state=ReasoningState.WITHIN, form={"regex": "yes|no"})
    assert takes(form, "Well</think>yes") and takes(form, "<think>Well</think>\n\nno")
    assert not takes(form, "Well</think>maybe")


@pytest.mark.parametrize(
    "form",
    [
        {"json_object": True},
        {"regex": r'\{"a": [0-9]+\}'},
        {"choice": ('{"a": 1}', "b")},
        {"grammar": 'start: "{" rest\nrest: /[^}]*/ "}"'},
        {
            "structural_tag": json.dumps(
                {
                    "type": "structural_tag",
                    "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
                    "triggers": ["<f"],
                }
            )
        },
    ],
    ids=lambda form: next(iter(form)),
)
@pytest.mark.parametrize("reasoning", ["qwen3", "openai_gptoss"])
def test_each_kind_of_form_can_follow_reasoning(form: dict[str, Any], reasoning: str) -> None:
    made = framed(None, None, reasoning=reasoning, form=form)
    thoughts = {
        "qwen3": "<think>\n1?\n</think>\n\n",
        "openai_gptoss": (
            "<|channel|>analysis<|message|>1?<|end|><|start|>assistant<|channel|>final<|message|>"
        ),
    }
    assert takes(made, thoughts[reasoning] + '{"a": 1}')
    if "structural_tag" not in form:
        assert not takes(made, thoughts[reasoning] + '{"a": 1')


def test_calls_begin_after_the_reasoning() -> None:
    for parser, reasoning, begin in (
        ("hermes", "qwen3", "<think>\nWhere?\n</think>\n\n"),
        ("openai", "openai_gptoss", "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant"),
    ):
        for is_required in (True, False):
            form = framed(parser, asked(is_required=is_required), reasoning=reasoning)
            good, broken = CALLS[parser]
            assert takes(form, begin + good) and takes(form, good)
            assert not takes(form, begin + broken)
            assert (
                takes(form, f"{begin}<|channel|>final<|message|>No.") is not is_required or parser == "hermes"
            )


@pytest.mark.parametrize(
    "parser", [name for name in TOOL_CALL_PARSERS if name not in ("openai", "llama3_json")]
)
def test_answer_is_calls_or_json(parser: str) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False}
    good, broken = CALLS[parser]
    for is_strict in (True, False):
        form = framed(
            parser, asked(is_required=False, is_strict=is_strict), form={"json": json.dumps(schema)}
        )
        assert takes(form, good) and takes(form, '{"name": "Ada"}') and takes(form, "{}")
        assert not takes(form, '{"name": 5}') and (not is_strict or not takes(form, broken))


@pytest.mark.parametrize("parser", ["pythonic", "qwen3_coder"])
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "properties": {"a b": {}}}, "'a b' cannot be an argument"),
        (
            {"type": "object", "properties": {"a": {}}, "minProperties": 1},
            "'minProperties' beside properties",
        ),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "'b' is required"),
        ({"type": "object", "properties": [], "required": 5}, "expected an object of properties"),
    ],
)
def test_schema_that_such_calls_cannot_keep_is_named(
    parser: str, schema: dict[str, Any], message: str
) -> None:
    tool = CallableTool(name="f", schema=schema, key="tools[3].function.parameters")
    calls = AskedCalls(tools=[tool], is_required=True, is_parallel=True)
    with pytest.raises(InvalidRequest, match=rf"^tools\[3\].function.parameters: {message}"):
        framed(parser, calls)


KEYWORDS: Final = [
    "type",
    "properties",
    "required",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "$defs",
    "items",
    "minLength",
    "pattern",
    "additionalProperties",
]


def test_answer_of_a_form_is_no_call_where_calls_begin_as_json() -> None:
    assert framed("llama3_json", asked(is_required=False), form=JSON_FORM).frame is None
    form = framed("llama3_json", asked(is_required=False), form=JSON_FORM, reasoning="qwen3")
    assert takes(form, '<think>a</think>{"city": "Paris"}') and takes(form, '{"city": "Paris"}')
    assert not takes(form, CALLS["llama3_json"][0])


JUNK: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(["", "string", "object", "[", "#/$defs/a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYWORDS, "a", "description"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
@settings(max_examples=30)
@given(properties=JUNK, others=st.dictionaries(st.sampled_from(["type", "required", "$defs", "allOf"]), JUNK))
def test_hostile_schemas_are_kept_or_refused(parser: str, properties: Any, others: dict[str, Any]) -> None:
    try:
        schema = arguments_schema({"properties": properties, **others})
        tool = CallableTool(name="f", schema=schema, key="tools[0]")
        check_form(framed(parser, AskedCalls(tools=[tool], is_required=True, is_parallel=True)))
    except InvalidRequest:
        pass
    text_arguments({"properties": properties, **others})


def test_schemas_that_are_too_long_are_refused() -> None:
    schema = {"type": "object", "properties": {f"a{n}": {"enum": ["b" * 50]} for n in range(4000)}}
    tool = CallableTool(name="f", schema=schema, key="tools[0]")
    with pytest.raises(InvalidRequest, match="^tools: the grammar of the calls has .* of 262144 characters"):
        framed("hermes", AskedCalls(tools=[tool], is_required=True, is_parallel=True))


def test_notes_of_a_schema_are_left_out_and_properties_of_these_names_are_not() -> None:
    schema = {
        "description": "a",
        "properties": {"title": {"type": "string", "title": "b"}, "description": {"enum": ["title"]}},
        "$defs": {"default": {"default": 5, "anyOf": [{"examples": []}]}},
    }
    assert arguments_schema(schema) == {
        "type": "object",
        "properties": {"title": {"type": "string"}, "description": {"enum": ["title"]}},
        "$defs": {"default": {"anyOf": [{}]}},
    }
