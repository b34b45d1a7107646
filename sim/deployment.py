"""The processes of one simulated cluster: production nodes on simulated parts, and a supervisor that restarts
them."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from baton.config.cluster import DRAIN_NOTICE_S
from baton.config.router import RouterConfig
from baton.decode_worker.worker import DecodeWorker
from baton.gateway.streams.frontend import Frontend
from baton.gateway.streams.request_stream import NODE_ENDS_S, ReplayLimits
from baton.kvtransfer.links import KvLinks, Link
from baton.messages.bounds import Kind
from baton.messages.control import Alive, Hello
from baton.messages.operations import Migrate, Migrated
from baton.messages.workers import Address, Worker, WorkerRole
from baton.prefill_worker.worker import PrefillWorker
from baton.router.decisions import DecisionLog
from baton.router.recording import Recording
from baton.router.redis.messages import MESSAGE, AnyShared, Codec
from baton.router.router import Router
from baton.rpc.liveness import BEAT_S, StepWatchdog
from baton.rpc.peers import PeerRegistry, new_router_id
from baton.rpc.session import HANDSHAKE_TIMEOUT_S
from baton.sim.endpoint import SimEndpoint
from baton.sim.engine import KV_DTYPE, MODEL, SimEngine, fingerprint_of
from baton.sim.network import MAX_DEATH_DELAY_S, End, Host, Network, Recorder
from baton.sim.process import Events, OffsetClock, SimProcess
from baton.sim.replay import UnsharedLink

CODEC: Final = Codec(bytes(32))
LOSS_CHANCES: Final = (0.0, 0.05, 1.0)  # of messages through Redis; one of these in each simulation
NOWHERE: Final = Address("sim", 0)
FIRST_PORT: Final = 1  # of a router; the ports of other processes follow
SLOW_DIAL_S: Final = 0.5  # until a link to a paused process is given up
MAX_CLOCK_OFFSET_S: Final = 1e6
MAX_INDEX_PAGES: Final = 4096  # more than all workers of a simulation have
PAGES_PER_SLICE: Final = 2  # prompts are short here, and most of them take several slices
FIRST_DATE_S: Final = 1.8e9
FULL_DISK: Final = Path("/dev/full")  # every write fails for lack of room
MAX_MODEL_LEN: Final = 96
START_S: Final = 0.8  # until a cluster is complete; some requests and no faults come before
SEEMS_DEAD_S: Final = 2.0  # of silence; some of it may have passed before
ZOMBIE_S: Final = 2.0
REQUEST_ID_LENGTH: Final = 32  # the attempt follows in an engine's name of a request
RECORDED_S: Final = 900.0
RECORDED_BYTES: Final = 2**26
RESTART_S: Final = (0.05, 1.5)


class SharedStream:
    """Redis as a simulation has it: carries messages between routers in order, or loses some or all of
    them."""

    def __init__(self, network: Network, random: Random) -> None:
        self._network = network
        self._random = random
        self._loss_chance = random.choice(LOSS_CHANCES)
        self._readers: dict[SimProcess, tuple[End, Callable[[AnyShared], None]]] = {}

    @property
    def may_lose(self) -> bool:
        """Messages may be lost in this simulation."""
        return self._loss_chance > 0

    def join(self, process: SimProcess, hear: Callable[[AnyShared], None]) -> "SharedLink":
        """Return the link of one router. The router gets the messages of the others until it dies."""
        self._readers[process] = End(process, self._network), hear
        process.on_death.append(partial(self._leave, process))
        return SharedLink(self, process)

    def _leave(self, process: SimProcess) -> None:
        del self._readers[process]

    def carry(self, sender: SimProcess, body: bytes) -> None:
        """Deliver a message to the other routers."""
        for reader, (end, hear) in list(self._readers.items()):
            if reader is not sender and self._random.random() >= self._loss_chance:
                self._network.deliver(end, lambda hear=hear: hear(CODEC.decode(MESSAGE, body)), 0.0)  # type: ignore[misc]


class SharedLink(UnsharedLink):
    """One router's link to the stream: see RedisLink. Workers tell each router of their pages themselves."""

    def __init__(self, stream: SharedStream, process: SimProcess) -> None:
        self._stream = stream
        self._process = process

    def share(self, message: AnyShared) -> None:
        body = CODEC.encode(MESSAGE, message)
        self._process.send(lambda: self._stream.carry(self._process, body))


