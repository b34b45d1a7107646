"""Keeps processes of the cluster alive.

1. `start` starts the process and waits until it serves.
2. `keep` starts it unless it serves, and watches it. A process that ends is started again, also after a
   SIGTERM from elsewhere; while it keeps ending, the pause before the next start grows. A process that hangs
   is killed and replaced: a worker when the routers agree (`replace`), a router or a gateway when its event
   loop has been silent for HUNG_S.
3. A worker that an operator drains (`baton drain`) is not started again until `undrain`, also when it dies
   or hangs meanwhile. `restart` lets a worker drain and starts it again.
4. `stop` lets the process drain within its time, and then ends it.
"""

import asyncio
import logging
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from baton.clock import Clock
from baton.cluster.runtimes.base import ManagedProcess, ProcessSpec, Runtime
from baton.errors import BatonError, WorkerLost

FIRST_S: Final = 0.2  # pause before a process is started again
LONGEST_S: Final = 10.0
WELL_AFTER_S: Final = 60.0  # a process that lived so long was in no crash loop
GRACE_S: Final = 5.0  # beyond the time to drain, for a process to end
HUNG_S: Final = 10.0  # silence of an event loop, longer than on any machine that is merely busy
LOOK_S: Final = 1.0
KILLED_S: Final = 1.0  # for SIGKILL to take effect, before the successor starts
MAX_STARTUPS: Final = 16  # start-ups kept for the planner
MIN_VERDICT_S: Final = 2.0  # no router gives a worker up sooner after its start

logger = logging.getLogger(__name__)


