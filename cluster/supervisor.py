"""Keeps one process of the cluster alive.

1. `start` starts it and waits until it serves.
2. `keep` watches it. What ends is started again, after a pause that grows while that goes on, also after a
   SIGTERM from elsewhere. What has drained, because an operator asked for it by `baton drain`, stays away.
3. `stop` lets it drain within its time, and then ends it.
"""

import asyncio
import logging
from typing import Final

from baton.clock import Clock
from baton.cluster.back_off import BackOff
from baton.cluster.process_spec import ProcessSpec
from baton.cluster.runtime import Process, Runtime
from baton.errors import BatonError
from baton.worker import Address

GRACE_S: Final = 5.0  # beyond the time to drain, for a process to end

logger = logging.getLogger(__name__)


class Supervised:
    def __init__(self, spec: ProcessSpec, runtime: Runtime, clock: Clock) -> None:
        self.spec = spec
        self.is_ready = False
        self.num_restarts = 0
        self._runtime = runtime
        self._clock = clock
        self._back_off = BackOff()
        self._process: Process | None = None
        self._is_stopping = False
        self._started_s = 0.0

    @property
    def name(self) -> str:
        return self.spec.name

    async def start(self) -> Address:
        """Where it serves. ConfigError or WorkerLost when it ends before."""
        self._started_s = self._clock.now_s()
        self._process = await self._runtime.spawn(self.spec)
        address = await self._process.ready()
        self.is_ready = True
        return address

    async def describe(self) -> str:
        """Its name, and how far it is with loading its weights."""
        loading = await self._process.loading() if self._process else None
        if loading is None or not loading.total_bytes:
            return self.name
        share, size = loading.num_bytes / loading.total_bytes, loading.total_bytes
        amount = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
        return f"{self.name} ({share:.0%} of {amount} of weights)"

    async def keep(self) -> None:
        """Ends when the process was asked to end, and has."""
        assert self._process is not None, "start comes first"
        while True:
            why = await self._process.watch()
            self.is_ready = False
            if self._is_stopping:
                return
            if not why:
                logger.warning("%s has drained and stays away", self.name)
                return
            pause_s = self._back_off.after(self._clock.now_s() - self._started_s)
            logger.warning("%s %s; it is started again in %.1f s", self.name, why, pause_s)
            await asyncio.sleep(pause_s)
            await self._start_again()

    async def stop(self, drain_timeout_s: float) -> None:
        self._is_stopping = True
        if self._process is None:
            return
        self._process.stop()
        try:
            async with asyncio.timeout(drain_timeout_s + GRACE_S):
                await self._process.watch()
        except TimeoutError:
            logger.warning("%s did not end in %.0f s and is ended", self.name, drain_timeout_s + GRACE_S)
            self._process.kill()

    async def _start_again(self) -> None:
        if self._is_stopping:
            return
        self.num_restarts += 1
        try:
            await self.start()
        except BatonError as error:
            logger.error("%s does not start again: %s", self.name, error)
        except Exception:  # of the runtime: if this ended `keep`, nobody would start it any more
            logger.exception("%s does not start again", self.name)
