"""A router and its peers; the test sends each message itself."""

import dataclasses
from collections.abc import Callable
from typing import Any

from baton.config.router import RouterConfig
from baton.messages.bounds import SHORT_KEY_BYTES, Kind
from baton.messages.control import Heartbeat, KvEventBatch, Reachable, Rejected, Routed, Submit
from baton.messages.workers import Load, Worker
from baton.request import Request
from baton.router.membership import Member
from baton.router.router import SETTLE_S, Router
from baton.router.sliced_work import PromptKeys, family_of
from baton.rpc.peers import TICK_S
from tests.fakes import JumpingClock
from tests.node_peers import ListeningPeer, TestPeer, a_request, a_worker, hello_of, id_of, name_of


@dataclasses.dataclass
class Cluster:
    """A router and its peers, which all reach each other."""

    clock: JumpingClock
    router: Router
    peers: dict[str, TestPeer]

    def __getitem__(self, name: str) -> TestPeer:
        return self.peers[name]

    def add(self, name: str, **changes: Any) -> TestPeer:
        self.peers[name] = TestPeer.worker(self.router, a_worker(name, **changes))
        self.all_reach_all()
        return self.peers[name]

    def all_reach_all(self) -> None:
        workers = tuple(peer.id for peer in self.peers.values() if peer.hello.process is Kind.WORKER)
        for peer in self.peers.values():
            peer.say(Reachable(workers=workers))

    def tick(self, seconds: float = TICK_S) -> None:
        self.clock.advance(seconds)
        self.router.tick()

    def beat(self, *names: str, **fields: Any) -> None:
        for name in names:
            self[name].say(Heartbeat(load=Load(), **fields))

    def settle(self, *names: str) -> None:
        """Let time pass until the list of members is complete. names: workers that stay alive."""
        until_s = self.clock.now_s() + 2 * SETTLE_S
        while self.clock.now_s() < until_s:
            self.beat(*names)
            self.tick()

    def hold(self, name: str, request: Request, num_pages: int) -> None:
        """Report that a worker holds the first pages of a prompt, and nothing else."""
        keys = PromptKeys().keys(family_of(a_worker(name)), request)[: SHORT_KEY_BYTES * num_pages]
        self[name].say(stored(keys, is_snapshot=True))

    def decode_others(self, name: str, num_attempts: int) -> None:
        """Report running decodes of an earlier router."""
        attempts = tuple((id_of(f"{name} {number}"), 0) for number in range(num_attempts))
        self[name].say(Heartbeat(load=Load(pages={"active": 64}), attempts=attempts))

    def submit(self, request: Request | None = None, gateway: str = "g", **fields: Any) -> Routed | Rejected:
        self[gateway].say(Submit(request=request or a_request(), **fields))
        answer = self[gateway].received.pop()
        assert isinstance(answer, Routed | Rejected)
        return answer

    def pair(self, request: Request | None = None, **fields: Any) -> tuple[str, str]:
        """Submit; return the names of the decode and the prefill worker, "" for none."""
        routed = self.submit(request, **fields)
        assert isinstance(routed, Routed)
        return name_of(routed.decode), name_of(routed.prefill)


def stored(keys: bytes, first: int = 0, **changes: Any) -> KvEventBatch:
    """A worker's report that it has stored the pages with these keys."""
    return KvEventBatch(first=first, keys=keys, **changes)


def a_member(worker: Worker) -> Member:
    """A member that no router knows."""
    return Member(worker, ListeningPeer(hello_of(worker)), 0.0)


class Turns:
    """The turns of a host's loop, which the test makes."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def next(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()

    def all(self) -> int:
        """Make turns until no call is left; return their number."""
        num_turns = 0
        while self.calls:
            self.next()
            num_turns += 1
        return num_turns


def cluster(*workers: str, turns: Turns | None = None, **settings: Any) -> Cluster:
    """A router with these workers and a gateway "g"; its policy is `least-loaded` by default.

    turns: with them the router does long work in slices of 4 pages.
    """
    clock = JumpingClock(100.0)
    config = RouterConfig(**{"policy": "least-loaded", **settings})
    call_soon = None if turns is None else turns.call_soon
    router = Router(config, clock, id_of("router"), call_soon=call_soon, pages_per_slice=4)
    made = Cluster(clock, router, {})
    made.peers["g"] = TestPeer.gateway(router)
    for name in workers:
        made.add(name)
    return made
