"""An agent whose pages a test can look at, in its own process; see kvtransfer/ranks/agent.py."""

import json
import socket
import threading
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from baton.config.engine import RankSidecar
from baton.kvtransfer.ranks.agent import RankAgent
from baton.kvtransfer.ranks.executor import CompletedSteps

FACTORY = "tests.watched_agent:WatchedAgent"


class WatchedAgent(RankAgent):
    def start(self, rank: int, pool: Tensor, steps: CompletedSteps | None = None) -> None:
        super().start(rank, pool, steps)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_address(self._arguments.address, rank))
        listener.listen()
        threading.Thread(target=self._show, args=(listener,), daemon=True).start()

    def _show(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            with sock, sock.makefile("rb") as asked:
                pages = json.loads(asked.readline())
                sock.sendall(self._pool[pages].contiguous().view(torch.uint8).numpy().tobytes())


def watched(sidecar: RankSidecar) -> RankSidecar:
    return msgspec.structs.replace(sidecar, factory=FACTORY)


def pages_of(sidecar: RankSidecar, rank: int, pages: Sequence[int], like: Tensor) -> Tensor:
    """What the rank has in these pages. like: a pool of another rank, cut and typed as its own."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(_address(json.loads(sidecar.arguments)["address"], rank))
        sock.sendall(json.dumps(list(pages)).encode() + b"\n")
        with sock.makefile("rb") as shown:
            content = bytearray(shown.read())
    return torch.frombuffer(content, dtype=like.dtype).view(len(pages), *like.shape[1:])


def _address(base: str, rank: int) -> str:
    return f"{base}-watched-{rank}"
