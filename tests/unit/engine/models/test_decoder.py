"""The forward pass: what it reads is the tokens and their pages, however the step is cut."""

from collections.abc import Sequence as Ordered
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine.models.decoder import Decoder
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.step_inputs import StepBuilder
from baton.engine.scheduler.sequence import ScheduledChunk, Sequence
from tests.batches import make_batch, make_sequence
from tests.tiny_models import VOCAB_SIZE, tiny_engine, write_config

LENGTH = 45
MODELS = {
    "llama": {},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "head_dim": 24},
}
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


class Steps:
    """Runs chunks of hand-made sequences straight through a model, each sequence in pages of its own."""

    @torch.inference_mode()  # as the pool was made
    def __init__(self, directory: Path, dtype: str, page_size: int = 4) -> None:
        cache = {"page_size": page_size, "kv_cache_memory_bytes": 2**21}
        self.runner: ModelRunner = tiny_engine(directory, dtype=dtype, cache=cache).runner
        self.runner.pool.device.fill_(float("nan"))  # what no token has written must not be read
        self._builder = StepBuilder(page_size, 8, -(-96 // page_size))
        self._page_size = page_size
        self._free = list(range(len(self.runner.pool.device)))

    def sequence(self, seed: int, length: int = LENGTH) -> Sequence:
        """Every position of it wants its logits."""
        made = make_sequence(
            str(seed), [(seed + 1) * i % VOCAB_SIZE for i in range(length)], prompt_logprobs=0
        )
        made.page_table = [
            self._free.pop((seed * 5) % len(self._free)) for _ in range(0, length, self._page_size)
        ]
        made.table_version = seed
        return made

    def run(self, *chunks: tuple[Sequence, int, int], num_padded_tokens: int = 0) -> list[Tensor]:
        """[T, V] logits of each chunk (sequence, start, stop)."""
        scheduled = [ScheduledChunk(sequence, start, stop - start) for sequence, start, stop in chunks]
        batch = make_batch(*scheduled, num_padded_tokens=num_padded_tokens)
        logits = self.runner.execute(self._builder.build(batch))
        return [part.clone() for part in logits.split([chunk.num_tokens for chunk in scheduled])]

    def in_chunks(self, sequence: Sequence, edges: Ordered[int]) -> Tensor:
        bounds = [0, *edges, LENGTH]
        return torch.cat([self.run((sequence, bounds[i], bounds[i + 1]))[0] for i in range(len(bounds) - 1)])


@pytest.fixture(params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_config(tmp_path / "model", **MODELS[request.param])


@dtypes
def test_logits_have_the_same_bits_however_the_prompt_is_cut(directory: Path, dtype: str) -> None:
    steps = Steps(directory, dtype)
    whole = steps.in_chunks(steps.sequence(1), [])
    assert whole.isfinite().all()
    for edges in ([1, 2, 3, 40], [16, 32], range(1, LENGTH)):
        again = Steps(directory, dtype)
        assert torch.equal(again.in_chunks(again.sequence(1), edges), whole)


@dtypes
def test_all_layers_in_one_call_give_the_bits_of_kernel_after_kernel(directory: Path, dtype: str) -> None:
    at_once, one_by_one = Steps(directory, dtype), Steps(directory, dtype)
    assert isinstance(at_once.runner.model, Decoder) and isinstance(one_by_one.runner.model, Decoder)
    assert at_once.runner.model.stack is not None
    one_by_one.runner.model.stack = None
    for steps in (at_once, one_by_one):
        steps.run((steps.sequence(2), 0, 30), num_padded_tokens=3)
    expected = one_by_one.in_chunks(one_by_one.sequence(1), [16, 17, 18])
    assert torch.equal(at_once.in_chunks(at_once.sequence(1), [16, 17, 18]), expected)


@dtypes
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_logits_have_the_same_bits_in_pages_of_any_size(directory: Path, dtype: str, page_size: int) -> None:
    usual, other = Steps(directory, dtype), Steps(directory, dtype, page_size)
    expected = usual.in_chunks(usual.sequence(1), [7])
    assert torch.equal(other.in_chunks(other.sequence(1), [7]), expected)


@dtypes
def test_logits_have_the_same_bits_in_any_company(directory: Path, dtype: str) -> None:
    alone, together = Steps(directory, dtype), Steps(directory, dtype)
    expected = alone.in_chunks(alone.sequence(1), [30])
    ours, decoding, prefilling = (together.sequence(seed) for seed in (1, 2, 3))
    together.run((decoding, 0, 20))
    first = together.run((decoding, 20, 21), (ours, 0, 30), (prefilling, 0, 11), num_padded_tokens=5)[1]
    second = together.run((decoding, 21, 22), (prefilling, 11, 29), (ours, 30, LENGTH))[2]
    assert torch.equal(torch.cat((first, second)), expected)


@dtypes
def test_unwanted_rows_are_left_out_and_change_no_other_row(directory: Path, dtype: str) -> None:
    steps = Steps(directory, dtype)
    expected = steps.in_chunks(steps.sequence(1), [])
    silent = make_sequence("silent", steps.sequence(1).token_ids)
    silent.page_table = steps.sequence(4).page_table
    chunk = ScheduledChunk(silent, 0, LENGTH)
    logits = steps.runner.execute(StepBuilder(4, 8, 24).build(make_batch(chunk)))
    assert torch.equal(logits, expected[-1:])
    part = ScheduledChunk(silent, 0, LENGTH - 1)
    assert steps.runner.execute(StepBuilder(4, 8, 24).build(make_batch(part))).shape == (0, VOCAB_SIZE)
