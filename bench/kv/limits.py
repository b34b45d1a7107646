"""Rates that transports are compared with, in the same rounds: limits of the machine, and other libraries.

    memcpy             page by page into scattered pages, one thread, no other process
    raw socket         sendall of one buffer over loopback, as many streams as the tcp transport has
    ..., unpaced       the same with the congestion control that the tcp transport asks for within a host
    isend/irecv        torch.distributed's gloo, one contiguous buffer
    isend/irecv pages  the same, a message a page, all in flight
    ..., 512 tokens    memcpy and raw socket with only the bytes of a prompt of 512 tokens

A round ends when the receiver has all bytes; the receiver is a process of its own. A rival is a command that
moves a batch of pages between two processes of its own. `{page_bytes}` and `{num_pages}` in the command are
replaced by the work of the limits, and its last line is a JSON object of rates in GB/s: {"write": 9.3,
"read": 15.9}.
"""

import ctypes
import json
import random
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from baton.errors import ConfigError
from baton.kernels.huge_pages import huge_zeros
from baton.kvtransfer.transports.page_socket import unpace
from baton.kvtransfer.transports.rank_pair import PairGroup, join_gloo

TIMEOUT_S: Final = 60.0
HOST: Final = "127.0.0.1"
CONTIGUOUS, PAGES = "contiguous", "pages"
UNPACED: Final = ", unpaced"


class PageMoves(NamedTuple):
    """The work of one round: page source_pages[i] goes to page destination_pages[i] of another pool."""

    page_bytes: int
    num_pool_pages: int
    source_pages: Sequence[int]
    destination_pages: Sequence[int]

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * len(self.source_pages)


class Subject(Protocol):
    """A way to move the bytes of a round."""

    name: str
    num_bytes: int  # of a round

    def run(self) -> float:
        """Run one round; return its seconds."""

    def close(self) -> None: ...


class Memcpy:
    """Copies page by page within one process."""

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
    """Sends a buffer from `num_streams` threads, each with a socket and its share."""

    def __init__(self, moves: PageMoves, num_streams: int, suffix: str = "") -> None:
        """suffix: of the name;

        with UNPACED the sockets ask for the congestion control of the tcp transport.
        """
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
            if suffix == UNPACED:
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
    """Sends with isend/irecv of torch.distributed; PAGES is a message a page, all in flight."""

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
    """Receive rounds until the sender says that there are no more."""
    word = torch.zeros(1, dtype=torch.uint8)
    while True:
        group.recv([word], 0, 0).wait()
        if word[0]:
            return
        for work in [group.recv([message], 0, 1 + tag) for tag, message in enumerate(messages)]:
            work.wait()
        group.send([word], 0, 0).wait()


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


def receive_by_group(port: int, kind: str, page_bytes: int, num_pool_pages: int, num_pages: int) -> None:
    """Join the group and receive its rounds."""
    group = join_gloo(TCPStore(HOST, port, is_master=False), 1, HOST, TIMEOUT_S)
    if kind == CONTIGUOUS:
        messages = [torch.zeros(num_pages * page_bytes, dtype=torch.uint8)]
    else:
        pool = torch.zeros((num_pool_pages, page_bytes), dtype=torch.uint8)
        pages = random.Random(1).sample(range(num_pool_pages), num_pages)
        messages = [pool[page] for page in pages]
    receive_by_gloo(group, messages)


RIVAL_TIMEOUT_S: Final = 300.0
SHOWN_CHARACTERS: Final = 300  # of the output of a command that failed


class Rival(NamedTuple):
    """Another library: the command that measures it, and the transport of ours that it is compared with."""

    transport: str
    name: str
    command: str

    @classmethod
    def parsed(cls, text: str, transports: Sequence[str]) -> Self:
        """Read TRANSPORT:NAME=COMMAND; ConfigError says what is missing."""
        title, equals, command = text.partition("=")
        transport, _, name = title.partition(":")
        if not equals or not name or not command.strip() or transport not in transports:
            known = ", ".join(transports)
            raise ConfigError(f"rival: expected TRANSPORT:NAME=COMMAND, TRANSPORT of {known}; got {text!r}")
        return cls(transport, name, command)


class RivalRates(NamedTuple):
    """Medians over the rounds, GB/s by operation; or the reason why there are none."""

    transport: str
    name: str
    gbps: Mapping[str, float]
    failure: str = ""


class Contest:
    """Rivals at one kind of work. A rival that fails once does not run again."""

    def __init__(self, rivals: Sequence[Rival], moves: PageMoves) -> None:
        self._moves = moves
        self._rivals = rivals
        self._rounds: dict[Rival, list[Mapping[str, float]]] = {rival: [] for rival in rivals}
        self._failures: dict[Rival, str] = {}

    def run(self) -> None:
        """Run one round of each rival."""
        for rival in self._rivals:
            if rival in self._failures:
                continue
            try:
                self._rounds[rival].append(rates_of(rival.command, self._moves))
            except (OSError, subprocess.SubprocessError, RuntimeError) as error:
                self._failures[rival] = str(error)

    def rates(self) -> list[RivalRates]:
        """Return the rates of every rival."""
        return [self._rates_of(rival) for rival in self._rivals]

    def _rates_of(self, rival: Rival) -> RivalRates:
        if rival in self._failures:
            return RivalRates(rival.transport, rival.name, {}, self._failures[rival])
        rounds = self._rounds[rival]
        operations = rounds[0] if rounds else ()
        gbps = {operation: median(rates[operation] for rates in rounds) for operation in operations}
        return RivalRates(rival.transport, rival.name, gbps)


def rates_of(command: str, moves: PageMoves) -> dict[str, float]:
    """Run a command once. RuntimeError, with the output: the last line has no rates."""
    filled = command.replace("{page_bytes}", str(moves.page_bytes)).replace(
        "{num_pages}", str(len(moves.source_pages))
    )
    result = subprocess.run(
        shlex.split(filled), capture_output=True, text=True, timeout=RIVAL_TIMEOUT_S, check=False
    )
    said = (result.stdout + result.stderr).strip()[-SHOWN_CHARACTERS:]
    rates = _rates_in(result.stdout)
    if result.returncode or not rates:
        raise RuntimeError(
            f"the command ended with {result.returncode}, and no rates in its last line: {said}"
        )
    return rates


def _rates_in(output: str) -> dict[str, float]:
    """Return rates by operation; empty where the last line is no such JSON."""
    lines = output.strip().splitlines() or [""]
    try:
        found = json.loads(lines[-1])
    except ValueError:
        return {}
    if not isinstance(found, dict) or not all(_is_rate(rate) for rate in found.values()):
        return {}
    return {operation: float(rate) for operation, rate in found.items()}


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def main() -> None:
    """Run the receiver that the arguments describe."""
    kind, *arguments = sys.argv[1:]
    if kind == "socket":
        receive_by_sockets(*map(int, arguments))
    else:
        receive_by_group(int(arguments[0]), arguments[1], *map(int, arguments[2:]))


if __name__ == "__main__":
    main()
