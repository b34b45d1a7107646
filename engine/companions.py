"""What runs beside the steps of a rank that is a process of its own, by the will of the engine's caller.

The life of a companion, in the rank's process:

1. It is made before the pool. On a CPU `zeros_on_cpu` gives the pool's memory.
2. `start` is given the pool, which steps fill from then on. It returns at once, and has threads of its own.
3. `close` comes after the last step, unless the process is killed.

It may read and write pages that no step uses: whose they are is the business of whoever owns the ledger.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from baton.companion import Companion
from baton.engine.step_marks import StepMarks
from baton.errors import ConfigError


class RankCompanion(Protocol):
    """What a Companion's factory makes. What it raises ends the rank, and rank 0 is told why."""

    def zeros_on_cpu(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    def start(self, rank: int, pool: Tensor, steps: StepMarks) -> None:
        """pool: [num_pages, num_layers, 2, heads_per_rank, page_size, head_dim] of this rank.

        steps: how far this rank has written it.
        """

    def close(self) -> None: ...


def make_companion(companion: Companion) -> RankCompanion:
    """ConfigError when there is no such factory."""
    module, _, name = companion.factory.partition(":")
    try:
        factory = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"companion: there is no {companion.factory}: {error}") from error
    return cast(RankCompanion, factory(companion.arguments))
