"""The gateway's process: an RPC server, a frontend and the HTTP server on one event loop."""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from fastapi import FastAPI

from baton.adapters import Adapter, NamedAdapter, named_paths, read_adapter
from baton.clock import Clock, SystemClock
from baton.config.environment import node_name
from baton.config.gateway import GatewayConfig, GatewayModel, TextSettings, text_settings
from baton.config.generation_config import read_sampling_defaults
from baton.errors import Overloaded
from baton.gateway.api.adapters import ServedAdapters, add_adapter_routes
from baton.gateway.api.admin import add_admin_routes
from baton.gateway.api.body_reader import BodyReader, ServedModel, ServedModels
from baton.gateway.api.dialects.response_store import add_response_routes
from baton.gateway.api.form_checker import FormChecker
from baton.gateway.api.health import Canary, add_health_routes
from baton.gateway.api.inference import Inference
from baton.gateway.api.sleep import add_sleep_routes
from baton.gateway.app import add_model_routes, add_operator_pages, guard, make_app
from baton.gateway.http.server import HttpServer
from baton.gateway.metrics.dashboard import LiveFeed, add_dashboard_routes
from baton.gateway.metrics.exporter import Exporter
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.metrics.tracing import Tracer
from baton.gateway.peer_gateways import PeerGateways
from baton.gateway.streams import request_stream
from baton.gateway.streams.frontend import Frontend
from baton.gateway.streams.request_stream import Service
from baton.gateway.streams.resume import EventIds
from baton.gateway.tenants.limiter import Limiter
from baton.gateway.tenants.tenants import Tenants, TenantsWatch
from baton.messages.bounds import Kind, short_id
from baton.messages.operations import MAX_TENANTS_TOLD, FindRequests, GatewayStatus
from baton.messages.timeline import RequestTimeline
from baton.messages.workers import Address
from baton.rpc import process
from baton.rpc.auth import ClusterKeys, KeyRing
from baton.rpc.connection import DroppedPeers
from baton.rpc.process import connections_within, raise_descriptor_limit
from baton.rpc.server import RpcServer

READY_S: Final = 3.0  # for the router and workers to connect; then the gateway listens and answers 503
LOOK_EVERY_S: Final = 0.02

logger = logging.getLogger(__name__)


class GatewayProcess:
    """The HTTP side over any Service: `start` it, then `drain` it."""

    def __init__(
        self, config: GatewayConfig, keys: ClusterKeys, service: Service, clock: Clock, *, name: str = ""
    ) -> None:
        """keys: a gateway's, or the cluster key. name: among the gateways of a cluster, for metrics.

        Raises ModelError and ConfigError, which say what to change.
        """
        ring = KeyRing.of(keys, Kind.GATEWAY)
        self.is_draining = False
        self._config = config
        self._address: Address | None = None
        self._forms = forms = FormChecker()
        refused: Counter[str] = Counter()
        self.metrics = Metrics(
            gateway=name,
            refused=refused,
            events=service.counters,
            worker_us=service.worker_us,
            forms=forms.outcomes,
            form_check=forms.times,
        )
        self._peers = PeerGateways(ring)
        self._watch: TenantsWatch | None = None
        self._tasks: list[asyncio.Task[None]] = []  # from `start` to `drain`
        tenants = Tenants(ring)
        if config.tenants_file is not None:
            self._watch = TenantsWatch(Path(config.tenants_file), ring, clock)
            tenants, self.metrics.tenants_file = self._watch.tenants, self._watch.counters
        models = _served_models(config, service)
        self._models, first = models, models.first
        self.limiter = Limiter(self.metrics, config)
        self._tracer = None if config.otlp_traces_endpoint is None else Tracer(config, first.name)
        self._inference = Inference(
            models,
            self.metrics,
            self.limiter,
            clock,
            config,
            EventIds(ring),
            forms,
            peers=self._peers,
            tracer=self._tracer,
        )
        self._adapters = ServedAdapters(models, self._peers, clock)
        exporter = Exporter(
            self.metrics, service, self._peers, models=models.names, vllm_names=config.vllm_metric_names
        )
        self.feed = LiveFeed(exporter, service, clock, model=", ".join(models.names))
        posts = self._inference.posts
        guarded = guard(
            make_app(posts, self._inference.websocket, self._routes(exporter, service, clock)),
            tenants,
            posts=posts,
            answered=self.metrics.answered,
            config=config,
            tracer=self._tracer,
        )
        self._server = HttpServer(guarded, config, refused)

    def _routes(
        self, exporter: Exporter, service: Service, clock: Clock
    ) -> Iterator[Callable[[FastAPI], None]]:
        models, stored = self._models, self._inference.responses
        canaries = [self._canary(model, service, clock) for model in models]
        yield partial(add_health_routes, models=models, canaries=canaries)
        yield partial(add_operator_pages, exporter=exporter)
        yield partial(add_dashboard_routes, feed=self.feed, service=service)
        yield partial(add_model_routes, models=models)
        yield partial(add_admin_routes, service=service, find=self.find)
        yield partial(add_response_routes, store=stored, answers=self.limiter.answers, clock=clock)
        yield partial(add_sleep_routes, models=models)
        yield partial(add_adapter_routes, adapters=self._adapters)

    async def prepare(self) -> None:
        """Start the text helpers, so that no request waits for them; optional before `start`."""
        await asyncio.gather(*(model.bodies.start() for model in self._models))

    async def start(self) -> Address:
        """Listen, and return the address for clients."""
        self._address = address = Address(*await self._server.start())
        if self._config.shares_port:
            self._peers.listen(address)
            await self._adapters.exchange()
            self._tasks.append(asyncio.create_task(self._adapters.keep_exchanging()))
        self._tasks.append(asyncio.create_task(self.feed.keep_reading()))
        if self._watch is not None:
            self._tasks.append(asyncio.create_task(self._watch.keep_looking()))
        return address

    async def drain(self) -> None:
        """Take no new request, let running ones end, close. May be called twice."""
        self.is_draining = True
        self.feed.close()
        if not await self._server.drain():
            self._inference.give_up(Overloaded("draining", retry_after_s=1.0))
        await self._server.closed()
        for task in self._tasks:
            task.cancel()
        await self._peers.close()
        await self._forms.close()
        await asyncio.gather(*(model.bodies.close() for model in self._models))
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def find(self, query: FindRequests) -> Sequence[RequestTimeline]:
        """Return the ended requests of this gateway that a query asks for."""
        return self._inference.requests.find(query)

    def status(self, id: str) -> GatewayStatus:
        """Return the report to routers. id: of this life of the process."""
        refused = self.metrics.refused_calls()
        counts = {tenant: sum(reasons.values()) for tenant, reasons in refused.items()}
        most = sorted(refused, key=lambda tenant: -counts[tenant])[:MAX_TENANTS_TOLD]
        return GatewayStatus(
            id=id,
            node=node_name(),
            pid=os.getpid(),
            address=self._address,
            num_open=self.metrics.num_open,
            num_refused=sum(counts.values()),
            refused={tenant: refused[tenant] for tenant in most},
            demand=self.limiter.demand(),
        )

    def _canary(self, model: ServedModel, service: Service, clock: Clock) -> Canary:
        own = self._config.other_models.get(model.name, self._config)
        return Canary(service, clock, expects_prefill=own.expects_prefill, model=model.key)


