"""Keeps one process of the cluster alive.

1. `start` starts it and waits until it serves.
2. `keep` watches it. What ends is started again, after a pause that grows while that goes on, also after a
   SIGTERM from elsewhere. A process that hangs is killed and replaced: a worker on the routers' verdict
   (`replace`), a router or a gateway when its event loop has been silent for HUNG_S.
3. A worker that has drained, because an operator asked for it by `baton drain`, stays away until `recall`.
   `restart` lets a worker drain and starts it again.
4. `stop` lets it drain within its time, and then ends it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import msgspec

from baton.clock import Clock
from baton.cluster.process_spec import ProcessSpec
from baton.cluster.runtimes.base import ManagedProcess, Runtime
from baton.errors import BatonError
from baton.messages.control import Members
from baton.messages.operations import WorkerRemoved
from baton.messages.workers import Address

# How long a process that keeps ending is left alone before it is started again.

FIRST_S: Final = 0.2
LONGEST_S: Final = 10.0
WELL_AFTER_S: Final = 60.0  # it was no crash loop, then


class BackOff:
    """Doubles from FIRST_S to LONGEST_S, and starts anew after a life of WELL_AFTER_S."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def after(self, lived_s: float) -> float:
        """Seconds to wait now that a life of `lived_s` has ended."""
        if lived_s >= WELL_AFTER_S:
            self._next_s = FIRST_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_S)
        return pause_s


GRACE_S: Final = 5.0  # beyond the time to drain, for a process to end
HUNG_S: Final = 10.0  # of an event loop, longer than any machine that is merely busy holds it up
LOOK_S: Final = 1.0
KILLED_S: Final = 1.0  # for SIGKILL to have its effect, before the successor starts
MIN_VERDICT_S: Final = 2.0  # no router gives a worker up sooner than that after its start
logger = logging.getLogger(__name__)


