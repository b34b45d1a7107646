"""Forms are checked in processes of their own, within limits; tenants do not wait for each other."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import psutil
import pytest

from baton.errors import InvalidRequest, Overloaded
from baton.gateway.api.form_checker import MAX_CPU_S, FormChecker
from baton.request import StructuredOutputs
from tests.event_loop import on_loop


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


HOSTILE: Final[dict[str, dict[str, Any]]] = {
    "nested groups": {"regex": "(" * 2000 + "a" + ")" * 2000},
    "nested repetition": {"regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"},
    "many alternatives": {"regex": "|".join(f"a{{{n}}}b" for n in range(3000))},
    "ambiguous": {"regex": "(a|a)*" * 500 + "b"},
    "counter": {"regex": ".*a.{2000}"},
    "large choice": {"choice": tuple(f"{n:06d}" for n in range(10_000))},
    "large enum": {"json": json.dumps({"enum": [f"{n:06d}" for n in range(6000)]})},
    "deep schema": {"json": nested(900)},
    "recursive": {"json": '{"$defs":{"a":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'},
    "product": {"json": json.dumps({"allOf": [{"anyOf": [{"minLength": n} for n in range(9)]}] * 9})},
    "long bounds": {"json": '{"type":"string","minLength":100000,"maxLength":900000}'},
    "many items": {"json": '{"type":"array","minItems":100000,"items":{"type":"integer"}}'},
    "patterns": {
        "json": json.dumps(
            {"patternProperties": {f"^a{{{n}}}.*b{n}$": {"type": "string"} for n in range(500)}}
        )
    },
    "negations": {"json": '{"not":' * 900 + "{}" + "}" * 900},
    "overlapping branches": {
        "json": json.dumps({"oneOf": [{"enum": [f"{m}" for m in range(n, 90)]} for n in range(90)]})
    },
    "patterns of values": {
        "json": json.dumps({"enum": ["a" * 60] * 200, "not": {"pattern": "((a+)+)+b"}, "minLength": 1})
    },
    "dependencies": {"json": json.dumps({"dependencies": {f"{n}": [f"{n + 1}"] for n in range(8)}})},
    "loop": {"grammar": "start: start"},
    "rules": {
        "grammar": "start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(2000)) + '\nr2000: "a"'
    },
    "gbnf": {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
}


SLOW: Final = HOSTILE["patterns"]  # a minute and more


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@asynccontextmanager
async def checking() -> AsyncIterator[FormChecker]:
    checker, before = FormChecker(), children()
    try:
        yield checker
    finally:
        await checker.close()
        assert children() == before


async def seconds(checker: FormChecker, tenant: str, fields: dict[str, Any]) -> tuple[float, str]:
    """Return how long a check took, and why the form was refused; "" if it was not."""
    began_s, why = time.monotonic(), ""
    try:
        await checker.check(tenant, StructuredOutputs(**fields))
    except InvalidRequest as error:
        why = str(error)
    return time.monotonic() - began_s, why


def busy_s(cpu_s: float) -> float:
    """Return how long a process of a helper's priority takes for so much processor time."""
    program = (
        "import time; from baton.rpc.process import lower_priority; lower_priority()\n"
        f"began_s = time.monotonic()\nwhile time.process_time() < {cpu_s}: pass\n"
        "print(time.monotonic() - began_s)"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return float(ended.stdout)


@on_loop
async def test_hostile_forms_are_refused_or_compiled_within_two_seconds() -> None:
    async with checking() as checker:
        await checker.check("", StructuredOutputs(regex="a"))
        for name, fields in HOSTILE.items():
            took_s, why = await seconds(checker, "", fields)
            assert len(why) < 1000, name
            if took_s >= 2.0:  # on a busy machine, where as much processor time takes as long meanwhile
                again = seconds(checker, "another", fields)
                (took_s, _), busy = await asyncio.gather(again, asyncio.to_thread(busy_s, MAX_CPU_S))
                assert took_s < max(2.0, 4 * busy), name
        assert "more than 250 ms" in (await seconds(checker, "", SLOW))[1]


@on_loop
async def test_other_tenants_do_not_wait_for_a_hostile_one() -> None:
    async with checking() as checker:
        await checker.check("good", StructuredOutputs(regex="a"))
        hostile = [asyncio.create_task(seconds(checker, "bad", SLOW)) for _ in range(4)]
        await asyncio.sleep(0.05)
        waits_s = [(await seconds(checker, "good", {"regex": "b" * n}))[0] for n in range(1, 9)]
        assert len(waits_s) == 8 and not hostile[-1].done()
        times_s = [(await task)[0] for task in hostile]
        assert times_s == sorted(times_s)  # one after another


@on_loop
async def test_checked_form_is_remembered_for_its_tenant() -> None:
    before = children()
    async with checking() as checker:
        await checker.check("one", StructuredOutputs(regex="a"))
        (server,) = children() - before
        server.suspend()
        await checker.check("one", StructuredOutputs(regex="a"))
        other = asyncio.create_task(checker.check("two", StructuredOutputs(regex="a")))
        await asyncio.sleep(0.1)
        assert not other.done()
        server.resume()
        await other


@on_loop
async def test_form_of_several_calls_at_once_is_checked_once() -> None:
    async with checking() as checker:
        form = StructuredOutputs(regex="a")
        await asyncio.gather(*(checker.check("one", form) for _ in range(3)))
        assert checker.outcomes == {"accepted": 1, "known": 2}


@on_loop
async def test_checks_are_counted_by_outcome_and_timed() -> None:
    async with checking() as checker:
        for fields in ({"regex": "a"}, {"regex": "a"}, {"regex": "a("}, SLOW):
            await seconds(checker, "", fields)
        assert checker.outcomes == {"accepted": 1, "known": 1, "refused": 1, "too_long": 1}
        assert checker.times.num == 3 and checker.times.sum > MAX_CPU_S


@on_loop
async def test_form_server_that_dies_fails_what_it_had_and_is_replaced() -> None:
    before = children()
    async with checking() as checker:
        await checker.check("", StructuredOutputs(regex="a"))
        (server,) = children() - before
        server.suspend()
        waiting = asyncio.create_task(checker.check("", StructuredOutputs(regex="b")))
        await asyncio.sleep(0.05)
        server.kill()
        with pytest.raises(Overloaded):
            await waiting
        await checker.check("", StructuredOutputs(regex="b"))


@on_loop
async def test_caller_that_leaves_disturbs_no_other() -> None:
    async with checking() as checker:
        await checker.check("", StructuredOutputs(regex="a"))
        leaving = asyncio.create_task(checker.check("", StructuredOutputs(**SLOW)))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await checker.check("", StructuredOutputs(regex="c"))


@on_loop
async def test_caller_that_leaves_before_its_check_begins_disturbs_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = children()
    async with checking() as checker:
        await checker.check("", StructuredOutputs(regex="a"))
        (server,) = children() - before
        server.suspend()
        leaving = asyncio.create_task(checker.check("", StructuredOutputs(regex="b")))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        server.resume()
        await checker.check("", StructuredOutputs(regex="c"))
        assert children() - before == {server}
    assert capfd.readouterr().err == ""
