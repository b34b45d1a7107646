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

import msgspec

from baton.cluster import standard_output
from baton.cluster.cluster_key import Keys
from baton.cluster.operator_node import connected
from baton.cluster.queue_lines import queue_lines, refusals
from baton.cluster.router_options import add_router_options, routers_of, spelled
from baton.errors import PeerGone, WorkerLost
from baton.operating import GatewayStatus, Status
from baton.router_status import RouterStatus
from baton.worker import Routers, WorkerStatus

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
    standard_output.check()
    status = asyncio.run(_ask(*routers_of(arguments)))
    if arguments.json:
        standard_output.write(f"{msgspec.json.encode(status).decode()}\n")
    else:
        standard_output.write(table(status) + "\n")


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
