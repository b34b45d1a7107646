"""A gateway's dealings with its routers: status and silence, queries, submissions and their ends."""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeAlias, TypeVar

import msgspec

from baton.clock import Clock
from baton.messages.bounds import MAX_EVENTS
from baton.messages.control import Decision, Ended, Started
from baton.messages.operations import (
    Explain,
    FindRequests,
    FoundRequests,
    GatewayReport,
    GatewayStatus,
    Status,
    StatusQuery,
)
from baton.messages.timeline import RequestTimeline
from baton.messages.workers import REMOTE_PREFILLS
from baton.request import AttemptKey, Request
from baton.rpc.peers import Peer, PeerRegistry

SILENT_S: Final = 3.0
MAX_ASKED: Final = 64  # questions at once
MAX_UNANSWERED_TOKENS: Final = 3_072
TOKENS_PER_SUBMIT: Final = 1024  # beside the prompt's: a router takes as long for an empty prompt
ItemT = TypeVar("ItemT")
ACTIVE_S: Final = 60.0  # since a tenant's last Submit

# Called once: with a decision for each attempt, or None when no router has answered.
Explained: TypeAlias = Callable[[tuple[Decision, ...] | None], None]
# Called with each gateway's answer, and whether it is the last one.
FoundTimelines: TypeAlias = Callable[[Sequence[RequestTimeline], bool], None]


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
            orders=tuple(order for each in self._statuses.values() for order in each.orders),
            routers=tuple(router for each in self._statuses.values() for router in each.routers),
        )

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

    def heard_s(self, router: str) -> float:
        """Return the time of the router's last message; -inf for a router that is not connected."""
        return self._heard_s.get(router, -math.inf)

    def left(self, router: Peer) -> None:
        """Forget a router."""
        self._heard_s.pop(router.hello.id, None)
        self._statuses.pop(router.hello.id, None)

    def excuse(self, seconds: float) -> None:
        """Do not count this time, in which this process did not run, as silence of routers."""
        self._any_heard_s += seconds
        for router in self._heard_s:
            self._heard_s[router] += seconds

    def silent(self) -> list[Peer]:
        """Return silent routers; none when no other router answers."""
        now_s, routers = self._clock.now_s(), self._peer_registry.routers
        silent = [each for each in routers if now_s - self._heard_s.get(each.hello.id, now_s) > SILENT_S]
        return silent if len(silent) < len(routers) else []


class Explanations:
    """Questions how a request was routed. Each router knows its own attempts and answers in order."""

    def __init__(self, peer_registry: PeerRegistry) -> None:
        self._peer_registry = peer_registry
        # By router, the oldest first: called with the router's answer; None: the router is gone.
        self._asked: dict[str, deque[Callable[[Sequence[Decision] | None], None]]] = {}

    def ask(self, request_id: str, explained: Explained) -> None:
        """Ask every router. Too many questions at once are answered with None."""
        routers = self._peer_registry.routers
        if not routers or any(len(waiting) >= MAX_ASKED for waiting in self._asked.values()):
            explained(None)
            return
        num_asked, answers = len(routers), list[Sequence[Decision] | None]()

        def answered(decisions: Sequence[Decision] | None) -> None:
            answers.append(decisions)
            if len(answers) == num_asked:
                found = [decision for answer in answers for decision in answer or ()]
                is_known = any(answer is not None for answer in answers)
                explained(tuple(sorted(found, key=lambda each: each.attempt)) if is_known else None)

        for router in routers:
            self._asked.setdefault(router.hello.id, deque()).append(answered)
        for router in routers:
            router.send(Explain(request_id=request_id))

    def answer(self, router: Peer, decisions: tuple[Decision, ...]) -> None:
        """Take a router's answer to its oldest question."""
        waiting = self._asked.get(router.hello.id)
        if waiting:
            waiting.popleft()(decisions)

    def lose(self, router: Peer) -> None:
        """Expect no more answers of a router."""
        for answered in self._asked.pop(router.hello.id, ()):
            answered(None)


class RequestSearches:
    """Asks all gateways about ended requests, through a router, which passes the answers back."""

    def __init__(self, peer_registry: PeerRegistry) -> None:
        self._peer_registry = peer_registry
        self._num_asked = 0
        self._open: dict[int, tuple[int, FoundTimelines]] = {}  # number -> answers so far, oldest first

    def ask(self, query: FindRequests, found: FoundTimelines) -> None:
        """Send a query. found: gets an empty answer without a router, or when too many queries are open."""
        router = self._peer_registry.router
        if router is None:
            found((), True)
            return
        self._num_asked += 1
        self._open[self._num_asked] = 0, found
        while len(self._open) > MAX_ASKED:  # a gateway that left has not answered
            self._open.pop(next(iter(self._open)))[1]((), True)
        router.send(msgspec.structs.replace(query, question=self._num_asked))

    def answer(self, answer: FoundRequests) -> None:
        """Take one gateway's answer."""
        asked = self._open.pop(answer.question, None)
        if asked is None:
            return
        num_answers, found = asked[0] + 1, asked[1]
        is_last = num_answers >= answer.num_asked
        if not is_last:
            self._open[answer.question] = num_answers, found
        found(answer.timelines, is_last)


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
        if not request.is_probe:
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
        """The first token of an attempt has come. router: that was asked for it."""
        self._started.setdefault(router, []).append(key)

    def ended(self, router: str, key: AttemptKey, num_answered: int) -> None:
        """An attempt has ended, with so many tokens of its own."""
        self._ended.setdefault(router, []).append((key, num_answered))

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