class SimContext:
    """The parts that all processes of one simulation share: time, network, randomness, ids and addresses."""

    def __init__(
        self,
        events: Events,
        network: Network,
        random: Random,
        recorder: Recorder,
        limits: ReplayLimits,
        num_routers: int = 1,
        num_nodes: int = 1,
        recordings: list[Recording] | None = None,
    ) -> None:
        """recordings: each life of a router adds its own; None: nothing is recorded."""
        self.recordings = recordings
        self.events = events
        self.network = network
        self.random = random
        self.recorder = recorder
        self.limits = limits
        self.files = ExitStack()  # that processes have open
        self.calendar = OffsetClock(events, FIRST_DATE_S)  # the date on all hosts
        self.roles: dict[
            str, WorkerRole
        ] = {}  # of workers that were ordered to flip, as their supervisor knows
        self.starts = itertools.count(1)  # of workers, as their supervisor counts them
        self.listeners: dict[Address, Host] = {}
        self.endpoints: dict[Address, SimEndpoint] = {}
        self.num_nodes = num_nodes  # with workers, at most
        self.killers: Counter[str] = Counter()  # request id -> deaths that it has caused, see `count_death`
        self._killed_s: dict[tuple[str, str], float] = {}  # (request id, node) -> when it killed last
        self.routers = [Address("sim", FIRST_PORT + number) for number in range(num_routers)]
        self.stream = SharedStream(network, random)
        self.direct_chance = 0.5  # that an endpoint writes another's pages itself
        self._last_port = FIRST_PORT + num_routers

    def count_death(self, culprit: str, node: str) -> None:
        """Count a death. Deaths by one culprit on one node of several, close together, count once.

        culprit: the request that caused the death; "" for none.
        """
        now_s, key = self.events.now_s, (culprit, node)
        is_close = now_s - self._killed_s.get(key, -math.inf) <= NODE_ENDS_S + MAX_DEATH_DELAY_S
        if self.num_nodes == 1 or not is_close:
            self.killers[culprit] += 1
        self._killed_s[key] = now_s

    def new_process(self, name: str) -> SimProcess:
        """Start a process with a random offset of its clock."""
        return SimProcess(name, self.events, self.random.uniform(0, MAX_CLOCK_OFFSET_S))

    def new_host(self, process: SimProcess) -> Host:
        """Return the host of a process's node."""
        return Host(process, self.network, self.listeners, self.recorder)

    def new_id(self, name: str) -> str:
        """Mint the id of a process."""
        return self._named(self.random.randbytes(16).hex(), name)

    def new_router_id(self, name: str) -> str:
        """Mint the id of a router that was started by hand: the calendar orders such routers."""
        return self._named(new_router_id(0, self.calendar.now_s(), self.random.randbytes(16)), name)

    def new_address(self) -> Address:
        """Return an unused address."""
        self._last_port += 1
        return Address("sim", self._last_port)

    def _named(self, minted: str, name: str) -> str:
        self.recorder.names[minted] = name
        return minted


class SimRouter:
    """One life of a router."""

    def __init__(
        self,
        context: SimContext,
        name: str,
        settings: RouterConfig,
        address: Address,
        max_index_pages: int = MAX_INDEX_PAGES,
        pages_per_slice: int = PAGES_PER_SLICE,
    ) -> None:
        self.process = context.new_process(name)
        self._files = context.files
        id_, clock = context.new_router_id(name), self.process.clock
        self.router = Router(
            settings,
            clock,
            id_,
            max_index_pages=max_index_pages,
            call_soon=partial(self.process.later, 0.0),
            pages_per_slice=pages_per_slice,
        )
        if len(context.routers) > 1:
            self.router.link(context.stream.join(self.process, self.router.heard))
        if context.recordings is not None:
            context.recordings.append(Recording(RECORDED_S, RECORDED_BYTES, context.calendar.now_s))
            self.router.record(context.recordings[-1])
        context.new_host(self.process).serve(self.router, address)

    def fill_disk(self) -> None:
        """Fail all further writes of the decision log, a router's only file."""
        log = self._files.enter_context(closing(DecisionLog(FULL_DISK)))
        self.router.log_to(log.write)


