"""One rank's part of all transfers: its pool, its listeners, and the shards that it sends and receives.

The executor makes no decisions. It carries out the commands of rank 0 (kvtransfer/ranks/messages.py) in
order, each at once unless a step of this rank still writes the pages. Listeners, transports and digests do
the slow work in threads of their own and report through `post`. One thread makes all calls to an executor:
the endpoint's in rank 0, the agent's in any other rank.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from baton.clock import Clock
from baton.kvtransfer.protocol.messages import DIGEST_BYTES, PeerRank, RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import TransferPlan, plan_transfer
from baton.kvtransfer.ranks.digests import ShardDigests, UnitDigests, differing_units
from baton.kvtransfer.ranks.messages import (
    CloseShard,
    Command,
    DropLink,
    ForgetShard,
    HashUnits,
    OpenShard,
    PushEnded,
    PushUnits,
    ReachPeer,
    ShardCommand,
    ShardEvent,
    ShardOpened,
    ShardReached,
    ShardStopped,
    ShardVerified,
    StopShard,
    UnitsHashed,
    UseKeys,
    VerifyShard,
    WriterStopped,
    registration_id,
)
from baton.kvtransfer.ranks.peer_transports import PeerTransports, RankTransports
from baton.kvtransfer.transports.base import (
    MAX_REASON,
    LocalRank,
    Piece,
    PieceOutcome,
    RankSettings,
    TransportSet,
    this_host,
)
from baton.kvtransfer.transports.pages import SharedPool
from baton.kvtransfer.transports.receive_registration import ReceiveRegistration
from baton.rpc.connection import DROPPED, Call, DroppedPeers, Post

logger = logging.getLogger(__name__)
Emit: TypeAlias = Callable[[ShardEvent], None]


class RankTools(NamedTuple):
    """The objects that all shards of a rank share."""

    rank: LocalRank
    digests: UnitDigests
    post: Post  # hands a call to the rank's thread
    emit: Emit  # reports to rank 0, from the rank's thread


class ReceiveShard:
    """A shard that this rank receives. The rank's thread makes all calls.

    The shard's registration says which bytes the rank accepts. For sources that write shared memory directly,
    the table of page generations says it too.

    Threads hash units as soon as the source reports them written, so little is left to do after the last
    units. The digests are compared when nothing can write the shard any more. Until then the source can only
    write the same bytes to these units again, so a correct digest stays correct.
    """

    def __init__(self, order: OpenShard, plan: TransferPlan, tools: RankTools) -> None:
        self.pages = order.pages
        self.registration_id = registration_id(order.transfer, order.shard)
        self.is_open = False
        self._order = order
        self._plan = plan
        self._tools = tools
        self._digests = ShardDigests(tools.digests, order.digest_key, order.shard)
        self._registrations = tools.rank.registrations
        self._found = bytearray(order.num_units * DIGEST_BYTES)
        self._hashes: list[tuple[int, int, Future[bytes]]] = []  # [first, stop), in the order of writing

    def open(self) -> None:
        """Accept the shard's bytes, for the first time or again."""
        generations, order = self._tools.rank.generations, self._order
        registration = ReceiveRegistration(
            id=self.registration_id,
            epoch=order.epoch,
            plan=self._plan,
            num_units=order.num_units,
            pages=order.pages,
            writer=order.source.listeners.incarnation,
            may_write_directly=generations is not None,
        )
        self._registrations.add(registration)
        self.is_open = True
        if generations is not None:
            generations.grant(order.pages, order.generations)

    def close(self, *, is_confirmed: bool) -> None:
        """Accept no more bytes; WriterStopped follows once no byte of the shard can be written."""
        self.is_open = False
        if is_confirmed:
            self._registrations.release(self.registration_id)
        stopped = WriterStopped(transfer=self._order.transfer, shard=self._order.shard)
        self._registrations.close(self.registration_id, on_safe=lambda: self._emit_later(stopped))

    def hash(self, first: int, stop: int) -> None:
        """Hash units [first, stop), which are written."""
        plan = self._plan
        digests = self._digests.submit(plan.as_stored(), plan.destination, self._order.pages, first, stop)
        self._hashes.append((first, stop, digests))

    def verify(self, expected: bytes) -> None:
        """Compare the digests once all are taken; ShardVerified follows later."""
        waiting = [digests for _, _, digests in self._hashes if not digests.done()]
        if waiting:
            waiting[-1].add_done_callback(lambda _: self._tools.post(lambda: self.verify(expected)))
            return
        for first, stop, digests in self._hashes:
            if digests.cancelled():
                continue
            if (error := digests.exception()) is not None:
                logger.error("the digest of received units failed, they count as corrupt: %r", error)
            else:
                self._found[first * DIGEST_BYTES : stop * DIGEST_BYTES] = digests.result()
        self._hashes.clear()
        corrupt_units = differing_units(expected, bytes(self._found))
        self._emit_later(
            ShardVerified(transfer=self._order.transfer, shard=self._order.shard, corrupt_units=corrupt_units)
        )

    def _emit_later(self, event: ShardEvent) -> None:
        self._tools.post(lambda: self._tools.emit(event))


