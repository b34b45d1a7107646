"""The cluster of one `baton serve`.

1. `start` reserves ports, plans the processes (serve_plan), and starts them; it returns when a request would
   be answered. Later each process is kept alive (supervisor).
2. Routers report workers that they lose, and pass on orders of operators: the cluster restarts those workers.
3. `drain` stops gateways, then workers, then routers. `close` ends everything.
"""

import asyncio
import errno
import importlib.util
import itertools
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec

from baton.clock import Clock, SystemClock
from baton.cluster.cluster_key import READ_EVERY_S, KeyWatch
from baton.cluster.cluster_record import ClusterRecord
from baton.cluster.operator_node import Operator, Verdicts, connected
from baton.cluster.redis_server import RedisServer, find_program
from baton.cluster.runtimes.base import ProcessSpec, Runtime, generations_of
from baton.cluster.serve_plan import Topology, more_workers, router_ports, specs, with_role
from baton.cluster.supervisor import Supervised
from baton.config.cluster import ServeConfig, WorkerConfig
from baton.config.environment import cache_directory
from baton.config.loader import without_credentials
from baton.errors import ConfigError, WorkerLost, reason_of
from baton.messages.bounds import MAX_SECONDS, Kind
from baton.messages.operations import Drain, Flip, OrderedWorkers, RestartWorker, Scale, Status, Undrain
from baton.messages.workers import Address, WorkerRole
from baton.router.policies.registry import policy_class
from baton.rpc.auth import ClusterKeys, KeyRing

if TYPE_CHECKING:
    from baton.cluster.planning import Planning

ASK_EVERY_S: Final = 0.1
SAY_EVERY_S: Final = 3.0
HEAD_LOOK_S: Final = 0.5
COMPILING: Final = "compiling-*"  # the names that kernels/native.py gives to its temporary folders
LONGEST_COMPILATION_S: Final = 300.0  # an older folder was left by a killed process
# New requests stop first, then running requests end, then no process needs a router.
STOPPING_ORDER: Final = (Kind.GATEWAY, Kind.WORKER, Kind.ROUTER)

ResultT = TypeVar("ResultT")
Say: TypeAlias = Callable[[str], None]

logger = logging.getLogger(__name__)


