"""Runs a prefill or decode worker: the engine and the KV endpoint on one thread, connections on others.

1. The model is loaded, the KV endpoint opens its listeners, the RPC server listens.
2. The loop takes messages, steps the engine, and sleeps only while there is nothing to do.
3. A worker that drains tells the routers and takes no new attempts. It ends when all its work is done,
   including pages that other workers will fetch, or after `drain_timeout_s`.
4. A worker that flips drains in the same way. Then it joins again, as another worker with the other role: the
   engine with its cached pages and the KV endpoint with its links stay.
5. A worker that shall sleep drains in the same way. Then it frees the engine and the KV endpoint, and joins
   again as a worker that takes no work. An order to wake makes it load the model and join once more.

An error that concerns more than one request ends the process: the supervisor starts another process.
"""

import contextlib
import gc
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, Queue
from typing import Final

import msgspec

from baton.clock import SystemClock
from baton.cluster.model_directory import resolve_draft_model, resolve_model
from baton.cluster.rank_host import HostedRanks
from baton.cluster.runtimes.base import Progress
from baton.config.cluster import DRAIN_NOTICE_S, WorkerConfig
from baton.config.engine import EngineConfig
from baton.config.environment import node_name
from baton.decode_worker.worker import DecodeWorker
from baton.engine.engine import Engine, copy_weights, load_engine
from baton.engine.models.loading.weights import Checkpoint
from baton.errors import BatonError, WorkerLost
from baton.kernels.native import give_back_freed_memory
from baton.kvtransfer.endpoint import EndpointSettings, KvEndpoint
from baton.kvtransfer.links import KvLinks, Link
from baton.kvtransfer.ranks.ranks import RankAgents
from baton.kvtransfer.transports.pages import SharedPool
from baton.messages.bounds import Kind
from baton.messages.control import Hello
from baton.messages.workers import Address, HostPlace, Worker, WorkerRole
from baton.prefill_worker.worker import PrefillWorker
from baton.rpc.auth import ClusterKeys, KeyRing
from baton.rpc.liveness import StepWatchdog
from baton.rpc.peers import PeerRegistry
from baton.rpc.server import RpcThread
from baton.rpc.worker_node import SleepingWorker

IDLE_S: Final = 0.25  # longest sleep: deadlines are checked between sleeps
EXPECTED_RESERVED_BYTES: Final = 2**29  # of a GPU, without an engine: workspaces of libraries

logger = logging.getLogger(__name__)


