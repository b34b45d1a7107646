"""Schemas in keywords that grammars honour mean what the schemas before meant. `jsonschema` is the oracle."""

import json
import random
from typing import Any, Final

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from baton.errors import InvalidRequest
from baton.json_schema.document import Document
from baton.json_schema.patterns import NUM_BYTES, byte_tokenizer
from baton.json_schema.rewriting import REWRITTEN, rewritten
from baton.json_schema.values import fits
from baton.request import StructuredOutputs
from baton.structured_output import check_form, grammar_of, parser_limits

DRAFT_7: Final = "http://json-schema.org/draft-07/schema#"
NAMES: Final = ("a", "b", "c")
SCALARS: Final = st.sampled_from((None, True, False, 0, 1, 2, 1.5, "", "a", "ab", "b"))
INSTANCES: Final = st.recursive(
    SCALARS,
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.sampled_from(NAMES), each, max_size=3),
    max_leaves=6,
)
TYPES: Final = st.sampled_from(("null", "boolean", "integer", "number", "string", "array", "object"))
SIZES: Final = st.integers(0, 3)


def schemas() -> st.SearchStrategy[Any]:
    """Schemas of draft 7 with every keyword that is rewritten, of few names and values."""
    leaves = st.one_of(
        st.just(True),
        st.builds(lambda each: {"type": each}, TYPES),
        st.builds(lambda each: {"type": each}, st.lists(TYPES, min_size=1, max_size=3, unique=True)),
        st.builds(lambda each: {"enum": each}, st.lists(INSTANCES, min_size=1, max_size=4)),
        st.builds(lambda each: {"const": each}, INSTANCES),
        *(st.builds(lambda n, key=key: {key: n}, SIZES) for key in ("minLength", "maxLength", "minItems")),
        *(st.builds(lambda n, key=key: {key: n}, SIZES) for key in ("maxItems", "minProperties")),
        *(st.builds(lambda n, key=key: {key: n}, SIZES) for key in ("minimum", "exclusiveMaximum")),
        st.builds(lambda each: {"pattern": each}, st.sampled_from(("^a", "b$", "^(ab)?$"))),
        st.builds(lambda each: {"required": each}, st.lists(st.sampled_from(NAMES), unique=True)),
    )
    return st.recursive(leaves, _composed, max_leaves=6)


