"""How near the cluster is to breaking what was promised to those who are here."""

from collections import Counter
from itertools import islice
from math import inf
from typing import Final

from baton.request import Request
from baton.router.admission import objective_of
from baton.router.forecast import Forecast
from baton.router.ladder import Reading
from baton.router.membership import Membership
from baton.router.tenant_queues import TenantQueues
from baton.worker import WorkerRole

MAX_LOOKED_AT: Final = 4096  # tenants, of each the request that is due first
USED: Final = ("active", "leased", "quarantined")  # states of KV pages


class Promises:
    """To all who wait or are being answered."""

    def __init__(self) -> None:
        self._tpots_s: Counter[float] = Counter()
        self._ranks: Counter[int] = Counter()
        self._num_promised = 0

    @property
    def has_any(self) -> bool:
        return self._num_promised > 0

    @property
    def tightest_tpot_s(self) -> float:
        """inf: nobody has one."""
        return min(self._tpots_s, default=inf)

    def add(self, request: Request) -> None:
        self._change(request, 1)

    def remove(self, request: Request) -> None:
        """One that was added."""
        self._change(request, -1)

    def is_lowest(self, rank: int) -> bool:
        """Whether others are here, and none of a lower class: such as are of a higher one come first."""
        return bool(self._ranks) and min(self._ranks) < rank >= max(self._ranks)

    def _change(self, request: Request, by: int) -> None:
        objective, rank = objective_of(request), request.standing.rank
        self._ranks[rank] += by
        if not self._ranks[rank]:
            del self._ranks[rank]
        if request.standing.wishes:
            return
        self._num_promised += by * objective.is_promised
        if objective.tpot_s < inf:
            self._tpots_s[objective.tpot_s] += by
            if not self._tpots_s[objective.tpot_s]:
                del self._tpots_s[objective.tpot_s]


def read_strain(
    queues: TenantQueues, promises: Promises, members: Membership, forecast: Forecast, now_s: float
) -> Reading:
    return Reading(
        has_waiting=len(queues) > 0,
        has_objectives=promises.has_any,
        lateness=_lateness(queues, now_s),
        pages=_pages_in_use(members),
        itl=forecast.step_s() / promises.tightest_tpot_s,
    )


def _lateness(queues: TenantQueues, now_s: float) -> float:
    """Of what waits for the cluster, not for its own tenant's quota."""
    latest = 0.0
    for waiting in islice(queues.heads(), MAX_LOOKED_AT):
        request = waiting.submit.request
        objective = objective_of(request)
        if objective.is_promised and not request.standing.wishes:
            may_wait_s = max(1e-3, objective.due_s)  # what workers have begun with may as long again
            latest = max(latest, waiting.queued_s(now_s) / may_wait_s)
    return latest


def _pages_in_use(members: Membership) -> float:
    """Share of the decode workers', as they have told."""
    num_used = num_all = 0
    for member in members.of_role(WorkerRole.DECODE):
        num_used += sum(member.load.pages.get(state, 0) for state in USED)
        num_all += member.worker.num_pages
    return num_used / max(1, num_all)
