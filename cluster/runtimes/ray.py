"""The Ray runtime: each process is a Ray actor, on an existing Ray or on one that Baton starts.

1. `open` joins the Ray at an address, or starts a Ray for this machine alone. Ray's own ports answer only
   clients with its token.
2. `place` creates a placement group for each worker, and spreads each role over the nodes. A worker has one
   bundle for each of its nodes (`nnodes`, mostly 1); ranks of a bundle share a node.
3. `spawn` starts a worker in its placement group, with a RankHostActor in each further bundle: when one of
   these actors ends, the others are ended. A router or a gateway runs on the present node, where
   clients connect. Ray restarts nothing: the supervisor starts a process again, in the same placement group.
   A worker that was given up, or whose node does not answer, moves to another node with room, if there is
   one: Ray itself takes a minute to notice that a node hangs. A worker of several nodes may keep some.
4. While Ray's head is away no process can be started, and calls that ask the head hang. Running processes go
   on: `spawn` waits for the head, and no call that asks the head runs on the event loop.
5. `close` ends the actors, removes the placement groups, and leaves Ray, which ends if it was started here.
"""

import asyncio
import logging
import math
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from baton.cluster.cluster_key import Keys
from baton.cluster.runtimes.base import (
    LOOPBACK,
    ActorPlace,
    Loading,
    ProcessSpec,
    Report,
    address_in,
    assignment,
    generations_of,
    kill_tree,
    share_out,
    started_at,
)
from baton.cluster.runtimes.gpus import is_torch_for_cpus
from baton.config.environment import mps_variables, prepare_ray
from baton.errors import ConfigError, WorkerLost, reason_of
from baton.messages.workers import Address
from baton.rpc.auth import ClusterKeys

OBJECT_STORE_BYTES: Final = 80 << 20  # the least that Ray accepts: Baton stores no objects
# For a Ray that is started here. By default its workers have niceness 15: other programs can starve them.
# It would also start an idle worker for each core that it counts.
SYSTEM_CONFIG: Final = {"worker_niceness": 0, "prestart_worker_first_driver": False}
ALONE_ROOM: Final = 4  # times the cores of the first workers, for those of `baton scale`
CONNECT_TIMEOUT_S: Final = 5.0
TRY_S: Final = 1.0  # for Ray to find room on the nodes that are preferred
ACTOR_START_S: Final = 120.0  # for an actor's process to start: Ray never gives up while the node hangs
REPORT_S: Final = 1.0  # for a worker's report to come after the end of a host: it says more
MOVE_S: Final = 5.0  # for Ray to find room on any node that is not suspected
PROBE_TIMEOUT_S: Final = 1.0
GREETING_TIMEOUT_S: Final = 5.0  # of a busy node
HTTP2_SETTINGS: Final = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # an empty frame of type 4, the first of each side
HTTP2_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS
SUSPECT_S: Final = 120.0  # a node where a worker was given up is avoided so long; Ray decides earlier
HEAD_LOOK_S: Final = 1.0
HEAD_AWAY_S: Final = 3.0  # without an answer of the head
CLOSE_TIMEOUT_S: Final = 15.0  # while Ray's head is away it cannot be told anything
NODE_ID_LABEL: Final = "ray.io/node-id"
AUTO: Final = "auto"
MIN_RAY: Final = (2, 54)  # the job API of older versions runs code of strangers

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


class RayNode(NamedTuple):
    """A living machine of the Ray cluster."""

    id: str
    address: str
    port: int  # of the raylet
    resources: Mapping[str, float]  # free and used together


class Placement(NamedTuple):
    """A placement group, and the node of each bundle."""

    group: Any
    node_ids: tuple[str, ...]


