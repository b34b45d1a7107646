"""The router's process: a hub and a router on one event loop."""

import asyncio
import logging
import secrets
from collections.abc import Callable

from baton.clock import SystemClock
from baton.hub import Hub
from baton.router.router import Router
from baton.router_config import RouterConfig
from baton.worker import Address

logger = logging.getLogger(__name__)


async def serve_router(
    config: RouterConfig, key: bytes, ready: Callable[[Address], None], stopping: asyncio.Event
) -> None:
    """Route until `stopping` is set. key: the cluster's. ready: told where it listens.

    Raises OSError when the port is taken.
    """
    hub = Hub(key)
    try:
        address = await hub.listen(config.host, config.port)
        hub.serve(Router(config, SystemClock(), secrets.token_hex(16)))
        logger.info("the router listens on %s:%d", address.host, address.port)
        ready(address)
        await stopping.wait()
    finally:
        await hub.close()
