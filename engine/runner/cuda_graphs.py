"""CUDA graphs of the decode step: one captured forward a batch size, replayed with new inputs.

A decode step of a small model is hundreds of launches of a few microseconds each; a replay is one. Batch
sizes are padded up to the next captured one; padding rows have context length 0 and slot -1, so they read
and write no page. A graph is captured when its size is first needed; all share one memory pool.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from baton.engine.models.model import Model
from baton.engine.runner.step_inputs import ModelInput, StepArrays

NUM_WARMUP_RUNS: Final = 2  # the first runs compile kernels and fill caches, which a capture must not


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: 1, 2, 4, then every 8 up to 64, every 16 up to 256, every 64 beyond."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_num_seqs + 64, 64)]
    return sorted({min(size, max_num_seqs) for size in sizes})


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    step: ModelInput  # static inputs, written before each replay
    logits_BV: Tensor  # static output


class DecodeGraphs:
    """The graphs of one rank, captured on demand."""

    def __init__(self, model: Model, kv_pool: Tensor, max_num_seqs: int, max_pages: int) -> None:
        self._model = model
        self._kv_pool = kv_pool
        self._max_pages = max_pages
        self._sizes = graph_sizes(max_num_seqs)
        self._graphs: dict[int, _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def can_replay(self, arrays: StepArrays) -> bool:
        """True when the step is a decode step of at most the largest captured size."""
        num_rows = len(arrays.token_ids)
        return arrays.num_decodes == num_rows == len(arrays.logit_rows) and num_rows <= self._sizes[-1]

    def replay(self, arrays: StepArrays) -> Tensor:
        """Logits [B, V]; valid until the next replay."""
        num_rows = len(arrays.token_ids)
        size = next(size for size in self._sizes if size >= num_rows)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        captured = self._graphs[size]
        _fill(captured.step, arrays)
        captured.graph.replay()
        return captured.logits_BV[:num_rows]

    def _capture(self, size: int) -> _Graph:
        step = _empty_step(size, self._max_pages, self._kv_pool.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARMUP_RUNS):
                self._run(step)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits_BV = self._run(step)
        return _Graph(graph, step, logits_BV)

    def _run(self, step: ModelInput) -> Tensor:
        return self._model.logits(self._model.forward(step, self._kv_pool))


def _empty_step(size: int, max_pages: int, device: torch.device) -> ModelInput:
    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return ModelInput(
        token_ids_T=zeros(size, dtype=torch.int64),
        positions_T=zeros(size, dtype=torch.int64),
        slots_T=zeros(size, dtype=torch.int64) - 1,
        cu_seqlens_B1=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens_B=zeros(size, dtype=torch.int32),
        page_table_BP=zeros(size, max_pages, dtype=torch.int32),
        logit_rows_R=torch.arange(size, device=device),
        num_decodes=size,
        max_seqlen_q=1,
    )


def _fill(step: ModelInput, arrays: StepArrays) -> None:
    """Write the step's rows into the static inputs; rows beyond become padding."""
    num_rows, num_pages = arrays.page_table.shape
    step.slots_T.fill_(-1)
    step.context_lens_B.zero_()
    for target, source in (
        (step.token_ids_T, arrays.token_ids),
        (step.positions_T, arrays.positions),
        (step.slots_T, arrays.slots),
        (step.context_lens_B, arrays.context_lens),
    ):
        target[:num_rows].copy_(torch.from_numpy(source).pin_memory(), non_blocking=True)
    page_table = torch.from_numpy(arrays.page_table).pin_memory()
    step.page_table_BP[:num_rows, :num_pages].copy_(page_table, non_blocking=True)