class SimGateway:
    """One life of a gateway."""

    def __init__(self, context: SimContext, name: str) -> None:
        self.process = context.new_process(name)
        host, clock = context.new_host(self.process), self.process.clock
        self.frontend = Frontend(context.new_id(name), context.routers, host.dial, clock, context.limits)
        host.serve(self.frontend)
        self.num_orders = 0  # to migrate, without an answer

    def migrate(self, worker: str, to: str) -> None:
        """Take an operator's order to move the streams of a worker. to: another worker, or "" for any."""
        order = Migrate(worker=worker, to=to)
        self.process.post(lambda: self._migrate(order))

    def _migrate(self, order: Migrate) -> None:
        self.num_orders += 1
        self.frontend.migrations.order(order, self._answered)

    def _answered(self, migrated: Migrated) -> None:
        self.num_orders -= 1


MakeEngine: TypeAlias = Callable[[Worker, SimProcess], SimEngine]


class SimWorker:
    """One life of a worker."""

    def __init__(self, context: SimContext, described: Worker, make_engine: MakeEngine) -> None:
        """described: what stays the same in all its lives; the role, until it flips."""
        role = context.roles.get(described.name, described.role)
        self.described = msgspec.structs.replace(
            described, role=role, kv_dtype=KV_DTYPE, incarnation=next(context.starts)
        )
        self.process = process = context.new_process(described.name)
        self.engine = make_engine(described, process)
        self.endpoint = SimEndpoint(
            process,
            self.engine.pages,
            self.engine.memory,
            context.network,
            context.random,
            context.recorder,
            fingerprint=described.fingerprint,
        )
        self.endpoint.pin, self.endpoint.fetch = self.engine.pin, self.engine.load_pages
        self._context = context
        self._kv_address = context.new_address()
        context.endpoints[self._kv_address] = self.endpoint
        self._steps = StepWatchdog(process.clock)
        self._join()
        process.turn = self._turn
        self._give_sign_of_life()

    def _join(self) -> None:
        """Join the cluster as a new worker: see HostedWorker."""
        self._may_end_s = math.inf
        self._host, address = self._context.new_host(self.process), self._context.new_address()
        self.worker = self._make_worker(self._hello(address, self._kv_address))
        self._host.serve(self.worker, address)

    def flip(self, role: WorkerRole) -> None:
        """Drain and join again in another role, as an operator orders it."""
        self._context.roles[self.described.name] = role
        self.process.post(lambda: self._flip(role))

    def _flip(self, role: WorkerRole) -> None:
        self.worker.next_role = role
        self._drain()

    def drain(self) -> None:
        """Drain and end, as SIGTERM makes a worker process do (cluster/worker_process.py)."""
        self.process.post(self._drain)

    def _drain(self) -> None:
        self._may_end_s = self._context.events.now_s + DRAIN_NOTICE_S
        self.worker.drain()

    def _give_sign_of_life(self) -> None:
        """Do what the RPC thread does beside the engine: see SignsOfLife."""
        self._host.tell_routers(Alive(step=self._steps.present))
        self.process.later(BEAT_S, self._give_sign_of_life)

    def _turn(self) -> None:
        self._steps.begin()
        self.worker.step()
        if self.engine.has_work():
            self.process.wake()
        elif self.worker.is_idle and self._context.events.now_s >= self._may_end_s:
            if self.worker.next_role is None:
                self._context.network.close_all(self.process)
                self.process.die()
            else:
                self._host.close()
                self.described = msgspec.structs.replace(self.described, role=self.worker.next_role)
                self._join()

    def _hello(self, address: Address, kv_address: Address) -> Hello:
        worker = msgspec.structs.replace(
            self.described,
            id=self._context.new_id(self.described.name),
            address=address,
            kv_address=kv_address,
        )
        return Hello(process=Kind.WORKER, id=worker.id, worker=worker)

    def _make_worker(self, hello: Hello) -> PrefillWorker | DecodeWorker:
        is_prefill = self.described.role is WorkerRole.PREFILL
        wanted = () if is_prefill else (WorkerRole.PREFILL,)
        peer_registry = PeerRegistry(hello, self._context.routers, self._host.dial, wanted)
        clock, links = self.process.clock, KvLinks(self._connect)
        if is_prefill:
            return PrefillWorker(self.engine, self.endpoint, peer_registry, clock, links)
        return DecodeWorker(self.engine, self.endpoint, peer_registry, clock, links)

    def _connect(self, address: Address, answer: Callable[[Link | None], None]) -> None:
        """See Connect in kvtransfer/links.py."""
        process, other = self.process, self._context.endpoints[address]
        network, is_direct = (
            self._context.network,
            self._context.random.random() < self._context.direct_chance,
        )

        def dial() -> None:
            link = None
            is_there = not other.process.is_dead and not other.process.is_paused
            is_open = not network.connects_in_s(process, other.process)
            if is_there and is_open and not network.is_parted(process, other.process):
                link = self.endpoint.connect(other, is_direct=is_direct)
            process.post(lambda: answer(link))

        wait_s = SLOW_DIAL_S if other.process.is_paused else network.connects_in_s(process, other.process)
        process.later(min(HANDSHAKE_TIMEOUT_S, wait_s + network.delay_s()), dial)


