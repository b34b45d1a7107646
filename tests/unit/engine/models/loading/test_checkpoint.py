"""Checkpoints and fingerprints: the tensors of `transformers`' files, and damaged files by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from baton.engine.models.loading.checkpoint import (
    DENSE_METHODS,
    MAX_FILE_BYTES,
    JsonObject,
    SafetensorsCheckpoint,
    fingerprint,
    read_entries,
    read_json,
    read_quantization,
    weight_files,
)
from baton.errors import ModelError

INDEX = "model.safetensors.index.json"
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def model() -> "transformers.LlamaForCausalLM":
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
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


def write_header(directory: Path, header: object, num_bytes: int) -> None:
    raw = json.dumps(header).encode()
    (directory / FILE).write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(num_bytes))


@pytest.mark.parametrize("shard_size", [None, "16KB"])
def test_checkpoint_has_the_tensors_of_transformers(
    tmp_path: Path, model: "transformers.LlamaForCausalLM", shard_size: str | None
) -> None:
    model.save_pretrained(tmp_path, **({} if shard_size is None else {"max_shard_size": shard_size}))
    assert (len(weight_files(tmp_path)) > 2) == (shard_size is not None)
    checkpoint, expected = SafetensorsCheckpoint(tmp_path), model.state_dict()
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.num_bytes(name) == tensor.nbytes
        assert torch.equal(checkpoint.slice(name, 0, 0, len(tensor)), tensor)


def test_slice_is_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    weight = torch.arange(24.0).view(4, 6)
    save_file({"w": weight}, tmp_path / FILE)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    rows, columns = checkpoint.slice("w", 0, 1, 3), checkpoint.slice("w", 1, 3, 6)
    assert torch.equal(rows, weight[1:3]) and torch.equal(columns, weight[:, 3:])
    assert columns.stride() == (6, 1)


def test_linked_file_is_followed(tmp_path: Path) -> None:
    # Download caches keep the bytes elsewhere and link to them.
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "blobs" / "abc")
    os.symlink("../blobs/abc", tmp_path / "model" / FILE)
    assert SafetensorsCheckpoint(tmp_path / "model").slice("w", 0, 0, 1).item() == 1.0


@pytest.mark.parametrize("kept", [0, 4, 20, 200, -1])
def test_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    path = tmp_path / FILE
    save_file({f"w{i}": torch.zeros(16) for i in range(4)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=f"{FILE}: is truncated or damaged"):
        read_entries(tmp_path)


def test_bytes_after_the_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE
    save_file({"w": torch.zeros(16)}, path)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ModelError, match=f"{FILE}: is truncated or damaged"):
        read_entries(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            {"w": {"dtype": "I16", "shape": [4], "data_offsets": [0, 8]}},
            "tensor 'w': dtype should be one of F32, BF16, F16, F8_E4M3, U8, I8, I32, I64, got 'I16'",
        ),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, "damaged: .*invalid shape"),
        ({"w": {"dtype": "F32", "shape": [4]}}, "damaged: .*data_offsets"),
        (
            {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "vw"},
            "is truncated or damaged",
        ),
    ],
    ids=["integers", "size", "no offsets", "overlap"],
)
def test_invalid_header_is_refused(tmp_path: Path, header: object, message: str) -> None:
    write_header(tmp_path, header, 8)
    with pytest.raises(ModelError, match=message):
        read_entries(tmp_path)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("absent.safetensors", "absent.safetensors: there is no such file"),
        ("../a.safetensors", "a shard should be a .safetensors file beside it"),
        ("/a.safetensors", "a shard should be a .safetensors file beside it"),
        ("sub/a.safetensors", "a shard should be a .safetensors file beside it"),
        ("a.bin", "a shard should be a .safetensors file beside it"),
        ("..", "a shard should be a .safetensors file beside it"),
        ("a.safetensors", "tensor 'v' should be in a.safetensors, which does not hold it"),
    ],
)
def test_index_names_only_tensors_in_files_beside_it(tmp_path: Path, shard: str, message: str) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    for folder in (tmp_path, inside):
        save_file({"w": torch.zeros(1)}, folder / "a.safetensors")
    write_shards(inside, {"w": "a.safetensors", "v": shard})
    with pytest.raises(ModelError, match=message):
        read_entries(inside)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_unread(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match=rf"got pickled weights \({name}\).*convert them to safetensors"):
        read_entries(tmp_path)


def test_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="found no weights"):
        read_entries(tmp_path)
    with pytest.raises(ModelError, match="there is no such directory"):
        read_entries(tmp_path / "absent")
    save_file({"w": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(ModelError, match="expected model.safetensors or .*, got consolidated.safetensors"):
        read_entries(tmp_path)


def test_headers_are_read_without_torch(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3, 2).half()}, tmp_path / FILE)
    script = (
        "import sys; from pathlib import Path; "
        "from baton.engine.models.loading.checkpoint import read_entries; "
        "entry = read_entries(Path(sys.argv[1]))['w']; print(entry.shape, 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert ran.stdout == "(3, 2) False\n", ran.stderr


# JSON files.


def test_null_counts_as_absent_and_is_distinguishable() -> None:
    keys = JsonObject({"one": 1, "none": None}, "f.json")
    assert "none" not in keys and "absent" not in keys
    assert keys.get("none", int) is None
    assert keys.is_null("none") and not keys.is_null("absent") and not keys.is_null("one")
    with pytest.raises(ModelError, match="f.json: key 'none' is missing"):
        keys.require("none", int)


@pytest.mark.parametrize("text", ["{", "[1]", "", '{"a": NaN}', '{"a": 1} x', '{"a":' + "[" * 200_000])
def test_damaged_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(ModelError, match="f.json: is not a JSON object"):
        read_json(tmp_path / "f.json")


def test_absent_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="f.json: there is no such file"):
        read_json(tmp_path / "f.json")
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        read_json(tmp_path)


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "f.json").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ModelError, match=f"at most {MAX_FILE_BYTES} bytes"):
        read_json(tmp_path / "f.json")


# Fingerprints.


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(64, 64), "v": torch.zeros(3)}, tmp_path / FILE)
    return tmp_path


@pytest.mark.parametrize(
    "tensors",
    [
        {"w": torch.zeros(64, 64), "v": torch.ones(3)},
        {"w": torch.zeros(32, 128), "v": torch.zeros(3)},
        {"w": torch.zeros(64, 64), "x": torch.zeros(3)},
        {"w": torch.zeros(64, 64).half(), "v": torch.zeros(3)},
    ],
    ids=["values", "shape", "name", "dtype"],
)
def test_other_weights_have_another_fingerprint(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    before = fingerprint(directory)
    save_file(tensors, directory / FILE)
    assert fingerprint(directory) != before


def test_other_config_or_dummy_seed_has_another_fingerprint(directory: Path) -> None:
    found = {fingerprint(directory), *(fingerprint(directory, dummy_seed=seed) for seed in (0, 1))}
    (directory / "config.json").write_text('{"rope_theta": 1}')
    assert len(found | {fingerprint(directory)}) == 4


@pytest.mark.parametrize("name", ["modules_to_not_convert", "ignored_layers"])
def test_fp8_leaves_out_the_layers_that_its_config_names(name: str) -> None:
    section = {"quant_method": "fp8", name: ["re:.*block_sparse_moe.gate", "down_proj"]}
    scheme = read_quantization(JsonObject({"quantization_config": section}, "config.json"), DENSE_METHODS)
    assert scheme is not None
    covered = {
        module: scheme.covers(f"model.layers.0.{module}")
        for module in ("mlp.down_proj", "block_sparse_moe.gate", "mlp.up_proj")
    }
    assert covered == {"mlp.down_proj": False, "block_sparse_moe.gate": False, "mlp.up_proj": True}
    assert not scheme.covers("lm_head")
