"""The router's process: a hub, a router and perhaps a link to Redis, on one event loop."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path
from typing import Final

from baton.clock import SystemClock
from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.messages.bounds import Kind
from baton.messages.workers import Address
from baton.router.decisions import DecisionLog
from baton.router.router import Router
from baton.rpc import process
from baton.rpc.auth import REDIS_NAMES, REDIS_VALUES, ClusterKeys, KeyRing
from baton.rpc.peers import new_router_id
from baton.rpc.server import RpcServer

LEARN_S: Final = 0.5  # a Redis that hangs holds up a router's start no longer

logger = logging.getLogger(__name__)


async def serve_router(
    config: RouterConfig,
    keys: ClusterKeys,
    ready: Callable[[Address], None],
    stopping: asyncio.Event,
    incarnation: int = 0,
) -> None:
    """Route until `stopping` is set. keys: a router's, or the cluster key. ready: told where it listens.

    incarnation: of the start, 0 where there is no supervisor; see `new_router_id`.
    Raises OSError when the port is taken, ConfigError when there can be no such Redis.
    """
    ring = KeyRing.of(keys, Kind.ROUTER)
    rpc_server = RpcServer(keys, link_timeout_s=config.link_timeout_s)
    router = Router(config, SystemClock(), new_router_id(incarnation, time.time(), secrets.token_bytes(16)))
    router.cluster_state.index.warm_up()
    async with AsyncExitStack() as ends:
        ends.push_async_callback(rpc_server.close)
        if config.redis == "auto":
            logger.info("only `baton serve` starts a Redis: what workers hold is known to this process alone")
        elif config.redis != "none" and router.cluster_state.policy.uses_prefix_index:
            await _link(router, config.redis, ring, ends)
        if config.decision_log is not None:
            log = ends.enter_context(closing(DecisionLog(Path(config.decision_log))))
            router.cluster_state.log_to(log.write)
        address = await rpc_server.listen(config.host, config.port)
        rpc_server.serve(router)
        logger.info("the router listens on %s:%d", address.host, address.port)
        with process.freeze_gc():
            ready(address)
            await stopping.wait()


async def _link(router: Router, url: str, keys: KeyRing, ends: AsyncExitStack) -> None:
    """Returns when what Redis knows is known here, or it has taken too long.

    The namespace is the cluster's, which its key names; pages of different models have different names in it.
    """
    try:
        from baton.router.redis.link import RedisLink
        from baton.router.redis.messages import Codec
    except ModuleNotFoundError:
        message = "redis: its Python library is not installed: add it (redis, hiredis), or set redis to none"
        raise ConfigError(message) from None

    namespace = keys.derived(REDIS_NAMES)[:8].hex()
    cluster_state = router.cluster_state
    codec = Codec(keys.derived(REDIS_VALUES))
    link = RedisLink(url, namespace, codec, router.hello.id, cluster_state.index, router.heard)
    cluster_state.link(link)
    router.status_reporter.redis = link
    task = asyncio.create_task(link.run())

    async def stop() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    ends.push_async_callback(stop)
    with suppress(TimeoutError):
        async with asyncio.timeout(LEARN_S):
            await link.has_learned.wait()
