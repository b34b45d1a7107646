"""The grammar of a structured output. llguidance compiles grammars and computes token masks.

The gateway checks a form before it accepts a request; the engine compiles it for the model's vocabulary.
Both use this module, so that a form means the same to both.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from baton.errors import InvalidRequest
from baton.json_schema.document import read_json
from baton.json_schema.patterns import NUM_BYTES, byte_tokenizer
from baton.json_schema.rewriting import ANY_REWRITTEN, REWRITTEN, rewritten
from baton.request import JSON_WHITESPACE, StructuredOutputs

MAX_ERROR_CHARS: Final = 500  # of the library's message
NUM_CHECKED_STEPS: Final = 24
NUM_SHORT_TEXTS: Final = 2
NUM_SHORT_STEPS: Final = 64
JSON_ENDS: Final = frozenset(b'",:]}0')
JSON_SPACE: Final = frozenset(b" \t\r\n")
NO_TOKEN: Final = "NoExtensionBias"  # the library's word for a text that nothing may follow
DEAD_END: Final = (
    "the form has a dead end: nothing may follow a text that it allows. One cause are patternProperties of "
    "which all names are among the properties"
)
ANY_OBJECT: Final = '{"type": "object"}'
UNKNOWN_FORMAT: Final = re.compile(r"Unknown format: (.+?)(?: \(\d+ times\))?")  # the wording of the library
# The formats that JSON Schema defines. A schema may name others, which say nothing about a value.
JSON_FORMATS: Final = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname"),
        *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uri-template", "uuid"),
        *("json-pointer", "relative-json-pointer", "regex"),
    )
)
# Parts of Lark's syntax within which `%json` is no keyword, and that keyword.
LARK_TOKEN: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)*/|(?P<json>%json\s*)')
JSON: Final = json.JSONDecoder()
UNCHECKED_TOKENS: Final = "no tokenizer - can't validate <["  # the wording of the library
FORM: Final = "form"  # as frames call it


def parser_limits() -> LLParserLimits:
    """Return the limits of the steps of a grammar; what compiling takes has no limit in the library."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=100_000,  # real schemas take up to 75,000 with a vocabulary of 128,000 tokens
        max_items_in_row=2_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def grammar_of(form: StructuredOutputs) -> str:
    """Return the form as a grammar of llguidance. InvalidRequest when the form cannot be read."""
    name, value = form.chosen
    try:
        grammar = _GRAMMARS[name](value)
        return grammar if form.frame is None or name == "frame" else _framed(form.frame, grammar)
    except Exception as error:  # the library's readers raise many kinds
        raise InvalidRequest(str(error)[:MAX_ERROR_CHARS]) from None


def check_form(form: StructuredOutputs) -> None:
    """Compile the form without a vocabulary, and take the steps of a few short answers of bytes.

    InvalidRequest names what the grammar library cannot honour. The steps find ambiguous grammars, which
    compile in no time and then hold up an engine for seconds, and most of those with dead ends. A frame may
    name tokens of the vocabulary by their ids. Takes milliseconds, for some hostile forms minutes, and cannot
    be interrupted: not for an event loop.
    """
    if form.frame is not None and form.chosen[0] != "frame":
        check_form(msgspec.structs.replace(form, frame=None))
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar_of(form), limits=parser_limits())
    if form.frame is not None and not is_error:
        messages = [each for each in messages if not each.startswith(UNCHECKED_TOKENS)]
    if not is_error:
        messages = [each for each in messages if not _is_other_format(each)]
    if is_error or messages:
        raise InvalidRequest(_named(messages[0], form)[:MAX_ERROR_CHARS])
    if form.frame is None:
        _check_steps(grammar_of(form))


def _check_steps(grammar: str) -> None:
    matcher, rng = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=parser_limits()), random.Random(0)
    _check_text(matcher.deep_copy(), NUM_CHECKED_STEPS, rng.choice)
    for _ in range(NUM_SHORT_TEXTS):
        _check_text(matcher.deep_copy(), NUM_SHORT_STEPS, lambda allowed: rng.choice(_ending(allowed)))


