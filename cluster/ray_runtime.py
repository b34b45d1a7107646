"""Processes as Ray actors: on this machine, where Ray is started for them, or on a cluster that is joined.

1. `open` joins the Ray at an address, or starts one for this machine alone. Ray's own ports answer only who
   has its token.
2. `place` takes room for all workers in one placement group, a bundle each, spread over the nodes. A worker's
   ranks are in one bundle, so they share a node.
3. `spawn` puts a worker into its bundle; a router or a gateway runs on this node, where clients expect it.
   Ray restarts nothing: what ends is started again by its supervisor, in the same bundle.
4. `close` ends the actors, gives the room back, and leaves Ray, which ends if it was started here.
"""

import asyncio
import logging
import math
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from baton.cluster.installing import install
from baton.cluster.process_spec import Failed, Loading, ProcessSpec, Report, Started, assignment, share_out
from baton.config import prepare_ray
from baton.errors import ConfigError, WorkerLost
from baton.worker import Address

LOOPBACK: Final = "127.0.0.1"
OBJECT_STORE_BYTES: Final = 80 << 20  # the least that Ray takes: no object of ours goes through it
CONNECT_TIMEOUT_S: Final = 5.0
AUTO: Final = "auto"
_REPORTS: Final[msgspec.json.Decoder[Report]] = msgspec.json.Decoder(Report)
MIN_RAY: Final = (2, 54)  # its job API could be used by strangers before


class RayRuntime:
    def __init__(
        self, key: bytes, *, address: str | None = None, num_cpus: int = 0, place_timeout_s: float = 60.0
    ) -> None:
        """address: of the Ray to join, None: start one, which is told of `num_cpus` cores at least.

        place_timeout_s: how long a cluster may take to have room, as one that grows does.
        """
        self._key = key
        self._address = address
        self._num_cpus = num_cpus
        self._place_timeout_s = place_timeout_s
        self._ray: Any = None  # imported when it is needed: half a second
        self._actor_class: Any = None
        self._group: Any = None
        self._bundles: dict[str, int] = {}
        self._needs: dict[str, dict[str, float]] = {}  # of Ray's resources, by the name of a worker
        self._alive: set[RayActor] = set()
        self.num_gpus = 0
        self.host = LOOPBACK

    @property
    def worker_host(self) -> str:
        return LOOPBACK if self._is_alone else ""

    @property
    def _is_alone(self) -> bool:
        return self._address is None

    async def open(self) -> None:
        await asyncio.to_thread(self._open)
        _take_signals_back()

    async def place(self, specs: list[ProcessSpec]) -> None:
        workers = [spec for spec in specs if spec.num_ranks]
        num_cores = cores_for(sum(spec.num_ranks for spec in workers), self._cores_of_nodes())
        for (name, cores), spec in zip(share_out(workers, num_cores).items(), workers, strict=True):
            self._needs[name] = _needs(spec, cores)
        self._bundles = {spec.name: index for index, spec in enumerate(workers)}
        bundles = [self._needs[spec.name] for spec in workers]
        self._group = self._ray.util.placement_group(bundles, strategy="SPREAD")
        try:
            async with asyncio.timeout(self._place_timeout_s):
                await self._group.ready()
        except TimeoutError:
            raise ConfigError(
                f"Ray has no room for the workers: they need {self._shortage(bundles)}: set cores_per_rank "
                "of prefill and decode lower, start fewer workers, or add nodes"
            ) from None

    async def spawn(self, spec: ProcessSpec) -> "RayActor":
        actor = self._actor_class.options(name=None, **self._where(spec)).remote(
            assignment(spec, self._key), is_alone=self._is_alone
        )
        process = RayActor(spec.name, actor, self._ray)
        self._alive.add(process)
        return process

    async def close(self) -> None:
        for process in self._alive:
            process.kill()
        if self._ray is not None:
            await asyncio.to_thread(self._close)

    def _open(self) -> None:
        self._ray = ray = _import_ray()
        logging.getLogger("ray").setLevel(logging.ERROR)  # errors come back as exceptions, the rest is chat
        try:
            if self._address is None:
                ray.init(
                    num_cpus=max(self._num_cpus, len(os.sched_getaffinity(0))),
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    configure_logging=False,
                    _node_ip_address=LOOPBACK,
                )
            else:
                _check_reachable(self._address)
                ray.init(address=self._address, configure_logging=False)
                self.host = ray.util.get_node_ip_address()
        except (OSError, RuntimeError, ValueError) as error:
            where = f"Ray at {self._address} cannot be joined" if self._address else "Ray cannot be started"
            raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None
        from baton.cluster.ray_process import NUM_THREADS, RayProcess

        self._actor_class = ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=NUM_THREADS)(
            RayProcess
        )
        self.num_gpus = int(ray.cluster_resources().get("GPU", 0))

    def _shortage(self, bundles: list[dict[str, float]]) -> str:
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        return ", ".join(
            f"{needed:g} {name} (of {total.get(name, 0):g} there are {free.get(name, 0):g} free)"
            for name, needed in _sum(bundles).items()
        )

    def _cores_of_nodes(self) -> list[int]:
        return [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]

    def _close(self) -> None:
        if self._ray.is_initialized():
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
            self._ray.shutdown()

    def _where(self, spec: ProcessSpec) -> dict[str, Any]:
        from ray.util import scheduling_strategies

        if spec.num_ranks:
            needs = dict(self._needs[spec.name])
            return {
                "num_cpus": needs.pop("CPU", 0),
                "num_gpus": needs.pop("GPU", 0),
                "resources": needs,
                "scheduling_strategy": scheduling_strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=self._bundles[spec.name]
                ),
            }
        here = self._ray.get_runtime_context().get_node_id()
        strategy = scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        return {"num_cpus": 0, "scheduling_strategy": strategy}


