"""Model directories that hold a config and nothing else: `load_format="dummy"` makes the weights."""

import json
import time
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from baton.clock import Clock
from baton.config.engine import EngineConfig, engine_config
from baton.engine.engine import Engine, load_engine
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.model import dummy_checkpoint
from baton.engine.models.parallel import TensorParallel
from baton.engine.models.registry import read_model_config
from baton.kernels.kv_rows import round_rows
from baton.kernels.native import TORCH_DTYPES
from baton.request import Request, SamplingParams, StepOutput, TokenIds

VOCAB_SIZE: Final = 131  # odd: the ranks' parts of the vocabulary differ
MAX_MODEL_LEN: Final = 96
MAX_WAIT_S: Final = 0.002
_KEYS: Final = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "mlp_bias": True,
    "initializer_range": 0.2,  # at the default a random model repeats a few tokens and equality proves little
}


def write_config(directory: Path, **keys: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_KEYS | keys))
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with a config and no weights."""
    return write_config(tmp_path_factory.mktemp("tiny") / "model")


def tiny_config(directory: Path, **settings: Any) -> EngineConfig:
    """An engine on the CPU over the config in `directory`, which is written if it is not there.

    Without a host tier, unless the settings have one: what a preemption does is then no matter of speed.
    """
    if not (directory / "config.json").exists():
        write_config(directory)
    cache = {"page_size": 4, "kv_cache_memory_bytes": 2**20, "host_cache_memory_bytes": 0}
    cache |= settings.pop("cache", {})
    base = {"model": str(directory), "device": "cpu", "load_format": "dummy", "seed": 1}
    return engine_config({**base, "cache": cache, **settings})


def tiny_engine(directory: Path, clock: Clock | None = None, **settings: Any) -> Engine:
    return load_engine(tiny_config(directory, **settings), clock=clock)


def dummy_parameters(directory: Path, tp: TensorParallel, dtype: str = "float32") -> Parameters:
    cpu = torch.device("cpu")
    checkpoint = dummy_checkpoint(read_model_config(directory), 1, cpu)
    return Parameters(checkpoint, tp, TORCH_DTYPES[dtype], cpu)


def add(engine: Engine, request_id: str, prompt: list[int], **sampling: Any) -> None:
    """Add a request, greedy and of six tokens unless said otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **sampling})
    engine.add(Request(request_id=request_id, token_ids=TokenIds.of(prompt), sampling=params))


def pause(engine: Engine) -> None:
    """Wait, as workers do, when a step computed nothing: another thread may need the interpreter to go on."""
    if engine.wait_s is not None:
        time.sleep(min(engine.wait_s, MAX_WAIT_S))


def run_to_end(engine: Engine) -> list[StepOutput]:
    """Step until the engine has no work; return every output."""
    outputs: list[StepOutput] = []
    while engine.has_work():
        outputs += engine.step()
        pause(engine)
    return outputs


@torch.inference_mode()
def run_rounded(engine: Engine, request: Request, transfer_dtype: str) -> list[StepOutput]:
    """The outputs of an idle engine whose pages are rounded, as a transfer would, after the first token."""
    engine.add(request)
    outputs: list[StepOutput] = []
    while not outputs:
        outputs += engine.step()
    pages = engine.runner.pool.device
    pages.copy_(round_rows(pages, TORCH_DTYPES[transfer_dtype]))
    return outputs + run_to_end(engine)


def generate(engine: Engine, prompt: list[int], **sampling: Any) -> list[StepOutput]:
    """Every output of one request, greedy and of eight tokens unless said otherwise."""
    add(engine, "only", prompt, **{"max_tokens": 8, **sampling})
    return run_to_end(engine)


def token_ids(outputs: list[StepOutput]) -> list[int | None]:
    return [output.token_id for output in outputs]
