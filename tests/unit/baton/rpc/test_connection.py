"""Connections over real sockets of both families; test_session.py has the rules of the wire."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from baton.errors import PeerGone, WireError
from baton.messages.bounds import MAX_BODY_BYTES
from baton.rpc import session
from baton.rpc.auth import Role
from baton.rpc.connection import Connection, DroppedPeers
from baton.rpc.session import encode_frame
from tests.fakes import proved_connections

KEY, OTHER_KEY = b"k" * 16, b"o" * 16
Sockets = tuple[socket.socket, socket.socket]
_to_close: list[socket.socket | Connection] = []


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    while _to_close:
        _to_close.pop().close()


def unix_sockets() -> Sockets:
    pair = socket.socketpair()
    _to_close.extend(pair)
    return pair


def bare(connection: Connection) -> socket.socket:
    sock = connection.detach()
    _to_close.append(sock)
    return sock


@pytest.fixture(params=["tcp", "unix"])
def sockets(request: pytest.FixtureRequest) -> Sockets:
    if request.param == "unix":
        return unix_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        connecting = socket.create_connection(server.getsockname())
        pair = (connecting, server.accept()[0])
    _to_close.extend(pair)
    return pair


class Peer(threading.Thread):
    """Runs one end of a test in a thread, and keeps its result or error."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._act = act
        self.result: object = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._act()
        except Exception as error:
            self.error = error

    def end(self) -> "Peer":
        self.join(10)
        assert not self.is_alive()
        return self


def test_threads_share_a_connection(sockets: Sockets) -> None:
    connecting, accepting = proved_connections(sockets, KEY)
    bodies = [bytes([sender]) * (sender * 1000 + 1) for sender in range(4)]

    def send(body: bytes) -> None:
        for _ in range(50):
            connecting.send(body)

    received: list[bytes] = []

    def receive() -> None:
        received.extend(accepting.recv(5) for _ in range(100))

    peers = [Peer(lambda body=body: send(body)) for body in bodies]  # type: ignore[misc]
    peers += [Peer(receive), Peer(receive)]
    assert [peer.end().error for peer in peers] == [None] * 6
    assert sorted(received) == sorted(bodies * 50)


def test_wrong_key_is_an_error_at_both_ends(sockets: Sockets) -> None:
    dropped = DroppedPeers(), DroppedPeers()
    connecting = Connection(sockets[0], KEY, Role.CONNECTING, dropped=dropped[0])
    accepting = Connection(sockets[1], OTHER_KEY, Role.ACCEPTING, dropped=dropped[1])
    peer = Peer(accepting.handshake)
    with pytest.raises(WireError, match="does not hold this cluster's key"):
        connecting.handshake()
    assert isinstance(peer.end().error, WireError)
    assert "may hold another key" in str(peer.error)
    assert connecting.is_closed and accepting.is_closed
    assert (dropped[0].counts(), dropped[1].counts()) == ({"key": 1}, {"handshake": 1})


@pytest.mark.parametrize("sent", [b"", b"\0\0\0\x21\x01abc"])
def test_silent_and_slow_strangers_are_dropped_in_time(sockets: Sockets, sent: bytes) -> None:
    dropped = DroppedPeers()
    sockets[0].sendall(sent)
    start_s = time.monotonic()
    with pytest.raises(WireError, match="did not prove itself in time"):
        Connection(sockets[1], KEY, Role.ACCEPTING, dropped=dropped).handshake(0.1)
    assert time.monotonic() - start_s < 5
    assert dropped.counts() == {"handshake": 1}


def test_rule_breaker_is_dropped_and_counted(sockets: Sockets) -> None:
    dropped = DroppedPeers()
    connecting, accepting = proved_connections(sockets, KEY, dropped)
    bare(connecting).sendall(b"\xff\xff\xff\xff\x01")
    with pytest.raises(WireError, match="4294967295 bytes was announced"):
        accepting.recv(1)
    assert accepting.is_closed
    assert dropped.counts() == {"length": 1}


