"""Keeps one process of the cluster alive (`Supervised`), and decides which workers to replace (`Verdicts`).

1. `start` starts the process and waits until it serves.
2. `keep` watches it. A process that ends is started again, also after a SIGTERM from elsewhere; while it
   keeps ending, the pause before the next start grows. A process that hangs is killed and replaced: a worker
   when the routers agree (`replace`), a router or a gateway when its event loop has been silent for HUNG_S.
3. A worker that has drained, because an operator ran `baton drain`, stays away until `recall`. `restart` lets
   a worker drain and starts it again.
4. `stop` lets the process drain within its time, and then ends it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import msgspec

from baton.clock import Clock
from baton.cluster.operator_node import WatcherMessage
from baton.cluster.process_spec import ProcessSpec
from baton.cluster.runtimes.base import ManagedProcess, Runtime
from baton.errors import BatonError
from baton.messages.control import Members
from baton.messages.operations import RestartWorker, Undrain, WorkerRemoved
from baton.messages.workers import Address

FIRST_S: Final = 0.2  # pause before a process is started again
LONGEST_S: Final = 10.0
WELL_AFTER_S: Final = 60.0  # a process that lived so long was in no crash loop
GRACE_S: Final = 5.0  # beyond the time to drain, for a process to end
HUNG_S: Final = 10.0  # silence of an event loop, longer than on any machine that is merely busy
LOOK_S: Final = 1.0
KILLED_S: Final = 1.0  # for SIGKILL to take effect, before the successor starts
MIN_VERDICT_S: Final = 2.0  # no router gives a worker up sooner after its start
SILENCE_GRACE_S: Final = 3.0  # for a silent worker to come back: its successor has to load the model
NOTHING_YET: Final = Members(workers=(), is_complete=False)

# Worker's name, the reason, seconds since its first router removed it.
Replace: TypeAlias = Callable[[str, str, float], None]
Order: TypeAlias = Callable[[Undrain | RestartWorker], None]

logger = logging.getLogger(__name__)


class BackOff:
    """A pause that doubles from FIRST_S to LONGEST_S, and starts anew after a life of WELL_AFTER_S."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def after(self, lived_s: float) -> float:
        """Return the seconds to wait after a life of `lived_s` seconds."""
        if lived_s >= WELL_AFTER_S:
            self._next_s = FIRST_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_S)
        return pause_s


class Supervised:
    """One process of the cluster under one name, over all its lives."""

    def __init__(self, spec: ProcessSpec, runtime: Runtime, clock: Clock, starts: Iterator[int]) -> None:
        """starts: incarnation numbers, shared by all processes of the cluster."""
        self.spec = spec
        self.is_ready = False
        self.is_away = False  # the process has drained and waits for `recall`
        self.num_restarts = 0
        self._runtime = runtime
        self._clock = clock
        self._starts = starts
        self._back_off = BackOff()
        self._process: ManagedProcess | None = None
        self._is_stopping = False
        self._comes_back = False  # when it has drained
        self._started_s = self._ready_s = 0.0
        self._hangs = asyncio.Event()  # `_verdict` says why
        self._verdict = ""

    @property
    def name(self) -> str:
        """The name of the process, the same in every life."""
        return self.spec.name

    async def start(self) -> Address:
        """Return the process's address when it serves. ConfigError or WorkerLost: it ended before."""
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
        """Return the process's name, and its progress while it loads weights."""
        loading = await self._process.loading() if self._process else None
        if loading is None or not loading.total_bytes:
            return self.name
        share, size = loading.num_bytes / loading.total_bytes, loading.total_bytes
        amount = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
        return f"{self.name} ({share:.0%} of {amount} of weights)"

    async def keep(self) -> None:
        """Keep the process alive; return when it was stopped, or has drained."""
        assert self._process is not None, "start comes first"
        while True:
            try:
                why = await self._until_over(self._process)
            except Exception as error:  # of the runtime: `keep` must go on
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
        """Kill the process, which may not answer, and start its successor. The routers lost it `age_s` ago.

        Nothing happens when they lost an earlier process of the name.
        """
        if self.is_ready and self._clock.now_s() - self._ready_s >= age_s + MIN_VERDICT_S:
            self._verdict = reason
            self._hangs.set()

    async def recall(self) -> None:
        """Start a drained process again, and keep it. A process that still drains comes back when it ends."""
        if not self.is_away:
            self._comes_back = True
            return
        self.is_away = False
        await self._start_again("is called back")
        if not self._is_stopping:
            await self.keep()

    async def restart(self, drain_timeout_s: float) -> None:
        """Let the process drain, and end it after its time; `keep` starts it again."""
        if self._process is None or not self.is_ready:
            return
        self._comes_back = True
        process = self._process
        process.stop()
        await self._end_in_time(process, drain_timeout_s)

    async def stop(self, drain_timeout_s: float) -> None:
        """Let the process drain, and end it after its time. It is not started again."""
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
        """Wait until the process ends or hangs. Return the reason; "": it has drained or was stopped."""
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
        """Return the reason: the routers' verdict, or silence at two looks in a row.

        One look may follow a pause of the present process, which has not read the newest messages then.
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
        """Try until the process serves, or is to stop."""
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
            except Exception as error:  # of the runtime
                logger.exception("%s did not start", self.name)
                why = f"did not start: {type(error).__name__}"
            if self._process is not None:
                self._process.kill()


class Verdicts:
    """Decides which workers to replace, from the messages of all routers; passes on operators' orders.

    1. A router removes a worker that is silent, or that hangs in a step. Its requests go elsewhere then.
    2. The worker is replaced once no connected router lists it: a router that a partition cuts off from the
       workers removes all of them, and the other routers keep them. A router that has just started and does
       not know all workers yet is waited for.
    3. A silent worker has SILENCE_GRACE_S more. If a router lists it again meanwhile, it is kept.
    """

    def __init__(self, now_s: Callable[[], float], replace: Replace, order: Order) -> None:
        """replace: called once for each worker that all connected routers have lost."""
        self._now_s = now_s
        self._replace = replace
        self._order = order
        self._lists: dict[str, Members] = {}  # id of a connected router -> the workers that it lists
        self._pending: dict[str, tuple[WorkerRemoved, str, float]] = {}  # id of a worker -> router, when

    def joined(self, router: str) -> None:
        """Wait for the list of this router, by its id."""
        self._lists[router] = NOTHING_YET

    def left(self, router: str) -> None:
        """Drop the router's list. Its verdicts stand: it was connected when the worker was silent."""
        self._lists.pop(router, None)
        self._judge()

    def told(self, router: str, message: WatcherMessage) -> None:
        """Take a message of the router with this id."""
        match message:
            case Members():
                self._listed(router, message)
            case WorkerRemoved():
                self._removed(router, message)
            case _:
                self._order(message)

    def _listed(self, router: str, members: Members) -> None:
        self._lists[router] = members
        for worker in members.workers:
            _, by, _ = self._pending.get(worker.id, (None, "", 0.0))
            if by == router:
                del self._pending[worker.id]
        self._judge()

    def _removed(self, router: str, removed: WorkerRemoved) -> None:
        members = self._lists.get(router, NOTHING_YET)
        others = tuple(worker for worker in members.workers if worker.id != removed.worker)
        self._lists[router] = Members(workers=others, is_complete=members.is_complete)
        _, _, since_s = self._pending.get(removed.worker, (None, "", self._now_s()))
        self._pending[removed.worker] = (removed, router, since_s)
        self._judge()

    def tick(self) -> None:
        """Replace the workers after their grace; called several times a second."""
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
