from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.models.decoder import Decoder
from baton.engine.models.layers import RmsNorm
from baton.engine.models.loading.checkpoint import fingerprint
from baton.engine.models.loading.weights import Checkpoint
from baton.engine.models.model import dummy_checkpoint, parameter_bytes, parameter_shapes
from baton.engine.models.parallel import TensorParallel
from baton.engine.models.registry import choose_max_model_len, read_model_config
from baton.engine.runner.model_runner import ModelRunner, choose_device, model_fingerprint
from baton.engine.runner.replica_rank import ReplicaRank
from baton.engine.runner.step_inputs import StepBuilder
from baton.errors import ConfigError
from tests.batches import make_batch, make_sequence, rest_of
from tests.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, tiny_config, write_config


def loaded_runner(directory: Path, **settings: Any) -> ModelRunner:
    runner = ModelRunner(tiny_config(directory, **settings), read_model_config(directory), ReplicaRank())
    runner.load()
    runner.allocate()
    return runner


def test_devices() -> None:
    assert choose_device("cpu", 3) == torch.device("cpu")
    if torch.cuda.is_available():
        assert choose_device("auto", 0) == torch.device("cuda", 0)
        return
    assert choose_device("auto", 1) == torch.device("cpu")
    with pytest.raises(ConfigError, match="device: expected a CUDA device"):
        choose_device("cuda", 0)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device("cuda", rank).index for rank in range(2)] == [0, 1]
    with pytest.raises(ConfigError, match="device: rank 2 of the worker needs a GPU of its own"):
        choose_device("auto", 2)


def test_models_length_may_be_lowered_never_raised(tiny_model: Path) -> None:
    model = read_model_config(tiny_model)
    assert choose_max_model_len(tiny_config(tiny_model), model) == MAX_MODEL_LEN
    assert choose_max_model_len(tiny_config(tiny_model, max_model_len=5), model) == 5
    with pytest.raises(ConfigError, match=f"max_model_len: the model has positions for {MAX_MODEL_LEN}"):
        choose_max_model_len(tiny_config(tiny_model, max_model_len=MAX_MODEL_LEN + 1), model)


LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 32,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
}


def test_fingerprint_tells_the_long_factors_of_longrope_from_the_short_ones(tmp_path: Path) -> None:
    directory = write_config(tmp_path, architectures=["Phi3ForCausalLM"], **LONGROPE)
    found = {
        length: model_fingerprint(tiny_config(directory, max_model_len=length))
        for length in (16, 32, 33, MAX_MODEL_LEN, None)
    }
    assert found[16] == found[32] != found[33]
    assert found[33] == found[MAX_MODEL_LEN] == found[None]


def test_fingerprint_of_a_model_without_longrope_depends_on_no_length(tiny_model: Path) -> None:
    configs = [tiny_config(tiny_model, max_model_len=length) for length in (16, MAX_MODEL_LEN)]
    assert {model_fingerprint(config) for config in configs} == {fingerprint(tiny_model, dummy_seed=1)}


def test_pool_is_as_large_as_the_memory_given(tiny_model: Path) -> None:
    page_bytes = loaded_runner(tiny_model).layout.page_bytes
    cache = {"kv_cache_memory_bytes": 30 * page_bytes + 1, "host_cache_memory_bytes": 7 * page_bytes}
    runner = loaded_runner(tiny_model, cache=cache)
    assert len(runner.pool.device) == 30 and len(runner.pool.host) == 7
    assert runner.describe_pool() == "KV cache: 120 tokens in 30 pages of 4 (0.00 GiB a rank), 7 host pages"


def test_pool_too_small_for_one_sequence_is_refused(tiny_model: Path) -> None:
    told = f"holds 0 tokens, one sequence of max_model_len {MAX_MODEL_LEN} needs .* got 1,024: raise"
    with pytest.raises(ConfigError, match=told):
        loaded_runner(tiny_model, cache={"kv_cache_memory_bytes": 1024})


