"""Forms that are slow, large or endless to compile, in the gateway's checks and in an engine."""

import asyncio
import json
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from baton.bench.report import Report, Row, at_most, percentile
from baton.bench.structured.masks import (
    END_ID,
    PERSON,
    VOCAB_SIZES,
    tokenizer_text,
)
from baton.errors import InvalidRequest
from baton.gateway.api.form_checker import FormChecker
from baton.kernels.sample import num_mask_words
from baton.request import StructuredOutputs
from baton.structured_output import grammar_of, parser_limits

HOSTILE_BAR_S: Final = 2.0
P99_BAR: Final = 2.0  # times, of ordinary forms beside hostile ones


def hostile_forms(num_forms: int, seed: int) -> list[tuple[str, StructuredOutputs | None]]:
    """Return forms that are slow, large or endless to compile, each with the name of its family.

    None: the gateway refuses the form before it is checked, because it is too large.
    """
    rng = random.Random(seed)
    families = list(_FAMILIES.items())
    chosen = [families[number % len(families)] for number in range(num_forms)]
    return [(name, _form_of(make(rng))) for name, make in chosen]


def _form_of(fields: dict[str, Any]) -> StructuredOutputs | None:
    try:
        return msgspec.convert(fields, StructuredOutputs)
    except (msgspec.ValidationError, InvalidRequest):
        return None


def _json(schema: Any) -> dict[str, Any]:
    return {"json": schema if isinstance(schema, str) else json.dumps(schema)}


def _nested(rng: random.Random) -> dict[str, Any]:
    depth = rng.choice((100, 500, 900, 2000))
    parts = (('{"type":"array","items":', "}"), ('{"properties":{"a":', "}}"), ('{"anyOf":[', "]}"))
    begin, end = rng.choice(parts)
    return _json(begin * depth + "{}" + end * depth)


def _enum(rng: random.Random) -> dict[str, Any]:
    num, length = rng.choice(((7000, 5), (2500, 20), (120, 500), (9000, 9)))
    return _json({"enum": ["".join(rng.choices("abcdef", k=length)) for _ in range(num)]})


def _regex(rng: random.Random) -> str:
    num = rng.randint(5, 1500)
    inner = rng.choice(("a", "[a-z]", "(a|b)", "\\\\w"))
    return rng.choice(
        (
            f"({inner}+)+b" * (num % 40 + 1),
            f".*{inner}.{{{num}}}",
            f"({inner}|{inner})*" * num + "b",
            f"((({inner}{{1,{num}}}){{1,{num}}}){{1,{num}}}){{1,9}}",
            "|".join(f"{inner}{{{each}}}x" for each in range(num)),
            "(" * num + inner + ")" * num,
            f"(.*{inner}){{{num}}}",
            f"(?:{inner}?){{{num}}}{inner}{{{num}}}",
        )
    )


def _recursive(rng: random.Random) -> dict[str, Any]:
    num = rng.randint(1, 60)
    key = rng.choice(("allOf", "anyOf", "oneOf"))
    links = {
        f"d{each}": {
            key: [{"$ref": f"#/$defs/d{(each + 1) % num}"}, {"$ref": f"#/$defs/d{(each + 2) % num}"}]
        }
        for each in range(num)
    }
    return _json({"$defs": links, "$ref": "#/$defs/d0"})


def _product(rng: random.Random) -> dict[str, Any]:
    one = {"anyOf": [{"minLength": each, "pattern": f"a{{{each}}}"} for each in range(rng.randint(3, 12))]}
    return _json({rng.choice(("allOf", "oneOf")): [one] * rng.randint(3, 12)})


