"""A rank of a replica without an engine: its pool and its agent, in a process of its own.

`RankProcess` starts this module as a program and calls a rank's methods there; whatever crosses is JSON.
"""

import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from baton.companion import Companion
from baton.engine.companions import make_companion
from baton.layout import PageLayout

ROOT: Final = Path(__file__).resolve().parents[1]


def shape_of(layout: PageLayout, num_pages: int) -> tuple[int, ...]:
    return (num_pages, layout.num_layers, 2, layout.heads_per_rank, layout.page_size, layout.head_dim)


def fill(pool: Tensor, layout: PageLayout, rank: int, seed: int) -> None:
    """Random contents, the same whole for every number of ranks."""
    shape = list(pool.shape)
    shape[3] = layout.num_kv_heads
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    first = rank * layout.heads_per_rank
    pool.copy_(whole[:, :, :, first : first + layout.heads_per_rank])


class LateSteps:
    """Of a device that writes when a test says so."""

    def __init__(self) -> None:
        self.launched = 0
        self.passed = 0

    def has_passed(self, mark: int) -> bool:
        return mark <= self.passed


class Rank:
    def __init__(self, companion: dict[str, str], layout: dict[str, Any], rank: int, num_pages: int) -> None:
        self._layout = msgspec.convert(layout, PageLayout)
        self._rank = rank
        self._agent = make_companion(msgspec.convert(companion, Companion))
        self._pool = self._agent.zeros_on_cpu(shape_of(self._layout, num_pages), torch.bfloat16)
        self._steps = LateSteps()
        self._agent.start(rank, self._pool, self._steps)

    def fill(self, seed: int) -> None:
        fill(self._pool, self._layout, self._rank, seed)

    def pass_mark(self, mark: int) -> None:
        """All that was launched before the mark is written now."""
        self._steps.passed = mark

    def pages(self, pages: list[int]) -> str:
        chosen = self._pool[pages].contiguous().view(torch.uint8)
        return base64.b64encode(chosen.numpy().tobytes()).decode()

    def close(self) -> None:
        self._agent.close()


class RankProcess:
    """Not yet there when it is made: its agent comes to the endpoint that is made next."""

    def __init__(self, companion: Companion, layout: PageLayout, rank: int, num_pages: int) -> None:
        self._layout = layout
        arguments = [msgspec.to_builtins(companion), msgspec.to_builtins(layout), rank, num_pages]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank_process", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )

    def fill(self, seed: int) -> None:
        self._call("fill", seed)

    def pass_mark(self, mark: int) -> None:
        self._call("pass_mark", mark)

    def pages(self, pages: Sequence[int]) -> Tensor:
        content = bytearray(base64.b64decode(self._call("pages", list(pages))))
        return torch.frombuffer(content, dtype=torch.bfloat16).view(shape_of(self._layout, len(pages)))

    def end_input(self) -> None:
        """And it ends by itself."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()

    def close(self) -> None:
        self.end_input()
        self.process.wait(timeout=20)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def _call(self, name: str, *arguments: object) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def main() -> None:
    rank = Rank(*json.loads(sys.argv[1]))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(rank, name)(*arguments)) + "\n")
        sys.stdout.flush()
    rank.close()


if __name__ == "__main__":
    main()
