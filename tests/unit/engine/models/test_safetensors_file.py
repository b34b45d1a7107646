import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from baton.engine.models.checkpoint import read_safetensors_header
from baton.errors import ModelError

FILE = "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_header_says_where_every_tensor_lies(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"w": torch.randn(3, 5).to(dtype), "scalar": torch.ones((), dtype=dtype), "none": torch.ones(0)}
    content = save(tensors, metadata={"format": "pt"})
    (tmp_path / FILE).write_bytes(content)
    header = read_safetensors_header(tmp_path / FILE)
    assert set(header.tensors) == set(tensors)
    for name, tensor in tensors.items():
        start, stop = (header.data_start + offset for offset in header.tensors[name].data_offsets)
        assert header.tensors[name].shape == tuple(tensor.shape)
        assert header.tensors[name].num_bytes == tensor.nbytes
        assert content[start:stop] == bytes(tensor.view(-1).view(torch.uint8).tolist())


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model.safetensors: there is no such file"):
        read_safetensors_header(tmp_path / FILE)


@pytest.mark.parametrize("kept", [0, 4, 20, 200, -1])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    path = tmp_path / FILE
    save_file({f"w{i}": torch.zeros(16) for i in range(4)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model.safetensors: is truncated.* got|no safetensors header"):
        read_safetensors_header(tmp_path / FILE)


def test_bytes_after_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / FILE
    save_file({"w": torch.zeros(16)}, path)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ModelError, match="is truncated or damaged"):
        read_safetensors_header(tmp_path / FILE)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]},
            "'w': dtype should be one of F32, BF16, F16, got",
        ),
        (
            {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
            r"'w': F32 \[4\] should take 16 bytes, got \[0, 8",
        ),
        ({"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}, r"'w': F32 \[-2, -1\] should take"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}, r"'w': F32 \[4\] should take"),
        ({"dtype": "F32", "shape": [4]}, "header cannot be read: .*data_offsets"),
        ([], "header cannot be read"),
    ],
)
def test_a_header_that_contradicts_itself(tmp_path: Path, entry: object, message: str) -> None:
    header = json.dumps({"w": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(ModelError, match=message):
        read_safetensors_header(tmp_path / FILE)
