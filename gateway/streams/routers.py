"""A gateway's dealings with its routers, apart from its requests.

`RouterWatch` asks routers for their status and finds silent ones. `Explanations` asks routers how a request
was routed. `AttemptReports` tells routers that attempts have started and ended. `SubmitWindow` bounds how
much of one tenant a gateway asks of a router before the router has answered.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeAlias, TypeVar

import msgspec

from baton.clock import Clock
from baton.gateway.streams.request_stream import AttemptKey, RequestStream
from baton.messages.bounds import MAX_EVENTS
from baton.messages.control import Decision, Ended, Started
from baton.messages.operations import Explain, GatewayReport, GatewayStatus, Status, StatusQuery
from baton.messages.workers import REMOTE_PREFILLS
from baton.request import Request
from baton.rpc.peers import Peer, PeerRegistry

SILENT_S: Final = 3.0
MAX_ASKED: Final = 64  # questions at once
MAX_UNANSWERED_TOKENS: Final = 6_144
TOKENS_PER_SUBMIT: Final = 1024  # beside the prompt's: a router takes as long for an empty prompt
ACTIVE_S: Final = 60.0  # since a tenant's last Submit

ItemT = TypeVar("ItemT")
# Called once: with a decision for each attempt, or None when no router has answered.
Explained: TypeAlias = Callable[[tuple[Decision, ...] | None], None]


class RouterWatch:
    """The status of a gateway's routers, and their silence.

    Each router is asked for its status once a second. A router that has answered nothing for SILENT_S while
    another one does stands still: the gateway gives it up, and connects again when it answers. While none
    answers, none is given up here (a link's own timeout does that), but the gateway is not ready.
    """

    def __init__(self, peer_registry: PeerRegistry, clock: Clock) -> None:
        self._peer_registry = peer_registry
        self._clock = clock
        self._heard_s: dict[str, float] = {}  # by router
        self._statuses: dict[str, Status] = {}  # by router
        self._any_heard_s = clock.now_s()
        self._num_transferred: dict[str, int] = {}  # prompts, by decode worker
        self.transferred_s: float | None = None  # the last time at which that number was seen to rise

    @property
    def silence_s(self) -> float:
        """Seconds since any router said anything, whether one is connected or not."""
        return self._clock.now_s() - self._any_heard_s

    @property
    def status(self) -> Status | None:
        """Workers as the asked router sees them, and all routers; None until all routers have answered."""
        router, present = self._peer_registry.router, self._peer_registry.routers
        if router is None or any(each.hello.id not in self._statuses for each in present):
            return None
        return msgspec.structs.replace(
            self._statuses[router.hello.id],
            num_attempts=sum(each.num_attempts for each in self._statuses.values()),
            routers=tuple(router for each in self._statuses.values() for router in each.routers),
        )

    def forget(self) -> None:
        """Have no `status` until all routers have answered again."""
        self._statuses.clear()

    def ask(self, own: GatewayStatus | None = None) -> None:
        """Ask every router for its status, after reporting this gateway's own."""
        for router in self._peer_registry.routers:
            self._heard_s.setdefault(router.hello.id, self._clock.now_s())
            if own is not None:
                router.send(GatewayReport(status=own))
            router.send(StatusQuery())

    def answered(self, router: Peer, status: Status) -> None:
        """Take a status. A worker's count that has risen shows that prompts were transferred."""
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
        """Take note that a router has said something."""
        self._heard_s[router.hello.id] = self._any_heard_s = self._clock.now_s()

    def left(self, router: Peer) -> None:
        """Forget a router."""
        self._heard_s.pop(router.hello.id, None)
        self._statuses.pop(router.hello.id, None)

    def held_up(self, seconds: float) -> None:
        """Excuse routers for a time in which this process stood still and read nothing."""
        self._any_heard_s += seconds
        for router in self._heard_s:
            self._heard_s[router] += seconds

    def silent(self) -> list[Peer]:
        """Return silent routers; none when no other router answers."""
        now_s, routers = self._clock.now_s(), self._peer_registry.routers
        silent = [each for each in routers if now_s - self._heard_s.get(each.hello.id, now_s) > SILENT_S]
        return silent if len(silent) < len(routers) else []


class _Question:
    def __init__(self, explained: Explained, num_asked: int) -> None:
        self._explained = explained
        self._num_waiting = num_asked
        self._found: list[Decision] | None = None  # None: no router has answered

    def answered(self, decisions: Sequence[Decision] | None) -> None:
        """Take the answer of one router; None: the router is gone."""
        self._num_waiting -= 1
        if decisions is not None:
            self._found = [*(self._found or ()), *decisions]
        if not self._num_waiting:
            found = self._found
            self._explained(None if found is None else tuple(sorted(found, key=lambda each: each.attempt)))


class Explanations:
    """Questions how a request was routed. Each router knows its own attempts and answers in order."""

    def __init__(self, peer_registry: PeerRegistry) -> None:
        self._peer_registry = peer_registry
        self._asked: dict[str, deque[_Question]] = {}  # by router, oldest first

    def ask(self, request_id: str, explained: Explained) -> None:
        """Ask every router. Too many questions at once are answered with None."""
        routers = self._peer_registry.routers
        if not routers or any(len(waiting) >= MAX_ASKED for waiting in self._asked.values()):
            explained(None)
            return
        question = _Question(explained, len(routers))
        for router in routers:
            self._asked.setdefault(router.hello.id, deque()).append(question)
        for router in routers:
            router.send(Explain(request_id=request_id))

    def answer(self, router: Peer, decisions: tuple[Decision, ...]) -> None:
        """Take a router's answer to its oldest question."""
        waiting = self._asked.get(router.hello.id)
        if waiting:
            waiting.popleft().answered(decisions)

    def lose(self, router: Peer) -> None:
        """Expect no more answers of a router."""
        for question in self._asked.pop(router.hello.id, ()):
            question.answered(None)


class AttemptReports:
    """Starts and ends of attempts, kept until `flush`: the events of one step leave in one message."""

    def __init__(self, peer_registry: PeerRegistry) -> None:
        self._peer_registry = peer_registry
        self._started: dict[str, list[AttemptKey]] = {}  # by router
        self._ended: dict[str, list[tuple[AttemptKey, int]]] = {}  # by router; with the tokens answered

    def started(self, stream: RequestStream) -> None:
        """The first token of the present attempt has come."""
        self._started.setdefault(stream.router, []).append(stream.key)

    def ended(self, stream: RequestStream) -> None:
        """The present attempt has ended."""
        self._ended.setdefault(stream.router, []).append((stream.key, stream.num_answered))

    def flush(self) -> None:
        """Tell each router of the attempts that it was asked for; tell the others if that router is gone."""
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


class SubmitWindow:
    """Bounds how much of one tenant a router has been asked and has not answered.

    A router handles the messages of a gateway in order, so a call with a thousand choices would delay every
    other tenant. While other tenants are active, a gateway sends Submits of one tenant only until those that
    no Routed, Queued or Rejected has answered have MAX_UNANSWERED_TOKENS. The gateway holds the tenant's
    other requests and submits them in the order in which they came.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unanswered: dict[str, dict[AttemptKey, tuple[str, int]]] = {}  # router -> tenant and tokens
        self._num_tokens: Counter[str] = Counter()  # of these, by tenant
        self._held: dict[str, dict[str, None]] = {}  # tenant -> request ids in their order
        self._submitted_s: dict[str, float] = {}  # each tenant's last Submit, oldest first

    def is_full(self, tenant: str) -> bool:
        """The tenant's next request must be held."""
        if self._num_tokens[tenant] < MAX_UNANSWERED_TOKENS:
            return False
        latest = islice(reversed(self._submitted_s.items()), 2)
        now_s = self._clock.now_s()
        return any(other != tenant and now_s - since_s < ACTIVE_S for other, since_s in latest)

    def submitted(self, router: str, request: Request) -> None:
        """A request has been submitted to a router."""
        num_tokens = TOKENS_PER_SUBMIT + request.num_tokens
        key = (request.request_id, request.attempt)
        self._unanswered.setdefault(router, {})[key] = (request.tenant, num_tokens)
        self._num_tokens[request.tenant] += num_tokens
        if not request.is_probe:
            self._submitted_s.pop(request.tenant, None)
            self._submitted_s[request.tenant] = self._clock.now_s()
        self.drop(request)

    def hold(self, request: Request) -> None:
        """Keep a request's place until `answered` names it."""
        self._held.setdefault(request.tenant, {})[request.request_id] = None

    def drop(self, request: Request) -> None:
        """Hold a request no longer, if it was held."""
        self._drop(request.tenant, request.request_id)

    def answered(self, router: str, key: AttemptKey) -> Iterator[str]:
        """Yield the held requests that may be submitted now; submit each before the next."""
        found = self._unanswered.get(router, {}).pop(key, None)
        if found is None:
            return  # answered before: the request was queued
        self._free(*found)
        tenant = found[0]
        while not self.is_full(tenant) and (held := self._held.get(tenant)):
            request_id = next(iter(held))
            self._drop(tenant, request_id)
            yield request_id

    def lose(self, router: str) -> None:
        """Expect no more answers of a router."""
        for tenant, num_tokens in self._unanswered.pop(router, {}).values():
            self._free(tenant, num_tokens)

    def _drop(self, tenant: str, request_id: str) -> None:
        held = self._held.get(tenant, {})
        held.pop(request_id, None)
        if not held:
            self._held.pop(tenant, None)

    def _free(self, tenant: str, num_tokens: int) -> None:
        self._num_tokens[tenant] -= num_tokens
        if not self._num_tokens[tenant]:
            del self._num_tokens[tenant]
