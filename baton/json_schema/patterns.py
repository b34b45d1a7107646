"""Regular expressions of strings, in the syntax of the grammar library, which is Rust's.

Expressions of formats follow the grammars of their RFCs.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, Final

import orjson
from llguidance import LLMatcher, LLTokenizer

NUM_BYTES: Final = 256
# A range from the character 0 on; then, so that their ends are no parts of others, escapes; negated classes.
ZERO_OR_NEGATED: Final = re.compile(r"(?P<zero>\\(?:x00|u0000|[xu]\{0+\})|\x00)-|\\.|\[\^\]?", re.DOTALL)
EMPTY: Final = "Regex is empty"  # the wording of the library
MAX_COMPILED: Final = 64  # patterns of one schema, and comparisons of them; each takes a millisecond
MAX_EXCLUDED_CHARS: Final = 50_000  # of an expression that excludes texts

_PERCENT: Final = "%[0-9A-Fa-f]{2}"
_UCS: Final = (
    r"\u{A0}-\u{D7FF}\u{F900}-\u{FDCF}\u{FDF0}-\u{FFEF}"
    r"\u{10000}-\u{1FFFD}\u{20000}-\u{2FFFD}\u{30000}-\u{3FFFD}"
)
_PRIVATE: Final = r"\u{E000}-\u{F8FF}"
_H16: Final = "[0-9A-Fa-f]{1,4}"
_OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LAST_32: Final = rf"(?:{_H16}:{_H16}|(?:{_OCTET}\.){{3}}{_OCTET})"
_IPV6: Final = "|".join(
    [
        f"(?:{_H16}:){{6}}{_LAST_32}",
        *(f"(?:(?:{_H16}:){{0,{left}}}{_H16})?::(?:{_H16}:){{{4 - left}}}{_LAST_32}" for left in range(5)),
        f"::(?:{_H16}:){{5}}{_LAST_32}",
        f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
        f"(?:(?:{_H16}:){{0,6}}{_H16})?::",
    ]
)


def _reference(more: str, more_in_query: str, *, is_relative: bool) -> str:
    """RFC 3986's URI or, with `more` characters, RFC 3987's IRI; relative references too where asked for."""
    name = rf"(?:[A-Za-z0-9._~!$&'()*+,;={more}-]|{_PERCENT})"
    segment = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@{more}-]|{_PERCENT})"
    query = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?{more}{more_in_query}-]|{_PERCENT})*"
    fragment = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?{more}-]|{_PERCENT})*"
    user = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:{more}-]|{_PERCENT})*@"
    authority = rf"//(?:{user})?(?:\[(?:{_IPV6})\]|{name}*)(?::[0-9]*)?(?:/{segment}*)*"
    absolute = rf"/(?:{segment}+(?:/{segment}*)*)?"
    rootless = rf"{segment}+(?:/{segment}*)*"
    without_scheme = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@{more}-]|{_PERCENT})+(?:/{segment}*)*"
    end = rf"(?:\?{query})?(?:#{fragment})?"
    whole = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{authority}|{absolute}|{rootless})?"
    return rf"(?:{whole}|{authority}|{absolute}|{without_scheme})?{end}" if is_relative else whole + end


def _template() -> str:
    """RFC 6570's templates."""
    char = rf"(?:[A-Za-z0-9_]|{_PERCENT})"
    variable = rf"{char}(?:\.?{char})*(?::[1-9][0-9]{{0,3}}|\*)?"
    literal = rf"[!#$&()*+,./0-9:;=?@A-Z\[\]_a-z~{_UCS}{_PRIVATE}-]|{_PERCENT}"
    return rf"(?:{literal}|\{{[+#./;?&]?{variable}(?:,{variable})*\}})*"