class HostedWorker:
    """Owns a worker, its engine, endpoint and connections. One thread makes, serves and closes it."""

    def __init__(
        self,
        config: WorkerConfig,
        keys: ClusterKeys,
        progress: Progress | None = None,
        incarnation: int = 0,
        rank_hosts: Sequence[HostPlace] = (),
    ) -> None:
        """Load the model and listen. `address` is the address for control connections.

        incarnation: see messages/workers.Worker. rank_hosts: on the worker's other nodes, in their order.
        Raises ModelError, ConfigError and WorkerLost, as `load_engine` does.
        """
        self._config = config
        self._incarnation = incarnation
        self._rank_hosts = rank_hosts
        self._ring = KeyRing.of(keys, Kind.WORKER)
        self._weights: Checkpoint | None = None  # while it sleeps
        self._order_number = 0  # see Worker
        self._nodes: HostedRanks | None = None
        self._open(progress)

    def _open(self, progress: Progress | None = None) -> None:
        """Load the model and join the cluster."""
        config, weights = self._config, self._weights
        with contextlib.ExitStack() as ends:
            shared = SharedPool()
            ends.callback(shared.close)
            agents = RankAgents(
                config.engine.num_ranks,
                ranks_here=config.engine.ranks_per_node,
                host=config.host,
                keys=self._ring if config.engine.nnodes > 1 else None,
                link_timeout_s=config.link_timeout_s,
            )
            ends.callback(agents.close)
            self._nodes = None
            if self._rank_hosts:
                self._nodes = HostedRanks(
                    self._rank_hosts, config.host, self._ring, agents.node_place, config.link_timeout_s
                )
            loaded = _load(config, shared, agents, self._nodes, progress, weights)
            self.engine = ends.enter_context(contextlib.closing(loaded))
            self._steps = StepWatchdog(SystemClock(), config.step_timeout_s)
            self.engine.on_batch = self._steps.sized
            self.endpoint = self._open_endpoint(shared, agents)
            ends.callback(self.endpoint.close)
            self._links = KvLinks(partial(_connect, self.endpoint))
            self._join()
            ends.callback(lambda: self._thread.close())
            self._ends = ends.pop_all()
        self._weights = None

    def serve(self, stop: threading.Event) -> None:
        """Serve until `stop` is set or an operator drains the worker, then for `drain_timeout_s` at most.

        A worker that is to flip serves on in its next role, and one that has slept as it did before.
        """
        self._serve_role(stop)
        while not (stop.is_set() or self.node.is_dismissed):
            if self.node.sleep_level:
                if not self._sleep(stop):
                    return
            elif self.node.next_role is not None:
                self._flip(self.node.next_role)
            else:
                return
            self._serve_role(stop)

    def _join(self) -> None:
        """Listen, and join the cluster as a new worker."""
        config = self._config
        self._thread = thread = RpcThread(
            self._ring,
            self.endpoint.post,
            dropped=self.endpoint.dropped,  # the endpoint reports the counts
            link_timeout_s=config.link_timeout_s,
        )
        try:
            self.address = thread.listen(config.host, config.port)
            self.node = self._make_node(thread)
        except BaseException:
            thread.close()
            raise
        thread.serve(self.node, self._steps)

    def _flip(self, role: WorkerRole) -> None:
        """Leave the cluster, end what is left of the work, and join in another role at the same address.

        Requests that have not moved away are replayed elsewhere, like those of a worker that has ended in
        order.
        """
        self._thread.close()  # each peer's end is an end of its work here
        until_s = time.monotonic() + self._config.drain_timeout_s
        while not self.node.is_idle:
            if time.monotonic() > until_s:
                raise WorkerLost(f"{self._config.name}: its transfers do not end, so it is started anew")
            self._steps.begin()
            self.node.step()
            if not self.engine.has_work():
                self.endpoint.wait(IDLE_S)
        logger.warning("%s is a %s worker from now on", self._config.name, role)
        self.engine.set_pressure(small_chunks=False, makes_room=False)
        self._config = msgspec.structs.replace(self._config, role=role, port=self.address.port)
        self._join()

    def _sleep(self, stop: threading.Event) -> bool:
        """Free the engine, wait until the worker is woken, and load the model again.

        Returns False when the worker is to end instead. Requests that are left are replayed elsewhere, like
        those of a worker that has ended in order.
        """
        described, level, port = self.node.hello.worker, self.node.sleep_level, self.address.port
        assert described is not None, "a worker describes itself"
        is_woken, role = self.node.orders.is_to_wake, self.node.next_role or described.role
        self._order_number = self.node.orders.latest.number
        self._config = msgspec.structs.replace(self._config, role=role)
        self._free()
        if not is_woken:
            if level == 1:
                self._weights = copy_weights(_resolved(self._config))
            logger.warning("%s sleeps", self._config.name)
            asleep = msgspec.structs.replace(
                described,
                id=secrets.token_hex(16),
                role=role,
                is_asleep=True,
                sleep_level=level,
                order_number=self._order_number,
            )
            is_woken = self._wait_for_wake(_hello_of(asleep), port, stop)
        if is_woken:
            logger.warning("%s is woken", self._config.name)
            self._config = msgspec.structs.replace(self._config, port=port)
            self._open()
            gc.freeze()
        return is_woken

    def _free(self) -> None:
        """Close the engine, the KV endpoint and the connections, and give their memory back."""
        self._ends.close()
        del self.engine, self.endpoint, self.node, self._links, self._thread, self._steps
        gc.unfreeze()
        gc.collect()
        reserved_bytes = give_back_freed_memory()
        if reserved_bytes > EXPECTED_RESERVED_BYTES:
            logger.warning(
                "%s has freed its engine, but %.1f GiB of its GPU are still in use: other processes may have "
                "its KV pages mapped",
                self._config.name,
                reserved_bytes / 2**30,
            )

    def _wait_for_wake(self, hello: Hello, port: int, stop: threading.Event) -> bool:
        """Join the cluster as a worker that sleeps; return whether it was woken."""
        config, calls = self._config, Queue[Callable[[], None]]()
        thread = RpcThread(self._ring, calls.put, link_timeout_s=config.link_timeout_s)
        try:
            thread.listen(config.host, port)
            node = SleepingWorker(PeerRegistry(hello, config.routers, thread.dial))
            steps = StepWatchdog(SystemClock(), config.step_timeout_s)
            thread.serve(node, steps)
            while not (node.orders.is_to_wake or node.is_draining or stop.is_set()):
                steps.begin()
                with contextlib.suppress(Empty):
                    calls.get(timeout=IDLE_S)()
        finally:
            thread.close()
        self._order_number = node.orders.latest.number
        return node.orders.is_to_wake and not stop.is_set()

    def _serve_role(self, stop: threading.Event) -> None:
        node, engine, clock = self.node, self.engine, SystemClock()
        notice_s = until_s = math.inf
        while not (clock.now_s() >= until_s or (clock.now_s() >= notice_s and node.is_idle)):
            self._steps.begin()
            self._check_ranks()  # an idle worker, too, ends with its ranks
            node.step()
            if (stop.is_set() or node.is_draining) and until_s == math.inf:
                node.drain()
                notice_s = clock.now_s() + DRAIN_NOTICE_S
                until_s = max(notice_s, clock.now_s() + self._config.drain_timeout_s)
            if not engine.has_work():
                self.endpoint.wait(IDLE_S)
            elif engine.wait_s is not None:
                self.endpoint.wait(min(engine.wait_s, IDLE_S))

    def _check_ranks(self) -> None:
        """Raise WorkerLost when a rank is lost, with the reason that its host gives, if there is one."""
        try:
            self.endpoint.check()
        except WorkerLost:
            if self._nodes is not None:
                self._nodes.failure()  # waits for the reason that the host reports, FAILURE_S at most
                self._nodes.check()
            raise
        if self._nodes is not None:
            self._nodes.check()

    def close(self) -> None:
        """Release everything."""
        self._ends.close()

    def _open_endpoint(self, shared: SharedPool, agents: RankAgents) -> KvEndpoint:
        pool = self.engine.runner.pool.device
        settings = EndpointSettings(
            keys=self._ring,
            fingerprint=self.engine.fingerprint,
            layout=self.engine.runner.layout,
            host=self._config.host,
            transport=self._config.transport,
            has_digests=self._config.kv_digests,
            num_streams=self._config.kv_streams,
            stream_priority=self._config.engine.stream_priority,
            link_timeout_s=self._config.link_timeout_s,
        )
        writable = None if pool.is_cuda else shared
        endpoint = KvEndpoint(
            settings,
            pool,
            self.engine.pages,
            shared=writable,
            agents=agents,
            steps=self.engine.runner.steps,
        )
        endpoint.pin, endpoint.fetch = self.engine.pin, self.engine.load_pages
        return endpoint

    def _make_node(self, thread: RpcThread) -> PrefillWorker | DecodeWorker:
        config, engine, endpoint = self._config, self.engine, self.endpoint
        wanted = (WorkerRole.PREFILL,) if config.role is WorkerRole.DECODE else ()
        peer_registry = PeerRegistry(self._hello(), config.routers, thread.dial, wanted)
        links = self._links
        if config.role is WorkerRole.PREFILL:
            return PrefillWorker(engine, endpoint, peer_registry, SystemClock(), links)
        return DecodeWorker(
            engine,
            endpoint,
            peer_registry,
            SystemClock(),
            links,
            prefill_patience_s=config.link_timeout_s / 2,
        )

    def _hello(self) -> Hello:
        config, engine = self._config, self.engine
        worker = Worker(
            id=secrets.token_hex(16),
            name=config.name,
            incarnation=self._incarnation,
            role=config.role,
            model=config.model_name,
            fingerprint=engine.fingerprint,
            address=self.address,
            kv_address=Address(*self.endpoint.address),
            page_size=engine.pages.page_size,
            num_pages=engine.pages.num_pages,
            max_num_seqs=config.engine.scheduler.max_num_seqs,
            max_num_batched_tokens=config.engine.scheduler.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            tensor_parallel_size=config.engine.tensor_parallel_size,
            pipeline_parallel_size=config.engine.pipeline_parallel_size,
            kv_dtype=engine.runner.layout.kv_dtype,
            num_host_pages=engine.scheduler.cache.host.num_places,
            node=node_name(),
            rank_nodes=tuple(each.node for each in self._rank_hosts),
            pid=os.getpid(),
            order_number=self._order_number,
        )
        return _hello_of(worker)


