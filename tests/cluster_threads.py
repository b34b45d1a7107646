"""A whole cluster in the test's process: router, workers and a gateway's Frontend, each on its own thread.

Sockets, handshakes and transfers are real. Tests can compare the pages in the workers' engines.
"""

import contextlib
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Self

from baton.clock import SystemClock
from baton.cluster.worker_process import HostedWorker
from baton.config.cluster import WorkerConfig
from baton.config.engine import EngineConfig
from baton.config.router import RouterConfig
from baton.gateway.streams.frontend import Frontend
from baton.gateway.streams.request_stream import ReplayLimits
from baton.messages.bounds import STEP_TIMEOUT_S
from baton.messages.workers import Address, WorkerRole
from baton.request import Request
from baton.router.router import Router
from baton.rpc.server import RpcThread
from tests import waiting
from tests.answer import Answer

KEY: Final = b"the key of a cluster for tests"
TIMEOUT_S: Final = 60.0


def wait_for(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> float:
    """Wait as `waiting.wait_for` does, for as long as a cluster may take."""
    return waiting.wait_for(condition, timeout_s)


class Threads:
    """A thread that makes the calls of one node, and the node's RPC thread."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.net = RpcThread(KEY, self._calls.put)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, call: Callable[[], object]) -> None:
        """Make a call on the node's thread; its error is raised here."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def make() -> None:
            try:
                call()
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)

        self._calls.put(make)
        error = done.get(timeout=TIMEOUT_S)
        if error is not None:
            raise error

    def close(self) -> None:
        self.call(self.net.close)  # on the node's thread, before calls that are posted meanwhile
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class GatewayThread(Threads):
    """A gateway's frontend, and the threads of it."""

    def __init__(
        self,
        routers: Sequence[Address],
        limits: ReplayLimits | None = None,
        through: Callable[[Address], Address] = lambda address: address,
    ) -> None:
        """through: returns where to dial an address."""
        super().__init__("gateway")
        self.frontend = Frontend(
            secrets.token_hex(16),
            routers,
            lambda address: self.net.dial(through(address)),
            SystemClock(),
            limits,
        )
        self.net.serve(self.frontend)

    def begin(self, request: Request, answer: Answer | None = None) -> Answer:
        answer = answer or Answer()
        self.call(lambda: self.frontend.open(request, answer))
        return answer

    def cancel(self, request_id: str) -> None:
        self.call(lambda: self.frontend.cancel(request_id))


class WorkerThread:
    def __init__(self, config: WorkerConfig, kind: type[HostedWorker] = HostedWorker) -> None:
        self.config = config
        self._kind = kind
        self.hosted: HostedWorker
        self._stop = threading.Event()
        self._ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=config.name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        error = self._ready.get(timeout=TIMEOUT_S)
        if error is not None:
            raise error

    def close(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), f"{self.config.name} does not end"

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.hosted = self._kind(self.config, KEY)
        except BaseException as error:
            self._ready.put(error)
            return
        self._ready.put(None)
        with contextlib.closing(self.hosted):
            self.hosted.serve(self._stop)


class Cluster:
    """`engines`: of the prefill workers, then of the decode workers."""

    def __init__(
        self,
        prefill: Sequence[EngineConfig],
        decode: Sequence[EngineConfig],
        *,
        transport: str = "auto",
        local_prefill_tokens: int = 0,
        policy: str = "round-robin",
        step_timeout_s: float = STEP_TIMEOUT_S,
        kind: type[HostedWorker] = HostedWorker,
    ) -> None:
        """kind: the class of the workers."""
        self._ends = contextlib.ExitStack()
        with contextlib.ExitStack() as ends:
            router = Threads("router")
            ends.callback(router.close)
            address = router.net.listen("127.0.0.1")
            self.router = Router(
                RouterConfig(policy=policy, local_prefill_tokens=local_prefill_tokens),
                SystemClock(),
                secrets.token_hex(16),
            )
            router.net.serve(self.router)
            self.workers = [
                WorkerThread(
                    WorkerConfig(
                        role=role,
                        name=f"{role}-{index}",
                        model_name="model",
                        engine=engine,
                        routers=(address,),
                        transport=transport,
                        drain_timeout_s=10.0,
                        step_timeout_s=step_timeout_s,
                    ),
                    kind,
                )
                for role, engines in ((WorkerRole.PREFILL, prefill), (WorkerRole.DECODE, decode))
                for index, engine in enumerate(engines)
            ]
            for worker in self.workers:
                ends.callback(worker.close)
            for worker in self.workers:
                worker.wait()
            gateway = GatewayThread([address])
            ends.callback(gateway.close)
            self.gateway, self.frontend = gateway, gateway.frontend
            self.begin, self.cancel = gateway.begin, gateway.cancel
            self._wait_until_routable()
            self._ends = ends.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def ask(self, requests: Sequence[Request], timeout_s: float = TIMEOUT_S) -> list[Answer]:
        """Send all requests at once; return the answers when all have ended."""
        answers = [self.begin(request) for request in requests]
        wait_for(lambda: all(answer.has_ended for answer in answers), timeout_s)
        return answers

    def workers_of(self, role: WorkerRole) -> Iterator[WorkerThread]:
        return (worker for worker in self.workers if worker.config.role is role)

    def check_nothing_is_held(self) -> None:
        """Every page becomes free or cached, and the ledgers agree."""
        for worker in self.workers:
            pages = worker.hosted.engine.pages
            wait_for(lambda pages=pages: bool(pages.num_available == pages.num_pages), 5.0)  # type: ignore[misc]
            worker.hosted.engine.scheduler.check_integrity()

    def _wait_until_routable(self) -> None:
        """Wait until the router can pair every prefill worker with every decode worker for this gateway."""
        wait_for(lambda: len(self.router.members) == len(self.workers))
        members = list(self.router.members.all())
        ids = {role: {m.id for m in members if m.worker.role is role} for role in WorkerRole}

        other = {WorkerRole.PREFILL: WorkerRole.DECODE, WorkerRole.DECODE: WorkerRole.PREFILL}

        def is_routable() -> bool:
            reached = [gateway.reached for gateway in self.router._gateways.values()]
            if len(reached) != 1 or not reached[0] >= ids[WorkerRole.PREFILL] | ids[WorkerRole.DECODE]:
                return False
            return all(member.reached >= ids[other[member.worker.role]] for member in members)

        wait_for(is_routable)