class SendShard:
    """A shard that this rank sends. The rank's thread makes all calls.

    A piece is hashed from its source pages after it is written. Pieces of bulk transfers from CPU memory are
    hashed while they are written: the pages are complete, and a busy rank would begin the hash a step later.
    """

    def __init__(
        self, order: ReachPeer, plan: TransferPlan, transports: PeerTransports, tools: RankTools
    ) -> None:
        self._order = order
        self._registration_id = registration_id(order.transfer, order.shard)
        self._plan = plan
        self._transports = transports
        self._tools = tools
        self._digests = ShardDigests(tools.digests, order.digest_key, order.shard)
        self._pages: tuple[int, ...] = ()

    def reach(self) -> None:
        """Open a transport to the destination; ShardReached follows, at once or later."""
        self._transports.when_settled(self._reached)

    def push(self, order: PushUnits) -> None:
        """Write a piece. PushEnded follows and, if the piece was written, UnitsHashed."""
        reach = self._order
        self._pages += order.more_pages
        piece = Piece(
            transfer=self._registration_id,
            epoch=reach.epoch,
            plan=self._plan,
            source_pages=self._pages,
            destination_pages=reach.pages,
            destination_generations=reach.generations,
            first=order.first,
            stop=order.stop,
            is_bulk=reach.is_bulk,
        )
        is_early = reach.is_bulk and self._tools.digests.is_in_place and self._digests.are_taken
        digests = self._take_digests(piece) if is_early else None
        self._transports.push(piece, partial(self._written, piece, digests))

    def stop(self) -> None:
        """Abort all pushes and emit ShardStopped: after the return nothing reads or writes for the shard."""
        self._transports.abort(self._registration_id)
        self._tools.emit(ShardStopped(transfer=self._order.transfer, shard=self._order.shard))

    def _reached(self) -> None:
        name = self._transports.name or ""
        self._tools.emit(ShardReached(transfer=self._order.transfer, shard=self._order.shard, transport=name))

    def _written(self, piece: Piece, digests: "Future[bytes] | None", outcome: PieceOutcome) -> None:
        self._tools.emit(
            PushEnded(
                transfer=self._order.transfer,
                shard=self._order.shard,
                first=piece.first,
                stop=piece.stop,
                outcome=outcome,
            )
        )
        if not outcome.is_done:
            return
        taken = digests or self._take_digests(piece)
        if taken.done():
            self._hashed(piece, taken)
        else:
            taken.add_done_callback(lambda taken: self._tools.post(partial(self._hashed, piece, taken)))

    def _hashed(self, piece: Piece, taken: "Future[bytes]") -> None:
        error = taken.exception()
        self._tools.emit(
            UnitsHashed(
                transfer=self._order.transfer,
                shard=self._order.shard,
                first=piece.first,
                stop=piece.stop,
                digests=b"" if error is not None else taken.result(),
                reason="" if error is None else f"the digest of a piece failed: {error!r}"[:MAX_REASON],
            )
        )

    def _take_digests(self, piece: Piece) -> "Future[bytes]":
        return self._digests.submit(
            self._plan, self._plan.source, piece.source_pages, piece.first, piece.stop
        )


class Background(Protocol):
    """Makes calls outside a rank's thread. What a call does to the rank, it posts to that thread."""

    def start(self, call: Call) -> None:
        """Make a call that may take seconds. RuntimeError: the process may have no more threads."""

    def when(self, has_happened: Callable[[], bool], call: Call) -> None:
        """Make the call soon after the condition holds. Any thread may check the condition."""

    def close(self) -> None:
        """Stop checking conditions. Any thread may call."""


SHORTEST_SLEEP_S: Final = 2e-5  # between two checks of the conditions; each further one is twice as long
LONGEST_SLEEP_S: Final = 1e-3