def _bounds(rng: random.Random) -> dict[str, Any]:
    size = rng.choice((1000, 100_000, 2**31, 10**18))
    return _json(
        rng.choice(
            (
                {"type": "string", "minLength": size, "maxLength": 2 * size},
                {"type": "array", "minItems": size, "items": {"type": "integer"}},
                {"type": "integer", "minimum": -size, "maximum": size * 7 + 3, "multipleOf": 9973},
                {"type": "number", "multipleOf": 1 / size, "minimum": 0.1234567891},
                {"type": "string", "pattern": f"^.{{{min(size, 10**6)}}}$"},
                {"type": "object", "minProperties": size, "additionalProperties": {"type": "null"}},
            )
        )
    )


def _properties(rng: random.Random) -> dict[str, Any]:
    num = rng.choice((200, 1000, 1800))
    if rng.random() < 0.5:
        return _json({"properties": {f"p{each}": {"pattern": f"a.*{each}"} for each in range(num)}})
    return _json({"patternProperties": {f"^a{{{each}}}.*b{each}$": {} for each in range(num)}})


def _grammar(rng: random.Random) -> dict[str, Any]:
    num = rng.randint(10, 1800)
    chain = "\n".join(f"r{each}: r{each + 1} r{each + 1} | r{each + 1}" for each in range(num))
    return {
        "grammar": rng.choice(
            (
                f'start: r0\n{chain}\nr{num}: "a"',
                "start: start start | start",
                'start: (("a"*)*)*',
                "root ::= " + "(" * num + '"a"' + ")" * num,
                f"start: /{_regex(rng)}/",
            )
        )
    }


