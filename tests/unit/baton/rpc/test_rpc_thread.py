"""Nodes whose RPC server runs on another thread; the test's thread makes the nodes' calls."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue

import pytest

from baton.messages.control import Cancel
from baton.rpc.connection import DroppedPeers
from baton.rpc.server import RpcThread
from tests.unit.baton.rpc.rpc_peers import KEY, Recorder, tokens

TIMEOUT_S = 10.0


class Host:
    """A node, its RPC thread, and the calls that wait for the test's thread."""

    def __init__(self, name: str, *, key: bytes = KEY, node: Recorder | None = None) -> None:
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.node = node or Recorder(name)
        self.dropped = DroppedPeers()
        self.thread = RpcThread(key, self.calls.put, dropped=self.dropped)
        self.address = self.thread.listen("127.0.0.1")
        self.thread.serve(self.node)

    def pump(self) -> None:
        """Make all calls that wait; without any, wait a moment for the next."""
        with suppress(Empty):
            self.calls.get(timeout=0.01)()
            while True:
                self.calls.get_nowait()()


@pytest.fixture
def make_host() -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(*arguments: str, **named: object) -> Host:
        made.append(Host(*arguments, **named))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for host in made:
        host.thread.close()


def pump_until(is_so: Callable[[], bool], *hosts: Host) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        if time.monotonic() > until_s:
            raise TimeoutError
        for host in hosts:
            host.pump()


def connected(make_host: Callable[..., Host], **named: object) -> tuple[Host, Host]:
    one, other = make_host("a"), make_host("b", **named)
    one.thread.dial(other.address)
    pump_until(lambda: bool(one.node.peers and other.node.peers), one, other)
    return one, other


def test_messages_come_in_order_on_the_nodes_thread(make_host: Callable[..., Host]) -> None:
    one, other = connected(make_host)
    assert one.node.peers[0].hello == other.node.hello
    for number in range(500):
        one.node.peers[0].send(tokens(1, start=number))
    assert other.node.messages == []
    pump_until(lambda: len(other.node.messages) == 500, other)
    assert other.node.messages == [tokens(1, start=number) for number in range(500)]


def test_end_of_a_connection_comes_after_its_messages(make_host: Callable[..., Host]) -> None:
    one, other = connected(make_host)
    one.node.peers[0].send(tokens(3))
    one.node.peers[0].close()
    pump_until(lambda: other.node.num_left == 1, one, other)
    assert other.node.messages == [tokens(3)]
    pump_until(lambda: one.node.num_left == 1, one, other)
    assert not one.node.peers and not other.node.peers


def test_peer_that_the_node_refuses_is_dropped_and_counted(make_host: Callable[..., Host]) -> None:
    one, other = connected(make_host, node=Recorder("b", refuses=Cancel))
    one.node.peers[0].send(tokens(1))
    one.node.peers[0].send(Cancel(request_id="a" * 32, attempt=0))
    pump_until(lambda: one.node.num_left == other.node.num_left == 1, one, other)
    assert other.node.messages == [tokens(1)]
    assert other.dropped.counts() == {"protocol": 1} and one.dropped.counts() == {}


def test_message_that_fits_no_frame_is_lost_alone(make_host: Callable[..., Host]) -> None:
    one, other = connected(make_host)
    one.node.peers[0].send(tokens(16_000).__class__(events=tokens(16_000).events * 6))
    one.node.peers[0].send(tokens(2))
    pump_until(lambda: bool(other.node.messages), one, other)
    assert other.node.messages == [tokens(2)]


def test_failed_call_holds_up_no_other(make_host: Callable[..., Host]) -> None:
    one, other = connected(make_host)
    has_more = threading.Event()

    def fail() -> None:
        has_more.wait(TIMEOUT_S)
        raise RuntimeError("a bug")

    one.thread.call(fail)
    one.node.peers[0].send(tokens(2))
    has_more.set()
    pump_until(lambda: bool(other.node.messages), other)
    assert other.node.messages == [tokens(2)]


def test_closing_sends_the_unsent_messages_and_ends_the_thread(make_host: Callable[..., Host]) -> None:
    other, threads = make_host("b"), set(threading.enumerate())
    closing = Host("c")
    closing.thread.dial(other.address)
    pump_until(lambda: bool(closing.node.peers), closing, other)
    for number in range(200):
        closing.node.peers[0].send(tokens(5, start=number))
    closing.thread.close()
    assert set(threading.enumerate()) <= threads
    pump_until(lambda: len(other.node.messages) == 200, other)


def test_messages_after_close_are_lost(make_host: Callable[..., Host]) -> None:
    one, other = connected(make_host)
    closing = Host("c")
    closing.thread.dial(other.address)
    pump_until(lambda: bool(closing.node.peers), closing, other)
    closing.thread.close()
    closing.node.peers[0].send(tokens(5))
    closing.thread.dial(one.address)
    pump_until(lambda: other.node.num_left == 1, one, other)
    assert other.node.messages == []


def test_sockets_that_are_accepted_during_the_end_are_closed() -> None:
    host, is_held, may_go = Host("a"), threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        may_go.wait(TIMEOUT_S)

    host.thread.call(hold)
    assert is_held.wait(TIMEOUT_S)
    with socket.create_connection((host.address.host, host.address.port), timeout=TIMEOUT_S) as late:
        closing = threading.Thread(target=host.thread.close)
        closing.start()
        time.sleep(0.05)  # for its call to reach the loop, which then takes both
        may_go.set()
        closing.join()
        assert late.recv(1) == b""
