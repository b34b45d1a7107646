"""A peer that holds the key and keeps no rule: it is dropped, and nobody else feels anything."""

import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import pytest

from baton.errors import ConfigError, PeerGone, TransferFailed
from baton.kvtransfer.endpoint import KvEndpoint
from baton.kvtransfer.links import MAX_LINKS_OF_PEER
from baton.kvtransfer.protocol.messages import Abort, EndpointClosed, Grant, PullRequest, Wrote
from baton.rpc.auth import Role
from baton.rpc.connection import Connection
from baton.rpc.liveness import is_ping
from tests.endpoint_host import NUM_PAGES, EndpointHost, HostProcess
from tests.rogue_peer import RoguePeer
from tests.transfer_ends import PAGE_KEYS
from tests.waiting import wait_for

AT_ONCE_S = 1.0  # less than any deadline, which are of 5 s
NUM_UNITS = 4


@pytest.fixture
def host(make_host: Callable[..., EndpointHost]) -> EndpointHost:
    return make_host(is_shared=False)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Who connects here waits for an answer that never comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def answer_s(host: EndpointHost) -> float:
    """How long the host's own thread was busy with something else."""
    started_s = time.monotonic()
    host.counts()
    return time.monotonic() - started_s


def grant_to(peer: RoguePeer, host: EndpointHost, num_units: int) -> Grant:
    """The host's grant of pages to the peer."""

    def grant() -> None:
        link = host.endpoint._peers.link_to(peer.incarnation)
        assert link is not None
        host.endpoint.grant(link, secrets.token_bytes(16), num_units, "sequence", deadline_s=10)

    wait_for(lambda: host._call(lambda: host.endpoint._peers.link_to(peer.incarnation)) is not None)
    host._call(grant)
    return peer.hear(Grant)


def a_pull_of(host: EndpointHost) -> PullRequest:
    """Return a pull that the host agrees to: it opens a transport to the peer."""
    wanted, _ = host.known_pages(NUM_UNITS)
    return PullRequest(
        transfer=secrets.token_bytes(16),
        epoch=1,
        deadline_ms=10_000,
        num_units=NUM_UNITS,
        wanted_keys=bytes.fromhex("".join(wanted)),
        pages=tuple(range(NUM_UNITS)),
        generations=(1,) * NUM_UNITS,
    )


def test_transfer_that_goes_on_cannot_be_granted_again(host: EndpointHost) -> None:
    with RoguePeer(host.address()) as peer:
        grant = grant_to(peer, host, NUM_UNITS)
        peer.say(grant)
        with pytest.raises(PeerGone):
            while is_ping(peer.connection.recv(5.0)):
                continue
    wait_for(lambda: host.counts()["FREE"] == NUM_PAGES)
    assert host.counts()["protocol"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"wanted_keys": bytes(16 * (NUM_UNITS - 1))}, id="of the host"),
        pytest.param({"pages": (0,), "generations": (1,)}, id="of the peer"),
    ],
)
def test_pull_with_another_number_of_pages_drops_the_peer(
    host: EndpointHost, changes: dict[str, Any]
) -> None:
    with RoguePeer(host.address()) as peer:
        peer.say(msgspec.structs.replace(a_pull_of(host), **changes))
        with pytest.raises(PeerGone):
            while is_ping(peer.connection.recv(5.0)):
                continue
    counts = host.counts()
    assert counts["protocol"] == 1 and counts["open"] == 0
    assert counts["CACHED"] == NUM_UNITS


def test_transport_that_never_opens_delays_no_other_transfer(host: EndpointHost, silent_port: int) -> None:
    with RoguePeer(host.address(), addresses={"tcp": str(silent_port)}) as peer:
        peer.say(a_pull_of(host))
        wait_for(lambda: host.counts()["open"] == 1)
        time.sleep(0.05)
    slowest_s = 0.0
    for _ in range(20):
        slowest_s = max(slowest_s, answer_s(host))
        time.sleep(0.01)
    assert slowest_s < AT_ONCE_S
    wait_for(lambda: host.counts()["open"] == 0)


def test_an_endpoint_closes_at_once_while_a_way_opens(silent_port: int) -> None:
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    host = EndpointHost(is_shared=False)
    with RoguePeer(host.address(), addresses={"tcp": str(silent_port)}) as peer:
        peer.say(a_pull_of(host))
        wait_for(lambda: host.counts()["open"] == 1)
        time.sleep(0.05)
        started_s = time.monotonic()
        host.close()
        assert time.monotonic() - started_s < 1.0
        peer.hear(EndpointClosed)
        with pytest.raises(PeerGone):
            peer.connection.recv(5.0)
    wait_for(lambda: set(threading.enumerate()) <= threads)
    assert len(os.listdir("/proc/self/fd")) <= files


def test_a_peer_that_joined_unseen_hears_of_the_end() -> None:
    host = EndpointHost(is_shared=False)
    address = host.address()
    host._is_closed = True  # its loop ends, nobody polls
    host._thread.join()
    with RoguePeer(address) as peer:
        host.endpoint.close()
        with pytest.raises(PeerGone):
            peer.connection.recv(5.0)