class Supervised:
    def __init__(self, spec: ProcessSpec, runtime: Runtime, clock: Clock, starts: Iterator[int]) -> None:
        """starts: numbers for the starts of all processes of the cluster, as in worker.Worker."""
        self.spec = spec
        self.is_ready = False
        self.is_away = False  # it was drained
        self.num_restarts = 0
        self._runtime = runtime
        self._clock = clock
        self._starts = starts
        self._back_off = BackOff()
        self._process: ManagedProcess | None = None
        self._is_stopping = False
        self._comes_back = False  # although it drains
        self._started_s = self._ready_s = 0.0
        self._hangs = asyncio.Event()  # `_verdict` says why
        self._verdict = ""

    @property
    def name(self) -> str:
        return self.spec.name

    async def start(self) -> Address:
        """Where it serves. ConfigError or WorkerLost when it ends before."""
        self._started_s = self._clock.now_s()
        self._hangs.clear()
        self._process = await self._runtime.spawn(
            msgspec.structs.replace(self.spec, incarnation=next(self._starts))
        )
        address = await self._process.ready()
        self._ready_s = self._clock.now_s()
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
        """Ends when the process was asked to end, and has, or when it was drained."""
        assert self._process is not None, "start comes first"
        while True:
            try:
                why = await self._until_over(self._process)
            except (
                Exception
            ) as error:  # of the runtime: if this ended `keep`, nothing would start it any more
                logger.exception("%s cannot be watched", self.name)
                self._process.give_up()
                why = f"cannot be watched: {type(error).__name__}"
            self.is_ready = False
            if self._is_stopping:
                return
            if not why and not self._comes_back:
                logger.warning("%s has drained and stays away", self.name)
                self.is_away = True
                return
            await self._start_again(why or "has drained")

    def replace(self, reason: str, age_s: float) -> None:
        """Kill it, though it may not answer, and start its successor: routers gave it up `age_s` ago.

        Nothing happens when that was an earlier process of its name.
        """
        if self.is_ready and self._clock.now_s() - self._ready_s >= age_s + MIN_VERDICT_S:
            self._verdict = reason
            self._hangs.set()

    async def recall(self) -> None:
        """Start it again when it was drained, and keep it; one that still drains comes back when it ends."""
        if not self.is_away:
            self._comes_back = True
            return
        self.is_away = False
        await self._start_again("is called back")
        if not self._is_stopping:
            await self.keep()

    async def restart(self, drain_timeout_s: float) -> None:
        """Let it drain, end it after its time if it has not; `keep` starts it again."""
        if self._process is None or not self.is_ready:
            return
        self._comes_back = True
        process = self._process
        process.stop()
        await self._end_in_time(process, drain_timeout_s)

    async def stop(self, drain_timeout_s: float) -> None:
        self._is_stopping = True
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

    async def _until_over(self, process: ManagedProcess) -> str:
        """Waits for the process to end, or to hang, and says which; "" when it has drained or was stopped."""
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
        """Why it is given up: the routers' verdict, or silence at two looks in a row.

        One look alone may follow a pause of this process itself, with what was said meanwhile unread.
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
        """Try until it serves, or is to stop."""
        self._comes_back = False
        while True:
            pause_s = self._back_off.after(self._clock.now_s() - self._started_s)
            logger.warning("%s %s; it is started again in %.1f s", self.name, why, pause_s)
            await asyncio.sleep(pause_s)
            if self._is_stopping:
                return
            self.num_restarts += 1
            try:
                await self.start()
                return
            except BatonError as error:
                why = f"did not start: {error}"
            except Exception as error:  # as above
                logger.exception("%s did not start", self.name)
                why = f"did not start: {type(error).__name__}"
            if self._process is not None:
                self._process.kill()


# Decides which workers a cluster replaces, from what its routers say of them.
#
# 1. A router removes a worker that is silent, or whose step takes too long: WorkerRemoved is a verdict. Its
# requests go elsewhere from then on.
# 2. The worker is replaced once no connected router lists it: a router that a partition cuts off from the
# workers removes all of them, and the others keep them. A router that has just started and does not know
# all workers yet is waited for.
# 3. A silent worker is given SILENCE_GRACE_S more, since its successor has to load the model: a process that
# was only held up for a moment comes back, and its router lists it again. That drops the verdict.

SILENCE_GRACE_S: Final = 3.0
NOTHING_YET: Final = Members(workers=(), is_complete=False)

# Worker's name, the reason, seconds since its first router removed it.
Replace: TypeAlias = Callable[[str, str, float], None]


class Verdicts:
    """Calls `replace` once for each worker that all connected routers have lost."""

    def __init__(self, now_s: Callable[[], float], replace: Replace) -> None:
        self._now_s = now_s
        self._replace = replace
        self._lists: dict[str, Members] = {}  # id of a connected router -> the workers that it lists
        self._pending: dict[str, tuple[WorkerRemoved, str, float]] = {}  # id of a worker -> router, when

    def joined(self, router: str) -> None:
        self._lists[router] = NOTHING_YET

    def left(self, router: str) -> None:
        """The router's verdicts stand: the worker was silent to it while it was connected."""
        self._lists.pop(router, None)
        self._judge()

    def listed(self, router: str, members: Members) -> None:
        """Take the router's present list of workers."""
        self._lists[router] = members
        for worker in members.workers:
            _, by, _ = self._pending.get(worker.id, (None, "", 0.0))
            if by == router:
                del self._pending[worker.id]
        self._judge()

    def removed(self, router: str, removed: WorkerRemoved) -> None:
        """Take the router's verdict; its list is from before that."""
        members = self._lists.get(router, NOTHING_YET)
        others = tuple(worker for worker in members.workers if worker.id != removed.worker)
        self._lists[router] = Members(workers=others, is_complete=members.is_complete)
        _, _, since_s = self._pending.get(removed.worker, (None, "", self._now_s()))
        self._pending[removed.worker] = (removed, router, since_s)
        self._judge()

    def tick(self) -> None:
        """Replace those whose grace is over; to be called several times a second."""
        if self._pending:
            self._judge()

    def _judge(self) -> None:
        if not all(members.is_complete for members in self._lists.values()):
            return
        listed = [worker for members in self._lists.values() for worker in members.workers]
        ids, names = {worker.id for worker in listed}, {worker.name for worker in listed}
        for worker, (removed, _, since_s) in list(self._pending.items()):
            age_s = self._now_s() - since_s
            if worker in ids or not (removed.is_hung or age_s >= SILENCE_GRACE_S):
                continue
            del self._pending[worker]
            if removed.name not in names:  # else its successor is there already
                self._replace(removed.name, removed.reason, age_s)
