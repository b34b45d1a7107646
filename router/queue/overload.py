"""The overload level of the cluster (baton/messages/status.py), and its effect on waiting requests.

A pressure of 1 is the most that the cluster can bear: answers about to be late, all KV pages in use, or
tokens as slow as the strictest promise. Above HIGH for CLIMB_S the level rises by one; below LOW for
DESCEND_S it falls by one. Where no request has an objective, nothing was promised, and requests just wait.
Only lateness is a reason to refuse requests: the other pressures can be relieved.
"""

import logging
from collections import Counter
from itertools import islice
from math import inf
from typing import Final, NamedTuple

from baton.messages.status import OverloadLevel
from baton.messages.workers import WorkerRole
from baton.request import Request
from baton.router.membership import MemberView
from baton.router.queue.objectives import Forecast, objective_of
from baton.router.queue.tenant_queues import QueuedAttempt, TenantQueues

HIGH: Final = 0.9
LOW: Final = 0.6
CLIMB_S: Final = 1.0
DESCEND_S: Final = 1.0
MAX_LOOKED_AT: Final = 4096  # tenants, of each the request that is due first
USED: Final = ("active", "leased", "quarantined")  # states of KV pages
LOCAL_PREFILL_TOKENS: Final = 256  # the longest prompt that level LOCAL_PREFILL moves to decode workers

logger = logging.getLogger(__name__)


class PressureReading(NamedTuple):
    """The pressures at one time; 1 is the most that can be borne."""

    has_waiting: bool
    has_objectives: bool  # any request that waits or runs
    lateness: float  # of waiting requests: the wait divided by the wait that the objective allows
    pages: float  # share of the decode workers' KV pages in use
    itl: float  # the time of a step divided by the shortest promised tpot_ms

    @property
    def pressure(self) -> float:
        """The largest pressure."""
        return max(self.lateness, self.pages, self.itl)


class OverloadController:
    """Derives the level from readings."""

    def __init__(self, now_s: float) -> None:
        self.level = OverloadLevel.CALM
        self.escalations: Counter[OverloadLevel] = Counter()  # how often each level was reached from below
        self._since_s = now_s  # the pressure has been in this zone since then
        self._zone = 0  # 1: above HIGH, -1: below LOW

    def update(self, reading: PressureReading, now_s: float) -> bool:
        """Take a reading; True when the level changes. Call at least twice a second."""
        zone = 1 if reading.pressure > HIGH else -1 if reading.pressure < LOW else 0
        if zone != self._zone or now_s < self._since_s:
            self._zone, self._since_s = zone, now_s
        level = min(self._next(reading, now_s), _highest(reading))
        if level == self.level:
            return False
        if level > self.level:
            self.escalations[level] += 1
        self.level = level
        self._since_s = now_s
        return True

    def _next(self, reading: PressureReading, now_s: float) -> OverloadLevel:
        if self.level is OverloadLevel.CALM and reading.has_waiting:
            return OverloadLevel.QUEUE
        held_s = now_s - self._since_s
        if self._zone > 0 and held_s >= CLIMB_S and self.level < OverloadLevel.SHED:
            return OverloadLevel(self.level + 1)
        if self._zone < 0 and held_s >= DESCEND_S and self.level > OverloadLevel.QUEUE:
            return OverloadLevel(self.level - 1)
        if self.level <= OverloadLevel.QUEUE and self._zone <= 0:
            return OverloadLevel.QUEUE if reading.has_waiting else OverloadLevel.CALM
        return self.level


def _highest(reading: PressureReading) -> OverloadLevel:
    if not reading.has_objectives:
        return OverloadLevel.QUEUE
    return OverloadLevel.SHED if reading.lateness > LOW else OverloadLevel.CLIP


