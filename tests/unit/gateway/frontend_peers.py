"""A frontend and its peers, called by hand."""

import dataclasses
from typing import Any

from baton.clock import ManualClock
from baton.gateway.streams.frontend import Frontend
from baton.gateway.streams.request_stream import ReplayLimits
from baton.messages.control import AttemptFailed, Failure, Members, Rejected, Routed, Submit, Tokens
from baton.messages.workers import Address, Worker
from baton.request import FinishReason, Request, TokenEvent
from baton.rpc.peers import TICK_S
from baton.tenants import Refusal
from tests.answer import Answer
from tests.node_peers import TestPeer, a_request, a_worker, id_of

ROUTER = Address("127.0.0.1", 7)
R = id_of("r")


def worker_at(name: str) -> Worker:
    """Return a worker; "d0@a" is on the node "a", and "d0@a+b" has ranks on "b", too."""
    node, *others = name.partition("@")[2].split("+")
    return a_worker(name, node=node, rank_nodes=tuple(others))


@dataclasses.dataclass
class Gateway:
    """`dialled` has every address that was asked for."""

    clock: ManualClock
    frontend: Frontend
    dialled: list[Address]
    peers: dict[str, TestPeer]

    def __getitem__(self, name: str) -> TestPeer:
        return self.peers[name]

    def join_router(self, name: str = "router") -> TestPeer:
        self.peers["router"] = TestPeer.router(self.frontend, name)
        return self.peers["router"]

    def join(self, *names: str) -> None:
        for name in names:
            self.peers[name] = TestPeer.worker(self.frontend, worker_at(name))

    def list_members(self, *names: str, is_complete: bool = True) -> None:
        self["router"].say(Members(workers=tuple(map(worker_at, names)), is_complete=is_complete))

    def tick(self, seconds: float = TICK_S) -> None:
        self.clock.advance(seconds)
        self.frontend.tick()

    def open(self, request: Request | None = None, sink: Answer | None = None, **fields: Any) -> Answer:
        sink = sink or Answer()
        self.frontend.open(request or a_request(), sink, **fields)
        return sink

    def submitted(self) -> Submit:
        """The one attempt that was submitted since this was asked last."""
        return self["router"].only(Submit)

    def route(
        self,
        decode: str,
        prefill: str = "",
        request: Request | None = None,
        *,
        router: str = "router",
        **times: Any,
    ) -> None:
        """As a router answers an attempt, the submitted one if none is given. times: of Routed."""
        request = request or self[router].only(Submit).request
        self[router].say(
            Routed(
                request_id=request.request_id,
                attempt=request.attempt,
                decode=id_of(decode),
                prefill=id_of(prefill) if prefill else "",
                **times,
            )
        )

    def refuse(
        self, attempt: int = 0, refusal: Refusal = Refusal.NO_ROOM, *, name: str = "r", reason: str = "full"
    ) -> None:
        """As the router refuses an attempt of the request of this name."""
        rejected = Rejected(
            request_id=id_of(name), attempt=attempt, reason=reason, retry_after_s=2.5, refusal=refusal
        )
        self["router"].say(rejected)

    def say(self, worker: str, *events: TokenEvent) -> None:
        self[worker].say(Tokens(events=events))


def gateway(*workers: str, wakes_models: bool = False, **limits: Any) -> Gateway:
    """With a router and these workers."""
    clock, dialled = ManualClock(50.0), list[Address]()
    of_gateway = ReplayLimits(**limits)
    dial = dialled.append
    frontend = Frontend(id_of("g"), [ROUTER], dial, clock, of_gateway, wakes_models=wakes_models)
    made = Gateway(clock, frontend, dialled, {})
    made.join_router()
    made.list_members(*workers)
    made.join(*workers)
    return made


def event(
    index: int,
    finish: FinishReason | None = None,
    *,
    name: str = "r",
    attempt: int = 0,
    token_id: int | None = -1,
) -> TokenEvent:
    """Its token is 100 + index if none is given."""
    return TokenEvent(id_of(name), attempt, index, 100 + index if token_id == -1 else token_id, finish)


def running(*workers: str, num_tokens: int = 3) -> tuple[Gateway, Answer]:
    """Request r runs at d0, its first token came from p0 if that is there."""
    g = gateway(*workers)
    sink = g.open()
    g.route("d0", "p0" if "p0" in workers else "")
    for index in range(num_tokens):
        g.say("p0" if index == 0 and "p0" in workers else "d0", event(index))
    return g, sink


def failed(failure: Failure, attempt: int = 0, worker: str = "") -> AttemptFailed:
    worker = id_of(worker) if worker else ""
    return AttemptFailed(request_id=R, attempt=attempt, failure=failure, reason="no reason", worker=worker)