def _composed(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named, few = (
        st.dictionaries(st.sampled_from(NAMES), part, max_size=3),
        st.lists(part, min_size=1, max_size=3),
    )
    needs = st.dictionaries(
        st.sampled_from(NAMES), part | st.lists(st.sampled_from(NAMES), unique=True), max_size=2
    )
    one_keyword = st.one_of(
        *(st.builds(lambda each, key=key: {key: each}, part) for key in ("not", "contains", "items")),
        *(st.builds(lambda each, key=key: {key: each}, few) for key in ("allOf", "anyOf", "oneOf", "items")),
        st.builds(lambda each: {"propertyNames": each}, part),
        st.builds(lambda each: {"properties": each}, named),
        st.builds(lambda each: {"additionalProperties": each}, part),
        st.builds(lambda each: {"dependencies": each}, needs),
        st.builds(lambda one, two, three: {"if": one, "then": two, "else": three}, part, part, part),
        st.builds(lambda one, two: {"if": one, "then": two}, part, part),
        st.builds(lambda each: {"uniqueItems": True, "items": {"enum": each}}, st.lists(SCALARS, min_size=1)),
    )
    both = st.builds(
        lambda one, other: {**one, **other} if isinstance(other, dict) else one, one_keyword, part
    )
    return one_keyword | both


def oracle(schema: Any) -> Any:
    return jsonschema.Draft7Validator(schema)


def is_rewritten(schema: Any) -> bool:
    """No keyword is left that grammars lack."""
    return not any(f'"{keyword}"' in json.dumps(schema) for keyword in REWRITTEN - {"minProperties"})


@settings(max_examples=300, deadline=None)
@given(schemas(), st.lists(INSTANCES, min_size=1, max_size=12))
def test_rewritten_schema_means_the_same(part: Any, instances: list[Any]) -> None:
    schema = {"$schema": DRAFT_7, "allOf": [part]}
    new = rewritten(schema)
    assume(is_rewritten(new))
    for instance in instances:
        is_valid = oracle(schema).is_valid(instance)
        assert oracle(new).is_valid(instance) == is_valid, (instance, new)


@settings(max_examples=300, deadline=None)
@given(schemas(), INSTANCES)
def test_verdict_on_a_value_is_that_of_the_oracle(part: Any, instance: Any) -> None:
    schema = {"$schema": DRAFT_7, "allOf": [part]}
    assert fits(instance, schema, Document(schema)) in (None, oracle(schema).is_valid(instance))


@settings(max_examples=100, deadline=None)
@given(schemas(), st.lists(INSTANCES, min_size=1, max_size=8), st.integers(0, 2**32))
def test_grammar_accepts_and_writes_valid_instances_alone(part: Any, instances: list[Any], seed: int) -> None:
    schema = {"$schema": DRAFT_7, "allOf": [part]}
    form = StructuredOutputs(json=json.dumps(schema))
    try:
        check_form(form)
    except InvalidRequest:
        return
    matcher = LLMatcher(byte_tokenizer(), grammar_of(form), log_level=0, limits=parser_limits())
    for instance in instances:
        reader = matcher.deep_copy()
        if reader.consume_tokens(list(json.dumps(instance).encode())) and reader.is_accepting():
            assert oracle(schema).is_valid(instance), instance
    rng = random.Random(seed)
    for _ in range(4):
        if (text := sampled(matcher.deep_copy(), rng)) is not None:
            assert oracle(schema).is_valid(json.loads(text)), text


def test_part_that_is_meant_elsewhere_too_holds_for_all_types() -> None:
    part = {"oneOf": [{"required": ["a"]}, {"properties": {"a": False}}]}  # of objects one, of others both
    schema = {"type": "object", "properties": {"b": {"$ref": "#/allOf/0"}}, "allOf": [part]}
    new = rewritten(schema)
    for value, is_valid in (({"b": {"a": 1}}, True), ({"b": {}}, True), ({"b": "x"}, False), ({}, True)):
        assert oracle(schema).is_valid(value) is oracle(new).is_valid(value) is is_valid


def test_subschema_that_only_a_reference_reaches_is_rewritten() -> None:
    schema: dict[str, Any] = {
        "shapes": {"round": {"not": {"type": "string"}}},
        "items": {"$ref": "#/shapes/round"},
    }
    new = rewritten(schema)
    assert is_rewritten(new) and "not" in schema["shapes"]["round"]
    assert oracle(new).is_valid([1]) and not oracle(new).is_valid(["a"])


@pytest.mark.parametrize(
    ("schema", "invalid"),
    [
        ({"propertyNames": False}, '{"a":1}'),
        ({"type": "string", "pattern": r"^[\u0000-\u001fa]*$"}, r'"\""'),
        ({"type": "string", "pattern": "^[\0-\x1fa]*$"}, r'"\""'),
    ],
)
def test_grammar_refuses(schema: dict[str, Any], invalid: str) -> None:
    form = StructuredOutputs(json=json.dumps(schema))
    check_form(form)
    matcher = LLMatcher(byte_tokenizer(), grammar_of(form), log_level=0, limits=parser_limits())
    assert not oracle(schema).is_valid(json.loads(invalid))
    assert not (matcher.consume_tokens(list(invalid.encode())) and matcher.is_accepting())


def sampled(matcher: LLMatcher, rng: random.Random) -> str | None:
    """Return a text of the grammar; None for one that is too long."""
    text = bytearray()
    for _ in range(80):
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.3):
            return text.decode("utf-8", "replace")
        allowed = [each for each, bias in enumerate(matcher.compute_logit_bias()[:NUM_BYTES]) if bias]
        if not allowed:
            break
        likely = [each for each in allowed if chr(each) in '"{}[],:0123abcnullfalsetrue'] or allowed
        matcher.consume_token(token := rng.choice(likely if rng.random() < 0.9 else allowed))
        text.append(token)
    return text.decode("utf-8", "replace") if matcher.is_accepting() else None
