"""What the router does against overload: which rung it is on, and what that means for those who wait."""

import logging
from collections import Counter
from itertools import islice
from math import inf
from typing import Final, NamedTuple

from baton.messages.status import OverloadLevel
from baton.messages.workers import WorkerRole
from baton.request import Request
from baton.router.membership import Membership
from baton.router.policies.forecast import Forecast
from baton.router.queue.objectives import objective_of
from baton.router.queue.tenant_queues import TenantQueues, Waiting

# The overload ladder: which rung (baton/messages/status.py) the cluster is on, by what is measured.
#
# A pressure of 1 is all that can be borne: answers about to be late, all KV pages in use, or tokens as slow
# as was promised at most. Above HIGH for CLIMB_S the ladder is climbed by one rung, below LOW for DESCEND_S
# it is climbed down by one; in between it stays. Only promises can be broken: where no request has an
# objective, waiting is all that is done. And only lateness is a reason to refuse anybody: the other two can
# be relieved.

HIGH: Final = 0.9
LOW: Final = 0.6
CLIMB_S: Final = 1.0
DESCEND_S: Final = 1.0
MAX_TOLD: Final = 64  # moves that are remembered


class PressureReading(NamedTuple):
    """Shares of what can be borne; see above."""

    has_waiting: bool
    has_objectives: bool  # any request that waits, or that workers have
    lateness: float  # of what waits: its wait by the wait that it can bear
    pages: float  # of the decode workers' KV pages, those in use
    itl: float  # the time of a step by the shortest tpot_ms that was promised

    @property
    def pressure(self) -> float:
        return max(self.lateness, self.pages, self.itl)


class LevelChange(NamedTuple):
    at_s: float
    level: OverloadLevel
    reading: PressureReading


class OverloadController:
    def __init__(self, now_s: float) -> None:
        self.level = OverloadLevel.CALM
        self.escalations: Counter[OverloadLevel] = Counter()  # how often each rung was climbed to
        self.moves: list[LevelChange] = []  # the latest
        self._since_s = now_s  # the pressure has been where it is
        self._zone = 0  # 1: above HIGH, -1: below LOW

    def update(self, reading: PressureReading, now_s: float) -> bool:
        """Whether the rung has changed. To be called twice a second at least, or it is climbed slower."""
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
        self.moves.append(LevelChange(now_s, level, reading))
        del self.moves[:-MAX_TOLD]
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


# How near the cluster is to breaking what was promised to those who are here.

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


def read_pressure(
    queues: TenantQueues, promises: Promises, members: Membership, forecast: Forecast, now_s: float
) -> PressureReading:
    return PressureReading(
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
        if objective.is_promised and not request.scheduling_key.has_unpromised_sla:
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


PRESSED_LOCAL_TOKENS: Final = 256  # prompts up to here are computed where they are decoded, on that rung
logger = logging.getLogger(__name__)


class OverloadManager:
    def __init__(self, members: Membership, forecast: Forecast, now_s: float) -> None:
        self.overload_controller = OverloadController(now_s)
        self.promises = Promises()  # to all that are here
        self._members = members
        self._forecast = forecast
        self._num_hopeless = 0  # since the last look

    @property
    def level(self) -> OverloadLevel:
        return self.overload_controller.level

    def count_hopeless(self) -> None:
        """One could not be let in, or had to go, for the work that is before it."""
        self._num_hopeless += 1

    def look(self, queues: TenantQueues, now_s: float) -> None:
        """To be called twice a second. What was hopeless is as late as can be."""
        reading = read_pressure(queues, self.promises, self._members, self._forecast, now_s)
        if self._num_hopeless:
            self._num_hopeless = 0
            reading = reading._replace(has_objectives=True, lateness=max(1.0, reading.lateness))
        if self.overload_controller.update(reading, now_s):
            told = {"num_queued": len(queues), **reading._asdict()}
            logger.info("overload: the rung is %s now", self.level.name, extra=told)

    def is_local(self, request: Request) -> bool:
        """Whether its prompt is to be computed where it is decoded, for want of other places."""
        return self.level >= OverloadLevel.LOCAL_PREFILL and request.num_tokens <= PRESSED_LOCAL_TOKENS

    def is_to_be_shed(self, waiting: Waiting) -> bool:
        """For those of higher classes."""
        if self.level is not OverloadLevel.SHED or waiting.submit.is_begun:
            return False
        return waiting.scheduling_key.degradation.may_shed and self.promises.is_lowest(waiting.rank)
