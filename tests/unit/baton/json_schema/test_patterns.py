"""Expressions of formats, and of texts that are excluded."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.json_schema.patterns import FORMATS, Patterns, excluding, whole

REGEX = Patterns()
FITTING = {
    "uri-reference": [
        "",
        "/a/b?c#d",
        "a/b:c",
        "//host:80/x",
        "http://[::1]/%20",
        "mailto:a@b",
        "?x",
        "#y",
        "../a",
    ],
    "iri": ["http://exämple.org/ä?ö", "urn:a:b", "http://[2001:db8::7:1.2.3.4]:1/"],
    "iri-reference": ["/ä", "ö", "http://a/ü"],
    "uri-template": ["/a{?b,c*}", "{+x:3}/{#y}", "http://a/{b.c}", "ü"],
    "json-pointer": ["", "/a", "/a~1b/~0/", "//"],
    "relative-json-pointer": ["0", "1/a", "12#", "0/"],
    "regex": ["^a+$", r"[a-z]{2,}|\d*?", r"((?:a|b)+c)?", "", r"^\w+@[^@]+\.com$"],
}
OTHER = {
    "uri-reference": ["1a:b", "a b", "%2", "http://[::1", "a\\b", "{", "ä", "http://a:b", "http://[1::2::3]"],
    "iri": ["/ä", "a b", "http://a<b"],
    "iri-reference": ["ä b", "%zz"],
    "uri-template": ["{", "}", "{a", "{ a}", "{a:0}", "{!a}", "a b", "<"],
    "json-pointer": ["a", "/~", "/~2", "#/a"],
    "relative-json-pointer": ["", "/a", "01", "-1", "1a"],
    "regex": ["(", "a\\", "a**", "[z", "*", "a{2", ")", "[z-a]", "(?=a)"],
}


@pytest.mark.parametrize("name", FORMATS)
def test_format_has_the_texts_of_its_rfc(name: str) -> None:
    patterns, pattern = Patterns(), whole(FORMATS[name])
    assert [text for text in FITTING[name] if patterns.matches(pattern, text) is not True] == []
    assert [text for text in OTHER[name] if patterns.matches(pattern, text) is not False] == []


@settings(max_examples=400, deadline=None)
@given(st.text("ab09-[](){}*+?|^$.\\dw,:=", max_size=8))
def test_expressions_of_the_format_regex_compile(text: str) -> None:
    if REGEX.matches(whole(FORMATS["regex"]), text):
        re.compile(text)


@given(
    st.frozensets(st.text('ab."\\]^-ä', max_size=4), min_size=1, max_size=5),
    st.text('ab."\\]^-ä', max_size=5),
)
def test_all_texts_but_the_excluded_ones_match(texts: frozenset[str], other: str) -> None:
    patterns, pattern = Patterns(), excluding(texts)
    assert pattern is not None
    for text in (*texts, other):
        assert patterns.matches(pattern, text) is (text not in texts)


@pytest.mark.parametrize(
    ("pattern", "fitting", "other"),
    [
        (r"^[^\\]+$", 'a"b', "a\\b"),
        (r"^[^\"]+$", "a\\b", 'a"b'),
        (r"^[^]\"]$", "a", "]"),
        (r"^\[[^a]$", "[b", "[a"),
        (r"^[\x00-!]$", "!", "\\"),
        (r"^[\u0000-\u001f!]$", "!", '"'),
        (r"^[\u{0}-\u{1f}!]$", "!", "\\"),
        ("^[\0-\x1f!]$", "!", '"'),
        (r"^\\x00-[a]$", r"\x00-a", r"\x01-a"),
    ],
)
def test_classes_exclude_quotes_and_backslashes(pattern: str, fitting: str, other: str) -> None:
    patterns = Patterns()
    assert patterns.matches(pattern, fitting) and patterns.matches(pattern, other) is False


def test_too_many_texts_are_not_excluded() -> None:
    assert excluding(frozenset({"a" * 1000})) is None


def test_texts_of_two_patterns_are_compared() -> None:
    patterns = Patterns()
    assert patterns.are_disjoint([{"pattern": "^a"}, {"pattern": "^b"}])
    assert patterns.are_disjoint([{"pattern": "^a$"}, {"minLength": 2}])
    assert not patterns.are_disjoint([{"pattern": "a"}, {"pattern": "b"}])
    assert not patterns.are_disjoint([{"pattern": "(?!a)"}, {"pattern": "b"}])
