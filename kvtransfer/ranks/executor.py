"""One rank's share of all transfers: its pool and doors, and the parts that leave and arrive here.

It decides nothing. What it is told (kvtransfer/ranks/messages.py) it does in the order in which it was told:
at once, but that steps of this rank are waited for which write a page that leaves, or may write one that is
granted. What takes time is done by threads of doors, transports and digests, whose news come back by way of
`post`. In rank 0 the thread is the endpoint's, in a follower the agent's.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from torch import Tensor

from baton.clock import Clock
from baton.kvtransfer.protocol.messages import RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import TransferPlan, plan_transfer
from baton.kvtransfer.ranks.listeners import PoolListeners
from baton.kvtransfer.ranks.messages import (
    ClosePart,
    Command,
    DropLink,
    ForgetPart,
    GrantPart,
    HashUnits,
    OfPart,
    OpenPart,
    PartCommand,
    PartEvent,
    PartOpened,
    PeerRank,
    PushPart,
    RankSettings,
    ReachPeer,
    StopPart,
    UseKeys,
    VerifyPart,
    WriterDied,
)
from baton.kvtransfer.ranks.pages import SharedPool
from baton.kvtransfer.ranks.shards import Hashing, RankTools, ReceiveShard, SendShard
from baton.kvtransfer.ranks.transports import RankTransports
from baton.kvtransfer.transports.message_stream import Post
from baton.kvtransfer.transports.registry import TransportCounters
from baton.messages.bounds import Kind
from baton.rpc.auth import PAGES, KeyRing, LinkKeys, LinkSecret
from baton.rpc.connection import DroppedPeers

# Commands of parts that wait until a step of this rank has come far enough (see engine/cache/page_pool.py).
#
# A command whose mark has passed is carried out at once. Any other waits, and so do all later commands for
# the same part, so that each part hears its commands in the order in which they were given. A thread looks
# whether the marks have passed while anything waits, and sleeps otherwise.

SHORTEST_SLEEP_S: Final = 2e-5  # between two looks; twice as long each time, up to
LONGEST_SLEEP_S: Final = 1e-3


class CompletedSteps(Protocol):
    """How far the steps of this rank have come."""

    def has_passed(self, mark: int) -> bool:
        """Whether all that was launched before the mark is written. From any thread."""


class NoSteps:
    """Of a pool that nobody computes in: whatever is asked for is there."""

    def has_passed(self, mark: int) -> bool:
        return True


class StepGate:
    """`perform` is called by the rank's thread, which `post` reaches."""

    def __init__(
        self,
        steps: CompletedSteps,
        carry_out: Callable[[PartCommand], None],
        post: Post,
        *,
        pushes_wait: bool = True,
    ) -> None:
        """pushes_wait: False where whoever reads the pages waits for what wrote them by itself."""
        self._steps = steps
        self._pushes_wait = pushes_wait
        self._carry_out = carry_out
        self._post = post
        self._waiting: dict[tuple[bytes, int], deque[PartCommand]] = {}  # part -> its commands, never empty
        self._marks: deque[tuple[int, tuple[bytes, int]]] = deque()  # for the thread: mark -> part
        self._has_marks = threading.Condition()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def perform(self, command: PartCommand) -> None:
        key = command.transfer, command.part
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append(command)
        elif self._may(command):
            self._carry_out(command)
        else:
            self._waiting[key] = deque((command,))
            self._watch(self._mark_before(command), key)

    def close(self) -> None:
        """What waits is never carried out. From any thread."""
        self._is_closed.set()
        with self._has_marks:
            self._has_marks.notify()

    def _may(self, command: PartCommand) -> bool:
        mark = self._mark_before(command)
        return not mark or self._steps.has_passed(mark)

    def _watch(self, mark: int, key: tuple[bytes, int]) -> None:
        with self._has_marks:
            self._marks.append((mark, key))
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="kv-steps", daemon=True)
                self._thread.start()
            self._has_marks.notify()

    def _look(self) -> None:
        sleep_s = SHORTEST_SLEEP_S
        while not self._is_closed.is_set():
            with self._has_marks:
                if not self._marks:
                    sleep_s = SHORTEST_SLEEP_S
                    self._has_marks.wait()
                    continue
                found = [each for each in self._marks if self._steps.has_passed(each[0])]
                for each in found:
                    self._marks.remove(each)
            for _, key in found:
                self._post(partial(self._go_on, key))
            if not found:
                self._is_closed.wait(sleep_s)
                sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)

    def _go_on(self, key: tuple[bytes, int]) -> None:
        """The part's first command may be carried out, and those behind it up to one that has to wait."""
        waiting = self._waiting.pop(key)
        while waiting and not self._is_closed.is_set():
            if not self._may(waiting[0]):
                self._waiting[key] = waiting
                self._watch(self._mark_before(waiting[0]), key)
                return
            self._carry_out(waiting.popleft())

    def _mark_before(self, command: PartCommand) -> int:
        """The mark that has to pass before the command; 0 for none."""
        if isinstance(command, OpenPart) or (isinstance(command, PushPart) and self._pushes_wait):
            return command.after
        return 0


