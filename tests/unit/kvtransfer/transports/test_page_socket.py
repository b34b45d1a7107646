import socket
import struct
import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import SystemClock
from baton.errors import PeerGone, TransferFailed
from baton.kvtransfer.transports.page_socket import (
    IOV_MAX,
    MERGED_BYTES,
    MemoryRuns,
    PageSocket,
    Stopped,
    unpace,
)

Pair = tuple[PageSocket, PageSocket]


def never() -> bool:
    return False


def wrap(sock: socket.socket, stall_s: float = 5.0, limit_s: float = 30.0) -> PageSocket:
    return PageSocket(sock, SystemClock(), stall_s=stall_s, limit_s=limit_s)


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    ends = wrap(left, stall_s=0.6), wrap(right, stall_s=0.6)
    yield ends
    for end in ends:
        end.close()


def scattered(buffer: "np.ndarray[tuple[int], np.dtype[np.uint8]]", run_bytes: int, seed: int) -> MemoryRuns:
    """All of the buffer, as runs in a random order."""
    offset_N = np.random.default_rng(seed).permutation(len(buffer) // run_bytes).astype(np.int64) * run_bytes
    return MemoryRuns.of_runs(buffer.ctypes.data, offset_N, run_bytes)


@pytest.mark.parametrize(("num_runs", "run_bytes"), [(1, 1), (3, 7), (IOV_MAX, 8), (5 * IOV_MAX + 3, 500)])
def test_scattered_bytes_arrive_in_order(pair: Pair, num_runs: int, run_bytes: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, num_runs * run_bytes, dtype=np.uint8)
    destination = np.zeros_like(source)
    sender = threading.Thread(target=pair[0].send, args=(scattered(source, run_bytes, 2), never))
    sender.start()
    pair[1].receive(scattered(destination, run_bytes, 2), never)
    sender.join()
    assert (source == destination).all()


@given(
    numbers=st.lists(st.integers(0, 30), max_size=30, unique=True),
    run_bytes=st.sampled_from([1, 8, MERGED_BYTES, MERGED_BYTES + 1]),
)
def test_runs_that_follow_each_other_are_one_place_of_the_same_bytes(
    numbers: list[int], run_bytes: int
) -> None:
    offset_N = np.asarray(numbers, dtype=np.int64) * run_bytes
    places = MemoryRuns.of_runs(1000, offset_N, run_bytes)
    covered = [start + run for start, length in places.rows.tolist() for run in range(0, length, run_bytes)]
    assert covered == [1000 + run_bytes * number for number in numbers]
    assert places.num_bytes == len(numbers) * run_bytes
    num_stretches = len(numbers) - sum(b == a + 1 for a, b in pairwise(numbers))
    assert len(places.rows) == (num_stretches if run_bytes <= MERGED_BYTES else len(numbers))


def test_silence_has_a_limit_in_both_directions(pair: Pair) -> None:
    buffer = np.zeros(2**24, dtype=np.uint8)
    with pytest.raises(TransferFailed, match="no byte"):
        pair[0].receive(MemoryRuns.of_runs(buffer.ctypes.data, np.zeros(1, dtype=np.int64), 8), never)
    with pytest.raises(TransferFailed, match="no byte"):
        pair[0].send(MemoryRuns.of_runs(buffer.ctypes.data, np.zeros(1, dtype=np.int64), len(buffer)), never)
    with pytest.raises(TransferFailed, match="no byte"):
        pair[0].receive_record(4)


def test_a_trickle_has_a_limit() -> None:
    left, right = socket.socketpair()
    slow = threading.Event()

    def trickle() -> None:
        while not slow.wait(0.05):
            left.send(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    end = wrap(right, limit_s=0.5)
    buffer = np.zeros(2**20, dtype=np.uint8)
    with pytest.raises(TransferFailed, match=r"within 0\.5 s"):
        end.receive(MemoryRuns.of_runs(buffer.ctypes.data, np.zeros(1, dtype=np.int64), len(buffer)), never)
    slow.set()
    sender.join()
    left.close()
    end.close()


def test_stopped_call_says_how_much_was_left(pair: Pair) -> None:
    buffer = np.zeros(100, dtype=np.uint8)
    pair[0].send_record(b"x" * 30)
    with pytest.raises(Stopped) as stopped:
        pair[1].receive(scattered(buffer, 10, 0), lambda: True)
    assert stopped.value.num_left == 70 and int((buffer == ord("x")).sum()) == 30


def test_a_record_may_come_in_parts_and_the_end_is_told_from_a_cut(pair: Pair) -> None:
    later = threading.Timer(0.15, pair[0].send_record, (b"ord",))
    pair[0].send_record(b"rec")
    later.start()
    assert pair[1].next_record(6) == b"record"
    later.join()
    pair[0].send_record(b"re")
    pair[0].close()
    with pytest.raises(PeerGone):
        pair[1].next_record(6)
    assert pair[1].next_record(6) is None


def test_waking_ends_a_wait(pair: Pair) -> None:
    waker = threading.Timer(0.25, pair[1].wake)  # after the first slice of time
    waker.start()
    assert pair[1].next_record(6) is None
    waker.join()
    buffer = np.zeros(8, dtype=np.uint8)
    with pytest.raises(PeerGone):
        pair[1].send(MemoryRuns.of_runs(buffer.ctypes.data, np.zeros(1, dtype=np.int64), 8), never)
    with pytest.raises(PeerGone):
        pair[1].send_record(b"x")


@pytest.mark.parametrize(("address", "is_same_host"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_only_a_connection_within_the_host_has_its_congestion_control_chosen(
    address: str, is_same_host: bool
) -> None:
    def control(sock: socket.socket) -> bytes:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    with socket.create_server(("127.0.0.1", 0)) as server:
        source = socket.create_connection(server.getsockname(), source_address=(address, 0))
        destination, _ = server.accept()
        systems_choice = control(source)
        with source, destination:
            for end in (source, destination):
                unpace(end)
                assert control(end) == (b"reno" if is_same_host else systems_choice)


def test_a_peer_that_has_left_already_is_no_error_before_anything_is_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # by a reset
        with accepted:
            with pytest.raises(OSError, match="reset"):
                accepted.recv(1)
            with pytest.raises(OSError, match="not connected"):
                accepted.getpeername()
            unpace(accepted)
