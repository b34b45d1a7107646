import msgspec
import pytest
import torch

from baton.engine.models.parameters import DummyCheckpoint, check_parameters
from baton.engine.models.registry import ModelConfig, RopeConfig
from baton.errors import ModelError

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=5000,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    qkv_bias=True,
    qk_norm=True,
    sliding_windows=(None, None),
    initializer_range=0.1,
)
EMBEDDING = "model.embed_tokens.weight"


def test_every_parameter_is_there() -> None:
    checkpoint = DummyCheckpoint(CONFIG, 0)
    check_parameters(checkpoint, CONFIG)
    for name in checkpoint.names():
        assert tuple(checkpoint.tensor(name).shape) == checkpoint.shape(name)


@pytest.mark.parametrize("name", [EMBEDDING, "model.layers.1.self_attn.o_proj.weight"])
def test_slices_are_those_of_the_whole(name: str) -> None:
    checkpoint = DummyCheckpoint(CONFIG, 3)
    whole = checkpoint.tensor(name)
    for dim, size in enumerate(whole.shape):
        parts = [checkpoint.slice(name, dim, start, start + size // 2) for start in (0, size // 2)]
        assert torch.equal(torch.cat(parts, dim), whole)


def test_biases_slice_too() -> None:
    checkpoint = DummyCheckpoint(CONFIG, 3)
    whole = checkpoint.tensor("model.layers.0.self_attn.q_proj.bias")
    assert whole.count_nonzero() > 0
    assert torch.equal(checkpoint.slice("model.layers.0.self_attn.q_proj.bias", 0, 16, 32), whole[16:32])


def test_same_seed_same_weights_and_another_seed_others() -> None:
    first, again, other = (DummyCheckpoint(CONFIG, seed).tensor(EMBEDDING) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.isclose(first, other).float().mean() > 0.01


def test_tensors_differ_from_each_other() -> None:
    checkpoint = DummyCheckpoint(CONFIG, 0)
    gate, up = (checkpoint.tensor(f"model.layers.0.mlp.{name}_proj.weight") for name in ("gate", "up"))
    assert abs(torch.corrcoef(torch.stack([gate.flatten(), up.flatten()]))[0, 1]) < 0.05


def test_weights_are_nearly_normal() -> None:
    weight = DummyCheckpoint(CONFIG, 0).tensor(EMBEDDING) / CONFIG.initializer_range
    assert weight.mean().item() == pytest.approx(0.0, abs=0.01)
    assert weight.std().item() == pytest.approx(1.0, abs=0.01)
    assert (weight.abs() < 1).float().mean().item() == pytest.approx(0.683, abs=0.02)


def test_norms_are_ones_in_the_dtype_of_the_config() -> None:
    config = msgspec.structs.replace(CONFIG, dtype="bfloat16")
    for name in ("model.norm.weight", "model.layers.1.self_attn.q_norm.weight"):
        weight = DummyCheckpoint(config, 0).tensor(name)
        assert torch.equal(weight, torch.ones_like(weight))
        assert weight.dtype == torch.bfloat16


def test_known_values_never_change() -> None:
    # A published benchmark or a saved answer depends on them.
    weight = DummyCheckpoint(CONFIG, 0).tensor(EMBEDDING)
    assert weight[0, :3].tolist() == pytest.approx([0.011235, -0.1850162, -0.133773], abs=1e-6)


def test_unknown_tensors_and_slices_are_refused() -> None:
    checkpoint = DummyCheckpoint(CONFIG, 0)
    with pytest.raises(ModelError, match="no tensor 'model.layers.2.mlp.up_proj.weight'"):
        checkpoint.tensor("model.layers.2.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"has no \[0, 5001\) along 0"):
        checkpoint.slice(EMBEDDING, 0, 0, 5001)
