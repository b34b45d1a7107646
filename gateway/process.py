"""The gateway's process: a hub, a frontend and the HTTP server on one event loop."""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from baton.clock import Clock, SystemClock
from baton.config.environment import node_name
from baton.config.gateway import GatewayConfig
from baton.errors import Overloaded
from baton.gateway.api.admin import Canary
from baton.gateway.api.call_reader import CallReader
from baton.gateway.api.inference import Inference, TextRoutes
from baton.gateway.api.stream_socket import StreamSocket
from baton.gateway.app import Parts, make_app
from baton.gateway.http.protocol import HttpLimits
from baton.gateway.http.server import HttpServer
from baton.gateway.metrics.dashboard import Dashboard
from baton.gateway.metrics.exporter import Exporter
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.metrics.peer_gateways import PeerGateways
from baton.gateway.streams import request_stream
from baton.gateway.streams.frontend import Frontend
from baton.gateway.streams.request_stream import Service
from baton.gateway.streams.resume import EventIds
from baton.gateway.tenants.limiter import Limiter
from baton.gateway.tenants.tenants import Tenants, TenantsWatch
from baton.gateway.text.chat_template import ChatTemplate
from baton.gateway.text.model_files import read_sampling_defaults, read_vocab_size
from baton.gateway.text.tokenizer import Tokenizer
from baton.gateway.text.work import HelperSpec, ServedModel, TextWork
from baton.messages.bounds import Kind
from baton.messages.operations import MAX_TENANTS_TOLD, GatewayStatus
from baton.messages.workers import Address
from baton.rpc import process
from baton.rpc.auth import ClusterKeys, KeyRing
from baton.rpc.process import connections_within, raise_descriptor_limit
from baton.rpc.server import RpcServer

SEED_BITS: Final = 63

MEETING_S: Final = 3.0  # for the router and workers to be met; then it listens all the same, and says 503
LOOK_EVERY_S: Final = 0.02

logger = logging.getLogger(__name__)


class GatewayProcess:
    """The HTTP side, over whatever serves its requests: `start` it, then `drain` it."""

    def __init__(
        self, config: GatewayConfig, keys: ClusterKeys, service: Service, clock: Clock, *, name: str = ""
    ) -> None:
        """keys: a gateway's, or the cluster key. name: among the gateways of a cluster, for metrics.

        Raises ModelError and ConfigError, which say what to change.
        """
        ring = KeyRing.of(keys, Kind.GATEWAY)
        self.is_draining = False
        self._address: Address | None = None
        self._shares_port = config.shares_port
        directory = Path(config.model)
        template = ChatTemplate.from_directory(directory, config.chat_template)
        helpers = HelperSpec(directory=directory, chat_template=config.chat_template)
        vocab_size = read_vocab_size(directory)
        self._text = TextWork(Tokenizer.find(directory), template, vocab_size=vocab_size, helpers=helpers)
        self.metrics = metrics = Metrics(name)
        self._siblings = PeerGateways(ring, lambda: metrics.counts(service.counters))
        model = ServedModel(
            name=config.served_model_name or directory.name,
            text=self._text,
            service=service,
            created_s=int(time.time()),
            defaults=read_sampling_defaults(directory, config.generation_config),
        )
        exporter = Exporter(
            metrics, service, self._siblings, model=model.name, vllm_names=config.vllm_metric_names
        )
        self._watch: TenantsWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        tenants = Tenants(ring)
        if config.tenants_file is not None:
            self._watch = TenantsWatch(Path(config.tenants_file), ring, clock)
            tenants, metrics.tenants_file = self._watch.tenants, self._watch.counters
        parts = _parts(config, model, exporter, clock, tenants, EventIds(ring))
        self._inference = parts.inference
        self._server = HttpServer(make_app(parts), config, _limits(config, self.metrics))

    async def prepare(self) -> None:
        """Start what callers would wait for otherwise; `start` does without."""
        await self._text.start()

    async def start(self) -> Address:
        """Where it listens from now on."""
        self._address = address = Address(*await self._server.start())
        if self._shares_port:
            self._siblings.listen(address)
        if self._watch is not None:
            self._watching = asyncio.create_task(self._watch.keep_looking())
        return address

    async def drain(self) -> None:
        """Take nothing new, let what runs end, close. May be called twice."""
        self.is_draining = True
        await self._server.drain(lambda: self._inference.give_up(Overloaded("draining", retry_after_s=1.0)))
        self._siblings.close()
        await self._text.close()
        if self._watching is not None:
            self._watching.cancel()

    def status(self, id: str) -> GatewayStatus:
        """Return what routers are told of this gateway. id: of this life of the process."""
        refused = self.metrics.tenants.refused()
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
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._text.tokenizer if self._text.has_tokenizer else None


