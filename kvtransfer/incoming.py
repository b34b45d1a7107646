"""A transfer that arrives at this rank: does what its DestinationHandoff asks for.

What may be written is in the landings, under the transfer's id; for sources that write straight into shared
memory it is in the pool's table of generations too.

A thread of the endpoint takes the digests of units as the source says that it has written them, so that
little is left to do when the last ones come; they are compared once nothing can be written any more. Until
then the source writes nothing there but the same bytes again, and nobody else may write: what is damaged on
its way is found, and memory that has been found right is trusted like any other.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from baton.errors import ProtocolError
from baton.kvtransfer.destination_handoff import DestinationHandoff, DestinationState
from baton.kvtransfer.digests import differing_units
from baton.kvtransfer.handoff import Action, CloseLanding, Finished, OpenLanding, Send, Verify
from baton.kvtransfer.hashing import Hashing
from baton.kvtransfer.landing import Landing
from baton.kvtransfer.link import Link, Post
from baton.kvtransfer.messages import DIGEST_BYTES, AnyMessage, Wrote
from baton.kvtransfer.pool_doors import PoolDoors
from baton.kvtransfer.transfer_plan import TransferPlan
from baton.kvtransfer.transport import offsets_of


class Incoming:
    """All calls are made by the endpoint's thread. One part: its source and this rank are the only pair."""

    def __init__(
        self,
        handoff: DestinationHandoff,
        plan: TransferPlan,
        num_units: int,
        link: Link,
        doors: PoolDoors,
        hashing: Hashing,
        post: Post,
        on_finished: Callable[["Incoming", Finished], None],
    ) -> None:
        self.handoff = handoff
        self.link = link
        self._plan = plan
        self._num_units = num_units
        self._landings = doors.landings
        self._digests = doors.pages.digests
        self._generations = doors.generations  # of a pool that sources on this host may write into directly
        self._hashing = hashing
        self._post = post
        self._on_finished = on_finished
        self._num_landings = 0
        self._found = bytearray(num_units * DIGEST_BYTES)
        self._taking: list[Future[None]] = []  # of digests, in the order in which units were written

    @property
    def is_over(self) -> bool:
        return self.handoff.state is DestinationState.CLOSED

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self.link.send(message)
                case OpenLanding():
                    self._open_landing()
                case CloseLanding(_, is_confirmed):
                    self._close_landing(is_confirmed=is_confirmed)
                case Verify(_, digests):
                    self._verify(digests)
                case Finished():
                    self._on_finished(self, action)

    def receive(self, message: AnyMessage) -> None:
        try:
            actions = self.handoff.receive(message)
        except ProtocolError as error:
            self.link.drop(error)
            actions = self.handoff.peer_lost()
        else:
            if isinstance(message, Wrote) and self._is_current(message):
                num_bytes = (message.stop - message.first) * self._plan.unit_bytes
                taking = self._hashing.submit(num_bytes, self._take_digests, message.first, message.stop)
                self._taking.append(taking)
        self.perform(actions)

    def _is_current(self, wrote: Wrote) -> bool:
        """Whether the hand-off, which has heard it, took it for more than a stale word."""
        handoff = self.handoff
        return wrote.epoch == handoff.epoch and handoff.state is DestinationState.RECEIVING

    def _open_landing(self) -> None:
        landing = Landing(
            id=self.handoff.transfer,
            epoch=self.handoff.epoch,
            plan=self._plan,
            num_units=self._num_units,
            pages=tuple(self.handoff.pages),
            writer=self.link.hello.incarnation,
            may_write_directly=self._generations is not None,
        )
        if self._num_landings:
            self._landings.reopen(landing)
        else:
            self._landings.add(landing)
        self._num_landings += 1
        if self._generations is not None:
            self._generations.grant(self.handoff.pages, self.handoff.generations())

    def _close_landing(self, *, is_confirmed: bool) -> None:
        transfer = self.handoff.transfer
        if self._generations is not None:
            self._generations.revoke(self.handoff.pages)
        if is_confirmed:
            self._landings.release(transfer)
        stopped = partial(self._post, self._writer_stopped)
        self._landings.close(transfer, on_safe=stopped)

    def _writer_stopped(self) -> None:
        self.perform(self.handoff.writer_stopped(0))

    def _take_digests(self, first: int, stop: int) -> None:
        offset_N = offsets_of(self._plan.destination, first, stop, self.handoff.pages)
        digests = self._digests.take(self._plan, offset_N, stop - first)
        self._found[first * DIGEST_BYTES : stop * DIGEST_BYTES] = digests

    def _verify(self, expected: bytes) -> None:
        """Compare when the last digest is taken."""
        waiting = [taking for taking in self._taking if not taking.done()]
        if waiting:
            waiting[-1].add_done_callback(lambda _: self._post(lambda: self._verify(expected)))
            return
        corrupt_units = differing_units(expected, bytes(self._found))
        self._post(lambda: self.perform(self.handoff.verified(0, corrupt_units)))
