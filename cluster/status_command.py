"""Workers, tenants and routers of a cluster: requests, KV pages, overload; whether Redis is there."""

import argparse
import asyncio
from collections.abc import Mapping

import msgspec

from baton.cluster import standard_output
from baton.cluster.listeners import Listener, processes
from baton.cluster.operator_node import connected
from baton.cluster.queue_lines import queue_lines
from baton.cluster.router_options import add_router_options, routers_of, spelled
from baton.errors import PeerGone, WorkerLost
from baton.operating import Status
from baton.router_status import RouterStatus
from baton.worker import Routers, WorkerStatus

COLUMNS = (
    "worker",
    "role",
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
    standard_output.check()
    status = asyncio.run(_ask(*routers_of(arguments)))
    if arguments.json:
        standard_output.write(f"{msgspec.json.encode(status).decode()}\n")
    else:
        standard_output.write(table(status, processes()) + "\n")


def table(status: Status, pids: Mapping[Listener, int]) -> str:
    """pids: of the processes of this machine, by where they listen."""
    rows = [COLUMNS, *(_row(entry, pids) for entry in sorted(status.workers, key=_place))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    gateways = f"{status.num_gateways} gateway{'s' * (status.num_gateways != 1)}"
    last = f"{gateways}, {status.num_attempts} requests under way"
    if status.left_out:
        counted = ", ".join(f"{count} {what}" for what, count in status.left_out.items())
        last = f"for want of room this leaves out: {counted}\n{last}"
    return "\n".join([*lines, *queue_lines(status.queue), *map(_router_line, status.routers), last])


def _router_line(router: RouterStatus) -> str:
    num_routed = sum(router.routing_counts)
    said = f"router {router.id[:8]}: {num_routed} routed"
    if num_routed:
        said += f", 99% of them in {1000 * router.routing_quantile_s(0.99):g} ms"
    if router.counters.get("decisions"):
        said += f", {router.blind_share:.1%} blindly"
    return said + {"none": "", "up": ", Redis is up", "down": ", REDIS IS DOWN"}[router.redis]


def _place(entry: WorkerStatus) -> tuple[str | int, ...]:
    """decode-2 before decode-10."""
    stem, _, number = entry.worker.name.rpartition("-")
    return (stem, int(number)) if number.isdecimal() else (entry.worker.name, -1)


def _row(entry: WorkerStatus, pids: Mapping[Listener, int]) -> tuple[str, ...]:
    worker, load = entry.worker, entry.load
    state = " (draining)" if entry.is_draining else ""
    hits = load.prefix_hits_tokens / load.prefix_queries_tokens if load.prefix_queries_tokens else 0.0
    pages = " ".join(f"{name} {count}" for name, count in load.pages.items() if count)
    return (
        worker.name + state,
        str(worker.role),
        str(pids.get(Listener(worker.address.host, worker.address.port), "-")),
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


async def _ask(routers: Routers, key: bytes) -> Status:
    try:
        async with connected(routers, key) as operator:
            return await operator.status()
    except (TimeoutError, PeerGone):
        raise WorkerLost(f"the router at {spelled(routers)} does not answer; is the key right?") from None