def _check_text(matcher: LLMatcher, num_steps: int, choose: Callable[[list[int]], int]) -> None:
    for _ in range(num_steps):
        allowed = [token for token, bias in enumerate(matcher.compute_logit_bias()[:NUM_BYTES]) if bias]
        if not allowed or matcher.is_stopped():
            break
        matcher.consume_token(choose(allowed))
    if matcher.is_error():
        error = matcher.get_error()
        raise InvalidRequest(DEAD_END if error.startswith(NO_TOKEN) else error[:MAX_ERROR_CHARS])


def _ending(allowed: list[int]) -> list[int]:
    """The bytes with which a part of JSON ends soon, so that a short text has several parts."""
    ends = [token for token in allowed if token in JSON_ENDS]
    return ends or [token for token in allowed if token not in JSON_SPACE] or allowed


def _of_json(schema: str) -> str:
    # Lenient: the library warns of what it would drop, and `check_form` refuses all but other formats.
    options: Any = {"whitespace_pattern": JSON_WHITESPACE, "lenient": True}
    return LLMatcher.grammar_from_json_schema(_honourable(schema), overrides=options)


def _honourable(schema: str) -> str:
    """The schema without keywords that grammars lack, where others say the same."""
    return json.dumps(rewritten(read_json(schema))) if ANY_REWRITTEN.search(schema) else schema


def _lark(text: str) -> str:
    """The grammar in Lark's syntax, with the schemas in it as grammars honour them."""
    parts, end = list[str](), 0
    for found in LARK_TOKEN.finditer(text) if ANY_REWRITTEN.search(text) else ():
        if found["json"] is not None and found.start() >= end:
            _, length = JSON.raw_decode(text[found.end() :])
            parts += [text[end : found.end()], _honourable(text[found.end() : found.end() + length])]
            end = found.end() + length
    return "".join([*parts, text[end:]])


def _named(message: str, form: StructuredOutputs) -> str:
    """The library's message, with the keyword that it lacks or that was rewritten."""
    if message.startswith("Schema intersection"):
        return f"allOf or $ref: {message}"
    found = {each.strip('"') for each in ANY_REWRITTEN.findall(form.json or "")}
    keywords = sorted(REWRITTEN & found)
    is_named = not keywords or any(keyword in message for keyword in keywords)
    return message if is_named else f"{', '.join(keywords)}: {message}"


def _is_other_format(message: str) -> bool:
    found = UNKNOWN_FORMAT.fullmatch(message)
    return found is not None and found[1] not in JSON_FORMATS


def _of_choice(choices: tuple[str, ...]) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


def _framed(frame: str, grammar: str) -> str:
    """Return the frame's grammar, with the form's as one that the frame refers to."""
    if grammar.lstrip().startswith("{"):
        first, *others = msgspec.json.decode(grammar)["grammars"]
    else:
        first, others = {"lark_grammar": grammar}, []
    return json.dumps(
        {"grammars": [{"name": "frame", "lark_grammar": _lark(frame)}, {**first, "name": FORM}, *others]}
    )


def _of_structural_tag(text: str) -> str:
    tag = msgspec.json.decode(text, type=_StructuralTag)
    tags = [
        StructTag(
            trigger=_trigger_of(structure, tag.triggers),
            begin=structure.begin,
            grammar=rewritten(structure.schema),
            end=structure.end,
        )
        for structure in tag.structures
    ]
    return StructTag.to_grammar(tags, assume_special=False)


def _trigger_of(structure: "_Structure", triggers: Iterable[str]) -> str:
    for trigger in triggers:
        if trigger and structure.begin.startswith(trigger):
            return trigger
    raise ValueError(f"there is no trigger for {structure.begin!r}")


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text between `begin` and `end` follows a JSON schema."""

    begin: str
    schema: dict[str, Any]
    end: str


class _StructuralTag(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="structural_tag"
):
    """Free text in which each structure, once its trigger is written, follows its schema."""

    structures: list[_Structure]
    triggers: list[str]


_GRAMMARS: Final[Mapping[str, Callable[[Any], str]]] = {
    "json": _of_json,
    "json_object": lambda _: _of_json(ANY_OBJECT),
    "regex": LLMatcher.grammar_from_regex,
    "choice": _of_choice,
    "grammar": lambda text: LLMatcher.grammar_from_lark(_lark(any_to_lark(text))),
    "structural_tag": _of_structural_tag,
    "frame": lambda text: LLMatcher.grammar_from_lark(_lark(text)),
}
