"""What the command line is to the cluster: it asks the routers, and serves nothing.

`async with connected(...) as operator:` keeps a connection to each router, dialled again when it is lost.
"""

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol, TypeAlias

import msgspec

from baton.errors import ConfigError, PeerGone, WireError
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import MAX_AGE_S, Decision, Hello, Members
from baton.messages.operations import (
    Decisions,
    Drain,
    Explain,
    GatewayStatus,
    HeadAway,
    RestartWorker,
    Status,
    StatusQuery,
    Undrain,
    WatchWorkers,
    WorkerRemoved,
)
from baton.messages.workers import Address, WorkerRole, WorkerStatus
from baton.rpc.auth import ClusterKeys
from baton.rpc.peers import Dial, Peer
from baton.rpc.server import RpcServer

ANSWER_TIMEOUT_S: Final = 5.0
MOMENT_S: Final = 0.5  # for a further router to be connected to

Answer: TypeAlias = "asyncio.Future[AnyMessage]"

# What becomes of a cluster whose workers of a role have gone.
ALONE: Final = {
    WorkerRole.PREFILL: "decode workers compute all prompts",
    WorkerRole.DECODE: "no request is answered",
}


class Watcher(Protocol):
    """Hears what routers tell an operator that starts workers; `router`: the id of the one that tells."""

    def joined(self, router: str) -> None:
        """The router is connected."""

    def left(self, router: str) -> None:
        """The router's connection ended."""

    def told(self, router: str, message: Members | WorkerRemoved | Undrain | RestartWorker) -> None:
        """The router has sent this."""

    def tick(self) -> None:
        """Called several times a second."""