async def serve_gateway(
    config: GatewayConfig, keys: ClusterKeys, ready: Callable[[Address], None], stopping: asyncio.Event
) -> None:
    """Serve until `stopping` is set, then drain. keys: a gateway's, or the cluster key.

    ready: told where it listens.

    Raises ConfigError and ModelError, which say what to change.
    """
    config = _within_descriptors(config)
    clock, rpc_server = SystemClock(), RpcServer(keys, link_timeout_s=config.link_timeout_s)
    limits = request_stream.ReplayLimits(
        max_streams=config.max_open_requests + 1,  # the canary's too
        max_wait_s=config.max_wait_s,
        max_begun_wait_s=config.max_begun_wait_s,
    )
    identity = secrets.token_hex(16)
    frontend = Frontend(identity, config.routers, rpc_server.dial, clock, limits)
    gateway = GatewayProcess(config, keys, frontend, clock, name=identity[:8])
    frontend.report = lambda: gateway.status(identity)
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
    """The same, with no more connections than there are descriptors for."""
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
    """A gateway that starts again behind a shared port takes no request that it can not answer yet."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MEETING_S):
            while not (frontend.is_ready or stopping.is_set()):
                await asyncio.sleep(LOOK_EVERY_S)


def _parts(
    config: GatewayConfig,
    model: ServedModel,
    exporter: Exporter,
    clock: Clock,
    tenants: Tenants,
    event_ids: EventIds,
) -> Parts:
    metrics = exporter.metrics
    reader = CallReader(
        model,
        metrics,
        clock,
        draw_seed=lambda: secrets.randbits(SEED_BITS),
        max_answer_entries=config.max_answer_entries,
        event_ids=event_ids,
        calendar_s=time.time,
        strict=config.strict,
    )
    door = Limiter(
        metrics.tenants,
        config.max_open_requests,
        max_input_bytes=config.max_input_bytes,
        max_answer_bytes=config.max_answer_bytes,
    )
    inference = Inference(
        reader,
        model,
        metrics,
        clock,
        calendar_s=time.time,
        ping_interval_s=config.ping_interval_s,
        door=door,
        event_ids=event_ids,
        resume_window_s=config.resume_window_s,
    )
    return Parts(
        model=model,
        inference=inference,
        text_routes=TextRoutes(reader, door),
        stream_socket=StreamSocket(inference, config.idle_timeout_s),
        canary=Canary(model.service, clock, expects_prefill=config.expects_prefill),
        metrics=metrics,
        exporter=exporter,
        dashboard=Dashboard(model.name, clock),
        tenants=tenants,
        operator_port=config.operator_port,
        explain=model.service.explain if isinstance(model.service, Frontend) else None,
    )


def _limits(config: GatewayConfig, metrics: Metrics) -> HttpLimits:
    def refused(code: str) -> None:
        metrics.refused[code] += 1

    return HttpLimits(
        max_connections=config.max_connections,
        max_body_bytes=config.max_body_bytes,
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
        stall_timeout_s=config.stall_timeout_s,
        refused=refused,
    )
