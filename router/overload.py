"""What the router does against overload: which rung it is on, and what that means for those who wait."""

import logging
from typing import Final

from baton.pressure import Rung
from baton.request import Request
from baton.router.forecast import Forecast
from baton.router.ladder import Ladder
from baton.router.membership import Membership
from baton.router.strain import Promises, read_strain
from baton.router.tenant_queues import TenantQueues, Waiting

PRESSED_LOCAL_TOKENS: Final = 256  # prompts up to here are computed where they are decoded, on that rung

logger = logging.getLogger(__name__)


class Overload:
    def __init__(self, members: Membership, forecast: Forecast, now_s: float) -> None:
        self.ladder = Ladder(now_s)
        self.promises = Promises()  # to all that are here
        self._members = members
        self._forecast = forecast
        self._num_hopeless = 0  # since the last look

    @property
    def rung(self) -> Rung:
        return self.ladder.rung

    def count_hopeless(self) -> None:
        """One could not be let in, or had to go, for the work that is before it."""
        self._num_hopeless += 1

    def look(self, queues: TenantQueues, now_s: float) -> None:
        """To be called twice a second. What was hopeless is as late as can be."""
        reading = read_strain(queues, self.promises, self._members, self._forecast, now_s)
        if self._num_hopeless:
            self._num_hopeless = 0
            reading = reading._replace(has_objectives=True, lateness=max(1.0, reading.lateness))
        if self.ladder.update(reading, now_s):
            told = {"num_queued": len(queues), **reading._asdict()}
            logger.info("overload: the rung is %s now", self.rung.name, extra=told)

    def is_local(self, request: Request) -> bool:
        """Whether its prompt is to be computed where it is decoded, for want of other places."""
        return self.rung >= Rung.LOCAL_PREFILL and request.num_tokens <= PRESSED_LOCAL_TOKENS

    def is_to_be_shed(self, waiting: Waiting) -> bool:
        """For those of higher classes."""
        if self.rung is not Rung.SHED or waiting.submit.is_begun:
            return False
        return waiting.standing.degradation.may_shed and self.promises.is_lowest(waiting.rank)
