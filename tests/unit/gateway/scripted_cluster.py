"""A real router, real frontends and scripted workers on a simulated network, and what must hold of them."""

from collections.abc import Callable, Sequence
from random import Random

from baton.config.router import RouterConfig
from baton.errors import BatonError, InvalidRequest, Overloaded, WorkerLost
from baton.gateway.streams.frontend import Frontend
from baton.gateway.streams.request_stream import ReplayLimits
from baton.messages.workers import Address, WorkerRole
from baton.request import Request, SamplingParams, TokenEvent
from baton.router.router import Router
from baton.sim.host import Host
from baton.sim.network import Network
from baton.sim.process import Events, SimProcess
from baton.sim.trace import Recorder
from tests.node_peers import a_worker, id_of
from tests.unit.gateway.scripted_workers import ScriptedWorker, golden

ROUTER = Address("router", 1)
STEP_S = 0.02
MAX_WAIT_S = 10.0


class Client:
    """The sink of one request; it keeps what it is told and objects to what it may not be told."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.end: str = ""
        self.is_cancelled = False

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            assert not self.end and not self.is_cancelled, f"{event} after the end"
            assert event.index == len(self.token_ids)
            assert event.token_id is not None
            self.token_ids.append(event.token_id)
            self.end = event.finish_reason or ""

    def failed(self, error: BatonError) -> None:
        assert not self.end and not self.is_cancelled, f"{error!r} after the end"
        assert isinstance(error, InvalidRequest | Overloaded | WorkerLost)
        self.end = type(error).__name__

    def check(self, num_dead: int) -> None:
        """After everything has come to rest."""
        tokens = golden(self.request)
        assert self.token_ids == tokens[: len(self.token_ids)]
        if not self.is_cancelled:
            assert self.end, f"request {self.request.request_id} has no end"
            assert self.end != "length" or self.token_ids == tokens
            assert self.end != "WorkerLost" or num_dead >= 2, "too few died for that"


class Running:
    """One life of a process."""

    def __init__(self, cluster: "ScriptedCluster", name: str) -> None:
        self.id = id_of(f"{name}.{next(cluster.serials)}")
        self.process = SimProcess(name, cluster.events, cluster.random.uniform(0, 1000))
        self.host = Host(self.process, cluster.network, cluster.listeners, cluster.recorder)


class ScriptedCluster:
    def __init__(self, seed: int, num_prefill: int = 2, num_decode: int = 2, num_gateways: int = 2) -> None:
        self.random = Random(seed)
        self.events = Events()
        self.network = Network(self.events, self.random)
        self.listeners: dict[Address, Host] = {}
        self.serials = iter(range(1, 1_000_000))
        self.recorder = Recorder(self.events)
        self.num_dead = 0  # worker processes that died, or seemed to
        self.running: dict[str, Running] = {}
        self.frontends: dict[str, Frontend] = {}
        self.workers: dict[str, ScriptedWorker] = {}
        self.clients: list[tuple[str, Client]] = []  # and the gateway that each asked
        self.start_router()
        for index in range(num_gateways):
            self._start_gateway(f"g{index}")
        self.worker_names = [f"p{index}" for index in range(num_prefill)]
        self.worker_names += [f"d{index}" for index in range(num_decode)]
        for name in self.worker_names:
            self.start_worker(name)

    # Processes.

    def start_router(self) -> None:
        running = self.running["router"] = Running(self, "router")
        self.router = Router(RouterConfig(policy="least-loaded"), running.process.clock, running.id)
        running.host.serve(self.router, ROUTER)

    def _start_gateway(self, name: str) -> None:
        running = self.running[name] = Running(self, name)
        limits = ReplayLimits(max_wait_s=MAX_WAIT_S)
        frontend = Frontend(running.id, [ROUTER], running.host.dial, running.process.clock, limits)
        self.frontends[name] = frontend
        running.host.serve(frontend)

    def start_worker(self, name: str) -> None:
        running = self.running[name] = Running(self, name)
        address = Address(name, 1)
        role = WorkerRole.PREFILL if name.startswith("p") else WorkerRole.DECODE
        hello = a_worker(name, role, id=running.id, address=address, kv_address=address)
        clock = running.process.clock
        worker = ScriptedWorker(hello, ROUTER, running.host.dial, clock, self.random)
        self.workers[name] = worker
        running.host.serve(worker, address)

        def step() -> None:
            worker.step()
            running.process.later(STEP_S, lambda: running.process.post(step))

        running.process.later(self.random.uniform(0, STEP_S), lambda: running.process.post(step))

    def is_alive(self, name: str) -> bool:
        return not self.running[name].process.is_dead

    def crash(self, name: str) -> None:
        self.num_dead += name in self.workers and self.is_alive(name)
        self.running[name].process.die()

    def pause(self, name: str) -> None:
        """A worker that stands still for too long is taken for dead."""
        self.num_dead += name in self.workers and self.is_alive(name)
        self.running[name].process.pause()

    def restart(self, name: str) -> None:
        if self.is_alive(name):
            self.crash(name)
        self.start_router() if name == "router" else self.start_worker(name)

    # Clients.

    def open(self, gateway: str, num_tokens: int, max_tokens: int) -> Client:
        number = len(self.clients)
        sampling = SamplingParams(max_tokens=max_tokens, seed=number)
        request = Request(
            request_id=id_of(f"r{number}"),
            token_ids=tuple((number + position) % 100 for position in range(num_tokens)),
            sampling=sampling,
        )
        client = Client(request)
        self.clients.append((gateway, client))
        frontend = self.frontends[gateway]
        self.running[gateway].process.post(lambda: frontend.open(request, client))
        return client

    def cancel(self, number: int) -> None:
        gateway, client = self.clients[number]

        def cancel() -> None:
            client.is_cancelled = client.is_cancelled or not client.end
            self.frontends[gateway].cancel(client.request.request_id)

        self.running[gateway].process.post(cancel)

    def run(self, seconds: float) -> None:
        self.events.run_until(self.events.now_s + seconds)

    def run_until(self, is_so: Callable[[], bool], within_s: float) -> None:
        until_s = self.events.now_s + within_s
        while not is_so():
            assert self.events.now_s < until_s, f"not so within {within_s} s"
            self.run(0.1)

    def wait_until_ready(self) -> None:
        """Every gateway and the router know of every worker that lives."""
        alive = [name for name in self.worker_names if self.is_alive(name)]

        def ready() -> bool:
            num_members = [len(self.router.status().workers)]
            num_members += [len(frontend.workers) for frontend in self.frontends.values()]
            return all(num == len(alive) for num in num_members)

        self.run_until(ready, 20)

    def come_to_rest(self) -> None:
        """Mend everything, then wait for the end of all that was asked for."""
        for name, running in self.running.items():
            if running.process.is_dead:
                self.restart(name)
            elif running.process.is_paused:
                running.process.resume()
        for worker in self.workers.values():
            worker.is_busy = False
        is_over = lambda: not any(frontend.num_open for frontend in self.frontends.values())  # noqa: E731
        self.run_until(is_over, 6 * MAX_WAIT_S)
        self.run(5.0)  # late words arrive

    def check(self) -> None:
        for _, client in self.clients:
            client.check(self.num_dead)
        assert len(self.router.in_flight) == 0, "the router's books are not empty"
        self.router.in_flight.check_integrity()
        left = {name: worker.attempts for name, worker in self.workers.items() if worker.attempts}
        assert not left, f"work is left: {left}"
        drops = [str(error) for _, error in self.recorder.drops]
        assert not [drop for drop in drops if "has been replaced" not in drop], drops
        for frontend in self.frontends.values():
            assert not frontend.counters["contradictions"]