Life: TypeAlias = SimRouter | SimGateway | SimWorker
LifeT = TypeVar("LifeT", bound=Life)


class Absence(NamedTuple):
    """A time in which a process was dead, or seemed to be."""

    since_s: float
    until_s: float
    cause: str  # absences of one cause, such as the end of a node, count once


class Slot:
    """A name that one process at a time has, and the supervisor of that process."""

    def __init__(self, name: str, start: Callable[[], Life], context: SimContext) -> None:
        self.name = name
        self.life = start()
        self.absences: list[Absence] = []
        self._replaced: list[SimProcess] = []  # processes that may still live
        self._start = start
        self._context = context
        self._restart_s: float | None = None
        self._cause = ""  # of the next death
        self._watch()

    @property
    def is_whole(self) -> bool:
        """One process has the name, and it runs."""
        process = self.life.process
        is_alone = all(replaced.is_dead for replaced in self._replaced)
        return is_alone and not process.is_dead and not process.is_paused

    def kill(self, restart_s: float | None = None, cause: str = "") -> None:
        """restart_s: until the supervisor starts the process again; None: a random time. cause: see Absence;
        "": one of its own.
        """
        self._restart_s, self._cause = restart_s, cause
        self.life.process.die()

    def pause(self, seconds: float, cause: str = "") -> None:
        """Pause the process, unless it is paused already. cause: as for `kill`."""
        process = self.life.process
        if self._stop(process, seconds) and seconds >= SEEMS_DEAD_S:
            self.seems_gone(seconds, cause)

    def replace(self, seconds: float) -> None:
        """Start another process as if this host did not answer; the old process resumes, and dies."""
        process = self.life.process
        if self._stop(process, seconds):
            self.seems_gone(seconds + ZOMBIE_S)
            self._replaced.append(process)
            self._restart()
            self._context.events.after(seconds + ZOMBIE_S, process.die)

    def seems_gone(self, seconds: float, cause: str = "") -> None:
        """Note that peers may take the process for dead, for so long from now on. cause: as for `kill`."""
        now_s = self._context.events.now_s
        cause = cause or f"{self.name} {len(self.absences)}"
        self.absences.append(Absence(now_s, now_s + seconds, cause))

    def _stop(self, process: SimProcess, seconds: float) -> bool:
        """Return whether the process was not paused before."""
        if process.is_paused:
            return False
        process.pause()
        self._context.network.stands_still(process, self._context.events.now_s + seconds)
        self._context.events.after(seconds, process.resume)
        return True

    def _watch(self) -> None:
        self.life.process.on_death.append(partial(self._died, self.life))

    def _died(self, life: Life) -> None:
        self._context.recorder.say(f"{self.name} has died")
        node = life.described.node if isinstance(life, SimWorker) else ""
        self._context.count_death(life.process.killed_by[:REQUEST_ID_LENGTH], node)
        if life is not self.life:
            return
        restart_s, self._restart_s = self._restart_s, None
        if restart_s is None:
            restart_s = self._context.random.uniform(*RESTART_S)
        self.seems_gone(max(restart_s, MAX_DEATH_DELAY_S), self._cause)
        self._cause = ""
        self._context.events.after(restart_s, self._restart)

    def _restart(self) -> None:
        self.life = self._start()
        self._watch()