@pytest.mark.parametrize(
    ("asked", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_weights_and_pages_have_the_requested_dtype(
    tiny_model: Path, asked: str, expected: torch.dtype
) -> None:
    runner = loaded_runner(tiny_model, dtype=asked)
    assert isinstance(runner.model, Decoder) and isinstance(runner.model.norm, RmsNorm)
    assert runner.pool.device.dtype == runner.model.norm.weight_E.dtype == expected
    sequence = make_sequence("s", range(7))
    sequence.page_table = [2, 0]
    logits = runner.execute(StepBuilder(4, 4, 24).build(make_batch(rest_of(sequence))))
    assert logits.shape == (1, VOCAB_SIZE) and logits.dtype == torch.float32 and logits.isfinite().all()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_progress_counts_every_byte_of_the_weights_once(tmp_path: Path, tied: bool, num_ranks: int) -> None:
    model = read_model_config(write_config(tmp_path, tie_word_embeddings=tied, dtype="bfloat16"))
    runner = ModelRunner(tiny_config(tmp_path), model, ReplicaRank(TensorParallel(0, num_ranks)))
    reports: list[tuple[int, int]] = []
    runner.load(lambda done, total: reports.append((done, total)))
    total = parameter_bytes(model, "bfloat16")
    assert reports[0] == (0, total) and reports[-1] == (total, total)
    assert len(reports) == 1 + len(parameter_shapes(model))
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


MIXTURES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
}


class NotingCheckpoint:
    """A checkpoint that notes the slices that are read."""

    def __init__(self, inner: Checkpoint) -> None:
        self.names, self.shape, self.num_bytes = inner.names, inner.shape, inner.num_bytes
        self._inner = inner
        self.slices: list[tuple[str, int, int, int]] = []

    def slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        self.slices.append((name, dim, start, stop))
        return self._inner.slice(name, dim, start, stop)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_rank_with_whole_experts_reads_no_other_expert(architecture: str, tmp_path: Path) -> None:
    directory = write_config(tmp_path, architectures=[architecture], **MIXTURES[architecture])
    model = read_model_config(directory)
    reports: list[tuple[int, int]] = []
    checkpoint = NotingCheckpoint(dummy_checkpoint(model, 1, torch.device("cpu")))
    config = tiny_config(directory, tensor_parallel_size=2, enable_expert_parallel=True)
    runner = ModelRunner(config, model, ReplicaRank(TensorParallel(1, 2)))
    runner.load(lambda done, total: reports.append((done, total)), checkpoint)
    assert reports[-1][0] == reports[-1][1], "the progress ends at the bytes of this rank's tensors"
    of_experts = [each for each in checkpoint.slices if ".experts." in each[0]]
    if architecture == "GptOssForCausalLM":  # all experts in one tensor
        assert {(dim, start, stop) for _, dim, start, stop in of_experts} == {(0, 2, 4)}
    else:
        assert {name.split(".experts.")[1].split(".")[0] for name, *_ in of_experts} == {"2", "3"}
        assert all(tuple(span) == (0, checkpoint.shape(name)[dim]) for name, dim, *span in of_experts)


def test_tied_embeddings_share_one_unpacked_table(tmp_path: Path) -> None:
    model = read_model_config(write_config(tmp_path, tie_word_embeddings=True))
    runner = ModelRunner(tiny_config(tmp_path, dtype="float16"), model, ReplicaRank())
    runner.load()
    decoder = runner.model
    assert isinstance(decoder, Decoder)
    assert decoder.head.weight.data.data_ptr() == decoder.embedding.table_VE.data_ptr()


@torch.inference_mode()  # as the pool was made
def test_step_may_be_copies_alone(tiny_model: Path) -> None:
    runner = loaded_runner(tiny_model, cache={"host_cache_memory_bytes": 2**16})
    runner.pool.device[3] = 5.0
    arrays = StepBuilder(4, 4, 24).build(make_batch(copies_to_host=((3, 1),), copies_to_device=((6, 1),)))
    assert runner.execute(arrays).shape == (0, VOCAB_SIZE)
    assert bool((runner.pool.host[1] == 5.0).all()) and bool((runner.pool.device[6] == 5.0).all())
