"""How overloaded a cluster is and how its tenants fare, as `baton status` shows it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from baton.operating import GatewayStatus
from baton.pressure import QueueStatus, Rung, TenantStatus

COLUMNS: Final = (
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
    if not named and not queue.num_queued and queue.rung is Rung.CALM:
        return []
    waiting = (
        f"{queue.num_queued} wait, the oldest {queue.oldest_wait_s:.1f} s"
        if queue.num_queued
        else "nobody waits"
    )
    lines = [f"overload: {queue.rung.name.lower().replace('_', ' ')}, {waiting}"]
    if not named:
        return lines
    work = sum(status.work_tokens for status in queue.tenants)
    rows = [COLUMNS, *(_row(status, work, refused.get(status.tenant, {})) for status in named[:MAX_LINES])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    if len(named) > MAX_LINES:
        lines.append(f"and {len(named) - MAX_LINES} more tenants, see --json")
    if queue.num_left_out:
        lines.append(f"and {queue.num_left_out} tenants that are not told of, as there are too many")
    return lines


def _row(status: TenantStatus, work: int, refused: ByReason) -> tuple[str, ...]:
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
