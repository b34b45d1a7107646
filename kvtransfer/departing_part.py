"""A part that leaves this rank: its pieces go out over the transports to the destination rank.

The digests of a piece are taken from the pages it was read from, which its reader holds until then: once it
is written, or while it is, if it is of what this CPU has computed long ago. A busy owner hears of things once
a step, and whoever pulls from it would wait one step more.
"""

from concurrent.futures import Future
from functools import partial
from typing import Final

from baton.kvtransfer.arriving_part import RankTools
from baton.kvtransfer.digests import PartDigests
from baton.kvtransfer.part_ranks import landing_id
from baton.kvtransfer.peer_transports import PeerTransports
from baton.kvtransfer.rank_messages import (
    GrantPart,
    PartHashed,
    PartReached,
    PartStopped,
    PartWritten,
    PushPart,
    ReachPeer,
)
from baton.kvtransfer.transfer_plan import TransferPlan
from baton.kvtransfer.transport import OutgoingTransfer, Piece, Progress, TransferStatus, offsets_of

MAX_REASON: Final = 256  # of a message


class DepartingPart:
    """All calls are made by the rank's thread."""

    def __init__(
        self, order: ReachPeer, plan: TransferPlan, transports: PeerTransports, tools: RankTools
    ) -> None:
        self._transfer = order.transfer
        self._part = order.part
        self._landing_id = landing_id(order.transfer, order.part)
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

    def _written(self, piece: Piece, digests: "Future[bytes] | None", progress: Progress) -> None:
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
