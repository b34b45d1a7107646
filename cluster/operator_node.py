"""The node of the command line and of `baton serve`, which asks routers and serves nothing.

`async with connected(...) as operator:` keeps a connection to each router, and dials a lost router again.
In `baton serve`, `Verdicts` decides which workers to replace.
"""

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from baton.errors import ConfigError, PeerGone, WireError, WorkerLost
from baton.messages.bounds import MAX_SECONDS, Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import Decision, Hello, Members
from baton.messages.operations import (
    Decisions,
    Drain,
    Explain,
    FindRequests,
    Flip,
    FoundRequests,
    Migrate,
    Migrated,
    Ordered,
    PlanSummary,
    RecordingPart,
    RecordingQuery,
    RestartWorker,
    Scale,
    Status,
    StatusQuery,
    SupervisorReport,
    Undrain,
    WatchWorkers,
    WorkerRemoved,
)
from baton.messages.orders import OrderT, Sleep, Wake, numbered
from baton.messages.timeline import RequestTimeline
from baton.messages.workers import Address, WorkerRole, WorkerStatus
from baton.rpc.auth import ClusterKeys
from baton.rpc.peers import EMPTY_LIST, Dial, Peer
from baton.rpc.questions import Questions
from baton.rpc.server import RpcServer

ANSWER_TIMEOUT_S: Final = 5.0
MIGRATE_TIMEOUT_S: Final = 150.0  # longer than a gateway tries
MOMENT_S: Final = 0.5  # for connections to further routers, and for gateways behind them

Answer: TypeAlias = "asyncio.Future[AnyMessage]"
AnswerT = TypeVar("AnswerT", Status, RecordingPart)
# Messages that a router sends to operators that start workers.
WatcherMessage: TypeAlias = Members | WorkerRemoved | Drain | Undrain | RestartWorker | Flip | Scale

# Worker's name, the reason, seconds since its first router removed it.
Replace: TypeAlias = Callable[[str, str, float], None]
Order: TypeAlias = Callable[[Drain | Undrain | RestartWorker | Flip | Scale], None]

SILENCE_GRACE_S: Final = 3.0  # for a silent worker to answer again: a successor would have to load the model
# The effect when the last worker of a role has gone.
ALONE: Final = {
    WorkerRole.PREFILL: "decode workers compute all prompts",
    WorkerRole.DECODE: "no request is answered",
}


class _Removal(NamedTuple):
    """A worker that some router has removed, until it is replaced or kept."""

    message: WorkerRemoved
    router: str  # the last router that removed it
    since_s: float  # when the first router removed it