async def serve_gateway(
    config: GatewayConfig, keys: ClusterKeys, ready: Callable[[Address], None], stopping: asyncio.Event
) -> None:
    """Serve until `stopping` is set, then drain.

    keys: a gateway's, or the cluster key. ready: called with the address for clients. Raises ConfigError and
    ModelError, which say what to change.
    """
    config = _within_descriptors(config)
    clock, rpc_server = SystemClock(), RpcServer(keys, link_timeout_s=config.link_timeout_s)
    limits = request_stream.ReplayLimits(
        max_streams=config.max_open_requests,
        max_wait_s=config.max_wait_s,
        max_begun_wait_s=config.max_begun_wait_s,
    )
    identity = secrets.token_hex(16)
    wakes = config.wake_on_request
    frontend = Frontend(identity, config.routers, rpc_server.dial, clock, limits, wakes_models=wakes)
    rpc_server.dropped = DroppedPeers(frontend.counters)
    gateway = GatewayProcess(config, keys, frontend, clock, name=short_id(identity))
    frontend.report = lambda: gateway.status(identity)
    frontend.find = gateway.find
    with contextlib.ExitStack() as ends:
        try:
            rpc_server.serve(frontend)
            await gateway.prepare()
            await _until_ready(frontend, stopping)
            address = await gateway.start()
            logger.info("the gateway listens on %s:%d", address.host, address.port)
            ends.enter_context(process.freeze_gc())
            ready(address)
            await stopping.wait()
        finally:
            await gateway.drain()
            await rpc_server.close()


def _within_descriptors(config: GatewayConfig) -> GatewayConfig:
    """Return the settings with no more connections than the process may have descriptors."""
    limit = raise_descriptor_limit()
    most = connections_within(limit)
    if config.max_connections <= most:
        return config
    logger.warning(
        "max_connections is %d, not %d: this process may open %d descriptors; raise the limit (ulimit -n)",
        most,
        config.max_connections,
        limit,
    )
    return msgspec.structs.replace(config, max_connections=most)


async def _until_ready(frontend: Frontend, stopping: asyncio.Event) -> None:
    """Wait READY_S at most for a router and workers; until then other gateways of a shared port answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while frontend.why_not_ready and not stopping.is_set():
                await asyncio.sleep(LOOK_EVERY_S)


def _served_models(config: GatewayConfig, service: Service) -> ServedModels:
    name = config.served_model_name or Path(config.model).name
    first = _served_model(name, config, service, is_one_of_several=bool(config.other_models))
    others = [
        _served_model(name, settings, service, is_one_of_several=True)
        for name, settings in config.other_models.items()
    ]
    return ServedModels([first, *others])


def _served_model(
    name: str, config: GatewayConfig | GatewayModel, service: Service, *, is_one_of_several: bool
) -> ServedModel:
    directory, created_s = Path(config.model), int(time.time())
    return ServedModel(
        name=name,
        key=name if is_one_of_several else "",
        bodies=BodyReader.from_directory(directory, TextSettings(**text_settings(config))),
        service=service,
        created_s=created_s,
        defaults=read_sampling_defaults(
            directory, config.generation_config, config.override_generation_config
        ),
        adapters={
            name: NamedAdapter(name, Adapter(path, read_adapter(path).digest), created_s)
            for name, path in named_paths(config.lora_modules).items()
        },
    )
