"""An engine to measure: a Llama of any shape with dummy weights, and a record of its steps."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from baton.adapters import Adapter
from baton.config.engine import engine_config
from baton.engine.engine import Engine, load_engine
from baton.engine.models.registry import ModelConfig
from baton.engine.runner.step_inputs import StepArrays
from baton.kernels.decoder_stack import OnLayers
from baton.request import Request, SamplingParams, TokenIds

if TYPE_CHECKING:
    import psutil

_numbers = count()


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The sizes of a Llama model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    initializer_range: float = 0.02  # standard deviation of dummy weights
    rope_theta: float = 500000.0

    def write(self, directory: Path, **others: object) -> None:
        """Write the config.json of a bf16 model; dummy weights need nothing else. others: keys to set."""
        keys = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "initializer_range": self.initializer_range,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": None,
        }
        (directory / "config.json").write_text(json.dumps(keys | others))


TOY_LLAMA = LlamaShape(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=512,
    max_positions=1024,
)
LLAMA_56M = LlamaShape(
    hidden_size=512,
    intermediate_size=1408,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=32_000,
    max_positions=2048,
)
# Some three million weights: a prompt of 4,096 tokens takes a CPU a second or two.
LLAMA_3M = replace(
    LLAMA_56M,
    hidden_size=256,
    intermediate_size=512,
    num_layers=6,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=1024,
)

LLAMA_8M = LlamaShape(
    hidden_size=256,
    intermediate_size=704,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=8192,
    max_positions=2048,
)


def num_layer_parameters(shape: LlamaShape | ModelConfig) -> int:
    """Return the parameters of all layers' matrices, by which every token is multiplied."""
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * shape.hidden_size
    return shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)


def num_head_parameters(shape: LlamaShape | ModelConfig) -> int:
    """Return the parameters of the output head, by which the rows that sample are multiplied."""
    return shape.vocab_size * shape.hidden_size


def random_tokens(shape: LlamaShape, rng: Random, num_tokens: int) -> list[int]:
    """Return random tokens of the vocabulary."""
    return rng.choices(range(shape.vocab_size), k=num_tokens)


def request_of(prompt: Sequence[int], sampling: SamplingParams, adapter: Adapter | None = None) -> Request:
    """Return a request with an id of its own."""
    name, token_ids = f"bench-{next(_numbers)}", TokenIds.of(prompt)
    return Request(request_id=name, token_ids=token_ids, sampling=sampling, adapter=adapter)


def greedy(prompt: Sequence[int], num_tokens: int, adapter: Adapter | None = None) -> Request:
    """Return a request for the most probable answer of exactly this length."""
    return request_of(
        prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True), adapter
    )


def generate(engine: Engine, prompts: Sequence[Sequence[int]], num_new_tokens: Sequence[int]) -> int:
    """Run greedy requests of these prompts and answer lengths to the end; return the tokens generated."""
    for prompt, num_tokens in zip(prompts, num_new_tokens, strict=True):
        engine.add(greedy(prompt, num_tokens))
    num_generated = 0
    while engine.has_work():
        num_generated += len(engine.step())
    return num_generated


def decode_step_seconds(engine: Engine, requests: Sequence[Request], num_steps: int) -> list[float]:
    """Compute all prompts, then time decode steps; the requests, which must not end before, are aborted.

    RuntimeError: a step does not yield a token of each request.
    """
    for request in requests:
        engine.add(request)
    begun: set[str] = set()
    while len(begun) < len(requests):
        begun |= {output.request_id for output in engine.step()}
    seconds = []
    for _ in range(num_steps):
        started_s = perf_counter()
        outputs = engine.step()
        seconds.append(perf_counter() - started_s)
        if len(outputs) != len(requests):
            raise RuntimeError(f"a decode step of {len(requests)} sequences yielded {len(outputs)} tokens")
    for request in requests:
        engine.abort(request.request_id)
    return seconds


class Ranks(NamedTuple):
    """An engine of the present process, and the processes of its other ranks."""

    engine: Engine
    others: Sequence["psutil.Process"]

    @property
    def used_s(self) -> tuple[float, ...]:
        """Processor time of each rank so far."""
        times = (each.cpu_times() for each in self.others)
        return process_time(), *(each.user + each.system for each in times)


def load_ranks(load: Callable[[], Engine]) -> Ranks:
    """Load an engine and find the processes that it starts."""
    import psutil  # the GPU suite runs without it

    here = psutil.Process()
    before = set(here.children(recursive=True))
    engine = load()
    return Ranks(engine, sorted(set(here.children(recursive=True)) - before, key=lambda rank: rank.pid))


class StepRows(NamedTuple):
    """The rows of one step."""

    num_tokens: int  # computed, padding included
    num_padded: int  # whose keys and values are not stored
    num_logits: int  # that sample


class RecordedEngine:
    """An engine of one rank whose steps are recorded; keeps the last step that had any rows."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.last_step: StepArrays | None = None
        self.steps: list[StepRows] = []
        self._execute = engine.runner.execute
        engine.runner.execute = self._recorded  # type: ignore[method-assign]

    def _recorded(
        self, arrays: StepArrays, on_layers: OnLayers | None = None, last_tokens_R: Tensor | None = None
    ) -> Tensor:
        if len(arrays.token_ids):
            # Any token will do for one that is still to come: the step can be repeated alone.
            self.last_step = arrays._replace(token_ids=arrays.token_ids.clip(min=0), num_last_tokens=0)
            num_padded = int(np.count_nonzero(arrays.slots < 0))
            self.steps.append(StepRows(len(arrays.token_ids), num_padded, len(arrays.logit_rows)))
        return self._execute(arrays, on_layers, last_tokens_R)


def load_replica(shape: LlamaShape, settings: Mapping[str, object]) -> Engine:
    """Load an engine with dummy weights. `settings` are those of EngineConfig, without the model."""
    with TemporaryDirectory() as folder:
        shape.write(Path(folder))
        return load_engine(engine_config({"model": folder, "load_format": "dummy", **settings}))
