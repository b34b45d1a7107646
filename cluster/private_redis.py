"""The private Redis of a cluster with `--redis auto`: started beside the routers, and kept alive.

A Redis that dies is started again, empty; the routers write their knowledge to it again. Without a Redis the
cluster runs too: its routers share nothing, and learn everything again after a restart.
"""

import asyncio
import logging
from typing import Final

from baton.clock import Clock
from baton.cluster.supervisor import BackOff
from baton.errors import ConfigError
from baton.router.redis.server import PrivateRedis

RETRY_S: Final = 10.0  # after a start that failed

logger = logging.getLogger(__name__)


class KeptRedis:
    """One Redis process under one URL, over all its lives."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._redis = PrivateRedis()
        self._back_off = BackOff()
        self._started_s = clock.now_s()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The id of the present process."""
        return self._redis.pid

    async def start(self) -> str:
        """Start Redis and return its URL, which stays the same. Raises ConfigError."""
        self._started_s = self._clock.now_s()
        try:
            await self._redis.start()
        except OSError as error:
            raise ConfigError(f"redis: {error}") from None
        self._keeping = asyncio.create_task(self._keep())
        return self._redis.url

    async def close(self) -> None:
        """End Redis."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._redis.stop()

    async def _keep(self) -> None:
        while True:
            status = await self._redis.ended()
            pause_s = self._back_off.after(self._clock.now_s() - self._started_s)
            logger.warning("redis ended with status %d; it is started again in %.1f s", status, pause_s)
            await asyncio.sleep(pause_s)
            while not await self._has_started():
                await asyncio.sleep(RETRY_S)

    async def _has_started(self) -> bool:
        self._started_s = self._clock.now_s()
        try:
            await self._redis.start()
        except (ConfigError, OSError) as error:
            logger.error("redis does not start again: %s", error)
            return False
        return True
