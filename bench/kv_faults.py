"""What faults cost in the middle of a transfer: how soon they are noticed, when the pages are back, and how
many bytes were moved for nothing.

    kill      the destination's process, after k % of the pages
    stall     the destination's process is stopped (SIGSTOP) for good after k % of the pages
    abort     the source gives the transfer up after k % of the pages
    cut       the link between the two is cut after k % of the pages
    corrupt   a bit of the page at k % is flipped as it arrives: its unit is written again
"""

import os
import signal
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

from baton.bench.kv_ends import DestinationProcess, SourceEnd, settings_of
from baton.engine.pages import PageState
from baton.kvtransfer.endpoint import KvEndpoint
from baton.kvtransfer.handoff import Outcome, Timing
from baton.layout import PageLayout

PERCENTS: Final = (1, 50, 99)
KINDS: Final = ("kill", "stall", "abort", "cut", "corrupt")
LEASE_S: Final = 2.0  # a stalled peer is given up after this long
LIMIT_S: Final = 30.0


class Fault(NamedTuple):
    """Medians over the rounds."""

    kind: str
    transport: str
    percent: int
    outcome: str
    detected_s: float  # until the source knows that the transfer has ended
    pages_back_s: float  # until every page of the source is free
    wasted_bytes: int


def measure_fault(
    kind: str,
    transport: str,
    percent: int,
    layout: PageLayout,
    num_pages: int,
    num_rounds: int,
    progress: Callable[[str], None],
) -> Fault:
    rounds = []
    for _ in range(num_rounds):
        progress(f"{kind} at {percent} % over {transport}")
        rounds.append(_one(kind, transport, percent, layout, num_pages))
    return Fault(
        kind=kind,
        transport=transport,
        percent=percent,
        outcome=rounds[-1][0],
        detected_s=median(each[1] for each in rounds),
        pages_back_s=median(each[2] for each in rounds),
        wasted_bytes=round(median(each[3] for each in rounds)),
    )


def _one(
    kind: str, transport: str, percent: int, layout: PageLayout, num_pages: int
) -> tuple[str, float, float, int]:
    num_units = num_pages // 2
    damaged_unit = max(1, num_units * percent // 100) if kind == "corrupt" else None
    destination = DestinationProcess(layout, num_pages, damaged_unit=damaged_unit)
    source = SourceEnd(layout, num_pages, transport)
    source.endpoint.close()
    timing = Timing(lease_s=LEASE_S, heartbeat_s=LEASE_S / 4)
    settings = settings_of(layout, transport, timing)
    endpoint = source.endpoint = KvEndpoint(settings, source.pool, source.ledger)
    try:
        link = source.link(destination)
        source.send(link, layout.page_size)  # everything is open and warm
        transfer = endpoint.start(link, num_units, deadline_s=LIMIT_S)
        pages = source.ledger.allocate(num_units, "prompt")
        num_first = max(1, len(pages) * percent // 100)
        endpoint.offer(transfer, pages[:num_first], num_first)
        _poll_for(endpoint, 0.2)  # the first pages move, the rest is not computed yet
        started_s = perf_counter()
        if kind == "cut":
            link.close()
        else:
            _strike(kind, endpoint, destination, transfer)
        endpoint.offer(transfer, pages[num_first:], len(pages))
        source.ledger.release(pages, "prompt")
        ended = source.wait_for(transfer)
        detected_s = perf_counter() - started_s
        while source.ledger.count(PageState.FREE) < num_pages and perf_counter() - started_s < LIMIT_S:
            endpoint.wait(0.001)
            endpoint.poll()
        pages_back_s = perf_counter() - started_s
    finally:
        os.kill(destination.pid, signal.SIGCONT)
        source.close()
        destination.close()
    num_bytes = 0 if ended.times is None else ended.times.num_bytes
    is_whole = ended.outcome is Outcome.HANDED_OVER
    wasted_bytes = num_bytes - num_units * layout.page_bytes if is_whole else num_bytes
    return ended.outcome.value, detected_s, pages_back_s, wasted_bytes


def _strike(kind: str, endpoint: KvEndpoint, destination: DestinationProcess, transfer: bytes) -> None:
    if kind == "kill":
        os.kill(destination.pid, signal.SIGKILL)
    elif kind == "stall":
        os.kill(destination.pid, signal.SIGSTOP)
    elif kind == "abort":
        endpoint.abort(transfer, "a bench of faults")


def _poll_for(endpoint: KvEndpoint, seconds: float) -> None:
    until_s = perf_counter() + seconds
    while perf_counter() < until_s:
        endpoint.wait(0.01)
        endpoint.poll()
