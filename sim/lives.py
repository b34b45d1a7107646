"""One life of each kind of process, from its start to its death: production nodes on simulated parts."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, NamedTuple, TypeAlias

from baton.config.cluster import DRAIN_NOTICE_S
from baton.config.router import RouterSettings
from baton.decode_worker.worker import DecodeWorker
from baton.gateway.streams.frontend import Frontend
from baton.gateway.streams.request_stream import ReplayLimits
from baton.kvtransfer.links import KvLinks, Link
from baton.kvtransfer.protocol.messages import Reserve
from baton.messages.bounds import Kind
from baton.messages.control import Alive, Hello, KvEventBatch
from baton.messages.workers import Address, Worker, WorkerRole
from baton.prefill_worker.worker import PrefillWorker
from baton.router.decisions import DecisionLog
from baton.router.redis.messages import AnyShared, Codec
from baton.router.router import Router
from baton.rpc.connection import HANDSHAKE_TIMEOUT_S
from baton.rpc.liveness import StepWatchdog
from baton.rpc.peers import PeerRegistry, new_router_id
from baton.rpc.reports import BEAT_S
from baton.sim.endpoint import SimEndpoint
from baton.sim.engine import FINGERPRINT, SimEngine, TokenMachine
from baton.sim.host import Directory, Host, Trace
from baton.sim.network import End, Network
from baton.sim.process import Calendar, Events, SimProcess

# What Redis is to several routers, in the simulation: it carries what they tell each other, or not all.
#
# What it carries comes in order, as a stream's entries do.

CODEC: Final = Codec(bytes(32))
LOSS_CHANCES: Final = (0.0, 0.05, 1.0)  # in one simulation it is one of these
Hear: TypeAlias = Callable[[AnyShared], None]


class SharedStream:
    def __init__(self, network: Network, random: Random) -> None:
        self._network = network
        self._random = random
        self._loss_chance = random.choice(LOSS_CHANCES)
        self._readers: dict[SimProcess, tuple[End, Hear]] = {}

    @property
    def may_lose(self) -> bool:
        return self._loss_chance > 0

    def join(self, process: SimProcess, hear: Hear) -> "SharedLink":
        self._readers[process] = End(process, self._network), hear

        def leave() -> None:
            del self._readers[process]

        process.on_death.append(leave)
        return SharedLink(self, process)

    def carry(self, sender: SimProcess, body: bytes) -> None:
        for reader, (end, hear) in list(self._readers.items()):
            if reader is not sender and self._random.random() >= self._loss_chance:
                self._network.deliver(end, partial(_say, hear, body), 0.0)


class SharedLink:
    """See router/sharing.py. Each router is told of pages by the workers themselves."""

    def __init__(self, stream: SharedStream, process: SimProcess) -> None:
        self._stream = stream
        self._process = process

    def joined(self, worker: Worker) -> None: ...

    def left(self, worker_id: str) -> None: ...

    def pages(self, worker_id: str, events: KvEventBatch) -> None: ...

    def share(self, message: AnyShared) -> None:
        body = CODEC.encode_shared(message)
        self._process.send(lambda: self._stream.carry(self._process, body))


def _say(hear: Hear, body: bytes) -> None:
    hear(CODEC.decode_shared(body))


FIRST_PORT: Final = 1  # of a router; the others' follow
SLOW_DIAL_S: Final = 0.5  # until a link to a process that does not answer is given up
MAX_CLOCK_OFFSET_S: Final = 1e6
MAX_INDEX_PAGES: Final = 4096  # more than all workers of a simulation have
FIRST_DATE_S: Final = 1.8e9
FULL_DISK: Final = Path("/dev/full")  # every write to it fails for want of room


@dataclass(eq=False)
class SimSite:
    """What all processes of one simulation share."""

    events: Events
    network: Network
    random: Random
    trace: Trace
    limits: ReplayLimits
    num_routers: int = 1

    def __post_init__(self) -> None:
        self.files = ExitStack()  # that its processes have open
        self.calendar = Calendar(self.events, FIRST_DATE_S)
        self.starts = itertools.count(1)  # of workers, as their supervisor counts them
        self.directory = Directory()
        self.endpoints: dict[Address, SimEndpoint] = {}
        self.names: dict[str, str] = {}  # id of a process -> its name
        self.killers: Counter[str] = Counter()  # request -> workers that died of it
        self.routers = [Address("sim", FIRST_PORT + number) for number in range(self.num_routers)]
        self._last_port = FIRST_PORT + self.num_routers
        self.stream = SharedStream(self.network, self.random)

    def new_process(self, name: str) -> SimProcess:
        return SimProcess(name, self.events, self.random.uniform(0, MAX_CLOCK_OFFSET_S))

    def new_id(self, name: str) -> str:
        minted = self.random.randbytes(16).hex()
        self.names[minted] = name
        return minted

    def new_router_id(self, name: str) -> str:
        """The id of a router started by hand: the calendar orders such routers."""
        minted = new_router_id(0, self.calendar.now_s(), self.random.randbytes(16))
        self.names[minted] = name
        return minted

    def new_address(self) -> Address:
        self._last_port += 1
        return Address("sim", self._last_port)


class RouterLife:
    def __init__(self, site: SimSite, name: str, settings: RouterSettings, address: Address) -> None:
        self.process = site.new_process(name)
        self._files = site.files
        id_, clock = site.new_router_id(name), self.process.clock
        self.router = Router(settings, clock, id_, max_index_pages=MAX_INDEX_PAGES)
        if site.num_routers > 1:
            self.router.cluster_state.link(site.stream.join(self.process, self.router.heard))
        Host(self.process, site.network, site.directory, site.trace).serve(self.router, address)

    def fill_disk(self) -> None:
        """Its decision log cannot be written any more; the log is the only file of a router."""
        log = self._files.enter_context(closing(DecisionLog(FULL_DISK)))
        self.router.cluster_state.log_to(log.write)


class GatewayLife:
    def __init__(self, site: SimSite, name: str) -> None:
        self.process = site.new_process(name)
        host = Host(self.process, site.network, site.directory, site.trace)
        self.frontend = Frontend(site.new_id(name), site.routers, host.dial, self.process.clock, site.limits)
        host.serve(self.frontend)


class WorkerPlan(NamedTuple):
    """What a worker is in every life."""

    name: str
    role: WorkerRole
    machine: TokenMachine
    local_prefill_tokens: int


class WorkerLife:
    def __init__(self, site: SimSite, plan: WorkerPlan) -> None:
        self.plan = plan
        self.process = process = site.new_process(plan.name)
        self.engine = SimEngine(plan.machine, process.clock, process.spend)
        self.endpoint = SimEndpoint(process, self.engine, site.network, site.random, site.trace, self._admit)
        self._notice_s = math.inf  # it may end from then on
        self._site = site
        self._host = Host(process, site.network, site.directory, site.trace)
        address, kv_address = site.new_address(), site.new_address()
        site.endpoints[kv_address] = self.endpoint
        self.worker = self._make_worker(self._hello(address, kv_address))
        self._steps = StepWatchdog(process.clock)
        process.turn = self._turn
        self._host.serve(self.worker, address)
        self._live()

    @property
    def is_draining(self) -> bool:
        return self.worker.is_draining

    def drain(self) -> None:
        """As SIGTERM does; see HostedWorker.serve."""
        self.process.post(self._drain)

    def _drain(self) -> None:
        self._notice_s = self._site.events.now_s + DRAIN_NOTICE_S
        self.worker.drain()

    def _live(self) -> None:
        """As the thread of its hub does, whatever the engine does: see beats.SignsOfLife."""
        self._host.tell_routers(Alive(step=self._steps.present))
        self.process.later(BEAT_S, self._live)

    def _turn(self) -> None:
        self._steps.begin()
        self.worker.step()
        if self.engine.has_work():
            self.process.wake()
        elif self.worker.is_idle and self._site.events.now_s >= self._notice_s:
            self._site.network.close_all(self.process)
            self.process.die()

    def _admit(self, reserve: Reserve, num_pages: int) -> str | None:
        worker = self.worker
        return worker.admit(reserve, num_pages) if isinstance(worker, DecodeWorker) else None

    def _hello(self, address: Address, kv_address: Address) -> Hello:
        plan, machine = self.plan, self.plan.machine
        worker = Worker(
            id=self._site.new_id(plan.name),
            name=plan.name,
            incarnation=next(self._site.starts),
            role=plan.role,
            model="numbers",
            fingerprint=FINGERPRINT,
            address=address,
            kv_address=kv_address,
            page_size=machine.page_size,
            num_pages=machine.num_pages,
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=machine.max_num_batched_tokens,
            max_model_len=machine.max_model_len,
        )
        return Hello(process=Kind.WORKER, id=worker.id, worker=worker)

    def _make_worker(self, hello: Hello) -> PrefillWorker | DecodeWorker:
        is_prefill = self.plan.role is WorkerRole.PREFILL
        wanted = () if is_prefill else (WorkerRole.PREFILL,)
        peer_registry = PeerRegistry(hello, self._site.routers, self._host.dial, wanted)
        clock = self.process.clock
        links = KvLinks(self._connect)
        if is_prefill:
            return PrefillWorker(self.engine, self.endpoint, peer_registry, clock, links)
        num_local = self.plan.local_prefill_tokens
        return DecodeWorker(
            self.engine, self.endpoint, peer_registry, clock, links, local_prefill_tokens=num_local
        )

    def _connect(self, address: Address, answer: Callable[[Link | None], None]) -> None:
        """See kv_links.Connect."""
        process, other = self.process, self._site.endpoints[address]
        network, is_direct = self._site.network, self._site.random.random() < 0.5

        def dial() -> None:
            link = None
            is_there = not other.process.is_dead and not other.process.is_paused
            is_open = not network.connects_in_s(process, other.process)
            if is_there and is_open and not network.is_parted(process, other.process):
                link = self.endpoint.connect(other, is_direct=is_direct)
            process.post(lambda: answer(link))

        wait_s = SLOW_DIAL_S if other.process.is_paused else network.connects_in_s(process, other.process)
        process.later(min(HANDSHAKE_TIMEOUT_S, wait_s + network.delay_s()), dial)


Life: TypeAlias = RouterLife | GatewayLife | WorkerLife