def test_peer_that_drips_bytes_is_dropped_at_the_frame_deadline(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FRAME_TIMEOUT_S", 0.2)
    dropped = DroppedPeers()
    connecting, accepting = proved_connections(sockets, KEY, dropped)
    raw, stop = bare(connecting), threading.Event()

    def drip() -> None:
        for byte in encode_frame(bytes(10_000)):
            if stop.wait(0.02):
                break
            raw.send(bytes([byte]))

    peer = Peer(drip)
    with pytest.raises(WireError, match="took longer than 0.2 s"):
        accepting.recv(None)
    stop.set()
    peer.end()
    raw.close()
    assert dropped.counts() == {"slow": 1}


@pytest.mark.parametrize("cut", [0, 3, 9])
def test_end_of_stream_is_a_peer_that_is_gone(sockets: Sockets, cut: int) -> None:
    dropped = DroppedPeers()
    connecting, accepting = proved_connections(sockets, KEY, dropped)
    raw = bare(connecting)
    raw.sendall(encode_frame(b"a body")[:cut])
    raw.close()
    with pytest.raises(PeerGone, match="in the middle of" if cut else "between two"):
        accepting.recv(1)
    assert accepting.is_closed
    assert dropped.counts() == {}


def test_timeout_leaves_half_a_frame_for_the_next_call(sockets: Sockets) -> None:
    connecting, accepting = proved_connections(sockets, KEY)
    frame = connecting.frame(b"whole")
    raw = bare(connecting)
    raw.sendall(frame[:8])
    with pytest.raises(TimeoutError):
        accepting.recv(0.05)
    raw.sendall(frame[8:])
    assert accepting.recv(1) == b"whole"


def test_peer_that_reads_nothing_is_dropped(sockets: Sockets) -> None:
    connecting, _ = proved_connections(sockets, KEY)
    with pytest.raises(WireError, match="took no frame"):
        for _ in range(100):
            connecting.send(bytes(MAX_BODY_BYTES), timeout_s=0.1)
    assert connecting.is_closed


def test_close_wakes_a_waiting_thread(sockets: Sockets) -> None:
    connecting, accepting = proved_connections(sockets, KEY)
    peer = Peer(lambda: accepting.recv(None))
    time.sleep(0.05)
    accepting.close()
    accepting.close()
    assert isinstance(peer.end().error, PeerGone)
    with pytest.raises(PeerGone):
        accepting.send(b"x")
    with pytest.raises(PeerGone):
        connecting.recv(1)


def test_peer_is_counted_once() -> None:
    dropped = DroppedPeers()
    connecting, accepting = proved_connections(unix_sockets(), KEY, dropped)
    for _ in range(2):
        accepting.drop(WireError("illegal", reason="protocol"))
    assert dropped.counts() == {"protocol": 1}
    connecting.close()


def test_detached_socket_continues_after_the_last_frame(sockets: Sockets) -> None:
    connecting, accepting = proved_connections(sockets, KEY)
    connecting.send(b"now bytes")
    with connecting.detach() as raw:
        raw.sendall(b"0123456789")
        assert accepting.recv(1) == b"now bytes"
        with accepting.detach() as other:
            other.setblocking(True)
            assert other.recv(10, socket.MSG_WAITALL) == b"0123456789"
    assert connecting.is_closed and accepting.is_closed


def test_open_files_travel_over_unix_sockets() -> None:
    connecting, accepting = proved_connections(unix_sockets(), KEY)
    reader, writer = os.pipe()
    connecting.send(b"two files", [reader, writer])
    os.close(reader)
    os.close(writer)
    assert accepting.recv(1) == b"two files"
    received = accepting.take_descriptors()
    os.write(received[1], b"through")
    assert os.read(received[0], 100) == b"through"
    assert accepting.take_descriptors() == []
    for descriptor in received:
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)
    connecting.close()
    accepting.close()


def test_too_many_open_files_drop_the_peer() -> None:
    dropped = DroppedPeers()
    connecting, accepting = proved_connections(unix_sockets(), KEY, dropped)
    reader, writer = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="5 open files"):
        connecting.send(b"x", [reader] * 5)
    connecting.send(b"x", [reader] * 3)
    connecting.send(b"x", [reader] * 3)
    with pytest.raises(WireError, match="more open files"):
        accepting.recv(1), accepting.recv(1)
    assert dropped.counts() == {"descriptors": 1}
    assert len(os.listdir("/proc/self/fd")) == before - 1  # its socket
    connecting.close()
    os.close(reader)
    os.close(writer)


def test_kernel_ends_connections_to_dead_hosts() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
    ):
        Connection(sock, KEY, Role.CONNECTING)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle_s, interval_s, count = (sock.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle_s + interval_s * count <= 30
