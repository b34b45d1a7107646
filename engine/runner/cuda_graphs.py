"""CUDA graphs of steps: one captured forward a shape, replayed with new inputs.

A step of a small model is hundreds of launches of a few microseconds each; a replay is one. Decode steps,
and steps with up to `MIXED_TOKENS[-1]` tokens of prompts and drafts, are padded up to the next captured
shape. Padding rows have context length 0 and slot -1, so they read and write no page.

1. `measure_bytes` captures two graphs over a small pool, to learn how much memory all graphs take.
2. `capture` captures all of them over the pool that serves. A running engine never captures.
3. `shape_of` says which graph computes a step, if any, and `replay` writes the inputs of the step to the
   addresses that all graphs read, and launches that graph.

Graphs run one at a time, so they share their memory: the inputs, the logits, and one memory pool for all that
is in between. They are captured on one stream, largest first, so that the memory of the first graph has room
for each later one. Other threads may use CUDA during a capture ("thread_local").
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from baton.engine.runner.step_inputs import GraphInputs, GraphShape, ModelInput, StepArrays

NUM_WARMUP_RUNS: Final = 2  # the first runs compile kernels and fill caches, which a capture must not
# One graph of about a thousand launches is taken to need less of the driver's memory than this. The device
# also has less free memory when another process loads while the graphs are measured.
MAX_DRIVER_BYTES: Final = 16 * 2**20
# Tokens of prompts in a graph. A larger step takes the device longer than its launches take the host.
MIXED_TOKENS: Final = (32, 64, 128, 256, 512)
MAX_PROMPTS: Final = 8  # in a step with a graph


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: 1, 2, 4, then every 8 up to 64, every 16 up to 256, every 64 beyond."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_num_seqs + 64, 64)]
    return sorted({min(size, max_num_seqs) for size in sizes})


def graph_shapes(max_num_seqs: int, max_num_tokens: int) -> list[GraphShape]:
    """The shapes worth a graph, smallest first. Steps have at most `max_num_tokens` tokens of prompts."""
    shapes = [GraphShape(size) for size in graph_sizes(max_num_seqs)]
    for num_tokens in _mixed_tokens(max_num_tokens):
        for num_decodes in _mixed_decodes(max_num_seqs):
            shapes.append(GraphShape(num_decodes, MAX_PROMPTS + 1, num_tokens))
    return sorted(shapes, key=lambda shape: shape.num_rows)


def _mixed_tokens(max_num_tokens: int) -> list[int]:
    """The numbers of tokens of graphs with prompts: those below the limit, and the next one."""
    return list(MIXED_TOKENS[: bisect_left(MIXED_TOKENS, max_num_tokens) + 1])


def _mixed_decodes(max_num_seqs: int) -> list[int]:
    """The numbers of decodes of graphs with prompts: padding costs little beside the prompts' tokens."""
    return sorted({min(number, max_num_seqs) for number in (0, 32, 128, max_num_seqs)})


class _MemoryUse(NamedTuple):
    reserved_bytes: int  # by torch in this process
    free_bytes: int  # of the device

    @classmethod
    def now(cls, device: torch.device) -> "_MemoryUse":
        torch.cuda.empty_cache()
        return cls(torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0])


class StepGraphs:
    """The graphs of one rank. Holds the static inputs, and logits [most rows, V], from the start."""

    def __init__(
        self,
        compute: Callable[[ModelInput, Tensor], Tensor],
        vocab_size: int,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_pages: int,
        device: torch.device,
        stream_priority: int = 0,
    ) -> None:
        """compute: the logits of a step, which writes its KV into the pool.

        stream_priority: of the kernels in all graphs, on any stream that replays them.
        """
        self._compute = compute
        self._device = device
        self._shapes = graph_shapes(max_num_seqs, max_num_tokens)
        self._sizes = graph_sizes(max_num_seqs)
        self._mixed_tokens = _mixed_tokens(max_num_tokens)
        self._mixed_decodes = _mixed_decodes(max_num_seqs)
        self._inputs = GraphInputs(self._shapes, max_pages, device)
        self._logits_RV = torch.zeros(
            (self._inputs.max_logits, vocab_size), dtype=torch.float32, device=device
        )
        self._graphs: dict[GraphShape, torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream(device, stream_priority)
        self._memory = torch.cuda.graph_pool_handle()

    def measure_bytes(self, kv_pool: Tensor) -> int:
        """The device memory that `capture` takes beyond what this object holds already.

        Captures the two largest graphs over any pool and drops them. The first one brings the memory that all
        share, and the second one shows what each costs on its own.
        """
        uses = [_MemoryUse.now(self._device)]
        for shape in self._shapes[:-3:-1]:
            self._graphs[shape] = self._capture(shape, kv_pool)
            uses.append(_MemoryUse.now(self._device))
        self._graphs.clear()
        self._memory = torch.cuda.graph_pool_handle()  # a pool without graphs is at an end
        torch.cuda.empty_cache()
        before, after = uses[-2:]
        reserved_bytes = after.reserved_bytes - before.reserved_bytes
        driver_bytes = before.free_bytes - after.free_bytes - reserved_bytes
        shared_bytes = after.reserved_bytes - uses[0].reserved_bytes
        return shared_bytes + len(self._shapes) * min(max(0, driver_bytes), MAX_DRIVER_BYTES)

    def capture(self, kv_pool: Tensor) -> None:
        """Capture the graphs of all shapes over the pool, which must stay where it is."""
        for shape in reversed(self._shapes):
            self._graphs[shape] = self._capture(shape, kv_pool)

    def shape_of(self, arrays: StepArrays) -> GraphShape | None:
        """The smallest captured shape that has room for the step."""
        num_decodes, num_seqs = arrays.num_decodes, len(arrays.context_lens)
        num_tokens, num_logits = len(arrays.token_ids) - num_decodes, len(arrays.logit_rows)
        if num_decodes > self._sizes[-1]:
            return None
        if num_tokens == 0:
            size = self._sizes[bisect_left(self._sizes, num_decodes)]
            return GraphShape(size) if num_logits == num_decodes else None
        if num_tokens > self._mixed_tokens[-1] or num_seqs - num_decodes > MAX_PROMPTS:
            return None
        most_decodes = self._mixed_decodes[bisect_left(self._mixed_decodes, num_decodes)]
        shapes = (
            GraphShape(most_decodes, MAX_PROMPTS + 1, most_tokens)
            for most_tokens in self._mixed_tokens[bisect_left(self._mixed_tokens, num_tokens) :]
        )
        return next((shape for shape in shapes if num_logits <= shape.num_logits), None)

    def replay(self, arrays: StepArrays, shape: GraphShape, last_tokens_R: Tensor | None = None) -> Tensor:
        """Logits [R, V] of the step, which fits in the shape; valid until the next replay."""
        self._inputs.write(arrays, shape, last_tokens_R)
        self._graphs[shape].replay()
        return self._logits_RV[: len(arrays.logit_rows)]

    def _capture(self, shape: GraphShape, kv_pool: Tensor) -> torch.cuda.CUDAGraph:
        logits_RV = self._logits_RV[: shape.num_logits]

        def run() -> None:
            step = self._inputs.step(shape)  # anew: the graph computes what attention derives from the inputs
            logits_RV.copy_(self._compute(step, kv_pool))

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARMUP_RUNS):
                run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph
