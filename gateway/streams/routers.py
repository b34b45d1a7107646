"""A gateway's dealings with its routers: status and silence, submissions and their ends."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

from baton.clock import Clock
from baton.messages.bounds import MAX_EVENTS
from baton.messages.control import Ended, Started
from baton.messages.operations import GatewayReport, GatewayStatus, Status, StatusQuery
from baton.request import AttemptKey, Request
from baton.rpc.peers import Peer, PeerRegistry

SILENT_S: Final = 3.0
MAX_UNANSWERED_TOKENS: Final = 3_072
TOKENS_PER_SUBMIT: Final = 1024  # charged for each Submit beside its prompt: the cost of routing it
ItemT = TypeVar("ItemT")
ACTIVE_S: Final = 60.0  # since a tenant's last Submit


class RouterWatch:
    """The status of a gateway's routers, and their silence.

    Each router is asked for its status once a second. The gateway closes its connection to a router that has
    been silent for SILENT_S while another router answers, and connects again when the router answers. If no
    router answers, the gateway keeps all of them until their links time out, and is not ready.
    """

    def __init__(self, peer_registry: PeerRegistry, clock: Clock) -> None:
        self._peer_registry = peer_registry
        self._clock = clock
        self._heard_s: dict[str, float] = {}  # by router
        self._statuses: dict[str, Status] = {}  # by router
        self._any_heard_s = clock.now_s()

    @property
    def silence_s(self) -> float:
        """Seconds since the last message of any router, also while none is connected."""
        return self._clock.now_s() - self._any_heard_s

    @property
    def status(self) -> Status | None:
        """The chosen router's view of the workers, and all routers; None until every router has answered."""
        router, present = self._peer_registry.router, self._peer_registry.routers
        if router is None or any(each.hello.id not in self._statuses for each in present):
            return None
        return Status.joined(list(self._statuses.values()), self._statuses[router.hello.id])

    def ask(self, own: GatewayStatus | None = None) -> None:
        """Ask every router for its status, after reporting this gateway's own."""
        for router in self._peer_registry.routers:
            self._heard_s.setdefault(router.hello.id, self._clock.now_s())
            if own is not None:
                router.send(GatewayReport(status=own))
            router.send(StatusQuery())

    def answered(self, router: Peer, status: Status) -> None:
        """Take a status."""
        self._statuses[router.hello.id] = status

    def heard(self, router: Peer) -> None:
        """Note a message of a router."""
        self._heard_s[router.hello.id] = self._any_heard_s = self._clock.now_s()

    def heard_s(self, router: str) -> float:
        """Return the time of the router's last message; -inf for a router that is not connected."""
        return self._heard_s.get(router, -math.inf)

    def left(self, router: Peer) -> None:
        """Forget a router."""
        self._heard_s.pop(router.hello.id, None)
        self._statuses.pop(router.hello.id, None)

    def excuse(self, seconds: float) -> None:
        """Leave out the seconds in which this process did not run from the silence of routers."""
        self._any_heard_s += seconds
        for router in self._heard_s:
            self._heard_s[router] += seconds

    def silent(self) -> list[Peer]:
        """Return silent routers; none when no other router answers."""
        now_s, routers = self._clock.now_s(), self._peer_registry.routers
        silent = [each for each in routers if now_s - self._heard_s.get(each.hello.id, now_s) > SILENT_S]
        return silent if len(silent) < len(routers) else []


class SubmitWindow:
    """Bounds the tokens of one tenant's Submits that no Routed, Queued or Rejected has answered.

    A router handles the messages of a gateway in order, so a call with a thousand choices would delay every
    other tenant. While other tenants are active, a gateway sends Submits of one tenant until those without an
    answer have MAX_UNANSWERED_TOKENS. The tenant's other streams stay WAITING, and are submitted in order.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unanswered: dict[str, dict[AttemptKey, tuple[str, int]]] = {}  # router -> tenant and tokens
        self._num_tokens: Counter[str] = Counter()  # of these, by tenant
        self._submitted_s: dict[str, float] = {}  # each tenant's last Submit, oldest first

    def is_full(self, tenant: str) -> bool:
        """Return whether the tenant's next stream must wait."""
        if self._num_tokens[tenant] < MAX_UNANSWERED_TOKENS:
            return False
        latest = islice(reversed(self._submitted_s.items()), 2)
        now_s = self._clock.now_s()
        return any(other != tenant and now_s - since_s < ACTIVE_S for other, since_s in latest)

    def submitted(self, router: str, request: Request) -> None:
        """Count a request that has been submitted to a router."""
        num_tokens = TOKENS_PER_SUBMIT + request.num_tokens
        self._unanswered.setdefault(router, {})[request.key] = (request.tenant, num_tokens)
        self._num_tokens[request.tenant] += num_tokens
        if not request.is_health_check:
            self._submitted_s.pop(request.tenant, None)
            self._submitted_s[request.tenant] = self._clock.now_s()

    def answered(self, router: str, key: AttemptKey) -> str | None:
        """Return the tenant if its waiting streams may be submitted now; None when no room has come free."""
        found = self._unanswered.get(router, {}).pop(key, None)
        if found is None:
            return None  # an answer came before: the request was queued
        tenant, num_tokens = found
        was_full = self.is_full(tenant)
        self._free(tenant, num_tokens)
        return tenant if was_full and not self.is_full(tenant) else None

    def lose(self, router: str) -> None:
        """Expect no more answers of a router."""
        for tenant, num_tokens in self._unanswered.pop(router, {}).values():
            self._free(tenant, num_tokens)

    def _free(self, tenant: str, num_tokens: int) -> None:
        self._num_tokens[tenant] -= num_tokens
        if not self._num_tokens[tenant]:
            del self._num_tokens[tenant]


class AttemptReports:
    """Starts and ends of attempts, kept until `flush`: the events of one step leave in one message."""

    def __init__(self, peer_registry: PeerRegistry) -> None:
        self._peer_registry = peer_registry
        self._started: dict[str, list[AttemptKey]] = {}  # by router
        self._ended: dict[str, list[tuple[AttemptKey, int]]] = {}  # by router; with the tokens answered

    def started(self, router: str, key: AttemptKey) -> None:
        """Note the first token of an attempt. router: the one that dispatched it."""
        self._started.setdefault(router, []).append(key)

    def ended(self, router: str, key: AttemptKey, num_answered: int) -> None:
        """Note the end of an attempt, and how many tokens it gave."""
        self._ended.setdefault(router, []).append((key, num_answered))

    def flush(self) -> None:
        """Report to each router the attempts that it dispatched; to all others if it is gone."""
        if not self._started and not self._ended:
            return
        started, self._started = self._started, {}
        ended, self._ended = self._ended, {}
        for router in started.keys() | ended.keys():
            peer = self._peer_registry.peer(router)
            for told in [peer] if peer is not None else self._peer_registry.routers:
                for keys in _batches(started.get(router, [])):
                    told.send(Started(attempts=keys))
                for pairs in _batches(ended.get(router, [])):
                    num_tokens = tuple(num_answered for _, num_answered in pairs)
                    told.send(Ended(attempts=tuple(key for key, _ in pairs), num_tokens=num_tokens))


def _batches(items: Sequence[ItemT]) -> Iterator[tuple[ItemT, ...]]:
    for first in range(0, len(items), MAX_EVENTS):
        yield tuple(items[first : first + MAX_EVENTS])