class BackgroundThreads:
    """The `Background` of a process: a thread for each call that takes long, and one for all conditions."""

    def __init__(self) -> None:
        self._awaited: deque[tuple[Callable[[], bool], Call]] = deque()
        self._has_awaited = threading.Condition()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, call: Call) -> None:
        threading.Thread(target=call, name="kv-open", daemon=True).start()

    def when(self, has_happened: Callable[[], bool], call: Call) -> None:
        with self._has_awaited:
            self._awaited.append((has_happened, call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._check, name="kv-steps", daemon=True)
                self._thread.start()
            self._has_awaited.notify()

    def close(self) -> None:
        self._is_closed.set()
        with self._has_awaited:
            self._has_awaited.notify()

    def _check(self) -> None:
        sleep_s = SHORTEST_SLEEP_S
        while not self._is_closed.is_set():
            with self._has_awaited:
                if not self._awaited:
                    sleep_s = SHORTEST_SLEEP_S
                    self._has_awaited.wait()
                    continue
                found = [each for each in self._awaited if each[0]()]
                for each in found:
                    self._awaited.remove(each)
            for _, call in found:
                call()
            if not found:
                self._is_closed.wait(sleep_s)
                sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)


class CompletedSteps(Protocol):
    """The progress of this rank's steps."""

    def has_passed(self, mark: int) -> bool:
        """Return True when the work that was launched before the mark has ended. Any thread may call."""


class StepGate:
    """Delays commands until the steps of this rank have passed their marks (see engine/cache/page_pool.py).

    A command runs at once when its mark has passed. Otherwise it waits, and all later commands for the same
    shard wait behind it, so each shard gets its commands in order.
    """

    def __init__(
        self,
        steps: CompletedSteps | None,
        carry_out: Callable[[ShardCommand], None],
        post: Post,
        background: Background,
        *,
        pushes_wait: bool = True,
    ) -> None:
        """steps: None: every mark has passed. carry_out: called by the rank's thread. background: checks
        whether marks have passed.

        pushes_wait: False when reads of pages are ordered after their writes in any case.
        """
        self._steps = steps
        self._pushes_wait = pushes_wait
        self._carry_out = carry_out
        self._post = post
        self._background = background
        self._waiting: dict[tuple[bytes, int], deque[ShardCommand]] = {}  # by shard; none is empty
        self._is_closed = False

    def perform(self, command: ShardCommand) -> None:
        key = command.transfer, command.shard
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append(command)
        elif self._can_run(command):
            self._carry_out(command)
        else:
            self._waiting[key] = deque((command,))
            self._wait(key)

    def close(self) -> None:
        """Drop the commands that wait. Any thread may call."""
        self._is_closed = True

    def _can_run(self, command: ShardCommand) -> bool:
        mark = self._mark_before(command)
        return not mark or self._steps is None or self._steps.has_passed(mark)

    def _wait(self, key: tuple[bytes, int]) -> None:
        """Resume the shard once its first command can run."""
        has_passed = partial(self._can_run, self._waiting[key][0])
        self._background.when(has_passed, partial(self._post, partial(self._resume, key)))

    def _resume(self, key: tuple[bytes, int]) -> None:
        """Run the shard's commands up to the next one that has to wait."""
        waiting = self._waiting.pop(key)
        while waiting and not self._is_closed:
            if not self._can_run(waiting[0]):
                self._waiting[key] = waiting
                self._wait(key)
                return
            self._carry_out(waiting.popleft())

    def _mark_before(self, command: ShardCommand) -> int:
        """Return the mark that has to pass before the command can run; 0 for none."""
        if isinstance(command, OpenShard) or (isinstance(command, PushUnits) and self._pushes_wait):
            return command.after
        return 0