class Operator:
    """A Node; `status`, `explain` and `drain` are for whoever runs on its loop.

    They raise PeerGone or TimeoutError when no router answers.
    """

    def __init__(self, routers: Sequence[Address], dial: Dial, watcher: Watcher | None = None) -> None:
        self._watcher = watcher
        self.hello = Hello(process=Kind.OPERATOR, id=secrets.token_hex(16))
        self._addresses = routers
        self._dial = dial
        self._routers: dict[Peer, deque[Answer]] = {}  # what each has been asked, in order
        self._is_connected = asyncio.Event()  # to one at least
        self._has_all = asyncio.Event()

    async def status(self) -> Status:
        """Of all routers that answer."""
        return _joined([each for each in await self._ask(StatusQuery()) if isinstance(each, Status)])

    async def explain(self, request_id: str) -> tuple[Decision, ...]:
        """One an attempt."""
        answers = await self._ask(Explain(request_id=request_id))
        decisions = [found for each in answers if isinstance(each, Decisions) for found in each.decisions]
        return tuple(sorted(decisions, key=lambda decision: decision.attempt))

    async def drain(self, worker: str, *, may_be_last: bool = False) -> None:
        """ConfigError when there is no worker of that name or id, or no other of its role would be left."""
        _check_drain(worker, (await self.status()).workers, may_be_last)
        await self._ask(Drain(worker=worker))

    def tell_head_away(self, seconds: float) -> None:
        """Tell all connected routers since when Ray's head does not answer; 0: it does."""
        for router in self._routers:
            router.send(HeadAway(seconds=min(seconds, MAX_AGE_S)))

    async def undrain(self, worker: str) -> None:
        """Call a drained worker back. ConfigError when no `baton serve` is there to start it."""
        await self._order(Undrain(worker=worker))

    async def restart(self, worker: str) -> None:
        """Drain a worker and start it again. ConfigError when no `baton serve` is there to start it."""
        await self._order(RestartWorker(worker=worker))

    async def _order(self, order: Undrain | RestartWorker) -> None:
        """Give an order through one router: each would pass it on, and a process told twice to stop dies."""
        await self._until_connected()
        for router in list(self._routers):
            answers = await self._ask(order, router)
            if any(isinstance(each, Status) and each.num_watchers for each in answers):
                return
        raise ConfigError("no `baton serve` supervises these workers: whoever started the worker restarts it")

    async def _ask(self, question: AnyMessage, only: Peer | None = None) -> list[AnyMessage]:
        """Return the answers of the routers that answer in time. only: ask this router alone."""
        await self._until_connected()
        asked: list[Answer] = []
        for router, answers in self._routers.items():
            if only not in (None, router):
                continue
            asked.append(asyncio.get_running_loop().create_future())
            answers.append(asked[-1])
            router.send(question)
        if not asked:
            raise PeerGone("the router has closed the connection")
        done, late = await asyncio.wait(asked, timeout=ANSWER_TIMEOUT_S)
        for answer in late:
            answer.cancel()
        heard = [answer.result() for answer in asked if answer in done and answer.exception() is None]
        if not done:
            raise TimeoutError
        if not heard:
            raise PeerGone("the router has closed the connection")
        return heard

    async def _until_connected(self) -> None:
        """To all routers, if those that are missing do not take longer than a moment."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await self._is_connected.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOMENT_S):
                await self._has_all.wait()

    # What the hub calls.

    def joined(self, peer: Peer) -> None:
        if peer.hello.process is not Kind.ROUTER:
            raise WireError(f"expected a router, got a {peer.hello.process}", reason="protocol")
        self._routers[peer] = deque()
        if self._watcher is not None:
            self._watcher.joined(peer.hello.id)
            peer.send(WatchWorkers())
        self._count()

    def received(self, peer: Peer, message: AnyMessage) -> None:
        answers = self._routers.get(peer)
        if answers is None:
            return
        if self._watcher is not None and isinstance(
            message, Members | WorkerRemoved | Undrain | RestartWorker
        ):
            self._watcher.told(peer.hello.id, message)
        if answers and isinstance(message, Status | Decisions):
            answer = answers.popleft()
            if not answer.done():
                answer.set_result(message)

    def left(self, peer: Peer) -> None:
        if peer not in self._routers:
            return
        for answer in self._routers.pop(peer):
            if not answer.done():
                answer.set_exception(PeerGone("the router has closed the connection"))
        if self._watcher is not None and all(each.hello.id != peer.hello.id for each in self._routers):
            self._watcher.left(peer.hello.id)
        self._count()

    def tick(self) -> None:
        if self._watcher is not None:
            self._watcher.tick()
        if not self._has_all.is_set():
            for address in self._addresses:
                self._dial(address)

    def _count(self) -> None:
        for event, is_true in (
            (self._is_connected, bool(self._routers)),
            (self._has_all, len(self._routers) >= len(self._addresses)),
        ):
            if is_true:
                event.set()
            else:
                event.clear()


@asynccontextmanager
async def connected(
    routers: Sequence[Address], keys: ClusterKeys, watcher: Watcher | None = None
) -> AsyncIterator[Operator]:
    """An operator that is connected, or is being connected, to each of these routers.

    watcher: hears of workers that routers remove, and of those that are to be started again.
    """
    rpc_server = RpcServer(keys)
    operator = Operator(routers, rpc_server.dial, watcher)
    rpc_server.serve(operator)
    operator.tick()
    try:
        yield operator
    finally:
        await rpc_server.close()


def _joined(statuses: Sequence[Status]) -> Status:
    """Of several routers: the workers as that one sees them which sees most."""
    most = max(statuses, key=lambda status: len(status.workers))
    return msgspec.structs.replace(
        most,
        head_away_s=max(status.head_away_s for status in statuses),
        num_gateways=min(status.num_gateways for status in statuses),
        gateways=_latest([gateway for status in statuses for gateway in status.gateways]),
        num_met=min(status.num_met for status in statuses),
        num_attempts=sum(status.num_attempts for status in statuses),
        routers=tuple(router for status in statuses for router in status.routers),
    )


def _latest(gateways: Sequence[GatewayStatus]) -> tuple[GatewayStatus, ...]:
    """Return each gateway once, as the router that heard of it last knows it: counts only grow."""
    latest: dict[str, GatewayStatus] = {}
    for gateway in sorted(gateways, key=lambda gateway: gateway.num_refused):
        latest[gateway.id] = gateway
    return tuple(sorted(latest.values(), key=lambda gateway: (gateway.node, gateway.pid)))


def _check_drain(worker: str, entries: Sequence[WorkerStatus], may_be_last: bool) -> None:
    found = [entry for entry in entries if worker in (entry.worker.id, entry.worker.name)]
    if not found:
        names = ", ".join(sorted(entry.worker.name for entry in entries)) or "none"
        raise ConfigError(f"worker: there is no {worker!r}; the cluster's workers are: {names}")
    role = found[0].worker.role
    others = [entry for entry in entries if entry.worker.role is role and entry not in found]
    if not may_be_last and all(entry.is_draining for entry in others):
        raise ConfigError(f"{worker} is the last {role} worker: without it {ALONE[role]}; --force drains it")
