"""A part that leaves this rank: its pieces go out over the transports to the destination rank.

The digests of a piece are taken from the pages it was read from, which its reader holds until then: once it
is written, or while it is, if it is of what this CPU has computed long ago. A busy owner hears of things once
a step, and whoever pulls from it would wait one step more.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, ParamSpec, TypeVar

from baton.kvtransfer.protocol.messages import DIGEST_BYTES
from baton.kvtransfer.protocol.transfer_plan import TransferPlan
from baton.kvtransfer.ranks.digests import PartDigests, differing_units
from baton.kvtransfer.ranks.listeners import PoolListeners
from baton.kvtransfer.ranks.messages import (
    GrantPart,
    OpenPart,
    PartEvent,
    PartHashed,
    PartReached,
    PartStopped,
    PartVerified,
    PartWritten,
    PushPart,
    ReachPeer,
    WriterStopped,
    registration_id,
)
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistration
from baton.kvtransfer.ranks.transports import PeerTransports
from baton.kvtransfer.transports.base import (
    OutgoingTransfer,
    Piece,
    TransferProgress,
    TransferStatus,
    offsets_of,
)
from baton.kvtransfer.transports.message_stream import Post

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
INLINE_BYTES: Final = 2**21  # 0.1 ms: what it takes to wake a thread and hear of its end


class Hashing:
    """Who takes digests: the caller for a little, threads for more."""

    def __init__(self, num_threads: int, *, may_inline: bool = True) -> None:
        """may_inline: pages are this CPU's own, so that the caller waits for nothing but the hash."""
        self.may_inline = may_inline
        self._inline_bytes = INLINE_BYTES if may_inline else -1
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-digest")

    def submit(
        self,
        num_bytes: int,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> "Future[Result]":
        """Call the function, which reads num_bytes; the future is done already where they are few.

        Functions that go to threads begin in the order in which they were submitted.
        """
        if num_bytes > self._inline_bytes:
            return self._threads.submit(function, *args, **kwargs)
        future: Future[Result] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Returns when no function runs any more; those that had not begun are cancelled."""
        self._threads.shutdown(cancel_futures=True)


# A part that arrives at this rank: its landing, and the digests of what came.
#
# What may be written is in the landings, under the part's id; for sources that write straight into shared
# memory it is in the pool's table of generations too.
#
# A thread takes the digests of units as the source says that it has written them, so that little is left to
# do when the last ones come; they are compared once nothing can be written any more. Until then the source
# writes nothing there but the same bytes again, and nobody else may write: what is damaged on its way is
# found, and memory that has been found right is trusted like any other.


class RankTools(NamedTuple):
    """What the parts of a rank share. emit: tells rank 0, from the rank's own thread; post gets there."""

    doors: PoolListeners
    hashing: Hashing
    post: Post
    emit: Callable[[PartEvent], None]


class ReceiveShard:
    """All calls are made by the rank's thread."""

    def __init__(self, order: OpenPart, plan: TransferPlan, tools: RankTools) -> None:
        self.pages = order.pages
        self.landing_id = registration_id(order.transfer, order.part)
        self.is_open = False
        self._order = order
        self._plan = plan
        self._tools = tools
        self._digests = PartDigests(tools.doors.pages.digests, order.digest_key, order.part)
        self._registrations = tools.doors.registrations
        self._has_landed = False
        self._found = bytearray(order.num_units * DIGEST_BYTES)
        self._taking: list[Future[None]] = []  # of digests, in the order in which units were written

    def open(self) -> None:
        """Let its bytes in, for the first time or once more."""
        generations, order = self._tools.doors.generations, self._order
        registration = ReceiveRegistration(
            id=self.landing_id,
            epoch=order.epoch,
            plan=self._plan,
            num_units=order.num_units,
            pages=order.pages,
            writer=order.source.doors.incarnation,
            may_write_directly=generations is not None,
        )
        if self._has_landed:
            self._registrations.reopen(registration)
        else:
            self._registrations.add(registration)
        self._has_landed = self.is_open = True
        if generations is not None:
            generations.grant(order.pages, order.generations)

    def close(self, *, is_confirmed: bool) -> None:
        """Emits WriterStopped, later, when nothing of the part can be written any more."""
        self.is_open = False
        if is_confirmed:
            self._registrations.release(self.landing_id)
        stopped = WriterStopped(transfer=self._order.transfer, part=self._order.part)
        self._registrations.close(self.landing_id, on_safe=lambda: self._emit_later(stopped))

    def hash(self, first: int, stop: int) -> None:
        """These units are written: their digests are taken meanwhile."""
        num_bytes = (stop - first) * self._plan.unit_bytes
        self._taking.append(self._tools.hashing.submit(num_bytes, self._take_digests, first, stop))

    def verify(self, expected: bytes) -> None:
        """Compare when the last digest is taken; emits PartVerified, later."""
        waiting = [taking for taking in self._taking if not taking.done()]
        if waiting:
            waiting[-1].add_done_callback(lambda _: self._tools.post(lambda: self.verify(expected)))
            return
        corrupt_units = differing_units(expected, bytes(self._found))
        self._emit_later(
            PartVerified(transfer=self._order.transfer, part=self._order.part, corrupt_units=corrupt_units)
        )

    def _take_digests(self, first: int, stop: int) -> None:
        offset_N = offsets_of(self._plan.destination, first, stop, self._order.pages)
        digests = self._digests.take(self._plan, offset_N, first, stop)
        self._found[first * DIGEST_BYTES : stop * DIGEST_BYTES] = digests

    def _emit_later(self, event: PartEvent) -> None:
        self._tools.post(lambda: self._tools.emit(event))


MAX_REASON: Final = 256  # of a message


class SendShard:
    """All calls are made by the rank's thread."""

    def __init__(
        self, order: ReachPeer, plan: TransferPlan, transports: PeerTransports, tools: RankTools
    ) -> None:
        self._transfer = order.transfer
        self._part = order.part
        self._landing_id = registration_id(order.transfer, order.part)
        self._plan = plan
        self._transports = transports
        self._tools = tools
        self._digests = PartDigests(tools.doors.pages.digests, order.digest_key, order.part)
        self._pages: tuple[int, ...] = ()
        self._grant: GrantPart | None = None

    def reach(self) -> None:
        """Emits PartReached, at once or later."""
        self._transports.when_settled(self._reached)

    def grant(self, grant: GrantPart) -> None:
        self._grant = grant

    def push(self, order: PushPart) -> None:
        """After the grant."""
        grant = self._grant
        assert grant is not None, "pages are pushed that nobody granted"
        self._pages += order.more_pages
        transfer = OutgoingTransfer(
            id=self._landing_id,
            epoch=grant.epoch,
            plan=self._plan,
            source_pages=self._pages,
            destination_pages=grant.pages,
            destination_generations=grant.generations,
            is_bulk=grant.is_bulk,
        )
        piece = Piece(transfer, order.first, order.stop)
        hashing, digests = self._tools.hashing, None
        if grant.is_bulk and hashing.may_inline:
            digests = hashing.submit(piece.num_bytes, self._digest, piece)
        self._transports.push(piece, partial(self._written, piece, digests))

    def stop(self) -> None:
        """Emits PartStopped: on return nothing is read or written for the part."""
        self._transports.abort(self._landing_id)
        self._tools.emit(PartStopped(transfer=self._transfer, part=self._part))

    def _reached(self) -> None:
        name = self._transports.name or ""
        self._tools.emit(PartReached(transfer=self._transfer, part=self._part, transport=name))

    def _written(self, piece: Piece, digests: "Future[bytes] | None", progress: TransferProgress) -> None:
        is_done = progress.status is TransferStatus.DONE
        self._tools.emit(
            PartWritten(
                transfer=self._transfer,
                part=self._part,
                first=piece.first,
                stop=piece.stop,
                is_done=is_done,
                reason=progress.reason[:MAX_REASON],
                num_bytes=progress.num_bytes,
                num_messages=progress.num_messages,
                spans=progress.spans,
            )
        )
        if not is_done:
            return
        taken = digests or self._tools.hashing.submit(piece.num_bytes, self._digest, piece)
        if taken.done():
            self._hashed(piece, taken)
        else:
            taken.add_done_callback(lambda taken: self._tools.post(partial(self._hashed, piece, taken)))

    def _hashed(self, piece: Piece, taken: "Future[bytes]") -> None:
        error = taken.exception()
        self._tools.emit(
            PartHashed(
                transfer=self._transfer,
                part=self._part,
                first=piece.first,
                stop=piece.stop,
                digests=b"" if error is not None else taken.result(),
                reason=f"no digest of what was written: {error!r}"[:MAX_REASON] if error is not None else "",
            )
        )

    def _digest(self, piece: Piece) -> bytes:
        offset_N = offsets_of(self._plan.source, piece.first, piece.stop, piece.transfer.source_pages)
        return self._digests.take(self._plan, offset_N, piece.first, piece.stop)
