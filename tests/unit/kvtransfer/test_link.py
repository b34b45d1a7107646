"""One end of a link, whose other end takes or says too much or too little."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from baton.clock import SystemClock
from baton.errors import TransferFailed, WireError
from baton.kvtransfer.links import KV_SCHEMA, Link, Peers, incompatibility
from baton.kvtransfer.protocol.messages import (
    PROTOCOL,
    AnyMessage,
    Commit,
    EndpointHello,
    Extend,
    RankListenerAddresses,
    decode,
    encode,
)
from baton.kvtransfer.transports.registry import transport_set
from baton.messages.bounds import LINK_TIMEOUT_S
from baton.rpc.auth import Role
from baton.rpc.connection import Call, Connection, DroppedPeers
from baton.rpc.liveness import PING_S, LinkLife, is_ping
from tests.fakes import proved_connections, refuse_threads
from tests.layouts import a_layout
from tests.transfer_ends import KEY
from tests.waiting import wait_for

LAYOUT = a_layout(head_dim=32, dtype="bfloat16")
HELLO = EndpointHello(
    protocol=PROTOCOL,
    incarnation=b"i" * 16,
    fingerprint="model",
    layout=LAYOUT,
    listeners=(RankListenerAddresses(incarnation=b"i" * 16, host="h", device="cpu"),),
)
LARGE = Commit(transfer=b"t" * 16, epoch=1, first=0, stop=2**16, digests=bytes(2**19))
SMALL = Extend(transfer=b"t" * 16, epoch=1)
AT_ONCE_S = 1.0  # far less than a peer may take for a frame


class LinkEnds:
    """A link and the bare connection of its peer; what the link learns waits in `calls`."""

    def __init__(self, link_timeout_s: float = LINK_TIMEOUT_S) -> None:
        self.dropped = DroppedPeers()
        self.calls: list[Call] = []
        self.received: list[AnyMessage] = []
        self.num_lost = 0
        self.peer, connection = proved_connections(socket.socketpair(), KEY, self.dropped)
        self.link = Link(connection, "127.0.0.1", HELLO, link_timeout_s)
        self.link.start(self.calls.append, lambda _, message: self.received.append(message), self._lose)

    def _lose(self) -> None:
        self.num_lost += 1

    def hear(self) -> AnyMessage:
        """The next message at the peer, pings left out."""
        while is_ping(body := self.peer.recv(5.0)):
            continue
        return decode(body)

    def poll(self) -> None:
        while self.calls:
            self.calls.pop(0)()


@pytest.fixture
def ends() -> Iterator[LinkEnds]:
    made = LinkEnds()
    yield made
    made.peer.close()
    made.link.close()


def test_sending_never_waits_for_the_peer(ends: LinkEnds) -> None:
    num_messages = 3
    started_s = time.monotonic()
    for _ in range(num_messages):
        ends.link.send(LARGE)
    ends.link.send(SMALL)
    assert time.monotonic() - started_s < AT_ONCE_S
    assert [ends.hear() for _ in range(num_messages + 1)] == [LARGE] * num_messages + [SMALL]
    ends.link.send(SMALL)
    assert ends.hear() == SMALL


def test_a_peer_that_takes_nothing_is_dropped_before_much_waits_for_it(ends: LinkEnds) -> None:
    started_s = time.monotonic()
    for _ in range(64):
        ends.link.send(LARGE)
    assert time.monotonic() - started_s < 2 * AT_ONCE_S
    assert ends.dropped.counts() == {"slow": 1}
    wait_for(lambda: bool(ends.calls))
    ends.poll()
    assert ends.num_lost == 1


def test_slow_peer_is_dropped_when_no_thread_can_start(
    ends: LinkEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, "rpc-outbox")
    ends.link.send(LARGE)
    assert ends.dropped.counts() == {"slow": 1}
    wait_for(lambda: bool(ends.calls))
    ends.poll()
    assert ends.num_lost == 1


def test_talkative_peer_waits_for_the_owner(ends: LinkEnds) -> None:
    num_messages = 64

    def talk() -> None:
        for _ in range(num_messages):
            ends.peer.send(encode(LARGE))

    talking = threading.Thread(target=talk)
    talking.start()
    wait_for(lambda: bool(ends.calls))
    time.sleep(0.2)
    assert len(ends.calls) <= 8
    deadline_s = time.monotonic() + 60.0
    while len(ends.received) < num_messages and time.monotonic() < deadline_s:
        ends.poll()
    assert ends.received == [LARGE] * num_messages
    talking.join()


def test_silent_peer_is_dropped_though_its_socket_is_open() -> None:
    ends = LinkEnds(link_timeout_s=2.0)
    try:
        wait_for(lambda: bool(ends.calls), 30.0)
        ends.poll()
        assert ends.num_lost == 1
        assert ends.dropped.counts() == {"silent": 1}
        assert is_ping(ends.peer.recv(5.0))
    finally:
        ends.peer.close()
        ends.link.close()


def test_pings_leave_and_no_peer_is_dropped_while_the_owner_is_busy() -> None:
    ends = LinkEnds(link_timeout_s=2.0)
    try:
        for _ in range(4):  # more than may wait for the owner: nothing is read any more
            ends.peer.send(encode(LARGE))
        until_s = time.monotonic() + 4.0
        num_pings, silence_s = 0, 0.0
        while time.monotonic() < until_s:
            life = LinkLife(60.0, 0.0)
            num_pings += life.take_ping(ends.peer.recv(5.0), 0.0)
            silence_s = max(silence_s, life.silence_s(0.0))
        assert num_pings >= 4.0 / PING_S / 2
        assert silence_s < 2.0
        while len(ends.received) < 4:
            ends.poll()
        assert ends.dropped.counts() == {} and ends.num_lost == 0
    finally:
        ends.peer.close()
        ends.link.close()


@pytest.fixture
def dropped() -> DroppedPeers:
    return DroppedPeers()


@pytest.fixture
def peers(dropped: DroppedPeers) -> Iterator[Peers]:
    made = Peers(
        ("127.0.0.1", 0),
        KEY,
        HELLO,
        transport_set("auto"),
        lambda call: call(),
        lambda link, message: None,
        lambda link: None,
        clock=SystemClock(),
        dropped=dropped,
    )
    yield made
    made.close()


def test_end_of_another_build_is_refused_and_both_ends_name_both_builds(
    peers: Peers, dropped: DroppedPeers, caplog: pytest.LogCaptureFixture
) -> None:
    connection = Connection(socket.create_connection(peers.address), KEY, Role.CONNECTING, schema=b"schema-2")
    with pytest.raises(WireError) as caught:
        connection.handshake()
    wait_for(lambda: bool(caplog.messages))
    assert dropped.counts() == {"version": 1}
    for complaint in (str(caught.value), *caplog.messages):
        assert "mixed builds" in complaint
        assert KV_SCHEMA.hex() in complaint and b"schema-2".hex() in complaint


def test_peer_with_a_malformed_hello_is_counted(peers: Peers, dropped: DroppedPeers) -> None:
    sock = socket.create_connection(peers.address)
    with closing(Connection(sock, KEY, Role.CONNECTING, schema=KV_SCHEMA)) as connection:
        connection.handshake().send(b"\xc1")
        wait_for(lambda: dropped.counts() == {"malformed": 1})


def test_endpoint_does_not_link_to_itself(peers: Peers) -> None:
    with pytest.raises(TransferFailed, match="this process itself"):
        peers.dial(peers.address)


def hello(**changes: Any) -> EndpointHello:
    return msgspec.structs.replace(HELLO, incarnation=b"b" * 16, **changes)


def relaid(ranks: str = "", /, **changes: Any) -> EndpointHello:
    """ranks: a letter for the process of each, one by one unless they are given."""
    layout = msgspec.structs.replace(LAYOUT, **changes)
    processes = [each.encode() * 16 for each in ranks or "abc"[: layout.num_ranks]]
    listeners = [RankListenerAddresses(incarnation=each, host="h", device="cpu") for each in processes]
    return hello(layout=layout, listeners=tuple(listeners))


@pytest.mark.parametrize("changes", [{}, {"tp_size": 2}, {"page_size": 64}, {"tp_size": 2, "page_size": 1}])
def test_other_cuts_of_the_same_pages_are_compatible(changes: dict[str, int]) -> None:
    assert incompatibility(HELLO, relaid(**changes)) is None
    assert incompatibility(relaid(**changes), HELLO) is None


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (hello(protocol=2), f"version {PROTOCOL} of the transfer protocol, the peer 2"),
        (hello(fingerprint="xyz"), "the model model, the peer xyz"),
        (relaid(num_layers=5), "num_layers 2 and num_layers 5"),
        (relaid(num_kv_heads=16), "num_kv_heads 2 and num_kv_heads 16"),
        (relaid(head_dim=128), "head_dim 32 and head_dim 128"),
        (relaid(dtype="float16"), "dtype bfloat16 and dtype float16"),
        (relaid(cache_dtype="int8"), "cache_dtype auto and cache_dtype int8"),
        (relaid(transfer_dtype="int8"), "transfer_dtype auto and transfer_dtype int8"),
    ],
)
def test_incompatible_field_is_named(theirs: EndpointHello, reason: str) -> None:
    found = incompatibility(HELLO, theirs)
    assert found is not None and reason in found


@pytest.mark.parametrize(
    ("incarnations", "reason"),
    [
        ("ab", None),
        ("a", "1 ranks listen, expected 2"),
        ("abc", "3 ranks listen, expected 2"),
        ("aa", "two ranks are one process"),
    ],
)
def test_every_rank_has_listeners_of_its_own(incarnations: str, reason: str | None) -> None:
    assert incompatibility(HELLO, relaid(incarnations, tp_size=2)) == reason
