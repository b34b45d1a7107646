"""The files of a checkpoint, and the tensors that their headers promise.

Only safetensors are read. Pickled weights are refused: unpickling runs whatever code the file carries. No
torch here: whether a model is whole is asked before any process is started that computes.
"""

from pathlib import Path
from typing import Final

from baton.engine.json_file import read_json
from baton.engine.safetensors_file import TensorEntry, read_safetensors_header
from baton.errors import ModelError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
PICKLE_SUFFIXES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


def read_entries(directory: Path) -> tuple[dict[str, TensorEntry], dict[str, Path]]:
    """Each tensor of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists, and the
    file that holds it.

    Every header is checked here, so that a damaged download is found before anything is loaded.
    Raises ModelError naming the file, and the tensor where one is to blame.
    """
    if (directory / SINGLE_FILE).exists():
        path = directory / SINGLE_FILE
        entries = read_safetensors_header(path).tensors
        return entries, dict.fromkeys(entries, path)
    if (directory / INDEX_FILE).exists():
        return _read_shards(directory / INDEX_FILE)
    raise ModelError(_why_no_weights(directory))


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files that `read_entries` reads, in order of name; none when there are none."""
    if (directory / SINGLE_FILE).exists():
        return (directory / SINGLE_FILE,)
    if (directory / INDEX_FILE).exists():
        return tuple(sorted(set(_read_index(directory / INDEX_FILE).values())))
    return ()


def _read_shards(index: Path) -> tuple[dict[str, TensorEntry], dict[str, Path]]:
    files = _read_index(index)
    headers = {path: read_safetensors_header(path).tensors for path in sorted(set(files.values()))}
    for name, path in files.items():
        if name not in headers[path]:
            raise ModelError(f"{index}: tensor {name!r} should be in {path.name}, which does not hold it")
    return {name: headers[path][name] for name, path in files.items()}, files


def _read_index(index: Path) -> dict[str, Path]:
    weight_map = read_json(index).require("weight_map", dict[str, str])
    for file_name in weight_map.values():
        # A path could name any file of this machine; shards lie beside their index.
        is_plain = Path(file_name).name == file_name and "\0" not in file_name
        if not is_plain or not file_name.endswith(".safetensors"):
            raise ModelError(f"{index}: a shard should be a .safetensors file beside it, got {file_name!r}")
    return {name: index.parent / file_name for name, file_name in weight_map.items()}


def _why_no_weights(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory}: there is no such directory"
    expected = f"{directory}: expected {SINGLE_FILE} or {INDEX_FILE}"
    names = sorted(path.name for path in directory.iterdir())
    pickles = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
    if pickles:
        return (
            f"{expected}, got pickled weights ({', '.join(pickles)}): reading a pickle can run any code, "
            f"so they are refused; convert them to safetensors"
        )
    others = [name for name in names if name.endswith(".safetensors")]
    return f"{expected}, got {', '.join(others)}" if others else f"{expected}, found no weights"
