"""What the machine can do at most with the bytes of a transfer, measured beside the transports.

    memcpy             page by page into scattered pages, one thread, no other process
    raw socket         sendall of one buffer over loopback, as many streams as the tcp transport has
    ..., unpaced       the same with the congestion control that the tcp transport asks for within a host
    isend/irecv        torch.distributed's gloo, one contiguous buffer
    isend/irecv pages  the same, a message a page, all in flight: what moving pages costs without a transport

    ..., 512 tokens    memcpy and raw socket with no more bytes than a prompt of 512 tokens has, at once

A round ends when the receiver has all bytes. The other ends run in a process of their own (kv_limit_peer.py).
"""

import ctypes
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Final, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from baton.kernels.huge_pages import huge_zeros
from baton.kvtransfer.transports.page_socket import unpace
from baton.kvtransfer.transports.rank_pair import PairGroup, join_gloo

TIMEOUT_S: Final = 60.0
HOST: Final = "127.0.0.1"
CONTIGUOUS, PAGES = "contiguous", "pages"


class PageMoves(NamedTuple):
    """One round: page source_pages[i] of one pool becomes page destination_pages[i] of the other."""

    page_bytes: int
    num_pool_pages: int
    source_pages: Sequence[int]
    destination_pages: Sequence[int]

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * len(self.source_pages)


class Subject(Protocol):
    """Something that moves the bytes of a round."""

    name: str
    num_bytes: int  # of a round

    def run(self) -> float:
        """Seconds of one round."""

    def close(self) -> None: ...


class Memcpy:
    def __init__(self, moves: PageMoves, suffix: str = "") -> None:
        self.name = f"memcpy{suffix}"
        self.num_bytes = moves.num_bytes
        self._moves = moves
        pool_bytes = moves.num_pool_pages * moves.page_bytes
        self._source, self._destination = (huge_zeros((pool_bytes,), torch.uint8).fill_(1) for _ in range(2))

    def run(self) -> float:
        moves, source, destination = self._moves, self._source.data_ptr(), self._destination.data_ptr()
        started_s = perf_counter()
        for from_page, to_page in zip(moves.source_pages, moves.destination_pages, strict=True):
            ctypes.memmove(
                destination + to_page * moves.page_bytes,
                source + from_page * moves.page_bytes,
                moves.page_bytes,
            )
        return perf_counter() - started_s

    def close(self) -> None:
        return


class Peer:
    """The process at the other end of a limit."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "baton.bench.kv.limits", *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RawSocket:
    """`num_streams` threads, each with a socket and its share of the buffer."""

    def __init__(self, moves: PageMoves, num_streams: int, suffix: str = "") -> None:
        """suffix: of the name; the system's own congestion control is kept without one."""
        self.name = f"raw socket x{num_streams}{suffix}" if num_streams > 1 else f"raw socket{suffix}"
        self.num_bytes = moves.num_bytes
        buffer = huge_zeros((moves.num_bytes,), torch.uint8).fill_(1)
        share = moves.num_bytes // num_streams
        self._shares = [memoryview(part.numpy()) for part in buffer.split(share)][:num_streams]
        with socket.create_server((HOST, 0)) as server:
            self._peer = Peer("socket", server.getsockname()[1], num_streams, share)
            server.settimeout(TIMEOUT_S)
            self._sockets = [server.accept()[0] for _ in range(num_streams)]
        for sock in self._sockets:
            sock.settimeout(TIMEOUT_S)
            if suffix:
                unpace(sock)

    def run(self) -> float:
        started_s = perf_counter()
        others = [
            threading.Thread(target=_send, args=pair)
            for pair in list(zip(self._sockets, self._shares, strict=True))[1:]
        ]
        for thread in others:
            thread.start()
        _send(self._sockets[0], self._shares[0])
        for thread in others:
            thread.join()
        return perf_counter() - started_s

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._peer.close()


