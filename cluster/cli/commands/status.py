"""Workers, gateways, routers and tenants of a cluster: where they run, what they do, overload, Redis.

running, waiting    sequences that have KV pages, and that wait for some
in, out             hand-offs of KV pages that come to the worker, and that leave it
attempts            requests that routers have sent to the worker and that have not ended
tokens              generated since the worker started
hits                share of prompt tokens whose KV was there already
pages               KV pages by state
"""

import argparse
import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

import msgspec

from baton.cluster.cli import output
from baton.cluster.cli.serve_options import add_router_options, routers_of, spelled
from baton.cluster.cluster_key import Keys
from baton.cluster.operator_node import connected
from baton.errors import PeerGone, WorkerLost
from baton.messages.operations import GatewayStatus, Status
from baton.messages.status import OverloadLevel, QueueStatus, RouterStatus, TenantStatus
from baton.messages.workers import Routers, WorkerStatus

# How overloaded a cluster is and how its tenants fare, as `baton status` shows it.

QUEUE_COLUMNS: Final = (
    "tenant",
    "weight",
    "share",
    "waiting",
    "oldest",
    "active",
    "in time",
    "degraded",
    "refused",
)
MAX_LINES: Final = 32  # of tenants; the first are those with most waiting and most work

ByReason: TypeAlias = Mapping[str, int]


def refusals(gateways: Iterable[GatewayStatus]) -> dict[str, ByReason]:
    """Return tenant -> reason -> calls that the gateways together refused; each call is counted once."""
    found: dict[str, Counter[str]] = {}
    for gateway in gateways:
        for tenant, reasons in gateway.refused.items():
            found.setdefault(tenant, Counter()).update(reasons)
    return dict(found)


def queue_lines(queue: QueueStatus, refused: Mapping[str, ByReason]) -> list[str]:
    """Return nothing for a cluster that is calm and has no tenants.

    refused: tenant -> reason -> calls, see `refusals`.
    """
    known = {status.tenant for status in queue.tenants}
    only_refused = [TenantStatus(tenant=tenant) for tenant in refused if tenant not in known]
    named = [status for status in (*queue.tenants, *only_refused) if status.tenant]
    if not named and not queue.num_queued and queue.level is OverloadLevel.CALM:
        return []
    waiting = (
        f"{queue.num_queued} wait, the oldest {queue.oldest_wait_s:.1f} s"
        if queue.num_queued
        else "nobody waits"
    )
    lines = [f"overload: {queue.level.name.lower().replace('_', ' ')}, {waiting}"]
    if not named:
        return lines
    work = sum(status.work_tokens for status in queue.tenants)
    rows = [
        QUEUE_COLUMNS,
        *(_queue_row(status, work, refused.get(status.tenant, {})) for status in named[:MAX_LINES]),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    if len(named) > MAX_LINES:
        lines.append(f"and {len(named) - MAX_LINES} more tenants, see --json")
    if queue.num_left_out:
        lines.append(f"and {queue.num_left_out} tenants that are not told of, as there are too many")
    return lines


def _queue_row(status: TenantStatus, work: int, refused: ByReason) -> tuple[str, ...]:
    num_judged = status.num_met + status.num_missed
    return (
        status.tenant,
        f"{status.weight:g}",
        f"{status.work_tokens / work:.0%}" if work else "-",
        str(status.num_queued),
        f"{status.oldest_wait_s:.1f} s" if status.num_queued else "-",
        str(status.num_active),
        f"{status.num_met / num_judged:.1%}" if num_judged else "-",
        str(status.num_degraded),
        " ".join(f"{reason} {count}" for reason, count in refused.items() if count) or "0",
    )


COLUMNS = (
    "worker",
    "role",
    "node",
    "pid",
    "tp",
    "running",
    "waiting",
    "in",
    "out",
    "attempts",
    "tokens",
    "hits",
    "pages",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_router_options(parser)
    parser.add_argument("--json", action="store_true", help="everything that the router knows, as JSON")


def run(arguments: argparse.Namespace) -> None:
    output.check()
    status = asyncio.run(_ask(*routers_of(arguments)))
    if arguments.json:
        output.write(f"{msgspec.json.encode(status).decode()}\n")
    else:
        output.write(table(status) + "\n")


def table(status: Status) -> str:
    """Return one line for each worker, router, gateway and tenant."""
    rows = [COLUMNS, *(_row(entry) for entry in sorted(status.workers, key=_place))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    num_gateways = f"{status.num_gateways} gateway{'s' * (status.num_gateways != 1)}"
    last = f"{num_gateways}, {status.num_attempts} requests under way"
    if status.left_out:
        counted = ", ".join(f"{count} {what}" for what, count in status.left_out.items())
        last = f"for want of room this leaves out: {counted}\n{last}"
    queue = queue_lines(status.queue, refusals(status.gateways))
    routers, gateways = map(_router_line, status.routers), map(_gateway_line, status.gateways)
    if status.head_away_s:
        last += f"\nRAY'S HEAD has not answered for {status.head_away_s:.0f} s: no worker can be started"
    return "\n".join([*lines, *queue, *routers, *gateways, last])


def _gateway_line(gateway: GatewayStatus) -> str:
    at = f", clients at {spelled((gateway.address,))}" if gateway.address is not None else ""
    counts = f"{gateway.num_open} calls open, {gateway.num_refused} refused"
    return f"gateway {gateway.id[:8]}{_place_of(gateway.node, gateway.pid)}{at}: {counts}"


def _place_of(node: str, pid: int) -> str:
    return f" on {node}, pid {pid}" if pid else ""


def _router_line(router: RouterStatus) -> str:
    num_routed = sum(router.routing_counts)
    said = f"router {router.id[:8]}{_place_of(router.node, router.pid)}: {num_routed} routed"
    if num_routed:
        said += f", 99% of them in {1000 * router.routing_quantile_s(0.99):g} ms"
    if router.counters.get("decisions"):
        said += f", {router.blind_share:.1%} blindly"
    return said + {"none": "", "up": ", Redis is up", "down": ", REDIS IS DOWN"}[router.redis]


def _place(entry: WorkerStatus) -> tuple[str | int, ...]:
    """decode-2 before decode-10."""
    stem, _, number = entry.worker.name.rpartition("-")
    return (stem, int(number)) if number.isdecimal() else (entry.worker.name, -1)


def _row(entry: WorkerStatus) -> tuple[str, ...]:
    worker, load = entry.worker, entry.load
    state = " (draining)" if entry.is_draining else ""
    hits = load.prefix_hits_tokens / load.prefix_queries_tokens if load.prefix_queries_tokens else 0.0
    pages = " ".join(f"{name} {count}" for name, count in load.pages.items() if count)
    return (
        worker.name + state,
        str(worker.role),
        worker.node or "-",
        str(worker.pid or "-"),
        str(worker.tensor_parallel_size),
        str(load.num_running),
        str(load.num_waiting),
        str(load.num_incoming),
        str(load.num_outgoing),
        str(entry.num_attempts),
        str(load.num_tokens),
        f"{hits:.0%}",
        f"{pages} of {worker.num_pages} x {worker.page_size} tokens",
    )


async def _ask(routers: Routers, keys: Keys) -> Status:
    try:
        async with connected(routers, keys) as operator:
            return await operator.status()
    except (TimeoutError, PeerGone):
        raise WorkerLost(f"the router at {spelled(routers)} does not answer; is the key right?") from None