def kept_port(host: str, port: int, option: int) -> socket.socket:
    """Return a socket that is bound and does not listen: the kernel gives its port to no other program.

    port: 0 binds any free port. Processes that listen on the port must set `option`: SO_REUSEADDR for one
    process, SO_REUSEPORT for several. ConfigError: the port is in use, or `host` is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kept = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            _check_unused(family, host, port)
        kept.setsockopt(socket.SOL_SOCKET, option, 1)
        kept.bind((host, port))
    except OSError as error:
        kept.close()
        raise _cannot_bind(host, port, error) from None
    return kept


def _check_unused(family: socket.AddressFamily, host: str, port: int) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger
        probe.bind((host, port))
        probe.listen(1)


def _cannot_bind(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port: {port} on {host} is in use: choose another, or 0 for one that is free")
    if error.errno == errno.EACCES:
        return ConfigError(f"port: {port} is for privileged processes: choose one from 1024 on")
    return ConfigError(f"host: {host} cannot be listened on: {reason_of(error)}")


class Cluster:
    """The processes of one `baton serve`."""

    def __init__(self, config: ServeConfig, runtime: Runtime, keys: ClusterKeys, say: Say) -> None:
        self._config = config
        self._runtime = runtime
        self._ring = KeyRing.of(keys, Kind.OPERATOR)
        self._say = say
        self._clock: Clock = SystemClock()
        self._processes: list[Supervised] = []
        self._topology: Topology | None = None
        # Starts at the present time in ms, above all numbers of an earlier `baton serve`.
        self._starts = itertools.count(round(time.time() * 1000))
        self._scaling = asyncio.Lock()
        self._leaving: set[Supervised] = set()  # they hand over their requests and end
        self._keeping: set[asyncio.Task[None]] = set()
        self._verdicts = Verdicts(self._clock.now_s, self._replace, self._order, config.start_timeout_s)
        self._resources = AsyncExitStack()
        self.redis: RedisServer | None = None

    async def start(self) -> Topology:
        """Start all processes; return when a request would be answered. Raises ConfigError and WorkerLost."""
        topology = self._topology = await self._make_topology()
        planned = specs(self._config, topology)
        planning = self._make_planning(topology.port)  # before the workers load the model: it may fail
        reporting = asyncio.create_task(self._report_progress())
        try:
            await self._runtime.place(planned)
            self._processes = [self._supervised(spec) for spec in planned]
            await self._start_in_time(topology, planning)
        finally:
            reporting.cancel()
        return topology

    async def drain(self) -> None:
        """Stop all processes in order; each has `drain_timeout_s` to finish its requests."""
        for kind in STOPPING_ORDER:
            of_kind = [process for process in self._processes if process.spec.kind is kind]
            await asyncio.gather(*(process.stop(self._config.drain_timeout_s) for process in of_kind))

    def follow_keys(self, watch: KeyWatch, changed: Callable[[], None]) -> None:
        """Give the keys that `watch` finds to every process, and call `changed` each time they change."""

        async def look() -> None:
            while True:
                await asyncio.sleep(READ_EVERY_S)
                if not await asyncio.to_thread(watch.look):
                    continue
                logger.info("the cluster keys have changed: %d are accepted now", len(watch.keys))
                try:
                    self._ring.replace(generations_of(Kind.OPERATOR, watch.keys))
                    self._runtime.use_keys(watch.keys)
                    changed()
                except Exception:  # of the runtime: later keys may reach all processes
                    logger.exception("the cluster keys have not reached all processes")

        self._keep(look())

    def _make_planning(self, port: int) -> "Planning | None":
        """Return the planner, if there is one. ConfigError: its settings, its times or its log are wrong."""
        settings = self._config.planner
        if settings.mode == "off":
            return None
        from baton.cluster.planning import Planning, log_path  # loads the simulator

        log = log_path(settings.log, port)
        planning = Planning(self._config, self._clock, self, log)
        self._say(f"the planner writes to {log}; `baton explain plan` shows the latest plans")
        return planning

    # The planner calls these.

    def ordered(self) -> dict[WorkerRole, list[str]]:
        """Return the names of the workers that are to run, by role."""
        names: dict[WorkerRole, list[str]] = {role: [] for role in self._config.pools}
        for each in self._workers():
            if not each.is_drained:
                names[WorkerRole(each.spec.role)].append(each.name)
        return names

    def startups(self) -> tuple[float, ...]:
        """Return the seconds of all start-ups of workers since the last call."""
        workers = self._workers()
        startups_s = tuple(seconds for each in workers for seconds in each.startups_s)
        for each in workers:
            each.startups_s = []
        return startups_s

    def flipped(self, name: str, role: WorkerRole) -> None:
        """Note that a worker takes another role."""
        if (process := self._worker(name)) is not None:
            process.spec = with_role(process.spec, role)

    async def _report(self, operator: Operator) -> None:
        """Tell the routers the ordered workers and the absence of Ray's head.

        Log when the head goes away and when it comes back.
        """
        was_away_s, told = 0.0, tuple[OrderedWorkers, ...]()
        while True:
            counts = Counter((model_of(each.spec), WorkerRole(each.spec.role)) for each in self._workers())
            ordered = tuple(OrderedWorkers(*each, number) for each, number in sorted(counts.items()))
            away_s = self._runtime.head_away_s
            if away_s and not was_away_s:
                logger.error(
                    "Ray's head has not answered for %.0f s: running processes go on, none can be started",
                    away_s,
                )
            elif was_away_s and not away_s:
                logger.warning("Ray's head answers again, after %.0f s", was_away_s)
            if away_s or was_away_s or ordered != told:
                operator.tell(head_away_s=min(away_s, MAX_SECONDS), ordered=ordered)
            was_away_s, told = away_s, ordered
            await asyncio.sleep(HEAD_LOOK_S)

    def _order(self, order: Drain | Undrain | RestartWorker | Flip | Scale) -> None:
        """Carry out an operator's order that a router has passed on. Workers drain and flip by themselves."""
        if isinstance(order, Scale):
            self._keep(self.scale(order.num_prefill, order.num_decode, order.model))
            return
        process = self._worker(order.worker)
        if process is None:
            logger.warning("this cluster has started no worker %r", order.worker)
            return
        match order:
            case Drain():
                process.drain()
            case Flip():
                self.flipped(order.worker, order.role)
            case RestartWorker() if not process.is_drained:
                self._keep(process.restart(self._config.drain_timeout_s))
            case _:
                process.undrain()

    async def scale(self, num_prefill: int, num_decode: int, model: str = "") -> None:
        """Start missing workers of each role, and drain those that are too many, the last ones first.

        Workers that an operator has drained are given up, so that others can have their room. No other worker
        is taken away when there is no room for the missing ones.
        model: of the workers; "" is the model of a cluster that has one.
        """
        wanted = {WorkerRole.PREFILL: num_prefill, WorkerRole.DECODE: num_decode}
        config = self._config_of(model)
        if config is None:
            return
        async with self._scaling:
            logger.warning("%s is scaled to %dP%dD", config.model_name, num_prefill, num_decode)
            workers = [each for each in self._workers() if model_of(each.spec) == config.model_name]
            for drained in [each for each in workers if each.is_drained]:
                workers.remove(drained)
                self._remove(drained)
                self._keep(drained.stop(0.0))
            pools = {role: [each for each in workers if each.spec.role == role] for role in wanted}
            try:
                await self._add(config, {role: most - len(pools[role]) for role, most in wanted.items()})
            except ConfigError as error:
                logger.error("no worker is started, and none that serves is taken away: %s", error)
                return
            for process in (process for role, most in wanted.items() for process in pools[role][most:]):
                self._leaving.add(process)
                self._keep(self._take_away(process))

    def _config_of(self, model: str) -> ServeConfig | None:
        """Return the settings of a model; "" is the model of a cluster that has one."""
        models = self._config.models
        found = models[0] if not model and len(models) == 1 else None
        found = next((each for each in models if each.model_name == model), found)
        if found is None:
            names = ", ".join(each.model_name for each in models)
            logger.error("there is no model %r: the cluster serves %s", model, names)
        return found

    async def _add(self, model: ServeConfig, missing: Mapping[WorkerRole, int]) -> None:
        """Start so many more workers of each role. Without room for all of them none is started."""
        assert self._topology is not None, "start comes first"
        names = [process.name for process in self._processes]
        planned = [
            spec
            for role, num_more in missing.items()
            for spec in more_workers(self._config, model, self._topology, role, max(0, num_more), names)
        ]
        if not planned:
            return
        await self._runtime.place([process.spec for process in self._processes] + planned)
        added = [self._supervised(spec) for spec in planned]
        self._processes += added
        for process in added:
            self._keep(process.keep())

    async def _take_away(self, process: Supervised) -> None:
        """Let a worker hand its requests over and end, and give up its resources."""
        await process.stop(self._config.drain_timeout_s)
        self._remove(process)

    def _remove(self, process: Supervised) -> None:
        self._processes.remove(process)
        self._leaving.discard(process)
        self._runtime.release(process.name)

    def _supervised(self, spec: ProcessSpec) -> Supervised:
        return Supervised(spec, self._runtime, self._clock, self._starts, self._config.start_timeout_s)

    def _workers(self) -> list[Supervised]:
        """Return the workers that are to stay."""
        staying = [process for process in self._processes if process not in self._leaving]
        return [process for process in staying if process.spec.kind is Kind.WORKER]

    def _replace(self, name: str, reason: str, age_s: float) -> None:
        if (process := self._worker(name)) is not None:
            process.replace(reason, age_s)

    def _worker(self, name: str) -> Supervised | None:
        for process in self._processes:
            if process.name == name and process.spec.kind is Kind.WORKER:
                return process
        return None

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background until it ends or the cluster is closed."""
        task = asyncio.create_task(work)
        self._keeping.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._keeping.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s has failed", task.get_coro(), exc_info=error)

    async def close(self) -> None:
        """End all processes now, and release the ports."""
        async with self._resources:
            try:
                keeping = list(self._keeping)
                for task in keeping:
                    task.cancel()
                await asyncio.gather(*keeping, return_exceptions=True)
            finally:
                await self._runtime.close()

    async def _make_topology(self) -> Topology:
        config = self._config
        api = self._resources.enter_context(kept_port(config.host, config.port, socket.SO_REUSEPORT))
        await self._runtime.open()
        host = self._runtime.host
        kept = [
            self._resources.enter_context(kept_port(host, number, socket.SO_REUSEADDR))
            for number in router_ports(config)
        ]
        return Topology(
            routers=tuple(Address(host, each.getsockname()[1]) for each in kept),
            redis=await self._redis_url(),
            host=self._runtime.worker_host,
            port=api.getsockname()[1],
            num_gpus=self._runtime.num_gpus,
        )

    async def _redis_url(self) -> str:
        settings = self._config.router
        if settings.redis != "auto" or not policy_class(settings.policy).uses_prefix_index:
            return settings.redis
        if find_program() is None or importlib.util.find_spec("redis") is None:
            return "none"  # `baton doctor` warns of this
        self.redis = RedisServer(clock=self._clock)
        self._resources.push_async_callback(self.redis.stop)
        try:
            await self.redis.start()
        except ConfigError as error:
            self._say(f"warning: routers share nothing, and know nothing after a restart: {error}")
            return "none"
        self._keep(self.redis.keep())
        return self.redis.url

    async def _start_in_time(self, topology: Topology, planning: "Planning | None") -> None:
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._start_all()
                for process in self._processes:
                    self._keep(process.keep())
                connecting = connected(topology.routers, self._ring, self._verdicts)
                operator = await self._resources.enter_async_context(connecting)
                self._keep(self._report(operator))
                if planning is not None:
                    self._keep(planning.keep_planning(operator))
                while not self._is_whole(await operator.status_or_none()):
                    await asyncio.sleep(ASK_EVERY_S)
        except TimeoutError:
            late = f"after {self._config.start_timeout_s:.0f} s the cluster still waits for"
            raise WorkerLost(f"{late} {await self._missing()}") from None

    async def _start_all(self) -> None:
        """Start all processes at once: the others start while the workers load the model."""
        try:
            async with asyncio.TaskGroup() as group:
                for process in self._processes:
                    group.create_task(process.start())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the others are cancellations

    def _is_whole(self, status: Status | None) -> bool:
        if status is None or status.num_ready < self._config.num_workers:
            return False
        has_all = len(status.routers) >= self._config.routers
        return has_all and status.num_gateways >= self._config.gateways

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(SAY_EVERY_S)
            self._say(f"waiting for {await self._missing()}")

    async def _missing(self) -> str:
        if not self._processes:
            return "room for the workers"
        late = [process for process in self._processes if not process.is_ready]
        names = await asyncio.gather(*(process.describe() for process in late))
        why = "; kernels are being compiled, once" if names and are_compiled_now() else ""
        return (", ".join(names) or "the processes to find each other") + why


def model_of(spec: ProcessSpec) -> str:
    """Return the name of a worker's model."""
    assert isinstance(spec.config, WorkerConfig)
    return spec.config.model_name


