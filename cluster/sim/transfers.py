"""One transfer at one simulated endpoint: does what its hand-off asks for.

The counterparts of kvtransfer/outgoing.py and incoming.py, which have threads and memory to do it with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.cluster.sim.kv_link import SimLink
from baton.cluster.sim.pieces import Piece, digest
from baton.errors import ProtocolError
from baton.kvtransfer.destination_handoff import DestinationHandoff, DestinationState
from baton.kvtransfer.handoff import (
    Action,
    CloseLanding,
    Finished,
    Granted,
    OpenLanding,
    Push,
    Send,
    StopPushes,
    Verify,
)
from baton.kvtransfer.landing import Landing
from baton.kvtransfer.messages import DIGEST_BYTES, AnyMessage, Grant, Pull
from baton.kvtransfer.source_handoff import SourceHandoff, SourceState

if TYPE_CHECKING:
    from baton.cluster.sim.endpoint import SimEndpoint


class SimOutgoing:
    def __init__(self, handoff: SourceHandoff, endpoint: SimEndpoint, link: SimLink) -> None:
        self.handoff = handoff
        self.link = link
        self._endpoint = endpoint
        self._plan = endpoint.plan(link, is_source=True)
        self._grant: Grant | Pull | None = None

    @property
    def is_over(self) -> bool:
        return self.handoff.state is SourceState.CLOSED

    def receive(self, message: AnyMessage) -> None:
        try:
            actions = self.handoff.receive(message)
        except ProtocolError as error:
            self.link.drop(error)
            actions = self.handoff.peer_lost()
        self.perform(actions)

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self.link.send(message)
                case Granted(grant):
                    self._grant = grant
                    self._endpoint.granted(self.handoff.transfer)
                case Push():
                    self._push(action)
                case StopPushes():
                    self._endpoint.pieces.stop(self.handoff.transfer)
                    self.perform(self.handoff.pushes_stopped())
                case Finished():
                    self._endpoint.finished(self, action)

    def _push(self, push: Push) -> None:
        grant, handoff = self._grant, self.handoff
        assert grant is not None, "pages are granted before any is pushed"

        def ended(digests: bytes | None, reason: str) -> None:
            if digests is None:
                self.perform(handoff.push_failed(*push, reason))
            else:
                self.perform(handoff.pushed(*push, digests))

        piece = Piece(
            handoff.transfer,
            grant.epoch,
            push.first,
            push.stop,
            self._plan.unit_tokens,
            tuple(handoff.pages),
            grant.pages,
            grant.generations,
            ended,
        )
        self._endpoint.pieces.push(self._endpoint, self.link.hello.incarnation, piece)


class SimIncoming:
    def __init__(
        self, handoff: DestinationHandoff, num_units: int, endpoint: SimEndpoint, link: SimLink
    ) -> None:
        self.handoff = handoff
        self.link = link
        self._num_units = num_units
        self._endpoint = endpoint
        self._plan = endpoint.plan(link, is_source=False)
        self._is_direct = endpoint.pieces.is_direct(link.hello.incarnation)
        self._num_landings = 0

    @property
    def is_over(self) -> bool:
        return self.handoff.state is DestinationState.CLOSED

    def receive(self, message: AnyMessage) -> None:
        try:
            actions = self.handoff.receive(message)
        except ProtocolError as error:
            self.link.drop(error)
            actions = self.handoff.peer_lost()
        self.perform(actions)

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
                    self._endpoint.finished(self, action)

    def _open_landing(self) -> None:
        handoff, landings = self.handoff, self._endpoint.landings
        landing = Landing(
            id=handoff.transfer,
            epoch=handoff.epoch,
            plan=self._plan,
            num_units=self._num_units,
            pages=tuple(handoff.pages),
            writer=self.link.hello.incarnation,
            may_write_directly=self._is_direct,
        )
        if self._num_landings:
            landings.reopen(landing)
        else:
            landings.add(landing)
        self._num_landings += 1
        self._endpoint.open_pages.update(zip(handoff.pages, handoff.generations(), strict=True))

    def _close_landing(self, *, is_confirmed: bool) -> None:
        endpoint, transfer = self._endpoint, self.handoff.transfer
        for page in self.handoff.pages:
            endpoint.open_pages.pop(page, None)
        if is_confirmed:
            endpoint.landings.release(transfer)
        stopped = self.handoff.writer_stopped
        endpoint.landings.close(
            transfer, on_safe=lambda: endpoint.process.post(lambda: self.perform(stopped(0)))
        )

    def _verify(self, expected: bytes) -> None:
        memory, pages = self._endpoint.memory, self.handoff.pages
        unit_tokens = self._plan.unit_tokens
        units_per_page = memory.page_size // unit_tokens
        corrupt_units = []
        for unit in range(self._num_units):
            place = memory.unit(
                pages[unit // units_per_page], unit % units_per_page * unit_tokens, unit_tokens
            )
            if digest(memory.bytes[place]) != expected[unit * DIGEST_BYTES : (unit + 1) * DIGEST_BYTES]:
                corrupt_units.append(unit)
        verified = self.handoff.verified
        self._endpoint.process.post(lambda: self.perform(verified(0, tuple(corrupt_units))))