def _rewritten(rng: random.Random) -> dict[str, Any]:
    """Keywords that are rewritten, where that is large."""
    num = rng.choice((10, 60, 300))
    names = [f"n{each}" for each in range(num)]
    texts = ["".join(rng.choices("abc", k=rng.choice((3, 60)))) for _ in range(num)]
    nested: Any = {"required": names[:3]}
    for _ in range(num):
        nested = {rng.choice(("not", "if", "contains", "propertyNames")): nested}
    return _json(
        rng.choice(
            (
                nested,
                {"oneOf": [{"pattern": f"^{text}(a|b)*$"} for text in texts]},
                {"oneOf": [{"enum": texts[each:]} for each in range(num)]},
                {"oneOf": [{"required": names[each : each + 3]} for each in range(num)]},
                {"dependencies": {name: {"not": {"required": names}} for name in names}},
                {"items": {"enum": texts}, "uniqueItems": True, "minItems": num // 2},
                {"enum": texts, "not": {"anyOf": [{"pattern": f"(({text}+)+)+$"} for text in texts]}},
                {"not": {"enum": texts}, "allOf": [{"not": {"enum": [text]}} for text in texts]},
            )
        )
    )


def _wrapped(rng: random.Random) -> dict[str, Any]:
    """Several hostile schemas in one."""
    makes = (_enum, _recursive, _product, _bounds, _properties)
    parts = [json.loads(rng.choice(makes)(rng)["json"]) for _ in range(3)]
    definitions = {key: value for part in parts for key, value in part.pop("$defs", {}).items()}
    return _json({"properties": {f"q{each}": part for each, part in enumerate(parts)}, "$defs": definitions})


_FAMILIES: Final = {
    "nested": _nested,
    "enum": _enum,
    "regex": lambda rng: {"regex": _regex(rng)},
    "pattern": lambda rng: _json({"type": "string", "pattern": _regex(rng)}),
    "recursive": _recursive,
    "product": _product,
    "bounds": _bounds,
    "properties": _properties,
    "grammar": _grammar,
    "rewritten": _rewritten,
    "wrapped": _wrapped,
}
WARMUP_TOKENS: Final = 24


def compile_and_walk_s(form: StructuredOutputs, tokenizer: LLTokenizer, rng: random.Random) -> float:
    """Return the seconds of compiling the form or of its slowest token, the longer of the two."""
    began_s = time.thread_time()
    matcher = LLMatcher(tokenizer, grammar_of(form), log_level=0, limits=parser_limits())
    longest_s = time.thread_time() - began_s
    mask_W = np.zeros(num_mask_words(tokenizer.vocab_size), np.int32)
    for _ in range(WARMUP_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        began_s = time.thread_time()
        matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
        if not len(allowed):
            break
        matcher.consume_tokens([int(rng.choice(allowed))])
        longest_s = max(longest_s, time.thread_time() - began_s)
    return longest_s


@dataclass
class HostileChecks:
    """The checks of hostile forms."""

    times_s: list[float] = field(default_factory=list)
    slowest: str = ""
    accepted: list[StructuredOutputs] = field(default_factory=list)
    num_refused: int = 0
    failed: list[str] = field(default_factory=list)  # neither accepted nor refused


async def check_hostile(
    checker: FormChecker, forms: Iterable[tuple[str, StructuredOutputs | None]]
) -> HostileChecks:
    """Check the forms one after another, as one tenant's are."""
    found = HostileChecks()
    for name, form in forms:
        if form is None:
            found.num_refused += 1
            continue
        began_s = time.monotonic()
        try:
            await checker.check("hostile", form)
            found.accepted.append(form)
        except InvalidRequest:
            found.num_refused += 1
        except Exception as error:  # every other exception is a failure of the check
            found.failed.append(f"{name}: {error!r}"[:200])
        took_s = time.monotonic() - began_s
        if took_s > max(found.times_s, default=0.0):
            found.slowest = name
        found.times_s.append(took_s)
    return found


async def ordinary_checks(
    checker: FormChecker, numbers: Iterator[int], until: asyncio.Event | int
) -> list[float]:
    """Check ordinary new forms of another tenant, one at a time; return the seconds of each."""
    times_s = list[float]()
    while not until.is_set() if isinstance(until, asyncio.Event) else len(times_s) < until:
        schema = {**PERSON, "title": str(next(numbers))}
        began_s = time.monotonic()
        await checker.check("good", StructuredOutputs(json=json.dumps(schema)))
        times_s.append(time.monotonic() - began_s)
        await asyncio.sleep(0.01)
    return times_s


async def hostile_rows(report: Report, num_forms: int, seed: int) -> list[Row]:
    """Return what hostile forms do to themselves and to others."""
    numbers, checker = count(), FormChecker()
    forms = hostile_forms(num_forms, seed)
    try:
        report.tell("ordinary forms alone")
        await ordinary_checks(checker, numbers, 20)
        alone_s = await ordinary_checks(checker, numbers, 300)
        report.tell("hostile forms")
        ended = asyncio.Event()
        beside = asyncio.create_task(ordinary_checks(checker, numbers, ended))
        found = await check_hostile(checker, forms)
        ended.set()
        beside_s = await beside
        alone_s += await ordinary_checks(checker, numbers, 300)  # before and after: the machine's load varies
    finally:
        await checker.close()
    note = f"{found.num_refused} refused, {len(found.accepted)} accepted; slowest: {found.slowest}"
    alone_ms, beside_ms = 1e3 * percentile(alone_s, 99), 1e3 * percentile(beside_s, 99)
    rows = [
        at_most(f"longest of {num_forms} hostile checks", max(found.times_s), "s", HOSTILE_BAR_S, note),
        at_most("hostile checks without an answer", len(found.failed), "", 0),
        at_most(
            "other tenant's p99 beside them",
            beside_ms / alone_ms,
            "times",
            P99_BAR,
            f"{alone_ms:.1f} ms alone, {beside_ms:.1f} ms beside",
        ),
    ]
    report.tell("accepted hostile forms in an engine")
    tokenizer = LLTokenizer(tokenizer_text(min(VOCAB_SIZES)), eos_token=END_ID)
    rng = random.Random(seed)
    longest_s = max((compile_and_walk_s(form, tokenizer, rng) for form in found.accepted), default=0.0)
    note = "compiling, or one token, of those that are accepted"
    rows.append(at_most("longest wait in an engine", longest_s, "s", HOSTILE_BAR_S, note))
    report.extra["failed checks"] = found.failed
    return rows