def _hello_of(worker: Worker) -> Hello:
    return Hello(process=Kind.WORKER, id=worker.id, worker=worker)


def _load(
    config: WorkerConfig,
    shared: SharedPool,
    agents: RankAgents,
    nodes: HostedRanks | None,
    progress: Progress | None,
    weights: Checkpoint | None,
) -> Engine:
    engine_config = _resolved(config)
    if config.role is WorkerRole.PREFILL:  # it samples first tokens alone
        engine_config = msgspec.structs.replace(engine_config, speculative=None)
    engine_config = resolve_draft_model(engine_config)
    return load_engine(
        engine_config,
        progress=progress,
        zeros_on_cpu=shared.zeros,
        sidecar=agents.sidecar,
        nodes=nodes,
        checkpoint=weights,
    )


def _resolved(config: WorkerConfig) -> EngineConfig:
    return msgspec.structs.replace(config.engine, model=str(resolve_model(config.engine.model)))


def _connect(endpoint: KvEndpoint, address: Address, answer: Callable[[Link | None], None]) -> None:
    """Connect to a KV endpoint on a new thread, since that may take seconds; `answer` gets the link."""

    def dial() -> None:
        link: Link | None = None
        try:
            link = endpoint.link((address.host, address.port))
        except BatonError as error:
            logger.warning("KV pages cannot be sent to %s", error)
        finally:
            endpoint.post(lambda: answer(link))

    try:
        threading.Thread(target=dial, name="kv-dial", daemon=True).start()
    except RuntimeError as error:  # the process may have no more threads
        logger.warning("KV pages cannot be sent to %s:%d: %s", address.host, address.port, error)
        endpoint.post(lambda: answer(None))
