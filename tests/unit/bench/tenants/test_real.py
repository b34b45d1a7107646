"""The suite of real tenants: its loads, its clients before servers of one sentence, and its rows."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from baton.bench.serve.figures import Sample, Slo
from baton.bench.serve.load import Job
from baton.bench.tenants.real import (
    SLO,
    SLOS,
    STOPPED,
    Call,
    Outcome,
    Overload,
    Pair,
    Size,
    TenantServer,
    goodputs,
    noisy,
    noisy_rows,
    overload_rows,
    recovery_s,
    renewed,
    service,
    serving,
    tenants_yaml,
    victims,
)
from baton.errors import WorkerLost
from baton.gateway.tenants.file import parse_tenants

CALL = Call("victim-0", Job((5, 6, 7), 2, 0.0))


def answered(asked_s: float, ttft_s: float = 0.1) -> Outcome:
    return Outcome(CALL, asked_s, 0, 200, sample=Sample(2, ttft_s, ttft_s + 0.1, (0.1,)))


def refused(asked_s: float, retry_after: str = "3", retry: int = 0) -> Outcome:
    return Outcome(CALL, asked_s, retry, 429, retry_after)


def test_goodput_is_of_what_was_asked_in_each_span_and_kept_its_objectives() -> None:
    outcomes = [answered(1.0), answered(9.0), answered(9.5, ttft_s=5.0), refused(2.0), answered(12.0)]
    assert goodputs(outcomes, 0.0, 20.0) == [0.2, 0.1]
    assert goodputs(outcomes, 5.0, 10.0) == [0.2], "a short span is one"


def test_recovered_is_when_nothing_later_is_bad() -> None:
    good = [answered(60.0 + number / 4) for number in range(80)]
    assert recovery_s(good, 60.0, 80.0) == 0.0
    assert recovery_s([*good, refused(63.0), answered(70.5, ttft_s=5.0)], 60.0, 80.0) == 12.0


def test_a_refusal_is_told_a_time_in_whole_seconds() -> None:
    said = ("3", "", "0", "soon", "-1", "2.5", "601")
    assert [refused(0.0, each).is_told for each in said] == [True] + 6 * [False]


def test_rows_of_an_overload_have_their_bars_beside_them() -> None:
    size = Size(point_s=8.0, overload_s=20.0, after_s=4.0)
    point = [answered(2.0 + number / 10) for number in range(80)]
    outcomes = [answered(number / 10) for number in range(240)] + [refused(3.0), refused(4.0, "", retry=1)]
    rows = {row.name: row for row in overload_rows(Overload([point, point[:8]], outcomes, size))}
    assert rows["overload: peak goodput"].value == 10.0
    assert rows["overload: least goodput of any 10 s / peak"].met
    told = rows["overload: refused with a time"]
    assert (told.value, told.met, told.note) == (50.0, False, "2 refused")
    assert rows["overload: returned during it, and good"].value == 0.0


def test_ratios_are_medians_of_rounds() -> None:
    alone = [answered(3.0, 0.1)] * 9
    apart = [answered(3.0, 0.105)] * 9
    stretches = {"alone": 1.25, "beside": 1.5, "apart": 9.0}
    pairs = [Pair(alone, [answered(3.0, ttft_s)] * 9, apart, stretches) for ttft_s in (0.11, 0.1, 5.0)]
    p99, least, stretch, _, attainment = noisy_rows(pairs)
    assert stretch.value == 1.2
    assert p99.value == pytest.approx(1.1) and p99.met
    assert least.value == pytest.approx(1.05)
    assert attainment.value == 1.0


def test_tenants_have_files_that_the_gateway_reads() -> None:
    keys = {tenant: f"key-{tenant}" for tenant in SLOS}
    file = parse_tenants(tenants_yaml(keys, SLOS, [STOPPED]), "tenants.yaml")
    assert list(file.tenants) == list(SLOS)
    assert [name for name, tenant in file.tenants.items() if tenant.quotas.tokens_per_s] == [STOPPED]
    assert file.tenants["victim-1"].sla.ttft_ms == 1e3 * (SLO.ttft_s or 0)
    assert file.tenants["noisy"].sla.ttft_ms is None


def test_loads_are_as_heavy_as_they_are_said_to_be() -> None:
    loads = [
        (victims(12_000.0, 60.0, Random(1)), 12_000.0, 60.0),
        (noisy(30_000.0, 60.0, Random(1)), 30_000.0, 60.0),
        (service([(30.0, 9000.0), (30.0, 3000.0)], Random(1)), 6000.0, 60.0),
    ]
    for calls, tokens_per_s, span_s in loads:
        found = sum(len(call.job.prompt) for call in calls) / span_s
        assert found == pytest.approx(tokens_per_s, rel=0.15)
        assert all(0 < call.job.arrival_s < span_s for call in calls)
        other = renewed(calls, Random(2))
        assert [len(call.job.prompt) for call in other] == [len(call.job.prompt) for call in calls]
        assert not {call.job.prompt[:16] for call in calls} & {call.job.prompt[:16] for call in other}


async def refuse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: bytes = b"Retry-After: 7\r\n"
) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"authorization: Bearer k\r\n" in head
    writer.write(b"HTTP/1.1 429 Too Many\r\n" + headers + b"content-length: 2\r\n\r\n{}")
    await writer.drain()
    writer.close()
    await writer.wait_closed()


def test_who_is_told_not_to_does_not_come_again() -> None:
    async def run() -> list[Outcome]:
        headers = b"Retry-After: 1\r\nX-Should-Retry: false\r\n"
        refusing = await asyncio.start_server(
            lambda reader, writer: refuse(reader, writer, headers), "127.0.0.1", 0
        )
        host, port = refusing.sockets[0].getsockname()
        server = TenantServer(f"http://{host}:{port}", {"victim-0": "k"})
        found = await server.load([CALL], 30.0)
        server.close()
        refusing.close()
        return found

    (once,) = asyncio.run(run())
    assert once.is_refused and once.is_told and not once.may_return


def test_what_is_refused_is_told_and_what_has_no_answer_when_the_load_is_over_is_given_up() -> None:
    async def run() -> list[Outcome]:
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
        return found

    told, given_up = asyncio.run(run())
    assert told.is_refused and told.is_told and told.retry_after == "7"
    assert given_up.status == 0 and not given_up.is_good


def test_a_cluster_that_does_not_start_is_an_error_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving({"a": Slo(ttft_s=-1.0)}, tmp_path):
            raise AssertionError("it serves")

    with pytest.raises(WorkerLost, match=r"serve\.log"):
        asyncio.run(run())
    assert "ttft_ms" in (tmp_path / "serve.log").read_text()
