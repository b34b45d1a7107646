"""A part that arrives at this rank: its landing, and the digests of what came.

What may be written is in the landings, under the part's id; for sources that write straight into shared
memory it is in the pool's table of generations too.

A thread takes the digests of units as the source says that it has written them, so that little is left to do
when the last ones come; they are compared once nothing can be written any more. Until then the source writes
nothing there but the same bytes again, and nobody else may write: what is damaged on its way is found, and
memory that has been found right is trusted like any other.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from baton.kvtransfer.digests import PartDigests, differing_units
from baton.kvtransfer.hashing import Hashing
from baton.kvtransfer.landing import Landing
from baton.kvtransfer.message_stream import Post
from baton.kvtransfer.messages import DIGEST_BYTES
from baton.kvtransfer.part_ranks import landing_id
from baton.kvtransfer.pool_doors import PoolDoors
from baton.kvtransfer.rank_messages import OpenPart, PartEvent, PartVerified, WriterStopped
from baton.kvtransfer.transfer_plan import TransferPlan
from baton.kvtransfer.transport import offsets_of


class RankTools(NamedTuple):
    """What the parts of a rank share. emit: tells rank 0, from the rank's own thread; post gets there."""

    doors: PoolDoors
    hashing: Hashing
    post: Post
    emit: Callable[[PartEvent], None]


class ArrivingPart:
    """All calls are made by the rank's thread."""

    def __init__(self, order: OpenPart, plan: TransferPlan, tools: RankTools) -> None:
        self.pages = order.pages
        self.landing_id = landing_id(order.transfer, order.part)
        self.is_open = False
        self._order = order
        self._plan = plan
        self._tools = tools
        self._digests = PartDigests(tools.doors.pages.digests, order.digest_key, order.part)
        self._landings = tools.doors.landings
        self._has_landed = False
        self._found = bytearray(order.num_units * DIGEST_BYTES)
        self._taking: list[Future[None]] = []  # of digests, in the order in which units were written

    def open(self) -> None:
        """Let its bytes in, for the first time or once more."""
        generations, order = self._tools.doors.generations, self._order
        landing = Landing(
            id=self.landing_id,
            epoch=order.epoch,
            plan=self._plan,
            num_units=order.num_units,
            pages=order.pages,
            writer=order.source.doors.incarnation,
            may_write_directly=generations is not None,
        )
        if self._has_landed:
            self._landings.reopen(landing)
        else:
            self._landings.add(landing)
        self._has_landed = self.is_open = True
        if generations is not None:
            generations.grant(order.pages, order.generations)

    def close(self, *, is_confirmed: bool) -> None:
        """Emits WriterStopped, later, when nothing of the part can be written any more."""
        self.is_open = False
        if is_confirmed:
            self._landings.release(self.landing_id)
        stopped = WriterStopped(transfer=self._order.transfer, part=self._order.part)
        self._landings.close(self.landing_id, on_safe=lambda: self._emit_later(stopped))

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
