import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from baton.engine.models.checkpoint import weight_files
from baton.engine.models.weights import ReportingCheckpoint, SafetensorsCheckpoint, open_checkpoint
from baton.errors import ModelError

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
        )
    )


def write_shards(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def assert_same_weights(checkpoint: SafetensorsCheckpoint, model: LlamaForCausalLM) -> None:
    expected = model.state_dict()
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_a_single_file(tmp_path: Path, model: LlamaForCausalLM) -> None:
    model.save_pretrained(tmp_path)
    assert weight_files(tmp_path) == (tmp_path / "model.safetensors",)
    assert_same_weights(open_checkpoint(tmp_path), model)


def test_shards(tmp_path: Path, model: LlamaForCausalLM) -> None:
    model.save_pretrained(tmp_path, max_shard_size="16KB")
    assert len(weight_files(tmp_path)) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_weights(open_checkpoint(tmp_path), model)


def test_a_slice_is_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    weight = torch.arange(24.0).view(4, 6)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    rows, columns = checkpoint.slice("w", 0, 1, 3), checkpoint.slice("w", 1, 3, 6)
    assert torch.equal(rows, weight[1:3])
    assert torch.equal(columns, weight[:, 3:])
    assert columns.stride() == (6, 1)


@pytest.mark.parametrize(("dim", "start", "stop"), [(2, 0, 1), (-1, 0, 1), (0, 0, 5), (0, 3, 2), (1, -1, 2)])
def test_a_slice_outside_the_tensor(tmp_path: Path, dim: int, start: int, stop: int) -> None:
    save_file({"w": torch.zeros(4, 6)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor 'w' of shape \[4, 6\] has no"):
        open_checkpoint(tmp_path).slice("w", dim, start, stop)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="no tensor 'v'"):
        open_checkpoint(tmp_path).tensor("v")


def test_progress_counts_the_bytes_handed_out(tmp_path: Path) -> None:
    tensors = {"v": torch.zeros(4), "w": torch.zeros(4, 2).half(), "unused": torch.zeros(9)}
    save_file(tensors, tmp_path / "model.safetensors")
    seen: list[tuple[int, int]] = []
    checkpoint = ReportingCheckpoint(open_checkpoint(tmp_path), "vw", lambda *done: seen.append(done))
    assert (set(checkpoint.names()), checkpoint.shape("w")) == (set(tensors), (4, 2))
    checkpoint.tensor("v")
    checkpoint.slice("w", 1, 0, 1)
    assert seen == [(0, 32), (16, 32), (32, 32)]


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"v": entry, "w": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match="model.safetensors: cannot be mapped"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    write_shards(tmp_path, {"w": "a.safetensors"})
    with pytest.raises(ModelError, match="a.safetensors: there is no such file"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_a_missing_tensor(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "a.safetensors")
    write_shards(tmp_path, {"w": "a.safetensors", "v": "a.safetensors"})
    with pytest.raises(ModelError, match="tensor 'v' should be in a.safetensors, which does not hold it"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("escape", ["../a.safetensors", "/a.safetensors", "sub/a.safetensors", "a.bin", ".."])
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, escape: str) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    save_file({"w": torch.zeros(1)}, tmp_path / "a.safetensors")
    write_shards(inside, {"w": escape})
    with pytest.raises(ModelError, match="a shard should be a .safetensors file beside it"):
        open_checkpoint(inside)


def test_a_linked_file_is_followed(tmp_path: Path) -> None:
    # Download caches keep the bytes elsewhere and link to them.
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "blobs" / "abc")
    os.symlink("../blobs/abc", tmp_path / "model" / "model.safetensors")
    assert open_checkpoint(tmp_path / "model").tensor("w").item() == 1.0


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_unread(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match=rf"got pickled weights \({name}\).*convert them to safetensors"):
        open_checkpoint(tmp_path)
    assert weight_files(tmp_path) == ()


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="found no weights"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="there is no such directory"):
        open_checkpoint(tmp_path / "absent")
    save_file({"w": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(ModelError, match="expected model.safetensors or .*, got consolidated.safetensors"):
        open_checkpoint(tmp_path)