def are_compiled_now() -> bool:
    """Return whether a process of this machine compiles kernels now, which may take minutes."""
    return any(_age_s(folder) < LONGEST_COMPILATION_S for folder in cache_directory().glob(COMPILING))


def _age_s(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:  # done meanwhile
        return LONGEST_COMPILATION_S


async def serve(
    config: ServeConfig,
    runtime: Runtime,
    keys: KeyWatch,
    *,
    stop: asyncio.Event,
    say: Say,
    record: Callable[[ClusterRecord], None],
    on_ready: Callable[[ClusterRecord], None],
) -> bool:
    """Serve until `stop` is set. Return False when `stop` was set before the cluster served.

    record: called with the cluster's record once requests are answered, and each time `keys` has changed.
    on_ready: called once, after the first `record`. Raises ConfigError and WorkerLost when the cluster cannot
    start.
    """
    cluster = Cluster(config, runtime, keys.keys, say)
    try:
        topology = await _unless(stop, cluster.start())
        if topology is None:
            return False

        def present() -> ClusterRecord:
            return ClusterRecord(
                host=config.host,
                port=topology.port,
                routers=topology.routers,
                keys=keys.keys,
                settings=msgspec.to_builtins(without_credentials(config)),
            )

        record(present())
        on_ready(present())
        cluster.follow_keys(keys, lambda: record(present()))
        await stop.wait()
        say("draining: running requests may end; interrupt once more to stop at once")
        await cluster.drain()
        return True
    finally:
        if stop.is_set():
            say("stopping ...")
        await cluster.close()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """Return the result of `work`, or None when `stop` is set first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