Emit = Callable[[PartEvent], None]


class Performer(Protocol):
    """Any rank of a replica, as the transfers see it."""

    def perform(self, command: Command) -> None:
        """Returns at once; what comes of it is emitted."""


class Executor(Performer, Protocol):
    """Any rank of a replica, as its rank 0 sees it. All but `stop` and `close` are called by one thread."""

    @property
    def doors(self) -> RankListenerAddresses: ...

    @property
    def is_lost(self) -> bool:
        """Whether its process is gone, or going: nothing is begun with it any more."""

    def counts(self) -> dict[str, int]:
        """What went wrong or well in it since the start, by name; of another process what it said last."""

    def stop(self) -> None:
        """No page leaves it any more; `wait_until_stopped` says when. From any thread."""

    def wait_until_stopped(self, timeout_s: float) -> bool:
        """Whether it is certain that none leaves."""

    def close(self) -> None:
        """No page of it is written any more on return, but by processes that have mapped them."""


class RankExecutor:
    """The rank of this process."""

    def __init__(
        self,
        settings: RankSettings,
        pool: Tensor,
        shared: SharedPool | None,
        incarnation: bytes,
        post: Post,
        emit: Emit,
        *,
        clock: Clock,
        dropped: DroppedPeers,
        steps: CompletedSteps | None = None,
    ) -> None:
        """shared: what `pool` was made by, if any. incarnation: of this process. emit: our thread's call.

        steps: that write the pool; None: nothing does but transfers.
        """
        self.is_lost = False  # and never will be: we would not know
        self._settings = settings
        self._ring: KeyRing | None = None  # None: the key never changes
        key: LinkSecret
        if isinstance(settings.key, bytes):
            key = settings.key
        else:
            self._ring = KeyRing(Kind.WORKER, settings.key)
            key = LinkKeys(self._ring, PAGES)
        self._hashing = Hashing(settings.num_hashing_threads, may_inline=not pool.is_cuda)
        self.pool_doors = PoolListeners(
            pool,
            shared,
            settings,
            key,
            incarnation,
            lambda registrations: post(partial(self._on_peer_death, registrations)),
            clock=clock,
            dropped=dropped,
        )
        self._dropped = dropped
        self.doors = self.pool_doors.message()
        self._transports = RankTransports(
            settings, key, self.doors, self.pool_doors.pages, post, clock=clock, dropped=dropped
        )
        self._emit = emit
        self._tools = RankTools(self.pool_doors, self._hashing, post, emit)
        self._arriving: dict[bytes, dict[int, ReceiveShard]] = {}  # transfer -> part -> what is known of it
        self._departing: dict[tuple[bytes, int], SendShard] = {}
        # On a GPU rank 0 pushes from the thread of its steps, and the stream that reads follows theirs.
        is_ordered = pool.is_cuda and settings.rank == 0
        self._gate = StepGate(steps or NoSteps(), self._carry_out, post, pushes_wait=not is_ordered)

    @property
    def counters(self) -> TransportCounters:
        return self._transports.counters

    def counts(self) -> dict[str, int]:
        landed = self.pool_doors.registrations.counters.by_name()
        dropped = {f"dropped_{why}": number for why, number in self._dropped.counts().items()}
        return {**self.counters.by_name(), **landed, **dropped}

    def perform(self, command: Command) -> None:
        if isinstance(command, DropLink):
            self._transports.drop(command.link)
        elif isinstance(command, UseKeys):
            if self._ring is not None:
                self._ring.replace(command.generations)
        else:
            self._gate.perform(command)

    def _carry_out(self, command: PartCommand) -> None:
        match command:
            case OpenPart() | ClosePart() | HashUnits() | VerifyPart():
                self._arrive(command)
            case ReachPeer() | GrantPart() | PushPart() | StopPart():
                self._depart(command)
            case ForgetPart():
                self._forget(command)

    def stop(self) -> None:
        self._transports.stop()

    def wait_until_stopped(self, timeout_s: float) -> bool:
        return True  # `stop` has waited

    def close(self) -> None:
        self.stop()
        self._gate.close()
        self.pool_doors.close()
        self._hashing.close()

    # What arrives.

    def _arrive(self, command: OpenPart | ClosePart | HashUnits | VerifyPart) -> None:
        if isinstance(command, OpenPart):
            self._open(command)
            return
        part = self._arriving[command.transfer][command.part]
        match command:
            case ClosePart():
                self._close_part(command, part)
            case HashUnits():
                part.hash(command.first, command.stop)
            case VerifyPart():
                part.verify(command.digests)

    def _open(self, order: OpenPart) -> None:
        parts = self._arriving.setdefault(order.transfer, {})
        part = parts.get(order.part)
        if part is None:
            part = parts[order.part] = ReceiveShard(
                order, self._plan(order.source, order.layers, is_source=False), self._tools
            )
        part.open()
        self._emit(PartOpened(transfer=order.transfer, part=order.part))

    def _close_part(self, command: ClosePart, part: ReceiveShard) -> None:
        """Its pages may be another part's too, with other heads: the table has them until the last closes."""
        generations = self.pool_doors.generations
        others = (other for other in self._arriving[command.transfer].values() if other is not part)
        if generations is not None and not any(other.is_open for other in others):
            generations.revoke(part.pages)
        part.close(is_confirmed=command.is_confirmed)

    def _on_peer_death(self, registrations: list[bytes]) -> None:
        """Their source's process is dead."""
        for transfer, parts in self._arriving.items():
            for number, part in parts.items():
                if part.landing_id in registrations:
                    self._tools.post(partial(self._emit, WriterDied(transfer=transfer, part=number)))

    # What leaves.

    def _depart(self, command: ReachPeer | GrantPart | PushPart | StopPart) -> None:
        key = command.transfer, command.part
        if isinstance(command, ReachPeer):
            transports = self._transports.to(command.link, command.destination)
            plan = self._plan(command.destination, command.layers, is_source=True)
            part = self._departing[key] = SendShard(command, plan, transports, self._tools)
            part.reach()
            return
        part = self._departing[key]
        match command:
            case GrantPart():
                part.grant(command)
            case PushPart():
                part.push(command)
            case StopPart():
                part.stop()

    # Both.

    def _forget(self, command: OfPart) -> None:
        self._departing.pop((command.transfer, command.part), None)
        parts = self._arriving.get(command.transfer)
        if parts is not None:
            parts.pop(command.part, None)
            if not parts:
                del self._arriving[command.transfer]

    def _plan(self, peer: PeerRank, layers: tuple[int, int], *, is_source: bool) -> TransferPlan:
        ours, theirs = (self._settings.layout, self._settings.rank), (peer.layout, peer.rank)
        (source, source_rank), (destination, rank) = (ours, theirs) if is_source else (theirs, ours)
        return plan_transfer(source, destination, source_rank, rank, layers)