def _expression(depth: int) -> str:
    """Expressions that ECMA and other dialects read alike. depth: of nested groups, at most."""
    punctuation = r"^$.|?*+(){}\[\]/\\-"
    escape = rf"\\[dDwWsStnrfv{punctuation}]"
    chars = rf"\[\^?(?:a-z|A-Z|0-9|a-f|A-F|[^\\\[\]^\-]|{escape})+\]"
    times = r"(?:[*+?]|\{[0-9]{1,3},?\}|\{[01],[1-9][0-9]{0,2}\})\??"
    atom = rf"[^\\^$|?*+()\[\]{{}}]|{escape}|{chars}"
    if depth:
        atom += rf"|\((?:\?:)?{_expression(depth - 1)}\)"
    row = rf"(?:(?:{atom})(?:{times})?|[\^$])*"
    return rf"{row}(?:\|{row})*"


_POINTER: Final = "(?:/(?:[^~/]|~[01])*)*"
# Formats that the grammar library lacks. Apply `whole` before use. `regex`: syntax that all dialects share.
FORMATS: Final[Mapping[str, str]] = {
    "uri-reference": _reference("", "", is_relative=True),
    "iri": _reference(_UCS, _PRIVATE, is_relative=False),
    "iri-reference": _reference(_UCS, _PRIVATE, is_relative=True),
    "uri-template": _template(),
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "regex": _expression(2),
}


def mended(pattern: str) -> str:
    """Return the pattern without the character 0 in classes that exclude characters, and in ranges.

    In JSON the library takes a class with all control characters to have the quote and the backslash, too.
    """
    return ZERO_OR_NEGATED.sub(_without_zero, pattern)


def _without_zero(found: re.Match[str]) -> str:
    begin = found[0]
    if found["zero"] is not None:
        return r"\x01-"
    if begin.startswith("\\"):
        return begin
    return r"[^\x00" + (r"\]" if begin.endswith("]") else "")


def whole(expression: str) -> str:
    """Return a `pattern` that matches the expression from begin to end."""
    return mended(f"^(?:{expression})$")


def excluding(texts: Collection[str]) -> str | None:
    """Return a `pattern` of all texts but these; None if that is too large. No text has a character 0."""
    if sum(len(text) ** 2 for text in texts) > MAX_EXCLUDED_CHARS:
        return None
    prefixes = sorted({text[:end] for text in texts for end in range(len(text) + 1)})
    following = dict[str, str]()
    for prefix in prefixes[1:]:
        following[prefix[:-1]] = following.get(prefix[:-1], "") + re.escape(prefix[-1])
    ends = [re.escape(prefix) for prefix in prefixes if prefix not in texts]
    others = [
        re.escape(prefix)
        + (rf"[^\x00{following[prefix]}]" if prefix in following else r"[\s\S]")
        + r"[\s\S]*"
        for prefix in prefixes
    ]
    return whole("|".join(ends + others))


@cache
def byte_tokenizer() -> LLTokenizer:
    """Return a tokenizer in which each byte is a token."""
    return LLTokenizer("byte")


class Patterns:
    """Matches patterns against given texts as grammars do, in linear time.

    Compiles MAX_COMPILED patterns and compares as many; for others the answer is "not known".
    """

    def __init__(self) -> None:
        self._compiled: dict[str, LLMatcher | None] = {}
        self._disjoint: dict[str, bool] = {}

    def matches(self, pattern: str, text: str) -> bool | None:
        """Return whether the pattern is found in the text; None if not known."""
        if not text.isprintable():
            return None
        if pattern not in self._compiled:
            if len(self._compiled) >= MAX_COMPILED:
                return None
            self._compiled[pattern] = _compiled(pattern)
        matcher = self._compiled[pattern]
        if matcher is None:
            return None
        matcher = matcher.deep_copy()
        return bool(matcher.consume_tokens(list(orjson.dumps(text))) and matcher.is_accepting())

    def are_disjoint(self, parts: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if provably no text fits all of the schemas, which have keywords of texts alone."""
        key = json.dumps(parts)
        if key not in self._disjoint:
            if len(self._disjoint) >= MAX_COMPILED:
                return False
            schema = {"type": "string", "allOf": list(parts)}
            _, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(schema))
            self._disjoint[key] = any(EMPTY in each for each in messages)
        return self._disjoint[key]


def _compiled(pattern: str) -> LLMatcher | None:
    try:
        grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": mended(pattern)})
        matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
    except ValueError:
        return None
    return None if matcher.is_error() else matcher