def _send(sock: socket.socket, share: memoryview) -> None:
    sock.sendall(share)
    if sock.recv(1) != b"\0":
        raise ConnectionError("the peer of the raw socket is gone")


class Gloo:
    """isend/irecv of torch.distributed; PAGES takes a message for every page, all of them in flight."""

    def __init__(self, moves: PageMoves, kind: str) -> None:
        self.name = "isend/irecv" if kind == CONTIGUOUS else "isend/irecv pages"
        self.num_bytes = moves.num_bytes
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._peer = Peer(
            "gloo", store.port, kind, moves.page_bytes, moves.num_pool_pages, len(moves.source_pages)
        )
        self._group = join_gloo(store, 0, HOST, TIMEOUT_S)
        if kind == CONTIGUOUS:
            self._messages = [torch.ones(moves.num_bytes, dtype=torch.uint8)]
        else:
            pool = torch.ones((moves.num_pool_pages, moves.page_bytes), dtype=torch.uint8)
            self._messages = [pool[page] for page in moves.source_pages]
        self._answer = torch.zeros(1, dtype=torch.uint8)

    @classmethod
    def contiguous(cls, moves: PageMoves) -> Self:
        return cls(moves, CONTIGUOUS)

    @classmethod
    def pages(cls, moves: PageMoves) -> Self:
        return cls(moves, PAGES)

    def run(self) -> float:
        started_s = perf_counter()
        self._group.send([self._answer], 1, 0).wait()
        for work in [self._group.send([message], 1, 1 + tag) for tag, message in enumerate(self._messages)]:
            work.wait()
        self._group.recv([self._answer], 1, 0).wait()
        return perf_counter() - started_s

    def close(self) -> None:
        self._group.send([torch.ones(1, dtype=torch.uint8)], 1, 0).wait()
        self._peer.close()


def receive_by_gloo(group: PairGroup, messages: list[Tensor]) -> None:
    """The other end of Gloo: rounds until it says that it has had enough."""
    word = torch.zeros(1, dtype=torch.uint8)
    while True:
        group.recv([word], 0, 0).wait()
        if word[0]:
            return
        for work in [group.recv([message], 0, 1 + tag) for tag, message in enumerate(messages)]:
            work.wait()
        group.send([word], 0, 0).wait()


# The receiving process of the limits in kv_limits.py: started by them, gone when they are.


def receive_by_sockets(port: int, num_streams: int, share: int) -> None:
    streams = [
        threading.Thread(target=_receive, args=(socket.create_connection((HOST, port), TIMEOUT_S), share))
        for _ in range(num_streams)
    ]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.join()


def _receive(sock: socket.socket, share: int) -> None:
    buffer = memoryview(huge_zeros((share,), torch.uint8).fill_(1).numpy().data)
    sock.settimeout(None)
    with sock:
        while True:
            num_received = 0
            while num_received < share:
                received = sock.recv_into(buffer[num_received:], 0, socket.MSG_WAITALL)
                if not received:
                    return
                num_received += received
            sock.send(b"\0")


def receive_by_group(port: int, kind: str, page_bytes: int, num_pool_pages: int, num_pages: int) -> None:
    group = join_gloo(TCPStore(HOST, port, is_master=False), 1, HOST, TIMEOUT_S)
    if kind == CONTIGUOUS:
        messages = [torch.zeros(num_pages * page_bytes, dtype=torch.uint8)]
    else:
        pool = torch.zeros((num_pool_pages, page_bytes), dtype=torch.uint8)
        pages = random.Random(1).sample(range(num_pool_pages), num_pages)
        messages = [pool[page] for page in pages]
    receive_by_gloo(group, messages)


def main() -> None:
    kind, *arguments = sys.argv[1:]
    if kind == "socket":
        receive_by_sockets(*map(int, arguments))
    else:
        receive_by_group(int(arguments[0]), arguments[1], *map(int, arguments[2:]))


if __name__ == "__main__":
    main()
