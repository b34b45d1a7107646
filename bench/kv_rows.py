"""What bench/kv.py measured as rows of its tables, beside the bars."""

from collections.abc import Sequence
from typing import Final

from baton.bench.kv_faults import Fault
from baton.bench.kv_relayout import Relaid
from baton.bench.kv_rivals import RivalRates
from baton.bench.kv_stream import Streamed
from baton.bench.kv_sweep import SMALL, SMALL_TOKENS, TRANSPORTS, UNPACED, Limits, Point
from baton.bench.kv_trace import Replayed
from baton.bench.report import Row, at_least, at_most

MEBIBYTE: Final = 2**20
# The rate that a transport is held to, and how much of it.
BARS: Final = {"shm": ("memcpy", 0.9), "tcp": ("raw socket", 0.85)}
GLOO_BAR: Final = 1.5
SMALL_BAR: Final = 0.6
# A name begins so -> times its rate of writing.
RIVAL_BARS: Final = {"nixl": 1.2, "mooncake": 2.0}
PUSHING: Final = "write"  # what Baton's transports do; a rival's other operations are there to be read
EXPOSED_BAR: Final = 3.0  # % of a prefill
STREAMING_BAR: Final = 3.0  # times less exposed
BACK_BAR_MS: Final = 1000.0


def sweep_rows(points: Sequence[Point], limits: Limits) -> list[Row]:
    """Figures of one shape and page size."""
    rows = [Row(f"limit: {name}", gbps, "GB/s") for name, gbps in limits.gbps.items()]
    for point in sorted(points, key=lambda point: (point.transport, point.num_tokens)):
        times = point.times
        note = (
            f"{point.num_bytes / MEBIBYTE:,.1f} MiB; reserve {1e3 * times.reserve_s:.1f} ms, "
            f"verify {1e3 * times.verify_s:.1f} ms, whole {1e3 * times.total_s:.1f} ms"
        )
        rows.append(Row(f"{point.transport}: {point.num_tokens:,} tokens", point.gbps, "GB/s", note=note))
    for transport in TRANSPORTS:
        rows += _ratios([point for point in points if point.transport == transport], limits)
    return rows


def _ratios(points: Sequence[Point], limits: Limits) -> list[Row]:
    """A transport's largest transfer against the limits, its 512-token one against the largest."""
    largest = max(points, key=lambda point: point.num_bytes)
    transport, (limit, bar) = largest.transport, BARS[largest.transport]
    many = [name for name in limits.gbps if name.startswith(limit) and not name.endswith((SMALL, UNPACED))]
    same_streams = max(many, key=len)
    rows = []
    if largest.num_bytes >= MEBIBYTE:
        ratio = largest.gbps / limits.gbps[same_streams]
        rows.append(at_least(f"{transport} / {same_streams}", ratio, "x", bar))
        unpaced = limits.gbps.get(same_streams + UNPACED)
        if unpaced is not None:
            rows.append(Row(f"{transport} / {same_streams}{UNPACED}", largest.gbps / unpaced, "x"))
        rows.append(
            at_least(
                f"{transport} / gloo, same pages",
                largest.gbps / limits.gbps["isend/irecv pages"],
                "x",
                GLOO_BAR,
            )
        )
    for point in points:
        if point.num_tokens == SMALL_TOKENS:
            rows += _small_ratios(point, largest, limit, limits)
    return rows


def _small_ratios(point: Point, largest: Point, limit: str, limits: Limits) -> list[Row]:
    """A short prompt against the large rate, and against as few bytes moved with nothing around them."""
    name, bare_gbps = f"{point.transport}: {SMALL_TOKENS} tokens", limits.gbps[limit + SMALL]
    note = f"{limit} of as few bytes: {bare_gbps / largest.gbps:.2f}"
    return [
        at_least(f"{name} / largest", point.gbps / largest.gbps, "x", SMALL_BAR, note),
        Row(f"{name} / {limit} of as few", point.gbps / bare_gbps, "x"),
    ]