class RayActor:
    """A Process whose calls go to an actor."""

    def __init__(self, name: str, actor: Any, ray: Any) -> None:
        self.name = name
        self._actor = actor
        self._ray = ray
        self._end = actor.serve.remote()

    async def ready(self) -> Address:
        try:
            report = _REPORTS.decode(await self._actor.report.remote())
        except self._ray.exceptions.RayActorError as error:
            raise WorkerLost(f"{self.name}: it ended before it served: {first_line(error)}") from None
        match report:
            case Started(address):
                return address
            case Failed(reason, is_users_error):
                raise (ConfigError if is_users_error else WorkerLost)(f"{self.name}: {reason}")

    async def loading(self) -> Loading | None:
        try:
            return msgspec.json.decode(await self._actor.loading.remote(), type=Loading | None)
        except self._ray.exceptions.RayError:
            return None

    async def watch(self) -> str:
        try:
            await self._end
        except self._ray.exceptions.RayError as error:
            self.kill()
            return f"ended: {first_line(error)}"
        self.kill()  # an actor stays when its method has returned
        return ""

    def stop(self) -> None:
        self._actor.stop.remote()

    def kill(self) -> None:
        if self._ray.is_initialized():
            self._ray.kill(self._actor, no_restart=True)

    def give_up(self) -> None:
        self.kill()

    async def silent_s(self) -> float:
        return 0.0


def _check_reachable(address: str) -> None:
    """OSError where nobody listens: Ray itself would try for minutes. ValueError for what is no address."""
    if address == AUTO:
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        raise ValueError("expected HOST:PORT of a cluster that this machine belongs to, or auto")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


def _take_signals_back() -> None:
    """Ray has put a handler of its own before ours, which dumps its stack when the cluster is to drain."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.getsignal(number))


def _import_ray() -> Any:
    prepare_ray()
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError(f"ray is not installed: {install('ray')}; or serve with --runtime local") from None
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < MIN_RAY:
        raise ConfigError(f"ray {ray.__version__} is too old: {'.'.join(map(str, MIN_RAY))} or newer is safe")
    return ray


def cores_for(num_ranks: int, cores_of_nodes: Sequence[int]) -> int:
    """Cores that so many ranks may take together when they are spread evenly over the nodes.

    Ray lets a process have as many threads as it takes cores.
    """
    usable = [cores for cores in cores_of_nodes if cores]
    if not usable or not num_ranks:
        return num_ranks
    ranks_per_node = math.ceil(num_ranks / len(usable))
    return num_ranks * max(1, min(usable) // ranks_per_node)


def _needs(spec: ProcessSpec, num_cores: int) -> dict[str, float]:
    """What Ray must have for a worker, on one node: its ranks share that."""
    if spec.gpus_per_rank:
        return {"GPU": spec.num_ranks * spec.gpus_per_rank, "CPU": 1.0, **spec.resources}
    return {"CPU": float(num_cores), **spec.resources}


def _sum(bundles: list[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for bundle in bundles for name in bundle})
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def first_line(error: BaseException) -> str:
    """What of an error of Ray is news: of an exception in an actor that one, without the way it took."""
    cause = getattr(error, "cause", None)
    said = f"{type(cause).__name__}: {cause}" if isinstance(cause, BaseException) else str(error)
    return next(iter(said.strip().splitlines()), type(error).__name__).rstrip(".")[:400]
