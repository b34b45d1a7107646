"""Page bytes through torch.distributed, at the destination.

1. `invite` makes a meeting for one source rank and starts the pair's thread, which joins within a deadline.
2. The thread waits for a message, as long as it takes. Its bytes arrive in staging memory, so a source that
   stops in the middle has written no page.
3. The record says which units they are; where they go is for the landing to say, and for nobody else. They
   are unpacked into the pages, or left where the landing lets nobody in; then the answer.
4. A record that is not the one due, or a source that is gone, ends this pair and no other.
"""

import contextlib
import hmac
import logging
import socket
import threading
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from torch import Tensor

from baton.clock import Clock, SystemClock
from baton.errors import BatonError, TransferFailed, WireError
from baton.kvtransfer.protocol.messages import is_beyond
from baton.kvtransfer.protocol.transfer_plan import TransferPlan, plan_transfer
from baton.kvtransfer.ranks.pages import PageMemory, packing_of
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistrations
from baton.kvtransfer.transports.listener import Listener, decode_said
from baton.kvtransfer.transports.rank_pair import (
    DESTINATION,
    NUM_SLOTS,
    GroupName,
    GroupSettings,
    PairChannel,
    join_pair,
    payload_bytes,
)
from baton.kvtransfer.transports.rendezvous import Rendezvous, RendezvousServer
from baton.kvtransfer.transports.tcp_receiver import OnWritten
from baton.kvtransfer.transports.tcp_streams import PartHeader, WriteOutcome, decode_header, encode_answer
from baton.pages import PageLayout
from baton.rpc.auth import LinkSecret
from baton.rpc.connection import Connection, DroppedPeers, Role

logger = logging.getLogger(__name__)
MAX_PAIRS: Final = 256  # each has some 40 MiB of staging memory


class GroupReceiver:
    """The pairs of one destination rank with any number of source ranks."""

    def __init__(
        self,
        name: GroupName,
        registrations: ReceiveRegistrations,
        pool: Tensor | PageMemory,
        *,
        settings: GroupSettings | None = None,
        dropped: DroppedPeers | None = None,
        on_written: OnWritten | None = None,
    ) -> None:
        """pool: the destination's, contiguous [num_pages, ...]."""
        self.name: GroupName = name
        self.registrations = registrations
        self.pool = pool
        self.settings = settings or GroupSettings()
        self.dropped = dropped or DroppedPeers()
        self.on_written = on_written
        self.place = RendezvousServer(self.settings.host, self.settings.connect_s, self.dropped)
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._is_closed = False

    def invite(self, plan: TransferPlan, secret: bytes) -> Rendezvous:
        """Expect one source rank that knows the secret. TransferFailed: too many pairs, or no thread."""
        pair = _Pair(self, plan, self.place.meeting(secret))
        try:
            with self._lock:
                if self._is_closed or len(self._pairs) >= MAX_PAIRS:
                    raise TransferFailed(f"{self.name}: no more than {MAX_PAIRS} pairs at once")
                pair.thread.start()
                self._pairs.add(pair)
        except (TransferFailed, RuntimeError) as error:
            self.place.cancel(pair.meeting)
            raise TransferFailed(str(error)) from error
        return pair.meeting

    def num_pairs(self) -> int:
        with self._lock:
            return len(self._pairs)

    def remove(self, pair: "_Pair") -> None:
        with self._lock:
            self._pairs.discard(pair)

    def close(self) -> None:
        """End all pairs; no page is written any more when it returns."""
        with self._lock:
            self._is_closed = True
            pairs = list(self._pairs)
        self.place.close()  # whoever waits there for a source waits no more
        for pair in pairs:
            pair.stop()
        for pair in pairs:
            pair.thread.join()


class _Pair:
    """One source rank, in a thread of its own."""

    def __init__(self, receiver: GroupReceiver, plan: TransferPlan, meeting: Rendezvous) -> None:
        self.meeting = meeting
        self.thread = threading.Thread(target=self._run, name=f"{receiver.name}-receive", daemon=True)
        self._receiver = receiver
        self._plan = plan
        self._packing = packing_of(receiver.pool)  # of its own: a stalled source holds up no other
        self._lock = threading.Lock()
        self._channel: PairChannel | None = None
        self._is_stopped = False

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            channel = self._channel
        if channel is not None:
            channel.abort()

    def _run(self) -> None:
        receiver = self._receiver
        try:
            self._serve(self._join())
        except WireError as error:
            receiver.dropped.add(error.reason)
            logger.warning("a %s pair was dropped: %s", receiver.name, error)
        except BatonError as error:
            logger.info("a %s pair ended: %s", receiver.name, error)
        finally:
            self.stop()
            receiver.remove(self)

    def _join(self) -> PairChannel:
        receiver = self._receiver
        with contextlib.closing(receiver.place.wait_for_source(self.meeting)) as store:
            channel = join_pair(
                receiver.name, store, DESTINATION, self._packing, self._plan, receiver.settings
            )
        with self._lock:
            self._channel = channel
            if self._is_stopped:
                raise TransferFailed("closed while the source was on its way")
        return channel

    def _serve(self, channel: PairChannel) -> None:
        for slot in range(NUM_SLOTS):
            channel.post(slot)
        num_received = 0
        while True:
            slot = num_received % NUM_SLOTS
            header = decode_header(self.meeting.record_key, num_received, channel.receive(slot))
            if header.num_bytes > payload_bytes(self._plan):
                raise WireError(f"a part of {header.num_bytes} bytes is no part of ours", reason="length")
            self._land(channel, slot, num_received, header)
            num_received += 1

    def _land(self, channel: PairChannel, slot: int, number: int, header: PartHeader) -> None:
        receiver = self._receiver
        registrations, stall_s = receiver.registrations, receiver.settings.stall_s
        payload = channel.fetch(slot, header.num_bytes, stall_s)
        writing = registrations.begin(
            header.transfer, header.epoch, header.first, header.stop, header.num_bytes
        )
        is_whole = False
        try:
            if writing is not None:
                self._packing.unpack(writing.registration.plan, writing.offsets(), payload)
                self._packing.finish()
            channel.post(slot)
            outcome = WriteOutcome.REFUSED if writing is None else WriteOutcome.WRITTEN
            channel.answer(slot, encode_answer(self.meeting.record_key, number, outcome), stall_s)
            is_whole = True
            if writing is not None and receiver.on_written is not None:
                receiver.on_written(writing)
        finally:
            if writing is not None:
                registrations.end(writing, is_whole=is_whole)


