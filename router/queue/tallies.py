"""How each tenant fares: what is counted of it, for operators."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Final

from baton.messages.status import MAX_TENANTS, QueueStatus, TenantStatus
from baton.router.queue.overload import OverloadController
from baton.tenants import Refusal

MAX_KEPT: Final = 4096  # tenants; the first that came is forgotten


class TenantTally:
    """One tenant's."""

    __slots__ = (
        *("num_degraded", "num_dispatched", "num_met", "num_missed"),
        *("refused", "waited_s", "weight", "work"),
    )

    def __init__(self) -> None:
        self.weight = 1.0
        self.work = 0.0  # of what has ended, as it was used
        self.num_dispatched = 0
        self.waited_s = 0.0
        self.num_met = 0
        self.num_missed = 0
        self.num_degraded = 0
        self.refused: Counter[Refusal] = Counter()

    def count_first_token(self, taken_s: float, promised_s: float) -> None:
        """promised_s: inf: nothing was."""
        if promised_s < inf:
            self.num_met += taken_s <= promised_s
            self.num_missed += taken_s > promised_s


class TenantTallies:
    def __init__(self) -> None:
        self._tallies: dict[str, TenantTally] = {}

    def of(self, tenant: str) -> TenantTally:
        tally = self._tallies.get(tenant)
        if tally is None:
            tally = self._tallies[tenant] = TenantTally()
            if len(self._tallies) > MAX_KEPT:
                del self._tallies[next(iter(self._tallies))]
        return tally

    def status(
        self,
        overload_controller: OverloadController,
        waiting: Iterable[tuple[str, float]],
        num_active: Callable[[str], int],
    ) -> QueueStatus:
        """waiting: of each that waits, its tenant and for how many seconds."""
        waits_s: defaultdict[str, list[float]] = defaultdict(list)
        for tenant, waited_s in waiting:
            waits_s[tenant].append(max(0.0, waited_s))  # a clock may jump
        return QueueStatus(
            level=overload_controller.level,
            escalations={
                level.name.lower(): count for level, count in overload_controller.escalations.items()
            },
            num_queued=sum(map(len, waits_s.values())),
            oldest_wait_s=min(86_400.0, max(map(max, waits_s.values()), default=0.0)),
            tenants=self._statuses(waits_s, num_active),
        )

    def _statuses(
        self, waits_s: Mapping[str, Sequence[float]], num_active: Callable[[str], int]
    ) -> tuple[TenantStatus, ...]:
        """The busiest MAX_TENANTS."""
        found = [
            self._status(tenant, tally, waits_s.get(tenant, ()), num_active(tenant))
            for tenant, tally in self._tallies.items()
        ]
        found.sort(key=lambda status: (-status.num_queued, -status.work_tokens, status.tenant))
        return tuple(found[:MAX_TENANTS])

    def _status(
        self, tenant: str, tally: TenantTally, waits_s: Iterable[float], num_active: int
    ) -> TenantStatus:
        waits = list(waits_s)
        return TenantStatus(
            tenant=tenant[:128],
            weight=tally.weight,
            num_queued=len(waits),
            num_active=num_active,
            oldest_wait_s=min(86_400.0, max(waits, default=0.0)),
            work_tokens=round(max(0.0, tally.work)),
            num_dispatched=tally.num_dispatched,
            waited_s=tally.waited_s,
            num_met=tally.num_met,
            num_missed=tally.num_missed,
            num_degraded=tally.num_degraded,
            refused=dict(tally.refused),
        )