class Verdicts:
    """Decides which workers to replace, from the messages of all routers; passes on operators' orders.

    1. A router removes a worker that is silent or hangs in a step, and moves its requests to other workers.
    2. The worker is replaced when no connected router lists it. A router that a partition separates from the
       workers removes all of them while the other routers keep them. Replacement waits until every connected
       router has had a complete list.
    3. A silent worker has SILENCE_GRACE_S more. If a router lists it again meanwhile, it is kept.
    4. A worker that was listed once is replaced when no connected router has listed it for `unlisted_s`: a
       router may have died before it removed the worker.
    """

    def __init__(self, now_s: Callable[[], float], replace: Replace, order: Order, unlisted_s: float) -> None:
        """replace: called once for each worker that all connected routers have lost.

        unlisted_s: longer than a worker takes to load its model.
        """
        self._now_s = now_s
        self._replace = replace
        self._order = order
        self._unlisted_s = unlisted_s
        self._listed_s: dict[str, float] = {}  # name of a worker -> when a router listed it last
        self._lists: dict[str, Members] = {}  # id of a connected router -> the workers that it lists
        self._pending: dict[str, _Removal] = {}  # by the id of a worker

    def joined(self, router: str) -> None:
        """Expect a list of the router with this id."""
        self._lists[router] = EMPTY_LIST

    def left(self, router: str) -> None:
        """Drop the router's list. Workers that the router has removed may still be replaced."""
        self._lists.pop(router, None)
        self._judge()

    def told(self, router: str, message: WatcherMessage) -> None:
        """Take a message of the router with this id."""
        match message:
            case Members():
                self._listed(router, message)
            case WorkerRemoved():
                self._removed(router, message)
            case _:
                self._order(message)

    def _listed(self, router: str, members: Members) -> None:
        was_complete = self._lists.get(router, EMPTY_LIST).is_complete
        self._lists[router] = msgspec.structs.replace(
            members, is_complete=members.is_complete or was_complete
        )
        for worker in members.workers:
            removal = self._pending.get(worker.id)
            if removal is not None and removal.router == router:
                del self._pending[worker.id]
        self._judge()

    def _removed(self, router: str, removed: WorkerRemoved) -> None:
        members = self._lists.get(router, EMPTY_LIST)
        others = tuple(worker for worker in members.workers if worker.id != removed.worker)
        self._lists[router] = Members(workers=others, is_complete=members.is_complete)
        before = self._pending.get(removed.worker)
        since_s = self._now_s() if before is None else before.since_s
        self._pending[removed.worker] = _Removal(removed, router, since_s)
        self._judge()

    def tick(self) -> None:
        """Replace workers after their time. Call several times a second."""
        if self._pending:
            self._judge()
        now_s = self._now_s()
        names = (worker.name for members in self._lists.values() for worker in members.workers)
        self._listed_s |= dict.fromkeys(names if self._lists else tuple(self._listed_s), now_s)
        for name, since_s in list(self._listed_s.items()):
            if now_s - since_s > self._unlisted_s:
                del self._listed_s[name]
                self._replace(name, f"no router has listed it for {self._unlisted_s:.0f} s", now_s - since_s)

    def _judge(self) -> None:
        if not all(members.is_complete for members in self._lists.values()):
            return
        listed = [worker for members in self._lists.values() for worker in members.workers]
        ids, names = {worker.id for worker in listed}, {worker.name for worker in listed}
        for worker, (removed, _, since_s) in list(self._pending.items()):
            age_s = self._now_s() - since_s
            if worker in ids or not (removed.is_hung or age_s >= SILENCE_GRACE_S):
                continue
            del self._pending[worker]
            if removed.name not in names:  # else its successor is there already
                self._replace(removed.name, removed.reason, age_s)


