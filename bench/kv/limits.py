"""Limits of the machine and other libraries, with which KV transfers are compared.

A round of a limit ends when the receiver, a process of its own, has all bytes. A rival is a command that
moves a batch of pages between two processes of its own: see `Rival`. docs/benchmarks.md explains the limits.
"""

import ctypes
import json
import random
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple, TypeAlias

import torch
from torch._C._distributed_c10d import TCPStore

from baton.bench.kv.ends import TRANSPORTS
from baton.bench.processes import HOST, Child
from baton.errors import ConfigError
from baton.kernels.native import huge_zeros
from baton.kvtransfer.transports.page_socket import unpace
from baton.kvtransfer.transports.rank_pair import PairGroup, join_gloo
from baton.kvtransfer.transports.tcp import TcpSettings
from baton.pages import PageLayout

TIMEOUT_S: Final = 600.0  # a round of a slow rival passes between two rounds of a limit
RIVAL_TIMEOUT_S: Final = 300.0
LIMIT_BYTES: Final = 2**26  # of a round: rates do not change beyond
SMALL_TOKENS: Final = 512
SMALL: Final = f", {SMALL_TOKENS} tokens"  # the end of a limit's name that moves only so many bytes
UNPACED: Final = ", unpaced"
SHOWN_CHARACTERS: Final = 300  # of the output of a command that failed


class PageMoves(NamedTuple):
    """The work of one round: page source_pages[i] goes to page destination_pages[i] of another pool."""

    page_bytes: int
    num_pool_pages: int
    source_pages: Sequence[int]
    destination_pages: Sequence[int]

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * len(self.source_pages)


