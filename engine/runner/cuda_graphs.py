"""CUDA graphs of the decode step: one captured forward a batch size, replayed with new inputs.

A decode step of a small model is hundreds of launches of a few microseconds each; a replay is one. Batch
sizes are padded up to the next captured one; padding rows have context length 0 and slot -1, so they read
and write no page.

1. `measure_bytes` captures two graphs over a small pool, to learn how much memory all graphs take.
2. `capture` captures all of them over the pool that serves. A running engine never captures.
3. `replay` writes the inputs of a step to the addresses that all graphs read, and launches one graph.

Graphs run one at a time, so they share their memory: the inputs, the logits, and one memory pool for all that
is in between. They are captured on one stream, largest first, so that the memory of the first graph has room
for each later one. Other threads may use CUDA during a capture ("thread_local").

Steps with prompts have no graphs: their launches depend on the number of decodes and on the longest chunk.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from baton.engine.models.model import Model
from baton.engine.runner.step_inputs import DecodeInputs, StepArrays

NUM_WARMUP_RUNS: Final = 2  # the first runs compile kernels and fill caches, which a capture must not
# Bounds the driver's memory for one graph of about a thousand launches. What is measured beyond it belongs to
# another process that loads at this moment.
MAX_DRIVER_BYTES: Final = 16 * 2**20


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: 1, 2, 4, then every 8 up to 64, every 16 up to 256, every 64 beyond."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_num_seqs + 64, 64)]
    return sorted({min(size, max_num_seqs) for size in sizes})


class _MemoryUse(NamedTuple):
    reserved_bytes: int  # by torch in this process
    free_bytes: int  # of the device

    @classmethod
    def now(cls, device: torch.device) -> "_MemoryUse":
        torch.cuda.empty_cache()
        return cls(torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0])


class DecodeGraphs:
    """The graphs of one rank. Holds the static inputs and the logits [max_num_seqs, V] from the start."""

    def __init__(
        self, model: Model, vocab_size: int, max_num_seqs: int, max_pages: int, device: torch.device
    ) -> None:
        self._model = model
        self._device = device
        self._inputs = DecodeInputs(max_num_seqs, max_pages, device)
        self._logits_BV = torch.zeros((max_num_seqs, vocab_size), dtype=torch.float32, device=device)
        self._sizes = graph_sizes(max_num_seqs)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def measure_bytes(self, kv_pool: Tensor) -> int:
        """The device memory that `capture` takes beyond what this object holds already.

        Captures the two largest graphs over any pool and drops them. The first one brings the memory that all
        share, and the second one shows what each costs on its own.
        """
        uses = [_MemoryUse.now(self._device)]
        for size in self._sizes[:-3:-1]:
            self._graphs[size] = self._capture(size, kv_pool)
            uses.append(_MemoryUse.now(self._device))
        self._graphs.clear()
        self._memory = torch.cuda.graph_pool_handle()  # a pool without graphs is at an end
        torch.cuda.empty_cache()
        before, after = uses[-2:]
        reserved_bytes = after.reserved_bytes - before.reserved_bytes
        driver_bytes = before.free_bytes - after.free_bytes - reserved_bytes
        shared_bytes = after.reserved_bytes - uses[0].reserved_bytes
        return shared_bytes + len(self._sizes) * min(max(0, driver_bytes), MAX_DRIVER_BYTES)

    def capture(self, kv_pool: Tensor) -> None:
        """Capture the graphs of all sizes over the pool, which must stay where it is."""
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size, kv_pool)

    def can_replay(self, arrays: StepArrays) -> bool:
        """True when the step is a decode step of at most the largest captured size."""
        num_rows = len(arrays.token_ids)
        return arrays.num_decodes == num_rows == len(arrays.logit_rows) and num_rows <= self._sizes[-1]

    def replay(self, arrays: StepArrays) -> Tensor:
        """Logits [B, V]; valid until the next replay."""
        num_rows = len(arrays.token_ids)
        size = next(size for size in self._sizes if size >= num_rows)
        self._inputs.write(arrays, size)
        self._graphs[size].replay()
        return self._logits_BV[:num_rows]

    def _capture(self, size: int, kv_pool: Tensor) -> torch.cuda.CUDAGraph:
        step, logits_BV = self._inputs.step(size), self._logits_BV[:size]

        def run() -> None:
            logits_BV.copy_(self._model.logits(self._model.forward(step, kv_pool)))

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARMUP_RUNS):
                run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph
