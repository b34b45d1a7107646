"""Forms of answers as grammars, and how forms that cannot be honoured are refused."""

import json
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.cluster.model_directory import resolve_model
from baton.errors import InvalidRequest
from baton.request import SamplingParams, StructuredOutputs
from baton.structured_output import check_form, grammar_of, parser_limits

TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}
NOT_TAG = TAG | {
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer", "not": {"const": 7}}, "end": "</f>"}]
}
ACCEPTED: list[tuple[dict[str, Any], str]] = [
    ({"json": '{"type": "integer"}'}, "-12"),
    ({"json": "{}"}, '["anything", {}]'),
    ({"json": '{"type": "string", "format": "byte"}'}, '"eA=="'),  # no format of JSON Schema
    ({"json": '{"type": "integer", "not": {"enum": [7]}}'}, "6"),
    (
        {"grammar": 'start: "%json {" /%json/ %json {"enum": [1, "a/b", 3], "not": {"const": 1}} "c"'},
        '%json {%json"a/b"c',
    ),
    ({"structural_tag": json.dumps(NOT_TAG)}, "one <f=a>12</f> two"),
    ({"json_object": True}, '{"a": [1, null]}'),
    ({"json_object": True}, '{\n    "a": 1\n}'),
    ({"regex": "[0-9]{3}-[a-z]+"}, "123-ab"),
    ({"choice": ("yes", 'no "really"\n')}, 'no "really"\n'),
    ({"grammar": 'start: "a" | "b" start'}, "bba"),
    ({"grammar": 'root ::= "x" [0-9]+'}, "x77"),
    ({"structural_tag": json.dumps(TAG)}, "one <f=a>12</f> two"),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": '{"type": "integer"}'}, "1.5"),
    ({"json": '{"type": "integer", "not": {"enum": [7]}}'}, "7"),
    (
        {"grammar": 'start: "%json {" /%json/ %json {"enum": [1, "a/b", 3], "not": {"const": 1}} "c"'},
        "%json {%json1c",
    ),
    ({"structural_tag": json.dumps(NOT_TAG)}, "one <f=a>7</f> two"),
    ({"json_object": True}, "[1]"),
    ({"json_object": True}, "{" + " " * 40 + "}"),
    ({"regex": "[0-9]{3}-[a-z]+"}, "12-ab"),
    ({"choice": ("yes", "no")}, "maybe"),
    ({"grammar": 'start: "a" | "b" start'}, "bb"),
    ({"structural_tag": json.dumps(TAG)}, "one <f=a>x</f>"),
]


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer((resolve_model("tiny") / "tokenizer.json").read_text("utf-8"), eos_token=1)


def takes(tokenizer: LLTokenizer, form: StructuredOutputs, text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar_of(form), log_level=0, limits=parser_limits())
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


@pytest.mark.parametrize(("fields", "text"), ACCEPTED)
def test_form_takes_a_text(tokenizer: LLTokenizer, fields: dict[str, Any], text: str) -> None:
    form = StructuredOutputs(**fields)
    check_form(form)
    assert takes(tokenizer, form, text)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(form), type=StructuredOutputs) == form


@pytest.mark.parametrize(("fields", "text"), REFUSED)
def test_form_refuses_a_text(tokenizer: LLTokenizer, fields: dict[str, Any], text: str) -> None:
    assert not takes(tokenizer, StructuredOutputs(**fields), text)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"json": '{"type": "objct"}'}, "objct"),
        ({"json": '{"type": "object", "propertyNames": {"format": "date"}}'}, "propertyNames"),
        ({"json": '{"type": "string", "format": "idn-email"}'}, "idn-email"),
        ({"json": '{"items": {"format": "idn-email"}, "contains": {"format": "a"}}'}, "idn-email|contains"),
        (
            {"json": '{"properties": {"a": {"format": "idn-email"}, "b": {"format": "idn-email"}}}'},
            "idn-email",
        ),
        ({"json": '{"type": "string", "format": "byte", "not": {}}'}, "not"),
        ({"json": '{"not": {"multipleOf": 3}}'}, "not"),
        ({"json": '{"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}'}, "oneOf"),
        ({"json": '{"type": "array", "items": {"type": "string"}, "uniqueItems": true}'}, "uniqueItems"),
        ({"json": '{"unevaluatedProperties": false}'}, "unevaluatedProperties"),
        ({"json": '{"allOf": [{"minimum": 2}, {"maximum": 1}], "type": "integer", "if": true}'}, "if"),
        ({"json": "[1"}, "line 1"),
        ({"json": "7"}, "object schema"),
        ({"regex": "a("}, "unclosed group"),
        ({"grammar": "}{"}, "Expected name"),
        ({"grammar": 'start: "a" other'}, "other"),
        ({"structural_tag": "{}"}, "structures"),
        ({"structural_tag": json.dumps(TAG | {"triggers": ["<g"]})}, "no trigger"),
    ],
)
def test_refusal_names_what_cannot_be_honoured(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        check_form(StructuredOutputs(**fields))


def test_ambiguous_grammar_is_refused_before_it_holds_up_an_engine() -> None:
    """It compiles in 30 ms; the mask of its second token takes 2 s with a vocabulary of 32,000."""
    rules = "\n".join(f"r{each}: r{each + 1} r{each + 1} | r{each + 1}" for each in range(1500))
    with pytest.raises(InvalidRequest, match="row has .* items"):
        check_form(StructuredOutputs(grammar=f'start: r0\n{rules}\nr1500: "a"'))


def test_grammar_with_a_dead_end_is_refused() -> None:
    """After both names the library allows a comma, and no third name."""
    names: dict[str, Any] = {"type": "object", "additionalProperties": False}
    names |= {"properties": {"a": {}, "b": {}}, "required": ["a", "b"]}
    check_form(StructuredOutputs(json=json.dumps(names)))
    with pytest.raises(InvalidRequest, match="dead end.*patternProperties"):
        check_form(StructuredOutputs(json=json.dumps({**names, "patternProperties": {"^[ab]$": True}})))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "choice": ("b",)},
        {"choice": ()},
        {"choice": ("",)},
    ],
)
def test_exactly_one_form(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        StructuredOutputs(**fields)


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_form_ends_where_it_is_complete(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(fields))):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **fields)