def scattered_moves(page_bytes: int, num_pages: int | None = None) -> PageMoves:
    """Return a round of so many pages, of LIMIT_BYTES by default, scattered over pools of twice as many."""
    num_at_most = max(1, LIMIT_BYTES // page_bytes)
    num_pages = num_pages or num_at_most
    pool, choose = 2 * max(num_pages, num_at_most), random.Random(0)
    return PageMoves(
        page_bytes, pool, choose.sample(range(pool), num_pages), choose.sample(range(pool), num_pages)
    )


class Memcpy:
    """Copies page by page within one process."""

    def __init__(self, moves: PageMoves, suffix: str = "") -> None:
        self.name, self.num_bytes = f"memcpy{suffix}", moves.num_bytes
        self._moves = moves
        pool_bytes = moves.num_pool_pages * moves.page_bytes
        self._source, self._destination = (huge_zeros((pool_bytes,), torch.uint8).fill_(1) for _ in range(2))

    def run(self) -> float:
        """Run one round; return its seconds."""
        size = self._moves.page_bytes
        source, destination = self._source.data_ptr(), self._destination.data_ptr()
        started_s = perf_counter()
        for from_page, to_page in zip(self._moves.source_pages, self._moves.destination_pages, strict=True):
            ctypes.memmove(destination + to_page * size, source + from_page * size, size)
        return perf_counter() - started_s

    def close(self) -> None:
        return


class RawSocket:
    """Sends a buffer from `num_streams` threads, each with a socket and its share."""

    def __init__(self, num_bytes: int, num_streams: int, suffix: str = "") -> None:
        """suffix: of the name; with UNPACED the sockets ask for the tcp transport's congestion control."""
        self.name = f"raw socket x{num_streams}{suffix}" if num_streams > 1 else f"raw socket{suffix}"
        self.num_bytes = num_bytes
        share = num_bytes // num_streams
        buffer = huge_zeros((num_bytes,), torch.uint8).fill_(1)
        self._shares = [memoryview(part.numpy()) for part in buffer.split(share)][:num_streams]
        with socket.create_server((HOST, 0)) as server:
            self._receiver = _receiver("socket", server.getsockname()[1], num_streams, share)
            server.settimeout(TIMEOUT_S)
            self._sockets = [server.accept()[0] for _ in range(num_streams)]
        for sock in self._sockets:
            sock.settimeout(TIMEOUT_S)
            if suffix == UNPACED:
                unpace(sock)

    def run(self) -> float:
        started_s = perf_counter()
        threads = [
            threading.Thread(target=_send, args=pair)
            for pair in zip(self._sockets[1:], self._shares[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        _send(self._sockets[0], self._shares[0])
        for thread in threads:
            thread.join()
        return perf_counter() - started_s

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._receiver.close()


def _send(sock: socket.socket, share: memoryview) -> None:
    sock.sendall(share)
    if sock.recv(1) != b"\0":
        raise ConnectionError("the receiver of the raw socket is gone")


class Gloo:
    """Sends with isend/irecv of torch.distributed, a message for each page, all in flight."""

    name = "isend/irecv pages"

    def __init__(self, moves: PageMoves) -> None:
        self.num_bytes = moves.num_bytes
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        size = (moves.num_pool_pages, moves.page_bytes)
        self._receiver = _receiver("gloo", store.port, len(moves.source_pages), *size)
        self._group = join_gloo(store, 0, HOST, TIMEOUT_S)
        pool = torch.ones(size, dtype=torch.uint8)
        self._messages = [pool[page] for page in moves.source_pages]
        self._answer = torch.zeros(1, dtype=torch.uint8)

    def run(self) -> float:
        started_s = perf_counter()
        self._group.send([self._answer], 1, 0).wait()
        for work in [self._group.send([message], 1, 1 + tag) for tag, message in enumerate(self._messages)]:
            work.wait()
        self._group.recv([self._answer], 1, 0).wait()
        return perf_counter() - started_s

    def close(self) -> None:
        self._group.send([torch.ones(1, dtype=torch.uint8)], 1, 0).wait()
        self._receiver.close()


Limit: TypeAlias = Memcpy | RawSocket | Gloo


def limits_of(layout: PageLayout) -> list[Limit]:
    """Return every limit for pages of this layout."""
    many = scattered_moves(layout.page_bytes)
    few = scattered_moves(layout.page_bytes, layout.num_pages(SMALL_TOKENS))
    streams = sorted({1, TcpSettings().num_streams})
    return [
        Memcpy(many),
        *(RawSocket(many.num_bytes, num_streams) for num_streams in streams),
        RawSocket(many.num_bytes, streams[-1], UNPACED),
        Gloo(many),
        Memcpy(few, SMALL),
        RawSocket(few.num_bytes, 1, SMALL),
    ]


def _receiver(kind: str, *numbers: int) -> Child:
    return Child("-m", "baton.bench.kv.limits", kind, *map(str, numbers))


def receive_by_sockets(port: int, num_streams: int, share: int) -> None:
    """Receive until the sockets close."""
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


def receive_by_gloo(port: int, num_pages: int, num_pool_pages: int, page_bytes: int) -> None:
    """Receive rounds into scattered pages until the sender says that there are no more."""
    group: PairGroup = join_gloo(TCPStore(HOST, port, is_master=False), 1, HOST, TIMEOUT_S)
    pool = torch.zeros((num_pool_pages, page_bytes), dtype=torch.uint8)
    messages = [pool[page] for page in random.Random(1).sample(range(num_pool_pages), num_pages)]
    is_over = torch.zeros(1, dtype=torch.uint8)
    while True:
        group.recv([is_over], 0, 0).wait()
        if is_over[0]:
            return
        for work in [group.recv([message], 0, 1 + tag) for tag, message in enumerate(messages)]:
            work.wait()
        group.send([is_over], 0, 0).wait()


class Rival:
    """Another library that moves pages between two processes of its own, once a round.

    `{page_bytes}` and `{num_pages}` in the command are replaced by the work of the limits. Its last line is a
    JSON object of rates in GB/s: {"write": 9.3, "read": 15.9}. A command that fails once does not run again.
    """

    def __init__(self, text: str) -> None:
        """text: TRANSPORT:NAME=COMMAND, with a transport of TRANSPORTS to compare with, else ConfigError."""
        title, equals, self.command = text.partition("=")
        self.transport, _, self.name = title.partition(":")
        if not equals or not self.name or not self.command.strip() or self.transport not in TRANSPORTS:
            known = ", ".join(TRANSPORTS)
            raise ConfigError(f"rival: expected TRANSPORT:NAME=COMMAND, TRANSPORT of {known}; got {text!r}")
        self.failure = ""
        self._rounds: list[dict[str, float]] = []

    @property
    def gbps(self) -> dict[str, float]:
        """Return the medians over the rounds by operation; empty after a failure."""
        rounds = [] if self.failure else self._rounds
        return {name: median(each[name] for each in rounds) for name in (rounds[0] if rounds else ())}

    def run(self, moves: PageMoves) -> None:
        """Run one round."""
        if self.failure:
            return
        try:
            self._rounds.append(_rates_of(self.command, moves))
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            self.failure = str(error)


def _rates_of(command: str, moves: PageMoves) -> dict[str, float]:
    """Run a command once. RuntimeError, with the output: the last line has no rates."""
    filled = command.replace("{page_bytes}", str(moves.page_bytes))
    words = shlex.split(filled.replace("{num_pages}", str(len(moves.source_pages))))
    ended = subprocess.run(words, capture_output=True, text=True, timeout=RIVAL_TIMEOUT_S, check=False)
    try:
        rates = json.loads((ended.stdout.strip().splitlines() or [""])[-1])
        if not ended.returncode and rates and all(rate > 0 for rate in rates.values()):
            return {operation: float(rate) for operation, rate in rates.items()}
    except (ValueError, AttributeError, TypeError):  # another kind of line
        pass
    said = (ended.stdout + ended.stderr).strip()[-SHOWN_CHARACTERS:]
    raise RuntimeError(f"the command ended with {ended.returncode}, and no rates in its last line: {said}")


if __name__ == "__main__":
    receive = receive_by_gloo if sys.argv[1] == "gloo" else receive_by_sockets
    receive(*map(int, sys.argv[2:]))
