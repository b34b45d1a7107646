"""One rank's share of all transfers: its pool and doors, and the parts that leave and arrive here.

It decides nothing. What it is told (rank_messages.py) it does in the order in which it was told: at once, but
that steps of this rank are waited for which write a page that leaves, or may write one that is granted. What
takes time is done by threads of doors, transports and digests, whose news come back by way of `post`. In
rank 0 the thread is the endpoint's, in a follower the agent's.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from baton.challenge import LinkSecret, PurposeKeys
from baton.clock import Clock
from baton.keys import PAGES, KeyRing
from baton.kvtransfer.arriving_part import ArrivingPart, RankTools
from baton.kvtransfer.choose import TransportCounters
from baton.kvtransfer.departing_part import DepartingPart
from baton.kvtransfer.hashing import Hashing
from baton.kvtransfer.message_stream import Post
from baton.kvtransfer.messages import RankDoors
from baton.kvtransfer.page_memory import SharedPool
from baton.kvtransfer.pool_doors import PoolDoors
from baton.kvtransfer.rank_messages import (
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
from baton.kvtransfer.rank_transports import RankTransports
from baton.kvtransfer.step_gate import NoSteps, StepGate, StepMarks
from baton.kvtransfer.transfer_plan import TransferPlan, plan_transfer
from baton.wire import DroppedPeers
from baton.wire_types import Kind

Emit = Callable[[PartEvent], None]


class Performer(Protocol):
    """Any rank of a replica, as the transfers see it."""

    def perform(self, command: Command) -> None:
        """Returns at once; what comes of it is emitted."""


class Plane(Performer, Protocol):
    """Any rank of a replica, as its rank 0 sees it. All but `stop` and `close` are called by one thread."""

    @property
    def doors(self) -> RankDoors: ...

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


class RankPlane:
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
        steps: StepMarks | None = None,
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
            key = PurposeKeys(self._ring, PAGES)
        self._hashing = Hashing(settings.num_hashing_threads, may_inline=not pool.is_cuda)
        self.pool_doors = PoolDoors(
            pool,
            shared,
            settings,
            key,
            incarnation,
            lambda landings: post(partial(self._bury, landings)),
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
        self._arriving: dict[bytes, dict[int, ArrivingPart]] = {}  # transfer -> part -> what is known of it
        self._departing: dict[tuple[bytes, int], DepartingPart] = {}
        # On a GPU rank 0 pushes from the thread of its steps, and the stream that reads follows theirs.
        is_ordered = pool.is_cuda and settings.rank == 0
        self._gate = StepGate(steps or NoSteps(), self._carry_out, post, pushes_wait=not is_ordered)

    @property
    def counters(self) -> TransportCounters:
        return self._transports.counters

    def counts(self) -> dict[str, int]:
        landed = self.pool_doors.landings.counters.by_name()
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
            part = parts[order.part] = ArrivingPart(
                order, self._plan(order.source, order.layers, is_source=False), self._tools
            )
        part.open()
        self._emit(PartOpened(transfer=order.transfer, part=order.part))

    def _close_part(self, command: ClosePart, part: ArrivingPart) -> None:
        """Its pages may be another part's too, with other heads: the table has them until the last closes."""
        generations = self.pool_doors.generations
        others = (other for other in self._arriving[command.transfer].values() if other is not part)
        if generations is not None and not any(other.is_open for other in others):
            generations.revoke(part.pages)
        part.close(is_confirmed=command.is_confirmed)

    def _bury(self, landings: list[bytes]) -> None:
        """Their source's process is dead."""
        for transfer, parts in self._arriving.items():
            for number, part in parts.items():
                if part.landing_id in landings:
                    self._tools.post(partial(self._emit, WriterDied(transfer=transfer, part=number)))

    # What leaves.

    def _depart(self, command: ReachPeer | GrantPart | PushPart | StopPart) -> None:
        key = command.transfer, command.part
        if isinstance(command, ReachPeer):
            transports = self._transports.to(command.link, command.destination)
            plan = self._plan(command.destination, command.layers, is_source=True)
            part = self._departing[key] = DepartingPart(command, plan, transports, self._tools)
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