class BackOff:
    """A pause that doubles from FIRST_S to LONGEST_S, and is FIRST_S again after a life of WELL_AFTER_S."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def after(self, lived_s: float) -> float:
        """Return the seconds to wait after a life of `lived_s` seconds."""
        if lived_s >= WELL_AFTER_S:
            self._next_s = FIRST_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_S)
        return pause_s


class Supervised:
    """A process of the cluster that is started again, under the same name, each time it ends."""

    def __init__(
        self,
        spec: ProcessSpec,
        runtime: Runtime,
        clock: Clock,
        starts: Iterator[int],
        start_timeout_s: float,
    ) -> None:
        """starts: yields incarnation numbers, and is shared by all processes of the cluster.

        start_timeout_s: seconds that a process has to serve after the runtime has started it.
        """
        self.spec = spec
        self.is_ready = False
        self.is_drained = False  # the process has drained and waits for `undrain`
        self.startups_s: list[float] = []  # of the starts that the planner has not heard of
        self._runtime = runtime
        self._clock = clock
        self._starts = starts
        self._start_timeout_s = start_timeout_s
        self._back_off = BackOff()
        self._process: ManagedProcess | None = None
        self._stopping = asyncio.Event()
        # After the end of the process: a start, or no start until `undrain`. None: no start after a drain.
        self._after_end: Literal["start", "rest"] | None = None
        self._called_back = asyncio.Event()  # a process that rests is called back, or stopped
        self._started_s = self._ready_s = 0.0
        self._hangs = asyncio.Event()  # `_verdict` says why
        self._verdict = ""

    @property
    def name(self) -> str:
        """The name of the process, the same in every life."""
        return self.spec.name

    async def start(self) -> None:
        """Start the process, and wait until it serves.

        Raises ConfigError or WorkerLost when the process ends before it serves, and WorkerLost when it does
        not serve within `start_timeout_s`.
        """
        self._started_s = self._clock.now_s()
        self._hangs.clear()
        self._process = await self._runtime.spawn(
            msgspec.structs.replace(self.spec, incarnation=next(self._starts))
        )
        if self._stopping.is_set():  # `stop` came too early for this process
            self._process.kill()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._process.ready()
        except TimeoutError:
            self._process.give_up()
            raise WorkerLost(f"it does not serve after {self._start_timeout_s:.0f} s") from None
        self._ready_s = self._clock.now_s()
        self.startups_s = [*self.startups_s[-MAX_STARTUPS + 1 :], self._ready_s - self._started_s]
        self.is_ready = True
        self._after_end = None  # an order may have come while it started

    async def describe(self) -> str:
        """Return the process's name, and its progress while it loads weights."""
        loading = await self._process.loading() if self._process else None
        if loading is None or not loading.total_bytes:
            return self.name
        share, size = loading.num_bytes / loading.total_bytes, loading.total_bytes
        amount = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
        return f"{self.name} ({share:.0%} of {amount} of weights)"

    async def keep(self) -> None:
        """Keep the process alive until it is stopped. A process that does not serve is started first."""
        why = "" if self.is_ready else await self._try_to_start()
        while True:
            await self._start_again(why)
            if self._stopping.is_set():
                return
            assert self._process is not None, "it serves"
            try:
                why = await self._until_over(self._process)
            except Exception as error:  # of the runtime: `keep` must go on
                logger.exception("%s cannot be watched", self.name)
                self._process.give_up()
                why = f"cannot be watched: {type(error).__name__}"
            self.is_ready = False
            if self._stopping.is_set():
                return
            has_drained, why = not why, why or "has drained"
            if self._after_end == "rest" or (self._after_end is None and has_drained):
                logger.warning("%s %s and stays away", self.name, why)
                await self._until_called_back()
                if self._stopping.is_set():
                    return
                why = "is called back"

    def replace(self, reason: str, age_s: float) -> None:
        """Kill the process, which may not answer, and start its successor.

        age_s: seconds since the routers removed the process. When the present process is younger, the routers
        mean an earlier process of the name, and nothing happens.
        """
        if self.is_ready and self._clock.now_s() - self._ready_s >= age_s + MIN_VERDICT_S:
            self._verdict = reason
            self._hangs.set()

    def drain(self) -> None:
        """Keep the process down once it ends, also when it dies: a router has told it to drain."""
        self._after_end = "rest"

    def undrain(self) -> None:
        """Have `keep` start a drained process again; one that still drains, when it has ended."""
        self._after_end = "start"
        self._called_back.set()

    async def restart(self, drain_timeout_s: float) -> None:
        """Let the process drain for `drain_timeout_s`, then end it; it is started again.

        A process that does not serve yet is killed.
        """
        if (process := self._process) is None:
            return
        if not self.is_ready:
            process.kill()
            return
        self._after_end = "start"
        process.stop()
        await self._end_in_time(process, drain_timeout_s)

    async def stop(self, drain_timeout_s: float) -> None:
        """Let the process drain for `drain_timeout_s`, then end it for good."""
        self._stopping.set()
        self._called_back.set()
        if self._process is None:
            return
        self._process.stop()
        await self._end_in_time(self._process, drain_timeout_s)

    async def _end_in_time(self, process: ManagedProcess, drain_timeout_s: float) -> None:
        try:
            async with asyncio.timeout(drain_timeout_s + GRACE_S):
                await process.watch()
        except TimeoutError:
            logger.warning("%s did not end in %.0f s and is ended", self.name, drain_timeout_s + GRACE_S)
            process.kill()

    async def _until_called_back(self) -> None:
        self.is_drained = True
        self._called_back.clear()
        await self._called_back.wait()
        self.is_drained = False

    async def _until_over(self, process: ManagedProcess) -> str:
        """Wait until the process ends or hangs. Return the reason; "" after a drain or a stop."""
        ending = asyncio.create_task(process.watch())
        hanging = asyncio.create_task(self._until_it_hangs(process))
        try:
            await asyncio.wait((ending, hanging), return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return ending.result()
            process.give_up()
            await asyncio.wait((ending,), timeout=KILLED_S)
            return f"hangs and is killed: {hanging.result()}"
        finally:
            ending.cancel()
            hanging.cancel()
            await asyncio.gather(ending, hanging, return_exceptions=True)

    async def _until_it_hangs(self, process: ManagedProcess) -> str:
        """Wait for the routers' verdict, or for silence at two looks in a row. Return the reason.

        A pause of the present process also looks like silence, because the newest messages are unread. So one
        look is not enough.
        """
        num_silent = 0
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._hangs.wait()
                    return self._verdict
            except TimeoutError:
                silent_s = await process.silent_s()
            num_silent = num_silent + 1 if silent_s > HUNG_S else 0
            if num_silent >= 2:
                return f"its event loop has been silent for {silent_s:.0f} s"

    async def _start_again(self, why: str) -> None:
        """Start the process, as often as necessary, until it serves or `stop` was called.

        why: the reason for a start; "": the process serves, and nothing is started.
        """
        while why:
            pause_s = self._back_off.after(self._clock.now_s() - self._started_s)
            logger.warning("%s %s; it is started again in %.1f s", self.name, why, pause_s)
            await asyncio.sleep(pause_s)
            if self._stopping.is_set():
                return
            why = await self._try_to_start()

    async def _try_to_start(self) -> str:
        """Start the process. Return why it does not serve; "": it does."""
        try:
            await self.start()
            return ""
        except BatonError as error:
            why = f"did not start: {error}"
        except Exception as error:  # of the runtime
            logger.exception("%s did not start", self.name)
            why = f"did not start: {type(error).__name__}"
        if self._process is not None:
            self._process.kill()
        return why