class Operator:
    """A Node that asks routers. Its coroutines run on the RPC server's event loop.

    The coroutines raise PeerGone or TimeoutError when no router answers.
    """

    def __init__(self, routers: Sequence[Address], dial: Dial, watcher: Verdicts | None = None) -> None:
        self._watcher = watcher
        self.hello = Hello(process=Kind.OPERATOR, id=secrets.token_hex(16))
        self._addresses = routers
        self._dial = dial
        self._report = SupervisorReport()
        self._routers: dict[Peer, deque[Answer]] = {}  # router -> open questions without a number, in order
        self._is_connected = asyncio.Event()  # to at least one router
        self._has_all = asyncio.Event()
        self._questions = Questions()

    async def status(self) -> Status:
        """Return the joined status of all routers that answer."""
        return _joined(await self._ask(StatusQuery(), Status))

    async def status_or_none(self) -> Status | None:
        """Return the joined status of all routers that answer; None when none does."""
        try:
            return await self.status()
        except (PeerGone, TimeoutError):
            return None

    async def explain(self, request_id: str) -> tuple[Decision, ...]:
        """Return one decision for each attempt of the request."""
        await self._until_connected()
        question = Explain(request_id=request_id)
        answers = await self._questions.ask(question, list(self._routers), Decisions, ANSWER_TIMEOUT_S)
        if not answers:
            raise TimeoutError
        decisions = [found for each in answers for found in each.decisions]
        return tuple(sorted(decisions, key=lambda decision: decision.attempt))

    async def timeline(self, request_id: str) -> RequestTimeline | None:
        """Return the timeline of an ended request; None when no gateway that answers in time has it."""
        await self._until_connected()
        question = FindRequests(request_id=request_id)
        answers = await self._questions.ask(question, list(self._routers)[:1], FoundRequests, MOMENT_S)
        return next((timeline for each in answers for timeline in each.timelines), None)

    async def recording(self, last_s: float) -> list[bytes]:
        """Return the chunks of one router's recording that the last `last_s` seconds need, in order.

        Returns [] when the router records nothing. WorkerLost: the chunks have left its memory meanwhile.
        """
        chunks, body, query = list[bytes](), b"", RecordingQuery(last_s=min(last_s, MAX_SECONDS))
        while True:
            (part,) = await self._ask(query, RecordingPart)
            if not part.number:
                if chunks or body:
                    raise WorkerLost("the recording has moved on meanwhile: run the command again")
                return []
            body += part.body
            if len(body) < part.num_bytes:
                query = RecordingQuery(number=part.number, first=len(body))
                continue
            chunks.append(body)
            body = b""
            if not part.next_number:
                return chunks
            query = RecordingQuery(number=part.next_number)

    async def drain(self, worker: str, *, may_be_last: bool = False) -> None:
        """Drain a worker, by name or id. ConfigError: there is no such worker, or no other of its role."""
        _check_drain(worker, (await self.status()).workers, may_be_last)
        await self._ask(Drain(worker=worker), Status)

    async def flip(self, worker: str, role: WorkerRole, *, may_be_last: bool = False) -> None:
        """Have a worker take another role.

        ConfigError: there is no such worker, no other of its role, or the worker has this role.
        """
        workers = (await self.status()).workers
        _check_drain(worker, workers, may_be_last)
        found = [each.worker for each in workers if worker in (each.worker.id, each.worker.name)]
        if any(each.role is role for each in found):
            raise ConfigError(f"{worker} is a {role} worker")
        if any(each.is_asleep for each in found):
            raise ConfigError(f"{worker} sleeps: wake its model first (baton wake)")
        await self._ask(Flip(worker=worker, role=role), Status)

    def tell(
        self,
        *,
        head_away_s: float | None = None,
        ordered: Ordered | None = None,
        plans: tuple[PlanSummary, ...] | None = None,
    ) -> None:
        """Tell all routers what has changed of a SupervisorReport; routers that connect later hear it too."""
        given = {"head_away_s": head_away_s, "ordered": ordered, "plans": plans}
        changes = {name: value for name, value in given.items() if value is not None}
        self._report = msgspec.structs.replace(self._report, **changes)
        for router in self._routers:
            router.send(self._report)

    async def undrain(self, worker: str) -> None:
        """Call a drained worker back. ConfigError: no `baton serve` supervises the worker."""
        await self._ask_one_router(Undrain(worker=worker))

    async def migrate(self, *, request_id: str = "", worker: str = "", to: str = "") -> Migrated:
        """Move one request, or all requests of a decode worker, and return how many have moved.

        to: the decode worker; "": the router chooses. Requests that have not moved run on where they are.
        WorkerLost: not every gateway has answered.
        """
        await self._until_connected()
        order = Migrate(request_id=request_id, worker=worker, to=to)
        answers = await self._questions.ask(order, list(self._routers)[:1], Migrated, MIGRATE_TIMEOUT_S)
        if not answers:
            raise TimeoutError
        told = [each for each in answers if not each.is_lost]
        num_moved, num_asked = sum(each.num_moved for each in told), answers[0].num_asked
        if len(told) < num_asked:
            raise WorkerLost(
                f"{num_moved} moved, but only {len(told)} of {num_asked} gateways have told about their "
                "requests: run the command again"
            )
        return msgspec.structs.replace(
            told[0],
            num_moved=num_moved,
            num_left=sum(each.num_left for each in told),
            reason=max((each.num_left, each.reason) for each in told)[1],
        )

    async def restart(self, worker: str) -> None:
        """Drain a worker and start it again. ConfigError: no `baton serve` supervises the worker."""
        await self._ask_one_router(RestartWorker(worker=worker))

    async def scale(self, num_prefill: int, num_decode: int, model: str = "") -> None:
        """Have so many workers of each role, of one of several models.

        ConfigError: no `baton serve` supervises the cluster, or the model is not one of several.
        """
        _check_model(model, (await self.status()).workers)
        await self._ask_one_router(Scale(num_prefill=num_prefill, num_decode=num_decode, model=model))

    async def new_order(self, order: OrderT) -> OrderT:
        """Return an order about a model with its number. ConfigError: see `scale`."""
        status = await self.status()
        _check_model(order.model, status.workers)
        return numbered(order, status.orders, time.time())

    async def send_order(self, order: Sleep | Wake) -> Status:
        """Give a numbered order about a model, and return the status; to repeat the order changes nothing."""
        return _joined(await self._ask(order, Status))

    async def _ask_one_router(self, order: Undrain | RestartWorker | Scale) -> None:
        """Send an order to one router: two routers would pass it on twice."""
        await self._until_connected()
        for router in list(self._routers):
            if any(status.num_watchers for status in await self._ask(order, Status, router)):
                return
        raise ConfigError(
            "no `baton serve` supervises these workers: start and end workers where they were started"
        )

    async def _ask(
        self, question: AnyMessage, answer_type: type[AnswerT], only: Peer | None = None
    ) -> list[AnswerT]:
        """Ask all routers, or `only` one. Return the answers that come in time, one or more."""
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
        if not done:
            raise TimeoutError
        heard = [answer.result() for answer in asked if answer in done and answer.exception() is None]
        found = [each for each in heard if isinstance(each, answer_type)]
        if not found:
            raise PeerGone("the router has closed the connection")
        return found

    async def _until_connected(self) -> None:
        """Wait for one router, and at most MOMENT_S longer for all routers."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await self._is_connected.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOMENT_S):
                await self._has_all.wait()

    # The RPC server calls these.

    def joined(self, peer: Peer) -> None:
        """Accept a router. WireError: the peer is no router."""
        if peer.hello.process is not Kind.ROUTER:
            raise WireError(f"expected a router, got a {peer.hello.process}", reason="protocol")
        self._routers[peer] = deque()
        if self._watcher is not None:
            self._watcher.joined(peer.hello.id)
            peer.send(WatchWorkers())
            peer.send(self._report)
        self._count()

    def received(self, peer: Peer, message: AnyMessage) -> None:
        """Take an answer, or a message for the watcher."""
        answers = self._routers.get(peer)
        if answers is None:
            return
        if self._watcher is not None and isinstance(message, WatcherMessage):
            self._watcher.told(peer.hello.id, message)
        if isinstance(message, Decisions | FoundRequests | Migrated):
            self._questions.take(peer, message)
        if answers and isinstance(message, Status | RecordingPart):
            answer = answers.popleft()
            if not answer.done():
                answer.set_result(message)

    def left(self, peer: Peer) -> None:
        """Fail the questions to a router that has left."""
        if peer not in self._routers:
            return
        for answer in self._routers.pop(peer):
            if not answer.done():
                answer.set_exception(PeerGone("the router has closed the connection"))
        self._questions.lose(peer)
        if self._watcher is not None and all(each.hello.id != peer.hello.id for each in self._routers):
            self._watcher.left(peer.hello.id)
        self._count()

    def tick(self) -> None:
        """Dial missing routers again."""
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
    routers: Sequence[Address], keys: ClusterKeys, watcher: Verdicts | None = None
) -> AsyncIterator[Operator]:
    """Connect an operator to each of these routers. The first question waits for a connection.

    watcher: receives removed workers, and orders to start workers again.
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
    """Join the statuses of several routers. The workers come from the router with the most workers."""
    return Status.joined(statuses, max(statuses, key=lambda status: len(status.workers)))


def _check_model(model: str, entries: Sequence[WorkerStatus]) -> None:
    """Raise ConfigError unless `model` is served, or is "" and one model is."""
    models = sorted({entry.worker.model for entry in entries})
    if not model and len(models) > 1:
        raise ConfigError(f"model: the cluster serves several, name one of {', '.join(models)}")
    if model and model not in models:
        raise ConfigError(f"model: there is no {model!r}; the cluster serves {', '.join(models)}")


def _check_drain(worker: str, entries: Sequence[WorkerStatus], may_be_last: bool) -> None:
    found = [entry for entry in entries if worker in (entry.worker.id, entry.worker.name)]
    if not found:
        names = ", ".join(sorted(entry.worker.name for entry in entries)) or "none"
        raise ConfigError(f"worker: there is no {worker!r}; the cluster's workers are: {names}")
    role, model = found[0].worker.role, found[0].worker.model
    alike = [entry for entry in entries if (entry.worker.role, entry.worker.model) == (role, model)]
    others = [entry for entry in alike if entry not in found]
    if not may_be_last and all(entry.is_draining for entry in others):
        raise ConfigError(f"{worker} is the last {role} worker: without it {ALONE[role]}; --force goes ahead")