def test_silent_strangers_keep_no_peer_out(host: EndpointHost) -> None:
    strangers = [socket.create_connection(host.address()) for _ in range(300)]
    try:
        wait_for(lambda: host.counts().get("limit", 0) > 0)  # the rest may end in their own time
        wait_for(lambda: sum(thread.name == "kv-answer" for thread in threading.enumerate()) <= 64)
        with RoguePeer(host.address()) as peer:
            grant_to(peer, host, 1)
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_peer_that_the_chosen_transport_cannot_reach_is_refused(transport: str) -> None:
    with closing(EndpointHost(transport=transport)) as host:
        with RoguePeer(host.address(), host="another", addresses={"shm": "x"}) as peer:
            if transport == "shm":
                with pytest.raises(PeerGone):
                    peer.connection.recv(5.0)
        assert answer_s(host) < AT_ONCE_S


def test_host_whose_transport_cannot_serve_the_peer_hears_why(make_host: Callable[..., EndpointHost]) -> None:
    strict = make_host(is_shared=False, transport="cuda_ipc")
    with HostProcess() as source, pytest.raises(ConfigError, match="cuda_ipc cannot serve"):
        strict.grant(source.address(), "ab" * 16, NUM_UNITS)


@pytest.mark.parametrize("num_units", [0, 2**16 + 1])
def test_a_transfer_that_no_message_can_ask_for_is_the_callers_mistake(
    host: EndpointHost, num_units: int
) -> None:
    with HostProcess() as destination:
        with pytest.raises(TransferFailed, match="a transfer has 1 to"):
            host.send(destination, num_units)
        assert host.send(destination, NUM_UNITS) == "handed_over"
        assert "malformed" not in destination.counts()


def test_a_pull_over_a_lost_link_ends_at_once(host: EndpointHost) -> None:
    with HostProcess() as holder:
        wanted, _ = holder.known_pages(2)
        link = host._call(lambda: host._link(tuple(holder.address())))
    wait_for(lambda: link.is_lost)
    keys = list(map(bytes.fromhex, wanted))
    transfer = host._call(lambda: host.endpoint.pull(link, keys, 2, "sequence", deadline_s=10))
    started_s = time.monotonic()
    assert host.outcome(transfer.hex()) == "recompute"
    assert time.monotonic() - started_s < 1.0
    wait_for(lambda: host.counts()["FREE"] == NUM_PAGES)


def test_an_endpoint_whose_port_is_taken_leaves_nothing_behind(host: EndpointHost) -> None:
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    settings = msgspec.structs.replace(host.endpoint.settings, port=host.address()[1])
    with pytest.raises(OSError, match="in use"):
        KvEndpoint(settings, host.pool, host.ledger)
    wait_for(lambda: set(threading.enumerate()) <= threads)
    assert len(os.listdir("/proc/self/fd")) <= files


def test_thousands_of_links_of_one_peer_keep_no_other_out(host: EndpointHost) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(RoguePeer(host.address()))
        for _ in range(MAX_LINKS_OF_PEER + 3):
            stack.enter_context(RoguePeer(host.address(), incarnation=first.incarnation))
        wait_for(lambda: host.counts().get("limit") == 4)
        grant_to(stack.enter_context(RoguePeer(host.address())), host, 1)
        first.say(Wrote(transfer=bytes(16), epoch=1, first=0, stop=1))
        assert first.hear(Abort).reason == "unknown transfer"


def test_writing_the_same_units_without_end_is_no_transfer(host: EndpointHost) -> None:
    with RoguePeer(host.address()) as peer:
        grant = grant_to(peer, host, NUM_UNITS)
        for _ in range(3):
            peer.say(Wrote(transfer=grant.transfer, epoch=grant.epoch, first=0, stop=NUM_UNITS))
        with pytest.raises(PeerGone):
            peer.hear(Abort)
    wait_for(lambda: host.counts()["FREE"] == NUM_PAGES)
    assert host.counts()["protocol"] == 1


def test_without_files_or_threads_the_listeners_wait_and_live_on(
    host: EndpointHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    port = int(host.endpoint._here.listeners.addresses["tcp"])
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = socket.socket()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, limit[1]))
        client.connect(("127.0.0.1", port))
        time.sleep(0.05)
        busy_s = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - busy_s < 0.15
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        client.close()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as sock:
            assert sock.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        Connection(sock, PAGE_KEYS, Role.CONNECTING).handshake().close()


def test_a_stale_word_about_units_that_never_were_changes_nothing(host: EndpointHost) -> None:
    with RoguePeer(host.address()) as peer:
        grant = grant_to(peer, host, NUM_UNITS)
        peer.say(Wrote(transfer=grant.transfer, epoch=grant.epoch + 1, first=0, stop=9 * NUM_UNITS))
        assert grant_to(peer, host, 1).epoch > grant.epoch
    wait_for(lambda: host.counts()["FREE"] == NUM_PAGES)