class Deployment:
    """A cluster of random size and settings."""

    def __init__(
        self, context: SimContext, random: Random, placement: Random, models: Sequence[str] = ("",)
    ) -> None:
        """placement: draws the node of each worker. models: each has workers of its own; see World."""
        self.context = context
        settings = RouterConfig(
            policy=random.choice(("least-loaded", "round-robin", "cost")),
            local_prefill_tokens=random.choice((0, 4, 8, 16)),
            seed=random.getrandbits(32),
        )
        drawn = [
            _draw_worker(model, role, number, random)
            for model in models
            for role in WorkerRole
            for number in range(random.randint(1, 3))
        ]
        nodes = [f"node-{number % context.num_nodes}" for number in range(len(drawn))]
        placement.shuffle(nodes)
        self.routers = [
            Slot(
                f"router-{number}",
                partial(SimRouter, context, f"router-{number}", settings, address),
                context,
            )
            for number, address in enumerate(context.routers)
        ]
        gateways = [f"gateway-{number}" for number in range(random.randint(1, 2))]
        self.gateways = [Slot(name, partial(SimGateway, context, name), context) for name in gateways]
        self.workers = []
        for (worker, make_engine), node in zip(drawn, nodes, strict=True):
            described = msgspec.structs.replace(worker, node=node)
            start = partial(SimWorker, context, described, make_engine)
            self.workers.append(Slot(worker.name, start, context))

    @property
    def slots(self) -> list[Slot]:
        """All processes."""
        return [*self.routers, *self.gateways, *self.workers]

    @property
    def is_whole(self) -> bool:
        """Every process runs."""
        return all(slot.is_whole for slot in self.slots)

    def lives(self, kind: type[LifeT]) -> list[LifeT]:
        """Return the present lives of one kind."""
        return [slot.life for slot in self.slots if isinstance(slot.life, kind)]

    def workers_of(self, node: str) -> list[Slot]:
        """Return the slots of a node's workers."""
        return [slot for slot in self.workers if _node_of(slot) == node]

    @property
    def nodes(self) -> list[str]:
        """Return the nodes with workers."""
        return sorted(set(map(_node_of, self.workers)))


def _node_of(slot: Slot) -> str:
    assert isinstance(slot.life, SimWorker)
    return slot.life.described.node


def _draw_worker(model: str, role: WorkerRole, number: int, random: Random) -> tuple[Worker, MakeEngine]:
    """Draw a worker without ids and addresses, which each of its lives has anew."""
    page_size = random.choice((4, 4, 8, 16))
    worker = Worker(
        id="",
        name=f"{model}-{role.value}-{number}".lstrip("-"),
        role=role,
        model=model or MODEL,
        fingerprint=fingerprint_of(model),
        address=NOWHERE,
        kv_address=NOWHERE,
        page_size=page_size,
        num_pages=random.choice((2, 2, 3, 8)) * MAX_MODEL_LEN // page_size,
        max_num_seqs=random.choice((2, 4, 16)),
        max_num_batched_tokens=random.choice((16, 32, 128)),
        max_model_len=MAX_MODEL_LEN,
    )
    step_s, token_s = random.uniform(0.01, 0.06), random.uniform(0.0001, 0.003)

    def make_engine(worker: Worker, process: SimProcess) -> SimEngine:
        return SimEngine(worker, process.clock, process.spend, step_s=step_s, token_s=token_s)

    return worker, make_engine