def rival_rows(points: Sequence[Point], rivals: Sequence[RivalRates]) -> list[Row]:
    """Each rival's rates, and the largest transfer of the transport it is set against over them."""
    rows = []
    for rival in rivals:
        if rival.failure:
            rows.append(Row(rival.name, None, "GB/s", met=False, note=rival.failure))
        ours = [point for point in points if point.transport == rival.transport]
        largest = max(ours, key=lambda point: point.num_bytes)
        for operation, gbps in rival.gbps.items():
            name, ratio = f"{rival.name}: {operation}", largest.gbps / gbps
            bar = RIVAL_BARS.get(rival.name.split()[0]) if operation == PUSHING else None
            title = f"{rival.transport} / {name}"
            rows.append(Row(name, gbps, "GB/s"))
            rows.append(Row(title, ratio, "x") if bar is None else at_least(title, ratio, "x", bar))
    return rows


def relayout_rows(relaid: Sequence[Relaid]) -> list[Row]:
    rows = []
    for each in relaid:
        name = f"{each.shape}, {each.transport}: pages of {each.page_size} into {each.into}"
        note = f"{each.run_bytes:,} bytes a run"
        rows += [
            Row(name, each.gbps, "GB/s", note=note),
            Row(f"{name} / memcpy of such runs", each.gbps / each.memcpy_gbps, "x"),
            Row(f"{name} / into equal pages", each.gbps / each.equal_gbps, "x"),
        ]
    return rows


def stream_rows(streamed: Sequence[Streamed]) -> list[Row]:
    rows = []
    for each in streamed:
        name = f"{each.transport}, {each.num_tokens:,} tokens"
        share = 100 * each.exposed_streaming_s / each.prefill_s
        gain = each.exposed_at_end_s / each.exposed_streaming_s
        note = f"{1e3 * each.exposed_streaming_s:.1f} ms of a prefill of {each.prefill_s:.2f} s"
        rows.append(at_most(f"{name}: exposed", share, "% of prefill", EXPOSED_BAR, note))
        rows.append(at_least(f"{name}: pushed at the end / streamed", gain, "x", STREAMING_BAR))
        slower = each.prefill_by_layers_s / each.prefill_s - 1
        note = f"{1e3 * each.exposed_by_layers_s:.1f} ms; the prefill takes {100 * slower:+.1f} %"
        by_layers = each.exposed_streaming_s / each.exposed_by_layers_s
        rows.append(Row(f"{name}: last chunk whole / by groups of layers", by_layers, "x", note=note))
    return rows


def trace_rows(replayed: Sequence[Replayed]) -> list[Row]:
    rows = []
    for each in replayed:
        note = f"{each.num_requests} requests, {each.num_cached_tokens:,} tokens were there already"
        rows += [
            Row(f"{each.transport}: while moving", each.gbps, "GB/s", note=note),
            Row(f"{each.transport}: a hand-off, P50", each.p50_ms, "ms"),
            Row(f"{each.transport}: a hand-off, P99", each.p99_ms, "ms"),
            Row(
                f"{each.transport}: exposed, median",
                each.exposed_ms,
                "ms",
                note="nothing streamed: the worst",
            ),
            Row(f"{each.transport}: exposed / TTFT", 100 * each.exposed_share, "%"),
        ]
    return rows


def fault_rows(faults: Sequence[Fault]) -> list[Row]:
    rows = []
    for each in faults:
        name = f"{each.kind} at {each.percent} %, {each.transport}"
        note = f"{each.outcome}; {each.wasted_bytes / MEBIBYTE:,.1f} MiB for nothing"
        rows.append(Row(f"{name}: noticed", 1e3 * each.detected_s, "ms", note=note))
        back_ms = 1e3 * (each.pages_back_s - each.detected_s)
        rows.append(at_most(f"{name}: pages back", back_ms, "ms", BACK_BAR_MS))
    return rows
