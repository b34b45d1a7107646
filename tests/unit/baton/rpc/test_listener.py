"""Newcomers at a listening socket, when there are many and when files or threads run out."""

import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from baton.errors import PeerGone, WireError
from baton.rpc.connection import DroppedPeers
from baton.rpc.listener import MAX_NEWCOMERS, Listener
from tests.waiting import wait_for


class Greeter:
    """Answers who speaks; who says nothing keeps a thread."""

    def __init__(self) -> None:
        self.dropped = DroppedPeers()
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = listener.getsockname()
        self.acceptor = Listener(listener, self._greet, "test", self.dropped)

    def _greet(self, sock: socket.socket) -> None:
        with sock:
            if sock.recv(1):
                sock.sendall(b"welcome")

    def is_welcome(self) -> bool:
        with socket.create_connection(self.address, timeout=5.0) as sock:
            sock.sendall(b"?")
            return sock.recv(7, socket.MSG_WAITALL) == b"welcome"


@pytest.fixture
def greeter() -> Iterator[Greeter]:
    made = Greeter()
    yield made
    made.acceptor.close()


def test_silent_newcomers_are_cut_off(greeter: Greeter) -> None:
    num_threads = threading.active_count()
    silent = [socket.create_connection(greeter.address) for _ in range(3 * MAX_NEWCOMERS)]
    assert greeter.is_welcome()
    wait_for(lambda: threading.active_count() <= num_threads + MAX_NEWCOMERS + 1)
    assert greeter.dropped.counts()["limit"] >= 2 * MAX_NEWCOMERS
    for sock in silent:
        sock.close()


def test_without_files_the_port_waits_and_burns_nothing(greeter: Greeter) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = socket.socket()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, limit[1]))
        client.connect(greeter.address)
        time.sleep(0.05)
        busy_s = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - busy_s < 0.1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    client.close()
    assert greeter.is_welcome()


def test_without_threads_the_port_lives_on(greeter: Greeter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with socket.create_connection(greeter.address, timeout=5.0) as sock:
            assert sock.recv(1) == b""
    assert greeter.is_welcome()


@pytest.mark.parametrize(
    ("error", "level"),
    [(WireError("lies", reason="seal"), "WARNING"), (PeerGone("dead"), "INFO"), (OSError(), "INFO")],
)
def test_newcomer_whose_greeting_fails_is_logged_and_closed(
    error: Exception, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    def greet(sock: socket.socket) -> None:
        raise error

    caplog.set_level("INFO")
    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = Listener(listener, greet, "test", DroppedPeers())
    with socket.create_connection(listener.getsockname(), timeout=5.0) as sock:
        assert sock.recv(1) == b""
    acceptor.close()
    assert [each.levelname for each in caplog.records] == [level]


def test_close_cuts_off_no_newcomer_that_was_let_in() -> None:
    may_answer = threading.Event()
    is_let_in = threading.Event()

    def greet(sock: socket.socket) -> None:
        acceptor.let_in(sock)
        is_let_in.set()
        with sock:
            assert may_answer.wait(5.0)
            sock.sendall(b"welcome")

    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = Listener(listener, greet, "test", DroppedPeers())
    with socket.create_connection(listener.getsockname(), timeout=5.0) as sock:
        assert is_let_in.wait(5.0)
        acceptor.close()
        may_answer.set()
        assert sock.recv(7, socket.MSG_WAITALL) == b"welcome"


def test_close_does_not_wait_for_silent_newcomers() -> None:
    greeter = Greeter()
    with socket.create_connection(greeter.address):
        time.sleep(0.05)
        started_s = time.monotonic()
        greeter.acceptor.close()
        assert time.monotonic() - started_s < 0.5
