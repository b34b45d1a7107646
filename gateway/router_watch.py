"""What a gateway's routers say of themselves, and which of them have fallen silent.

Each is asked for its status once a second. One that has answered nothing for SILENT_S, while another does,
stands still: it is given up, and connected to again when it answers. While none answers none is given up
here, which a link's own timeout does (baton/link_life.py); but the gateway is not ready then, and says so.
"""

from typing import Final

import msgspec

from baton.clock import Clock
from baton.colleagues import Colleagues
from baton.node import Peer
from baton.operating import GatewayReport, GatewayStatus, Status, StatusQuery
from baton.worker import REMOTE_PREFILLS

SILENT_S: Final = 3.0


class RouterWatch:
    def __init__(self, colleagues: Colleagues, clock: Clock) -> None:
        self._colleagues = colleagues
        self._clock = clock
        self._heard_s: dict[str, float] = {}  # by router, as the statuses
        self._statuses: dict[str, Status] = {}
        self._any_heard_s = clock.now_s()
        self._num_transferred: dict[str, int] = {}  # prompts, by decode worker
        self.transferred_s: float | None = None  # when some were seen to have been

    @property
    def silence_s(self) -> float:
        """For how long no router has said anything, whether one is connected or not."""
        return self._clock.now_s() - self._any_heard_s

    @property
    def status(self) -> Status | None:
        """Of workers as that router sees them which is asked for pairs, and of all routers, once all told."""
        router, present = self._colleagues.router, self._colleagues.routers
        if router is None or any(each.hello.id not in self._statuses for each in present):
            return None
        return msgspec.structs.replace(
            self._statuses[router.hello.id],
            num_attempts=sum(each.num_attempts for each in self._statuses.values()),
            routers=tuple(router for each in self._statuses.values() for router in each.routers),
        )

    def forget(self) -> None:
        """`status` is None until they are heard of again."""
        self._statuses.clear()

    def ask(self, own: GatewayStatus | None = None) -> None:
        """Ask every router for its status, after reporting this gateway's own."""
        for router in self._colleagues.routers:
            self._heard_s.setdefault(router.hello.id, self._clock.now_s())
            if own is not None:
                router.send(GatewayReport(status=own))
            router.send(StatusQuery())

    def answered(self, router: Peer, status: Status) -> None:
        """Counts that have risen since the worker's last one show that prompts were transferred."""
        self._statuses[router.hello.id] = status
        before, counts = self._num_transferred, dict[str, int]()
        for each in status.workers:
            count = each.load.counters.get(REMOTE_PREFILLS, 0)
            known = before.get(each.worker.id, count)
            if count > known:
                self.transferred_s = self._clock.now_s()
            counts[each.worker.id] = max(count, known)  # another router may have heard more
        self._num_transferred = counts

    def heard(self, router: Peer) -> None:
        self._heard_s[router.hello.id] = self._any_heard_s = self._clock.now_s()

    def left(self, router: Peer) -> None:
        self._heard_s.pop(router.hello.id, None)
        self._statuses.pop(router.hello.id, None)

    def held_up(self, seconds: float) -> None:
        """This process stood still so long: what they said meanwhile is unread."""
        self._any_heard_s += seconds
        for router in self._heard_s:
            self._heard_s[router] += seconds

    def silent(self) -> list[Peer]:
        """None of them, where nobody else would answer."""
        now_s, routers = self._clock.now_s(), self._colleagues.routers
        silent = [each for each in routers if now_s - self._heard_s.get(each.hello.id, now_s) > SILENT_S]
        return silent if len(silent) < len(routers) else []