# Where a source asks a destination for a meeting, and proves that it may have one.
#
# 1. The source connects over TCP; both prove that they hold the cluster key.
# 2. It says which rank it is and how its pages are cut. The two must agree on what moves between them.
# 3. The destination makes a meeting for it and says where. The meeting's secret is never sent: both ends
# derive it from the key that their connection alone has.


class RendezvousRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A source rank. `payload_bytes` is the most that its messages have.

    gloo ends a process that is sent more than it has made room for, so the two agree on it first.
    """

    name: GroupName
    layout: PageLayout
    rank: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    payload_bytes: Annotated[int, Meta(ge=1, le=2**40)]


class RendezvousReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The port of the meeting place, or why there is none."""

    port: Annotated[int, Meta(ge=0, le=2**16 - 1)] = 0
    refusal: Annotated[str, Meta(max_length=512)] = ""


def request_rendezvous(
    address: tuple[str, int],
    key: LinkSecret,
    rendezvous_request: RendezvousRequest,
    timeout_s: float,
    *,
    clock: Clock | None = None,
    dropped: DroppedPeers | None = None,
) -> Rendezvous:
    """TransferFailed when the destination can't be reached, or refuses."""
    host, port = address
    try:
        with socket.create_connection(address, timeout_s) as sock:
            connection = Connection(sock, key, Role.CONNECTING, dropped=dropped, clock=clock)
            connection.handshake(timeout_s)
            connection.send(msgspec.msgpack.encode(rendezvous_request))
            welcome = decode_said(connection.recv(timeout_s), RendezvousReply, "welcome")
            secret = _secret(connection)
    except (OSError, BatonError) as error:
        raise TransferFailed(f"{rendezvous_request.name} {host}:{port}: {error}") from error
    if welcome.refusal:
        raise TransferFailed(f"{rendezvous_request.name} {host}:{port}: {welcome.refusal}")
    return Rendezvous(host=host, port=welcome.port, secret=secret)


class GroupListener:
    """Listens at `address` for the sources of one destination rank."""

    def __init__(
        self,
        receiver: GroupReceiver,
        layout: PageLayout,
        rank: int,
        key: LinkSecret,
        *,
        clock: Clock | None = None,
        dropped: DroppedPeers | None = None,
    ) -> None:
        self._receiver = receiver
        self._layout = layout
        self._rank = rank
        self._key = key
        self._clock = clock or SystemClock()
        self._dropped = dropped or DroppedPeers()
        host = receiver.settings.host
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=128)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._acceptor = Listener(listener, self._answer, "group", self._dropped)

    def close(self) -> None:
        """No source gets a meeting any more; the pairs that there are stay."""
        self._acceptor.close()

    def _answer(self, sock: socket.socket) -> None:
        timeout_s = self._receiver.settings.connect_s
        try:
            with sock:
                connection = Connection(
                    sock, self._key, Role.ACCEPTING, dropped=self._dropped, clock=self._clock
                )
                connection.handshake(timeout_s)
                try:
                    rendezvous_request = decode_said(connection.recv(timeout_s), RendezvousRequest, "knock")
                    if is_beyond(rendezvous_request.layout):
                        raise WireError(
                            f"a layout beyond all models: {rendezvous_request.layout}", reason="knock"
                        )
                except WireError as error:
                    raise connection.drop(error) from None
                connection.send(
                    msgspec.msgpack.encode(self._welcome(rendezvous_request, _secret(connection)))
                )
        except (BatonError, TimeoutError, OSError) as error:
            logger.warning("a source got no meeting: %s", error)

    def _welcome(self, rendezvous_request: RendezvousRequest, secret: bytes) -> RendezvousReply:
        try:
            plan = plan_transfer(rendezvous_request.layout, self._layout, rendezvous_request.rank, self._rank)
            if rendezvous_request.name != self._receiver.name:
                raise TransferFailed(f"this is a door of {self._receiver.name}")
            if payload_bytes(plan) != rendezvous_request.payload_bytes:
                raise TransferFailed(
                    f"messages of {payload_bytes(plan)} bytes here, "
                    f"of {rendezvous_request.payload_bytes} there"
                )
            return RendezvousReply(port=self._receiver.invite(plan, secret).port)
        except (ValueError, TransferFailed) as error:
            return RendezvousReply(refusal=str(error)[:512])


def _secret(connection: Connection) -> bytes:
    return hmac.digest(connection.session_key, b"baton pair secret 1", "sha256")