class RayRuntime:
    """A Runtime of Ray actors."""

    def __init__(
        self,
        keys: ClusterKeys,
        *,
        address: str | None = None,
        num_cpus: int = 0,
        place_timeout_s: float = 60.0,
    ) -> None:
        """address: of the Ray to join; None: start a Ray that counts at least `num_cpus` cores.

        place_timeout_s: for Ray to have room for all workers; meanwhile an autoscaler may add nodes.
        """
        self._keys = keys
        self._address = address
        self._num_cpus = num_cpus
        self._place_timeout_s = place_timeout_s
        self._ray: Any = None  # the module: its import takes half a second
        self._actor_class: Any = None  # called with a name
        self._host_class: Any = None
        self._placements: dict[str, Placement] = {}  # by the name of a worker
        # Name of a worker -> Ray's resources that each of its bundles needs.
        self._needs: dict[str, list[dict[str, float]]] = {}
        self._roles: dict[str, str] = {}  # by the name of a worker
        self._suspects: dict[str, float] = {}  # id of a node -> when a worker on it was given up
        self._given_up: set[str] = set()  # names of workers that move with their next start
        self._node_id = ""  # of this machine
        self._head_s = 0.0  # when Ray's head last answered
        self._is_closed = False
        self._alive: set[RayProcess] = set()
        self.num_gpus = 0
        self.host = LOOPBACK

    @property
    def worker_host(self) -> str:
        return LOOPBACK if self._is_alone else ""

    @property
    def _is_alone(self) -> bool:
        return self._address is None

    @property
    def head_away_s(self) -> float:
        silent_s = time.monotonic() - self._head_s
        return silent_s if self._head_s and silent_s > HEAD_AWAY_S else 0.0

    async def open(self) -> None:
        await asyncio.to_thread(self._open)  # on a thread that stays: Ray ends with its thread
        _take_signals_back()
        self._head_s = time.monotonic()
        threading.Thread(target=self._watch_head, name="ray-head", daemon=True).start()

    async def place(self, specs: list[ProcessSpec]) -> None:
        everyone = [spec for spec in specs if spec.num_ranks]
        nodes = await _in_thread(self._nodes)
        cores = [int(node.resources.get("CPU", 0)) for node in nodes]
        if self._is_alone:  # a Ray that was started here counts more cores, for later workers
            cores = [len(os.sched_getaffinity(0))]
        num_cores = cores_for(sum(spec.num_ranks for spec in everyone), cores)
        shares = share_out(everyone, num_cores)
        workers = [spec for spec in everyone if spec.name not in self._placements]
        self._needs |= {spec.name: _needs(spec, shares[spec.name]) for spec in workers}
        self._roles = {spec.name: spec.role for spec in everyone}
        self._request_nodes()
        with ExitStack() as releases:
            for spec in workers:
                releases.callback(self.release, spec.name)
            try:
                async with asyncio.timeout(self._place_timeout_s):
                    await self._place_all([spec.name for spec in workers], nodes)
            except TimeoutError:
                bundles = [bundle for spec in workers for bundle in self._needs[spec.name]]
                shortage = await _in_thread(self._shortage, bundles)
                spread = max(spec.num_nodes for spec in workers)
                on_nodes = f", and {spread} nodes for one worker (nnodes)" if spread > 1 else ""
                raise ConfigError(
                    f"Ray has no room for the workers: they need {shortage}{on_nodes}: "
                    "set cores_per_rank of prefill and decode lower, start fewer workers, or add nodes"
                ) from None
            releases.pop_all()

    async def _place_all(self, names: Sequence[str], nodes: Sequence[RayNode]) -> None:
        for name in names:
            await self._place(name, self._preferred(name, nodes), TRY_S)
        # The other groups are requested together, so that an autoscaler sees all of them.
        late = [name for name in names if name not in self._placements]
        await asyncio.gather(*(self._place(name, None, self._place_timeout_s) for name in late))

    def release(self, name: str) -> None:
        self._given_up.discard(name)
        placement = self._placements.pop(name, None)
        if placement is not None:
            _in_background(self._ray.util.remove_placement_group, placement.group)
        if self._needs.pop(name, None) is not None:
            self._request_nodes()

    async def spawn(self, spec: ProcessSpec) -> "RayProcess":
        if self.head_away_s:
            logger.warning("%s is started when Ray's head answers again", spec.name)
        while self.head_away_s:
            await asyncio.sleep(HEAD_LOOK_S)
        if spec.num_ranks:
            await self._move_if_needed(spec.name)
        given = self._keys
        actors = await _in_thread(self._start_actors, spec)
        process = RayProcess(spec, actors, self)
        self._alive.add(process)
        if self._keys is not given:  # they have changed meanwhile
            process.use_keys(self._keys)
        return process

    def use_keys(self, keys: Keys) -> None:
        self._keys = keys
        for process in self._alive:
            process.use_keys(keys)

    @property
    def errors(self) -> Any:
        """The module of Ray's exceptions."""
        return self._ray.exceptions

    async def close(self) -> None:
        """End all actors and leave Ray. While the head is away, parts of Ray may end later."""
        self._is_closed = True
        if self._ray is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await _in_thread(self._close)

    # RayProcesses call these.

    def ended(self, process: "RayProcess") -> None:
        """Forget a process that has ended."""
        self._alive.discard(process)

    def kill(self, actors: Sequence[Any]) -> None:
        """Tell Ray to end actors. Returns at once, also while the head is away."""
        if self._ray.is_initialized():
            for actor in actors:
                _in_background(self._ray.kill, actor)

    def give_up(self, name: str, actors: Sequence[Any], places: Sequence[ActorPlace | None]) -> None:
        """End actors that may not answer: through Ray, and by SIGKILL to their processes and their ranks.

        places: one an actor; None: it has not said its place, so its node is suspected, and no other is.
        """
        self._given_up.add(name)
        self.kill(actors)
        known = [place for place in places if place is not None]
        suspects = {place.node_id for place in known}
        if len(known) < len(places) and name in self._placements:
            suspects = set(self._placements[name].node_ids) - suspects
        self._suspects |= dict.fromkeys(suspects, time.monotonic())
        for place in known:
            # A process of this node may be in another container, where its id means another process.
            if place.node_id == self._node_id and started_at(place.pid) == place.started:
                kill_tree(place.pid, place.started)
            else:
                _in_background(self._kill_there, place)

    # Placement groups of workers.

    async def _move_if_needed(self, name: str) -> None:
        """Place the worker on other nodes if a node does not answer, or if the worker was given up."""
        old = self._placements[name]
        nodes = await _in_thread(self._nodes)
        is_whole = set(old.node_ids) <= {node.id for node in await _answering(nodes, old.node_ids)}
        if name not in self._given_up and is_whole:
            return
        self._given_up.discard(name)
        others = [node for node in self._unsuspected(nodes) if node.id not in old.node_ids]
        if await self._place_on(name, others):
            logger.warning("%s moves to another node of Ray", name)
            _in_background(self._ray.util.remove_placement_group, old.group)
        elif len(old.node_ids) > 1:
            await self._place_again(name)
        # Otherwise Ray starts the worker on its old nodes as soon as possible.

    async def _place_again(self, name: str) -> None:
        """Place a worker on the nodes of it that are left, and others, once there are enough.

        Its placement group goes first: it holds the room on the nodes that are left. WorkerLost: the worker
        is released meanwhile.
        """
        logger.warning("%s is placed again, as soon as enough nodes of Ray have room", name)
        await _in_thread(self._ray.util.remove_placement_group, self._placements[name].group)
        while name in self._needs:
            nodes = await _answering(await _in_thread(self._nodes))
            if await self._place_on(name, self._unsuspected(nodes)) or await self._place_on(name, nodes):
                return
            await asyncio.sleep(HEAD_LOOK_S)
        raise WorkerLost(f"{name} is taken away")

    def _unsuspected(self, nodes: Sequence[RayNode]) -> list[RayNode]:
        """Return the nodes on which no worker was given up lately."""
        since_s = time.monotonic() - SUSPECT_S
        return [node for node in nodes if self._suspects.get(node.id, -math.inf) < since_s]

    async def _place_on(self, name: str, nodes: Sequence[RayNode]) -> bool:
        """Place the worker on some of these nodes, best on those with the fewest of its role."""
        if name not in self._needs:  # it was released meanwhile
            return False
        for node_ids in (self._preferred(name, nodes), [node.id for node in nodes]):
            if await self._place(name, node_ids, MOVE_S):
                return True
        return False

    def _preferred(self, name: str, nodes: Sequence[RayNode]) -> list[str]:
        """Return the ids of the nodes with the fewest workers of the worker's role."""
        role = self._roles[name]
        used = Counter(
            node_id
            for other, placement in self._placements.items()
            if other != name and self._roles[other] == role
            for node_id in placement.node_ids
        )
        return least_used(self._needs[name], nodes, used)

    async def _place(self, name: str, node_ids: Sequence[str] | None, timeout_s: float) -> bool:
        """Place the worker on some of these nodes; None: on any. Return False when no room is found."""
        bundles = self._needs.get(name, [])
        if not bundles or (node_ids is not None and len(node_ids) < len(bundles)):
            return False
        creating = _in_thread(self._create_placement_group, bundles, node_ids, timeout_s)
        try:
            placement = await asyncio.shield(creating)
        except asyncio.CancelledError:
            creating.add_done_callback(self._remove_unwanted)
            raise
        if placement is not None and name not in self._needs:  # it was released meanwhile
            self._remove_unwanted(creating)
            return False
        if placement is not None:
            self._placements[name] = placement
        return placement is not None

    def _remove_unwanted(self, created: asyncio.Future[Placement | None]) -> None:
        if (placement := _result(created)) is not None:
            _in_background(self._ray.util.remove_placement_group, placement.group)

    def _create_placement_group(
        self, bundles: list[dict[str, float]], node_ids: Sequence[str] | None, timeout_s: float
    ) -> Placement | None:
        label = None if node_ids is None else {NODE_ID_LABEL: f"in({','.join(node_ids)})"}
        group = self._ray.util.placement_group(
            bundles,
            strategy="PACK" if len(bundles) == 1 else "STRICT_SPREAD",
            bundle_label_selector=None if label is None else [label] * len(bundles),
        )
        placement = None
        try:
            if group.wait(timeout_s):
                node_ids = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
                placement = Placement(group, tuple(node_ids[index] for index in range(len(bundles))))
        finally:
            if placement is None:
                self._ray.util.remove_placement_group(group)
        return placement

    def _request_nodes(self) -> None:
        """Have an autoscaler bring nodes for all workers together, and take idle ones away."""
        from ray.autoscaler.sdk import request_resources

        every = (bundle for bundles in self._needs.values() for bundle in bundles)
        bundles = [{name: most for name, most in bundle.items() if most} for bundle in every]
        _in_background(lambda: request_resources(bundles=bundles))

    # On threads: Ray's own calls, which may wait for its head.

    def _watch_head(self) -> None:
        """Ask the head for its nodes every HEAD_LOOK_S; the call hangs while the head is away."""
        while not self._is_closed and self._ray.is_initialized():
            with suppress(Exception):  # Ray gives up after a minute, with one of many errors
                self._ray.nodes()
                self._head_s = time.monotonic()
            time.sleep(HEAD_LOOK_S)

    def _nodes(self) -> list[RayNode]:
        return [
            RayNode(node["NodeID"], node["NodeManagerAddress"], node["NodeManagerPort"], node["Resources"])
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def _start_actors(self, spec: ProcessSpec) -> list[Any]:
        """Start the actor of a process, then those that host ranks on its other nodes."""
        given = assignment(spec, self._keys)
        actor = (
            self._actor_class(spec.name)
            .options(name=None, **self._where(spec))
            .remote(
                given,
                is_alone=self._is_alone,
                parent=None if spec.num_ranks else (os.getpid(), started_at(os.getpid())),
            )
        )
        hosts = []
        for node in range(1, spec.num_nodes):
            host = self._host_class(f"{spec.name}-node-{node}")
            hosts.append(host.options(name=None, **self._where(spec, node)).remote(given, node))
        return [actor, *hosts]

    def _kill_there(self, place: ActorPlace) -> None:
        """Run `kill_tree` beside the raylet of a node. The task never ends if that node hangs."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        killer = self._ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(kill_tree)
        killer.remote(place.pid, place.started)

    def _open(self) -> None:
        self._ray = ray = _import_ray()
        logging.getLogger("ray").setLevel(logging.ERROR)  # errors come as exceptions
        try:
            if self._address is None:
                ray.init(
                    num_cpus=ALONE_ROOM * max(self._num_cpus, len(os.sched_getaffinity(0))),
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    configure_logging=False,
                    _node_ip_address=LOOPBACK,
                    _system_config=SYSTEM_CONFIG,
                )
            else:
                _check_reachable(self._address)
                ray.init(address=self._address, configure_logging=False)
                self.host = ray.util.get_node_ip_address()
            self._node_id = ray.get_runtime_context().get_node_id()
        except (OSError, RuntimeError, ValueError) as error:
            where = f"Ray at {self._address} cannot be joined" if self._address else "Ray cannot be started"
            raise ConfigError(f"{where}: {' '.join(reason_of(error).split())}") from None
        from baton.cluster.runtimes.ray_process import NUM_THREADS, NodeActor, ProcessActor, RankHostActor

        remote = ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=NUM_THREADS)

        def named(base: type[NodeActor], name: str) -> Any:
            # Ray shows the name of the class in ps and top, and overwrites any other title.
            return remote(type(f"baton-{name}", (base,), {"__module__": base.__module__}))

        self._actor_class, self._host_class = partial(named, ProcessActor), partial(named, RankHostActor)
        is_for_cpus = self._is_alone and is_torch_for_cpus()
        self.num_gpus = 0 if is_for_cpus else int(ray.cluster_resources().get("GPU", 0))

    def _shortage(self, bundles: list[dict[str, float]]) -> str:
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        return ", ".join(
            f"{needed:g} {name} (of {total.get(name, 0):g} there are {free.get(name, 0):g} free)"
            for name, needed in _sum(bundles).items()
        )

    def _close(self) -> None:
        if self._ray.is_initialized():
            for actor in (actor for process in self._alive for actor in process.actors):
                self._ray.kill(actor, no_restart=True)
            for placement in self._placements.values():
                self._ray.util.remove_placement_group(placement.group)
            self._ray.shutdown()

    def _where(self, spec: ProcessSpec, node: int = 0) -> dict[str, Any]:
        """Return where an actor runs. node: of the worker's nodes."""
        from ray.util import scheduling_strategies

        if spec.num_ranks:
            needs = dict(self._needs[spec.name][node])
            variables = mps_variables(spec.mps_priority)
            return {
                **({"runtime_env": {"env_vars": variables}} if variables else {}),
                "num_cpus": needs.pop("CPU", 0),
                "num_gpus": needs.pop("GPU", 0),
                "resources": needs,
                "scheduling_strategy": scheduling_strategies.PlacementGroupSchedulingStrategy(
                    self._placements[spec.name].group, placement_group_bundle_index=node
                ),
            }
        strategy = scheduling_strategies.NodeAffinitySchedulingStrategy(self._node_id, soft=False)
        return {"num_cpus": 0, "scheduling_strategy": strategy}


class RayProcess:
    """A ManagedProcess that runs in a ProcessActor; the ranks of its other nodes, in RankHostActors.

    The calls of the actors use connections of their own, and never wait for Ray's head.
    """

    def __init__(self, spec: ProcessSpec, actors: Sequence[Any], runtime: RayRuntime) -> None:
        """actors: the ProcessActor first."""
        self.name = spec.name
        self.actors = actors
        self.actor = actors[0]
        self._runtime = runtime
        self._kind = spec.kind
        self._errors = runtime.errors
        self._has_loop = not spec.num_ranks  # a router or a gateway, which reports that its event loop runs
        # Calls of `place`, one an actor, made by `ready`.
        self._asked_places: list[asyncio.Future[ActorPlace]] = []
        hosts = actors[1:]
        self._end = self.actor.serve.remote(*(host.host_place.remote() for host in hosts))
        self._host_ends = [host.serve.remote() for host in hosts]
        self._asked: asyncio.Future[float] | None = None  # the unanswered call of `silent_s`
        self._asked_s = 0.0

    async def ready(self) -> Address:
        reporting = asyncio.ensure_future(self.actor.report.remote())
        ends = [asyncio.ensure_future(end) for end in (self._end, *self._host_ends)]
        try:
            await self._until_started()
            # A host of ranks may end or hang while rank 0 waits for it, or before `serve` begins.
            done, _ = await asyncio.wait((reporting, *ends), return_when=asyncio.FIRST_COMPLETED)
            if reporting not in done:
                await asyncio.wait((reporting,), timeout=REPORT_S)
            if not reporting.done():
                await next(end for end in ends if end in done)
            report: Report = await reporting
        except self._errors.RayError as error:
            raise WorkerLost(f"{self.name}: it ended before it served: {first_line(error)}") from None
        finally:
            futures = (reporting, *ends, *self._asked_places)
            for future in futures:
                future.cancel()
            await asyncio.gather(*futures, return_exceptions=True)
        return address_in(report, self.name)

    async def _until_started(self) -> None:
        """Wait for the processes of all actors. Gives them up, with a WorkerLost, when one does not start."""
        self._asked_places = [asyncio.ensure_future(actor.place.remote()) for actor in self.actors]
        done, late = await asyncio.wait(
            self._asked_places, timeout=ACTOR_START_S, return_when=asyncio.FIRST_EXCEPTION
        )
        for place in done:
            place.result()  # raises its error
        if late:
            self.give_up()
            raise WorkerLost(f"{self.name}: a node of Ray has started no process in {ACTOR_START_S:g} s")

    async def loading(self) -> Loading | None:
        try:
            loading: Loading | None = await self.actor.loading.remote()
        except self._errors.RayError:
            return None
        return loading

    async def watch(self) -> str:
        ends = [asyncio.ensure_future(end) for end in (self._end, *self._host_ends)]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await next(end for end in ends if end in done)
            return ""
        except self._errors.RayError as error:
            return f"ended: {first_line(error)}"
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            self.kill()  # an actor stays when its method has returned

    def stop(self) -> None:
        self.actor.stop.remote()

    def use_keys(self, keys: ClusterKeys) -> None:
        """Derive the keys of the process's kind from these cluster keys, and send them to the process."""
        generations = msgspec.json.encode(generations_of(self._kind, keys))
        for actor in self.actors:
            actor.use_keys.remote(generations)

    def kill(self) -> None:
        self._runtime.ended(self)
        self._runtime.kill(self.actors)

    def give_up(self) -> None:
        self._runtime.ended(self)
        self._runtime.give_up(self.name, self.actors, list(map(_result, self._asked_places)))

    async def silent_s(self) -> float:
        if not self._has_loop:
            return 0.0
        now_s = time.monotonic()
        if self._asked is None:
            self._asked, self._asked_s = asyncio.ensure_future(self.actor.silent_s.remote()), now_s
        await asyncio.wait((self._asked,), timeout=PROBE_TIMEOUT_S)
        if not self._asked.done():
            return now_s - self._asked_s
        answered, self._asked = self._asked, None
        return 0.0 if answered.exception() else answered.result()  # `watch` reports its end


def _result(future: asyncio.Future[ResultT]) -> ResultT | None:
    """Return the result of a call; None: there is none yet, or it has failed."""
    has_failed = future.done() and (future.cancelled() or future.exception() is not None)
    return future.result() if future.done() and not has_failed else None


def _in_thread(call: Callable[..., ResultT], *arguments: Any) -> asyncio.Future[ResultT]:
    """Make a call of Ray that may hang on a daemon thread, so that the process can still end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def tell(set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not future.done():
            set_outcome(outcome)

    def work() -> None:
        set_outcome: Callable[[Any], None] = future.set_result
        try:
            outcome: object = call(*arguments)
        except BaseException as raised:
            set_outcome, outcome = future.set_exception, raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, set_outcome, outcome)

    threading.Thread(target=work, name="ray-call", daemon=True).start()
    return future


def _in_background(call: Callable[..., Any], *arguments: Any) -> None:
    """Make a call of Ray that may hang, without waiting for the result; a failure is logged."""

    def log_failure(future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.info("a call of Ray failed: %s", first_line(error))

    _in_thread(call, *arguments).add_done_callback(log_failure)


async def _answering(nodes: Sequence[RayNode], among: Collection[str] | None = None) -> list[RayNode]:
    """Return the nodes that answer, of those with these ids; None: of all."""
    asked = [node for node in nodes if among is None or node.id in among]
    answers = await asyncio.gather(*map(_listens, asked))
    return [node for node, answers_now in zip(asked, answers, strict=True) if answers_now]


async def _listens(node: RayNode) -> bool:
    """Return whether the raylet greets a client, as gRPC servers do: a hung one only accepts connections."""
    with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(node.address, node.port)
            with closing(writer):
                writer.write(HTTP2_GREETING)
                return (await reader.readexactly(len(HTTP2_SETTINGS)))[3] == HTTP2_SETTINGS[3]
    return False


def _check_reachable(address: str) -> None:
    """Raises OSError when no process listens at the address; Ray itself would retry for minutes.

    Raises ValueError for a malformed address.
    """
    if address == AUTO:
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        raise ValueError("expected HOST:PORT of a cluster that this machine belongs to, or auto")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


def _take_signals_back() -> None:
    """Install Baton's signal handlers again: Ray has put its own, which dumps a stack, before them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.getsignal(number))


def _import_ray() -> Any:
    prepare_ray()
    try:
        import ray
    except ModuleNotFoundError:
        install = "pip install '.[ray]', in Baton's checkout"
        raise ConfigError(f"ray is not installed: {install}; or serve with --runtime local") from None
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < MIN_RAY:
        raise ConfigError(f"ray {ray.__version__} is too old: {'.'.join(map(str, MIN_RAY))} or newer is safe")
    return ray


def cores_for(num_ranks: int, cores_of_nodes: Sequence[int]) -> int:
    """Return the number of cores for all ranks together, spread evenly over the nodes.

    Ray gives a process one thread for each of its cores.
    """
    usable = [cores for cores in cores_of_nodes if cores]
    if not usable or not num_ranks:
        return num_ranks
    ranks_per_node = math.ceil(num_ranks / len(usable))
    return num_ranks * max(1, min(usable) // ranks_per_node)


def least_used(
    bundles: Sequence[Mapping[str, float]], nodes: Sequence[RayNode], used: Mapping[str, int]
) -> list[str]:
    """Return the ids of the nodes with the fewest workers, of those that have the resources of a bundle.

    As many nodes as there are bundles, and all that have no more workers than these; fewer only where fewer
    have the resources. used: node id -> number of workers.
    """
    fitting = [
        node.id
        for node in nodes
        if all(node.resources.get(name, 0.0) >= most for name, most in bundles[0].items())
    ]
    counts = sorted(used.get(node_id, 0) for node_id in fitting)
    most_used = max(counts[: len(bundles)], default=0)
    return [node_id for node_id in fitting if used.get(node_id, 0) <= most_used]


def _needs(spec: ProcessSpec, num_cores: int) -> list[dict[str, float]]:
    """Return the resources of each bundle: those that the worker's ranks on one node need.

    Raises ConfigError for several ranks with parts of GPUs: each rank needs another GPU, and Ray would give
    parts of one.
    """
    if spec.gpus_per_rank:
        ranks_per_node = spec.num_ranks // spec.num_nodes
        if spec.gpus_per_rank < 1 < ranks_per_node:
            raise ConfigError(
                f"{spec.name}: {ranks_per_node} ranks of one worker cannot share GPUs on Ray, and there "
                "are fewer GPUs than ranks: lower tensor_parallel_size, start fewer workers, add GPUs or, on "
                "one machine, serve with --runtime local"
            )
        needs = {"GPU": ranks_per_node * spec.gpus_per_rank, "CPU": 1.0, **spec.resources}
    else:
        needs = {"CPU": float(num_cores // spec.num_nodes), **spec.resources}
    return [needs] * spec.num_nodes


def _sum(bundles: list[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for bundle in bundles for name in bundle})
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def first_line(error: BaseException) -> str:
    """Return the first line of an error of Ray, or of the exception in an actor that caused the error."""
    cause = getattr(error, "cause", None)
    said = f"{type(cause).__name__}: {cause}" if isinstance(cause, BaseException) else str(error)
    return next(iter(said.strip().splitlines()), type(error).__name__).rstrip(".")[:400]
