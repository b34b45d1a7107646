"""The suite of real tenants: loads, clients before small servers, and rows."""

import asyncio
from collections.abc import Sequence
from random import Random

import pytest

from baton.bench.clusters import tenants_yaml
from baton.bench.report import Row
from baton.bench.tenants.calls import OverloadSpan, goodputs, overload_rows, recovery_s
from baton.bench.tenants.real import SLAS, WORKLOAD, Pair, TenantServer, pair_rows, serving
from baton.errors import WorkerLost
from baton.gateway.tenants.file import parse_tenants
from baton.sim.timed.fleet import CallOutcome, ClientCall
from baton.tenants import Sla
from tests.event_loop import on_loop

CALL = ClientCall(at_s=0.0, tenant="victim-0", token_ids=(5, 6, 7), num_answered=2, sla=WORKLOAD.sla)


def answered(asked_s: float, ttft_s: float = 0.1) -> CallOutcome:
    first_s = asked_s + ttft_s
    return CallOutcome(call=CALL, asked_s=asked_s, first_token_s=first_s, ended_s=first_s + 0.1)


def refused(asked_s: float, retry_after_s: float = 3.0, retry: int = 0) -> CallOutcome:
    return CallOutcome(call=CALL, asked_s=asked_s, retry=retry, refusal="429", retry_after_s=retry_after_s)


def test_goodput_counts_requests_within_their_objectives_by_when_they_were_asked() -> None:
    outcomes = [answered(1.0), answered(9.0), answered(9.5, ttft_s=5.0), refused(2.0), answered(12.0)]
    assert goodputs(outcomes, 0.0, 20.0) == [0.2, 0.1]
    assert goodputs(outcomes, 5.0, 10.0) == [0.2], "a short span is one"


def test_recovery_ends_when_no_later_request_is_bad() -> None:
    good = [answered(60.0 + number / 4) for number in range(80)]
    assert recovery_s(good, 60.0, 80.0, 2.0) == 0.0
    assert recovery_s([*good, refused(63.0), answered(70.5, ttft_s=5.0)], 60.0, 80.0, 2.0) == 12.0


def rows_of(outcomes: Sequence[CallOutcome]) -> dict[str, Row]:
    span = OverloadSpan(0.0, 20.0, 24.0)
    rows = overload_rows(outcomes, 10.0, span, moment_s=2.0, most_told_s=600.0, most_calls=None)
    return {row.name.removeprefix("overload: "): row for row in rows}


def test_rows_of_an_overload_have_their_bars_beside_them() -> None:
    outcomes = [answered(number / 10) for number in range(240)] + [refused(3.0), refused(4.0, -1.0, retry=1)]
    rows = rows_of(outcomes)
    assert rows["least goodput of any 10 s / peak"].met
    assert rows["least goodput of any 10 s / peak"].note == "not good: 2 x 429"
    told = rows["refused with a time"]
    assert (told.value, told.met, told.note) == (50.0, False, "2 refused")
    assert rows["returned during it, and good"].value == 0.0


def test_retry_time_of_hours_does_not_count() -> None:
    assert rows_of([answered(1.0), refused(1.0, 601.0)])["refused with a time"].value == 0.0


def test_ratios_are_medians_of_rounds() -> None:
    alone = [answered(3.0, 0.1)] * 9
    pairs = [Pair(alone, [answered(3.0, ttft_s)] * 9) for ttft_s in (0.11, 0.1, 5.0)]
    p99, attainment, _ = pair_rows(pairs)
    assert p99.value == pytest.approx(1.1) and p99.met
    assert attainment.value == 1.0


def test_tenants_have_files_that_the_gateway_reads() -> None:
    keys = {tenant: f"key-{tenant}" for tenant in SLAS}
    file = parse_tenants(tenants_yaml(keys, SLAS), "tenants.yaml")
    assert list(file.tenants) == list(SLAS)
    assert file.tenants["victim-1"].sla.ttft_ms == WORKLOAD.sla.ttft_ms
    assert file.tenants["noisy"].sla.ttft_ms is None


def test_loads_have_the_rates_that_were_asked_for() -> None:
    loads = [
        (WORKLOAD.victims(12_000.0, 60.0, Random(1)), 12_000.0, 60.0),
        (WORKLOAD.noisy(30_000.0, 60.0, Random(1)), 30_000.0, 60.0),
        (WORKLOAD.service([(30.0, 9000.0), (30.0, 3000.0)], Random(1)), 6000.0, 60.0),
    ]
    for calls, tokens_per_s, span_s in loads:
        assert sum(call.num_tokens for call in calls) / span_s == pytest.approx(tokens_per_s, rel=0.15)
        assert all(0 < call.at_s < span_s for call in calls)
        other = WORKLOAD.renewed(calls, Random(2))
        assert [call.num_tokens for call in other] == [call.num_tokens for call in calls]
        assert not {call.token_ids[:16] for call in calls} & {call.token_ids[:16] for call in other}


async def refuse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: bytes = b"Retry-After: 7\r\n"
) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"authorization: Bearer k\r\n" in head
    writer.write(b"HTTP/1.1 429 Too Many\r\n" + headers + b"content-length: 2\r\n\r\n{}")
    await writer.drain()
    writer.close()
    await writer.wait_closed()


@on_loop
async def test_refused_call_with_x_should_retry_false_does_not_come_again() -> None:
    headers = b"Retry-After: 1\r\nX-Should-Retry: false\r\n"
    refusing = await asyncio.start_server(
        lambda reader, writer: refuse(reader, writer, headers), "127.0.0.1", 0
    )
    host, port = refusing.sockets[0].getsockname()
    server = TenantServer(f"http://{host}:{port}", {"victim-0": "k"})
    found = await server.load([CALL], 30.0)
    server.close()
    refusing.close()
    (once,) = found
    assert (once.refusal, once.retry_after_s, once.retry) == ("429", 1.0, 0)


@on_loop
async def test_refusal_has_its_time_and_an_unanswered_call_is_given_up_at_the_end() -> None:
    has_left = asyncio.Event()

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        has_left.set()

    silent = await asyncio.start_server(keep_silent, "127.0.0.1", 0)
    refusing = await asyncio.start_server(refuse, "127.0.0.1", 0)
    found = []
    for each in (refusing, silent):
        host, port = each.sockets[0].getsockname()
        server = TenantServer(f"http://{host}:{port}", {"victim-0": "k"})
        found += await server.load([CALL], 0.3)
        server.close()
        each.close()
    await has_left.wait()
    told, given_up = found
    assert (told.refusal, told.retry_after_s) == ("429", 7.0)
    assert not given_up.refusal and not given_up.is_good


@on_loop
async def test_cluster_that_does_not_start_is_an_error_at_once() -> None:
    with pytest.raises(WorkerLost, match="ttft_ms"):
        async with serving({"a": Sla(ttft_ms=-1.0)}):
            raise AssertionError("it serves")
