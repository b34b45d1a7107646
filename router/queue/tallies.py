"""Counts of each tenant, for operators."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final

from baton.messages.status import MAX_TENANTS, TenantStatus
from baton.tenants import Refusal

MAX_KEPT: Final = 4096  # tenants; the first that came is forgotten


class TenantTally:
    """The counts of one tenant."""

    __slots__ = (
        *("num_degraded", "num_dispatched", "num_met", "num_missed"),
        *("refused", "waited_s", "weight", "work"),
    )

    def __init__(self) -> None:
        self.weight = 1.0
        self.work = 0.0  # used by requests that have ended
        self.num_dispatched = 0
        self.waited_s = 0.0
        self.num_met = 0
        self.num_missed = 0
        self.num_degraded = 0
        self.refused: Counter[Refusal] = Counter()

    def count_first_token(self, taken_s: float, promised_s: float) -> None:
        """Count a first token as in time or late. promised_s: inf when none was promised."""
        if promised_s < inf:
            self.num_met += taken_s <= promised_s
            self.num_missed += taken_s > promised_s


class TenantTallies:
    """The counts of all tenants."""

    def __init__(self) -> None:
        self._tallies: dict[str, TenantTally] = {}

    def of(self, tenant: str) -> TenantTally:
        """The counts of a tenant; new ones for an unknown tenant."""
        tally = self._tallies.get(tenant)
        if tally is None:
            tally = self._tallies[tenant] = TenantTally()
            if len(self._tallies) > MAX_KEPT:
                del self._tallies[next(iter(self._tallies))]
        return tally

    def statuses(
        self, waits_s: Mapping[str, Sequence[float]], num_active: Callable[[str], int]
    ) -> tuple[TenantStatus, ...]:
        """The statuses of the busiest MAX_TENANTS. waits_s: tenant -> the waits of its queued requests."""
        found = [
            _status(tenant, tally, waits_s.get(tenant, ()), num_active(tenant))
            for tenant, tally in self._tallies.items()
        ]
        found.sort(key=lambda status: (-status.num_queued, -status.work_tokens, status.tenant))
        return tuple(found[:MAX_TENANTS])


def _status(tenant: str, tally: TenantTally, waits_s: Sequence[float], num_active: int) -> TenantStatus:
    return TenantStatus(
        tenant=tenant[:128],
        weight=tally.weight,
        num_queued=len(waits_s),
        num_active=num_active,
        oldest_wait_s=min(86_400.0, max(waits_s, default=0.0)),
        work_tokens=round(max(0.0, tally.work)),
        num_dispatched=tally.num_dispatched,
        waited_s=tally.waited_s,
        num_met=tally.num_met,
        num_missed=tally.num_missed,
        num_degraded=tally.num_degraded,
        refused=dict(tally.refused),
    )
