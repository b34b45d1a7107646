import shutil
import subprocess
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import torch

from baton.cluster.model_directory import resolve_model
from baton.engine.engine import load_engine
from baton.engine.models.loading.checkpoint import SafetensorsCheckpoint
from baton.engine.models.loading.weights import HostCheckpoint
from baton.engine.models.model import parameter_bytes
from baton.engine.models.registry import read_model_config
from baton.engine.runner.model_runner import ModelRunner, check_memory
from baton.errors import ConfigError, ModelError
from tests.forked_ranks import forked_ranks
from tests.tiny_models import generate, tiny_config, tiny_engine, token_ids, write_config

PROMPT = [1, 2, 3, 4, 5]


def test_dummy_weights_are_the_seeds(tiny_model: Path) -> None:
    answers = [token_ids(generate(tiny_engine(tiny_model, seed=seed), PROMPT)) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_directory_without_a_model_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="config.json"):
        load_engine(msgspec.structs.replace(tiny_config(tiny_model), model=str(tmp_path / "missing")))
    with pytest.raises(ModelError, match=r"expected model.safetensors .* found no weights"):
        tiny_engine(tiny_model, load_format="auto")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "KV heads: 3 cannot be split over 2"),
        ({"intermediate_size": 33}, r"intermediate_size: 33 cannot be split over 2"),
    ],
)
def test_model_that_cannot_be_split_is_refused_and_no_rank_is_left(
    tmp_path: Path, keys: dict[str, int], message: str
) -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match=message):
        tiny_engine(write_config(tmp_path, **keys), tensor_parallel_size=2)
    assert psutil.Process().children() == before


MIXTURE: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "expert parallelism: LlamaForCausalLM has no experts"),
        (MIXTURE | {"num_local_experts": 5}, "experts: 5 cannot be split over 2"),
    ],
)
def test_experts_that_ranks_cannot_share_out_are_refused(
    tmp_path: Path, keys: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    directory = write_config(tmp_path, **keys)
    with pytest.raises(ConfigError, match=message):
        tiny_engine(directory, tensor_parallel_size=2, enable_expert_parallel=True)


def test_experts_of_any_width_can_be_shared_out(tmp_path: Path) -> None:
    """Ranks could not split 33 inputs."""
    directory = write_config(tmp_path, **MIXTURE, intermediate_size=33)
    with pytest.raises(ConfigError, match="intermediate_size: 33 cannot be split over 2"):
        tiny_engine(directory, tensor_parallel_size=2)
    with closing(tiny_engine(directory)) as alone:
        expected = token_ids(generate(alone, PROMPT))
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with forked_ranks(), closing(tiny_engine(directory, **settings)) as engine:
        assert token_ids(generate(engine, PROMPT)) == expected


@pytest.mark.parametrize("num_ranks", [3, 1_000_000])
def test_uneven_ranks_are_refused_before_a_process_starts(
    tiny_model: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match=rf"heads: \d cannot be split over {num_ranks} "):
        tiny_engine(tiny_model, tensor_parallel_size=num_ranks)


def test_unavailable_kv_memory_is_reported_in_bytes(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="KV pages of .* bytes cannot be allocated"):
        tiny_engine(tiny_model, cache={"kv_cache_memory_bytes": 2**66})


def test_weights_that_no_memory_of_the_machine_holds_are_refused_before_any_is_made(tmp_path: Path) -> None:
    directory = write_config(
        tmp_path, num_hidden_layers=64, head_dim=65534, hidden_size=2**16, intermediate_size=2**18
    )
    with pytest.raises(ModelError, match=r"bytes of weights; this machine has [\d,]+ of memory"):
        tiny_engine(directory)


@pytest.mark.parametrize("ties", [True, False])
def test_node_holds_the_weights_of_its_own_stages_alone(
    tmp_path: Path, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_config(tmp_path, num_hidden_layers=4, tie_word_embeddings=ties)
    model_config, config = read_model_config(directory), tiny_config(directory)
    memory = SimpleNamespace(total=int(0.7 * parameter_bytes(model_config, "float32")))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(ModelError, match="bytes of weights"):
        check_memory(config, model_config)
    two = tiny_config(directory, pipeline_parallel_size=4, nnodes=2)
    for node in (0, 1):
        check_memory(two, model_config, node)
        memory.total //= 2
        with pytest.raises(ModelError, match="bytes of weights"):
            check_memory(two, model_config, node)
        memory.total *= 2


def test_step_too_large_for_the_device_names_the_settings_to_lower(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object) -> None:
        raise torch.OutOfMemoryError("9 GiB")

    monkeypatch.setattr(ModelRunner, "allocate", allocate)
    with pytest.raises(ConfigError, match=r"lower scheduler.max_num_batched_tokens .*: 9 GiB"):
        tiny_engine(tiny_model)


def test_weights_in_host_memory_load_without_their_file(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    shutil.copytree(resolve_model("tiny"), directory)
    settings: dict[str, Any] = {
        "load_format": "auto",
        "cache": {"page_size": 16, "kv_cache_memory_bytes": 2**24},
    }
    with closing(tiny_engine(directory, **settings)) as engine:
        expected = token_ids(generate(engine, PROMPT))
    kept = HostCheckpoint(SafetensorsCheckpoint(directory))
    with (directory / "model.safetensors").open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        file.seek(8 + size)
        file.write(bytes(2**20))  # the fingerprint reads the file, and the engine must not
    with closing(load_engine(tiny_config(directory, **settings), checkpoint=kept)) as engine:
        assert token_ids(generate(engine, PROMPT)) == expected
