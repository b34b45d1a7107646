"""How overloaded a cluster is and how its tenants fare, as `baton status` shows it."""

from typing import Final

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


def queue_lines(queue: QueueStatus) -> list[str]:
    """None of a cluster that is calm and has no tenants."""
    named = [status for status in queue.tenants if status.tenant]
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
    rows = [COLUMNS, *(_row(status, work) for status in named[:MAX_LINES])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    if len(named) > MAX_LINES:
        lines.append(f"and {len(named) - MAX_LINES} more tenants, see --json")
    if queue.num_left_out:
        lines.append(f"and {queue.num_left_out} tenants that are not told of, as there are too many")
    return lines


def _row(status: TenantStatus, work: int) -> tuple[str, ...]:
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
        " ".join(f"{refusal.value} {count}" for refusal, count in status.refused.items() if count) or "0",
    )
