"""What the command line is to the cluster: it asks the router, and serves nothing.

`async with connected(...) as operator:` keeps a connection to the router, dialled again when it is lost.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from baton.control import AnyMessage, Decisions, Drain, Explain, Hello, Kind, Status, StatusQuery
from baton.decision import Decision
from baton.errors import ConfigError, PeerGone, WireError
from baton.hub import Hub
from baton.node import Dial, Peer
from baton.worker import Address, WorkerRole, WorkerStatus

ANSWER_TIMEOUT_S: Final = 5.0
# What becomes of a cluster whose workers of a role have gone.
ALONE: Final = {
    WorkerRole.PREFILL: "decode workers compute all prompts",
    WorkerRole.DECODE: "no request is answered",
}


class Operator:
    """A Node; `status`, `explain` and `drain` are for whoever runs on its loop."""

    def __init__(self, router: Address, dial: Dial) -> None:
        self.hello = Hello(process=Kind.OPERATOR, id=secrets.token_hex(16))
        self._address = router
        self._dial = dial
        self._router: Peer | None = None
        self._is_connected = asyncio.Event()
        self._answers: list[asyncio.Future[Status]] = []
        self._explanations: list[asyncio.Future[tuple[Decision, ...]]] = []

    async def explain(self, request_id: str) -> tuple[Decision, ...]:
        """One an attempt. PeerGone or TimeoutError, as below."""
        router = await self._connection()
        answer: asyncio.Future[tuple[Decision, ...]] = asyncio.get_running_loop().create_future()
        self._explanations.append(answer)
        router.send(Explain(request_id=request_id))
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await answer

    async def status(self) -> Status:
        """PeerGone or TimeoutError when the router does not answer."""
        router = await self._connection()
        answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        router.send(StatusQuery())
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await answer

    async def drain(self, worker: str, *, may_be_last: bool = False) -> None:
        """ConfigError when there is no worker of that name or id, or no other of its role would be left."""
        _check_drain(worker, (await self.status()).workers, may_be_last)
        (await self._connection()).send(Drain(worker=worker))
        await self.status()  # answered in order: the router has had the Drain

    async def _connection(self) -> Peer:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await self._is_connected.wait()
        assert self._router is not None
        return self._router

    # What the hub calls.

    def joined(self, peer: Peer) -> None:
        if peer.hello.process is not Kind.ROUTER:
            raise WireError(f"expected a router, got a {peer.hello.process}", reason="protocol")
        self._router = peer
        self._is_connected.set()

    def received(self, peer: Peer, message: AnyMessage) -> None:
        if isinstance(message, Status) and self._answers:
            answer = self._answers.pop(0)
            if not answer.done():
                answer.set_result(message)
        elif isinstance(message, Decisions) and self._explanations:
            explanation = self._explanations.pop(0)
            if not explanation.done():
                explanation.set_result(message.decisions)

    def left(self, peer: Peer) -> None:
        self._router = None
        self._is_connected.clear()
        for answers in (self._answers, self._explanations):
            for answer in answers:
                if not answer.done():
                    answer.set_exception(PeerGone("the router has closed the connection"))
            answers.clear()

    def tick(self) -> None:
        if self._router is None:
            self._dial(self._address)


@asynccontextmanager
async def connected(router: Address, key: bytes) -> AsyncIterator[Operator]:
    hub = Hub(key)
    operator = Operator(router, hub.dial)
    hub.serve(operator)
    operator.tick()
    try:
        yield operator
    finally:
        await hub.close()


def _check_drain(worker: str, entries: Sequence[WorkerStatus], may_be_last: bool) -> None:
    found = [entry for entry in entries if worker in (entry.worker.id, entry.worker.name)]
    if not found:
        names = ", ".join(sorted(entry.worker.name for entry in entries)) or "none"
        raise ConfigError(f"worker: there is no {worker!r}; the cluster's workers are: {names}")
    role = found[0].worker.role
    others = [entry for entry in entries if entry.worker.role is role and entry not in found]
    if not may_be_last and all(entry.is_draining for entry in others):
        raise ConfigError(f"{worker} is the last {role} worker: without it {ALONE[role]}; --force drains it")