class RankExecutor:
    """The executor of the rank in this process. One thread makes all calls except `stop` and `close`."""

    def __init__(
        self,
        settings: RankSettings,
        pool: Tensor,
        shared: SharedPool | None,
        incarnation: bytes,
        transports: TransportSet,
        post: Post,
        emit: Emit,
        *,
        clock: Clock,
        dropped: DroppedPeers,
        steps: CompletedSteps | None = None,
        node: str = "",
        background: Background | None = None,
    ) -> None:
        """pool, shared, incarnation: see LocalRank. emit: called by the rank's thread. post: hands a call to
        that thread.

        steps: the steps that write the pool; None: only transfers write it. node: the address of the rank's
        node, if the ranks are on several nodes. background: None: threads.
        """
        self.rank = LocalRank(
            pool,
            settings,
            incarnation,
            shared=shared,
            on_writer_death=lambda registrations: post(partial(self._on_writer_death, registrations)),
            clock=clock,
            dropped=dropped,
        )
        # Now: a transfer that waited for the compiler would time out.
        self.rank.packing().warm_up(
            plan_transfer(settings.layout, settings.layout, settings.rank, settings.rank)
        )
        self._open_listeners = transports.listen(self.rank)
        self.listeners = RankListenerAddresses(
            incarnation=incarnation,
            host=this_host(),
            device=self.rank.device,
            node=node,
            addresses={name: listener.address for name, listener in self._open_listeners.items()},
        )
        self._background = background or BackgroundThreads()
        self._transports = RankTransports(self.rank, self.listeners, transports, post, self._background.start)
        self._emit = emit
        self._digests = UnitDigests(self.rank)
        self._tools = RankTools(self.rank, self._digests, post, emit)
        self._receiving: dict[bytes, dict[int, ReceiveShard]] = {}  # transfer -> shard
        self._sending: dict[tuple[bytes, int], SendShard] = {}  # (transfer, shard)
        # On a GPU, rank 0 pushes from the thread of its steps, on a stream that is ordered after theirs.
        is_ordered = pool.is_cuda and settings.rank == 0
        self._gate = StepGate(steps, self._carry_out, post, self._background, pushes_wait=not is_ordered)

    def counts(self) -> dict[str, int]:
        """Return the rank's counters since its start, by name."""
        dropped = {DROPPED + reason: number for reason, number in self.rank.dropped.counts().items()}
        return {**self._transports.counts, **self.rank.registrations.counts(), **dropped}

    def in_use(self) -> list[tuple[int, str, str]]:
        """Return the link, the open transport and the first choice of each peer's rank."""
        return self._transports.in_use()

    def perform(self, command: Command) -> None:
        """Begin to carry out a command; its events follow later."""
        match command:
            case DropLink(link=link):
                self._transports.drop(link)
            case UseKeys(generations=generations):
                self.rank.keys.replace(generations)
            case _:
                self._gate.perform(command)

    def stop(self) -> None:
        """Stop sending pages. On return no page can leave the rank. Any thread may call."""
        self._transports.stop()

    def close(self) -> None:
        """Stop the rank. After the return only processes that have mapped the pool can write its pages."""
        self.stop()
        self._gate.close()
        self._background.close()
        for listener in self._open_listeners.values():
            listener.close()
        self.rank.close()
        self._digests.close()

    def _carry_out(self, command: ShardCommand) -> None:
        match command:
            case OpenShard():
                self._open(command)
            case CloseShard():
                self._close_shard(command)
            case HashUnits():
                self._receiving[command.transfer][command.shard].hash(command.first, command.stop)
            case VerifyShard():
                self._receiving[command.transfer][command.shard].verify(command.digests)
            case ReachPeer():
                self._reach(command)
            case PushUnits():
                self._sending[command.transfer, command.shard].push(command)
            case StopShard():
                self._sending[command.transfer, command.shard].stop()
            case ForgetShard():
                self._forget(command)

    def _open(self, order: OpenShard) -> None:
        shards = self._receiving.setdefault(order.transfer, {})
        shard = shards.get(order.shard)
        if shard is None:
            plan = self._plan(order.source, order.layers, is_source=False)
            shard = shards[order.shard] = ReceiveShard(order, plan, self._tools)
        shard.open()
        self._emit(ShardOpened(transfer=order.transfer, shard=order.shard))

    def _close_shard(self, command: CloseShard) -> None:
        """Close one shard. Shards share pages (each has other heads), so the last one revokes the pages."""
        shards, generations = self._receiving[command.transfer], self.rank.generations
        shard = shards[command.shard]
        others = (other for other in shards.values() if other is not shard)
        if generations is not None and not any(other.is_open for other in others):
            generations.revoke(shard.pages)
        shard.close(is_confirmed=command.is_confirmed)

    def _on_writer_death(self, registrations: list[bytes]) -> None:
        """Close the shards that dead writers have left; WriterStopped follows."""
        dead = [
            CloseShard(transfer=transfer, shard=shard, is_confirmed=True)
            for transfer, shards in self._receiving.items()
            for shard, state in shards.items()
            if state.registration_id in registrations
        ]
        for command in dead:
            self._close_shard(command)

    def _reach(self, order: ReachPeer) -> None:
        transports = self._transports.to(order.link, order.destination)
        plan = self._plan(order.destination, order.layers, is_source=True)
        shard = SendShard(order, plan, transports, self._tools)
        self._sending[order.transfer, order.shard] = shard
        shard.reach()

    def _forget(self, command: ForgetShard) -> None:
        self._sending.pop((command.transfer, command.shard), None)
        shards = self._receiving.get(command.transfer)
        if shards is not None:
            shards.pop(command.shard, None)
            if not shards:
                del self._receiving[command.transfer]

    def _plan(self, peer: PeerRank, layers: tuple[int, int], *, is_source: bool) -> TransferPlan:
        own = self.rank.settings
        ours, theirs = (own.layout, own.rank), (peer.layout, peer.rank)
        (source, source_rank), (destination, rank) = (ours, theirs) if is_source else (theirs, ours)
        return plan_transfer(source, destination, source_rank, rank, layers)