class OverloadManager:
    """Reads the pressure, and says which requests the level affects.

    Knows the objectives and classes of all open requests: those that wait and those that run.
    """

    def __init__(self, members: MemberView, forecast: Forecast, now_s: float) -> None:
        self.controller = OverloadController(now_s)
        self._members = members
        self._forecast = forecast
        self._num_hopeless = 0  # since the last update
        self._tpots_s: Counter[float] = Counter()  # promised to open requests
        self._ranks: Counter[int] = Counter()  # of open requests
        self._num_promised = 0  # open requests with an objective

    @property
    def level(self) -> OverloadLevel:
        """The present level."""
        return self.controller.level

    def opened(self, request: Request) -> None:
        """A request waits."""
        self._count(request, 1)

    def closed(self, request: Request) -> None:
        """An opened request has ended."""
        self._count(request, -1)

    def count_hopeless(self) -> None:
        """A request was refused for the work before it."""
        self._num_hopeless += 1

    def read(self, queues: TenantQueues, now_s: float) -> PressureReading:
        """The present pressure."""
        reading = PressureReading(
            has_waiting=len(queues) > 0,
            has_objectives=self._num_promised > 0,
            lateness=_lateness(queues, now_s),
            pages=_pages_in_use(self._members),
            itl=self._forecast.step_s() / min(self._tpots_s, default=inf),
        )
        if self._num_hopeless:  # hopeless requests were as late as can be
            reading = reading._replace(has_objectives=True, lateness=max(1.0, reading.lateness))
        return reading

    def update(self, queues: TenantQueues, now_s: float) -> None:
        """Update the level. Call twice a second."""
        reading = self.read(queues, now_s)
        self._num_hopeless = 0
        if self.controller.update(reading, now_s):
            told = {"num_queued": len(queues), **reading._asdict()}
            logger.info("the overload level is %s", self.level.name, extra=told)

    @property
    def local_prefill_tokens(self) -> int:
        """Prompts of up to this many tokens are computed on their decode worker because of the level."""
        return LOCAL_PREFILL_TOKENS if self.level >= OverloadLevel.LOCAL_PREFILL else 0

    def is_local(self, request: Request) -> bool:
        """True when the prompt is computed on its decode worker because of the level."""
        return request.num_tokens <= self.local_prefill_tokens

    def is_to_be_shed(self, waiting: QueuedAttempt) -> bool:
        """True for a request of the lowest class, when others are open, at the level SHED."""
        if self.level is not OverloadLevel.SHED or waiting.submit.is_begun or not self._ranks:
            return False
        is_lowest = min(self._ranks) < waiting.rank >= max(self._ranks)
        return is_lowest and waiting.scheduling_key.degradation.may_shed

    def _count(self, request: Request, by: int) -> None:
        objective, rank = objective_of(request), request.scheduling_key.rank
        self._ranks[rank] += by
        if not self._ranks[rank]:
            del self._ranks[rank]
        if request.scheduling_key.has_unpromised_sla:
            return
        self._num_promised += by * objective.is_promised
        if objective.tpot_s < inf:
            self._tpots_s[objective.tpot_s] += by
            if not self._tpots_s[objective.tpot_s]:
                del self._tpots_s[objective.tpot_s]


def _lateness(queues: TenantQueues, now_s: float) -> float:
    """The lateness of requests that wait for the cluster, not for their tenant's quota."""
    latest = 0.0
    for waiting in islice(queues.heads(), MAX_LOOKED_AT):
        objective = objective_of(waiting.request)
        if objective.is_promised and not waiting.scheduling_key.has_unpromised_sla:
            # An attempt that continues a stream may wait as long again.
            may_wait_s = max(1e-3, objective.due_s)
            latest = max(latest, waiting.queued_s(now_s) / may_wait_s)
    return latest


def _pages_in_use(members: MemberView) -> float:
    num_used = num_all = 0
    for member in members.of_role(WorkerRole.DECODE):
        num_used += sum(member.load.pages.get(state, 0) for state in USED)
        num_all += member.worker.num_pages
    return num_used / max(1, num_all)
