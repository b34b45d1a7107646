"""Show the workers, gateways, routers and tenants of a cluster: node, load, overload, Redis.

running, waiting    sequences that have KV pages, and that wait for KV pages
in, out             transfers of KV pages to the worker, and from the worker
attempts            requests that routers have sent to the worker and that have not ended
tokens              tokens generated since the worker started
hits                share of prompt tokens whose KV was cached
pages               KV pages by state
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from baton.cluster.cli import output
from baton.cluster.cli.connections import add_router_options, ask, spelled
from baton.cluster.cli.options import CliCommand, Parser
from baton.messages.bounds import short_id
from baton.messages.operations import GatewayStatus, Status
from baton.messages.status import OverloadLevel, QueueStatus, RouterStatus, TenantStatus
from baton.messages.workers import WorkerStatus

COLUMNS: Final = (
    *("worker", "role", "node", "pid", "tp", "pp"),
    *("running", "waiting", "in", "out", "attempts", "tokens", "hits", "pages"),
)
QUEUE_COLUMNS: Final = (
    *("tenant", "weight", "share", "waiting", "oldest", "active", "in time", "degraded", "refused"),
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


def queue_parts(queue: QueueStatus, refused: Mapping[str, ByReason]) -> list[output.Part]:
    """Return the lines and the table of the queue; none for a cluster that is calm and has no tenants.

    refused: tenant -> reason -> calls, see `refusals`.
    """
    known = {status.tenant for status in queue.tenants}
    only_refused = [TenantStatus(tenant=tenant) for tenant in refused if tenant not in known]
    named = [status for status in (*queue.tenants, *only_refused) if status.tenant]
    if not named and not queue.num_queued and queue.level is OverloadLevel.CALM:
        return []
    waiting = "no request waits"
    if queue.num_queued:
        waiting = f"{queue.num_queued} wait, the oldest {queue.oldest_wait_s:.1f} s"
    parts: list[output.Part] = [f"overload: {queue.level.name.lower().replace('_', ' ')}, {waiting}"]
    if not named:
        return parts
    work = sum(status.work_tokens for status in queue.tenants)
    rows = (_queue_row(status, work, refused.get(status.tenant, {})) for status in named[:MAX_LINES])
    parts.append(output.table(QUEUE_COLUMNS, rows))
    if len(named) > MAX_LINES:
        parts.append(f"and {len(named) - MAX_LINES} more tenants, see --json")
    if queue.num_left_out:
        parts.append(f"and {queue.num_left_out} more tenants, for which the status has no room")
    return parts


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


def _add_options(parser: Parser) -> None:
    add_router_options(parser)
    parser.add_argument("--json", action="store_true", help="the whole status, as JSON")


def _run(arguments: argparse.Namespace) -> None:
    output.check()
    found = ask(arguments, lambda operator: operator.status())
    if arguments.json:
        output.write(f"{msgspec.json.encode(found).decode()}\n")
    else:
        output.show(*parts_of(found))


def parts_of(status: Status) -> list[output.Part]:
    """Return the tables of workers and tenants, and a line for each router and gateway."""
    workers = sorted(status.workers, key=lambda entry: output.natural(entry.worker.name))
    columns: Sequence[str] = COLUMNS
    rows = [_row(entry) for entry in workers]
    if len({entry.worker.model for entry in workers}) > 1:
        columns = ("worker", "model", *COLUMNS[1:])
        rows = [(row[0], entry.worker.model, *row[1:]) for entry, row in zip(workers, rows, strict=True)]
    last: list[output.Part] = []
    if status.left_out:
        counted = ", ".join(f"{count} {what}" for what, count in status.left_out.items())
        last.append(f"the status has no room for: {counted}")
    gateways = f"{status.num_gateways} gateway{'s' * (status.num_gateways != 1)}"
    last.append(f"{gateways}, {status.num_attempts} requests under way")
    if status.head_away_s:
        last.append(f"RAY'S HEAD has not answered for {status.head_away_s:.0f} s: no worker can be started")
    return [
        output.table(columns, rows),
        *queue_parts(status.queue, refusals(status.gateways)),
        *map(_router_line, status.routers),
        *map(_gateway_line, status.gateways),
        *last,
    ]


def _gateway_line(gateway: GatewayStatus) -> str:
    at = f", clients at {spelled((gateway.address,))}" if gateway.address is not None else ""
    counts = f"{gateway.num_open} calls open, {gateway.num_refused} refused"
    return f"gateway {short_id(gateway.id)}{_place_of(gateway.node, gateway.pid)}{at}: {counts}"


def _place_of(node: str, pid: int) -> str:
    return f" on {node}, pid {pid}" if pid else ""


def _router_line(router: RouterStatus) -> str:
    num_routed = router.routing.num
    said = f"router {short_id(router.id)}{_place_of(router.node, router.pid)}: {num_routed} routed"
    if num_routed:
        said += f", 99% of them in {1000 * router.routing.quantile(0.99):g} ms"
    if router.counters.get("decisions"):
        said += f", {router.blind_share:.1%} blindly"
    return said + {"none": "", "up": ", Redis is up", "down": ", REDIS IS DOWN"}[router.redis]


def _row(entry: WorkerStatus) -> tuple[str, ...]:
    worker, load = entry.worker, entry.load
    state = " (asleep)" if worker.is_asleep else " (draining)" if entry.is_draining else ""
    hits = load.prefix_hits_tokens / load.prefix_queries_tokens if load.prefix_queries_tokens else 0.0
    pages = " ".join(f"{name} {count}" for name, count in load.pages.items() if count)
    return (
        worker.name + state,
        str(worker.role),
        worker.node or "-",
        str(worker.pid or "-"),
        str(worker.tensor_parallel_size),
        str(worker.pipeline_parallel_size),
        str(load.num_running),
        str(load.num_waiting),
        str(load.num_incoming),
        str(load.num_outgoing),
        str(entry.num_attempts),
        str(load.num_tokens),
        f"{hits:.0%}",
        f"{pages} of {worker.num_pages} x {worker.page_size} tokens",
    )


status = CliCommand(__doc__, _add_options, _run)
