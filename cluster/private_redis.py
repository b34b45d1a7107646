"""The Redis of a cluster that was asked for none of its own: started beside its routers, and kept alive.

It is started again, empty, when it dies; routers tell it afresh what they know. That there can be none is no
failure of the cluster: its routers then share nothing, and learn everything anew when they are restarted.
"""

import asyncio
import logging
from typing import Final

from baton.clock import Clock
from baton.cluster.supervisor import BackOff
from baton.errors import ConfigError
from baton.router.redis.server import PrivateRedis

RETRY_S: Final = 10.0  # after one that did not start

logger = logging.getLogger(__name__)


class KeptRedis:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._redis = PrivateRedis()
        self._back_off = BackOff()
        self._started_s = clock.now_s()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._redis.pid

    async def start(self) -> str:
        """Its url, which stays. ConfigError: why there is none."""
        self._started_s = self._clock.now_s()
        try:
            await self._redis.start()
        except OSError as error:
            raise ConfigError(f"redis: {error}") from None
        self._keeping = asyncio.create_task(self._keep())
        return self._redis.url

    async def close(self) -> None:
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
