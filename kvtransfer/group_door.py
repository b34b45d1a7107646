"""Where a source asks a destination for a meeting, and proves that it may have one.

1. The source connects over TCP; both prove that they hold the cluster key.
2. It says which rank it is and how its pages are cut. The two must agree on what moves between them.
3. The destination makes a meeting for it and says where. The meeting's secret is never sent: both ends
   derive it from the key that their connection alone has.
"""

import hmac
import logging
import socket
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.challenge import LinkSecret
from baton.clock import Clock, SystemClock
from baton.errors import BatonError, TransferFailed, WireError
from baton.kvtransfer.acceptor import Acceptor
from baton.kvtransfer.door_messages import decode_said
from baton.kvtransfer.group_receiver import GroupReceiver
from baton.kvtransfer.messages import is_beyond
from baton.kvtransfer.pair import GroupName
from baton.kvtransfer.pair_channel import payload_bytes
from baton.kvtransfer.rendezvous import Meeting
from baton.kvtransfer.transfer_plan import plan_transfer
from baton.layout import PageLayout
from baton.wire import Connection, DroppedPeers, Role

logger = logging.getLogger(__name__)


class Knock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A source rank. `payload_bytes` is the most that its messages have.

    gloo ends a process that is sent more than it has made room for, so the two agree on it first.
    """

    name: GroupName
    layout: PageLayout
    rank: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    payload_bytes: Annotated[int, Meta(ge=1, le=2**40)]


class Welcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The port of the meeting place, or why there is none."""

    port: Annotated[int, Meta(ge=0, le=2**16 - 1)] = 0
    refusal: Annotated[str, Meta(max_length=512)] = ""


def ask_for_meeting(
    address: tuple[str, int],
    key: LinkSecret,
    knock: Knock,
    timeout_s: float,
    *,
    clock: Clock | None = None,
    dropped: DroppedPeers | None = None,
) -> Meeting:
    """TransferFailed when the destination can't be reached, or refuses."""
    host, port = address
    try:
        with socket.create_connection(address, timeout_s) as sock:
            connection = Connection(sock, key, Role.CONNECTING, dropped=dropped, clock=clock)
            connection.handshake(timeout_s)
            connection.send(msgspec.msgpack.encode(knock))
            welcome = decode_said(connection.recv(timeout_s), Welcome, "welcome")
            secret = _secret(connection)
    except (OSError, BatonError) as error:
        raise TransferFailed(f"{knock.name} {host}:{port}: {error}") from error
    if welcome.refusal:
        raise TransferFailed(f"{knock.name} {host}:{port}: {welcome.refusal}")
    return Meeting(host=host, port=welcome.port, secret=secret)


class GroupDoor:
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
        self._acceptor = Acceptor(listener, self._answer, "group", self._dropped)

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
                    knock = decode_said(connection.recv(timeout_s), Knock, "knock")
                    if is_beyond(knock.layout):
                        raise WireError(f"a layout beyond all models: {knock.layout}", reason="knock")
                except WireError as error:
                    raise connection.drop(error) from None
                connection.send(msgspec.msgpack.encode(self._welcome(knock, _secret(connection))))
        except (BatonError, TimeoutError, OSError) as error:
            logger.warning("a source got no meeting: %s", error)

    def _welcome(self, knock: Knock, secret: bytes) -> Welcome:
        try:
            plan = plan_transfer(knock.layout, self._layout, knock.rank, self._rank)
            if knock.name != self._receiver.name:
                raise TransferFailed(f"this is a door of {self._receiver.name}")
            if payload_bytes(plan) != knock.payload_bytes:
                raise TransferFailed(
                    f"messages of {payload_bytes(plan)} bytes here, of {knock.payload_bytes} there"
                )
            return Welcome(port=self._receiver.invite(plan, secret).port)
        except (ValueError, TransferFailed) as error:
            return Welcome(refusal=str(error)[:512])


def _secret(connection: Connection) -> bytes:
    return hmac.digest(connection.session_key, b"baton pair secret 1", "sha256")
