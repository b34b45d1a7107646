"""The files of a model directory: JSON, read key by key, the scheme of quantised weights, and safetensors.

Only safetensors are read. Pickled weights are refused, because unpickling runs any code that the file
carries. The safetensors library checks every header. This module imports no torch: `read_entries` says
whether a model is whole before any process starts that computes.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from baton.errors import ModelError

T = TypeVar("T")
Shape: TypeAlias = tuple[int, ...]
MAX_COUNT: Final = 2**31 - 1
MAX_FILE_BYTES: Final = 64 * 2**20  # no real index is larger; checked before memory is taken


class JsonObject:
    """One JSON object of a file. A key with the value null counts as absent, as in `transformers`."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self._values = values
        self.source = source

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Return True when the key is present with the value null."""
        return key in self._values and self._values[key] is None

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of `key` as `kind` (a type that msgspec converts to), or None when it is absent."""
        value = self._values.get(key)
        if value is None:
            return None
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            wanted = kind.__name__ if type(kind) is type else str(kind)
            raise ModelError(f"{self.source}: {key!r} should be {wanted}, got {value!r}") from None

    def require(self, key: str, kind: type[T]) -> T:
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.source}: key {key!r} is missing")
        return value

    def count(self, key: str, default: int | None = None, *, most: int = MAX_COUNT) -> int:
        """A whole number from 1 to `most`; required when there is no default."""
        value = self.require(key, int) if default is None else self.get(key, int)
        chosen = default if value is None else value
        if chosen is None or not 1 <= chosen <= most:
            raise ModelError(f"{self.source}: {key!r} should be 1 to {most}, got {chosen}")
        return chosen

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero; required when there is no default."""
        value = self.require(key, float) if default is None else self.get(key, float)
        chosen = default if value is None else value
        if chosen is None or not 0 < chosen < float("inf"):
            raise ModelError(f"{self.source}: {key!r} should be a number above 0, got {chosen}")
        return chosen

    def integers(self, key: str) -> tuple[int, ...]:
        """One whole number or a list of them; empty when absent."""
        if isinstance(self._values.get(key), list):
            return tuple(self.require(key, list[int]))
        value = self.get(key, int)
        return () if value is None else (value,)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, bool)
        return default if value is None else value

    def section(self, key: str) -> "JsonObject":
        """The nested object under `key`, empty when it is absent."""
        values: dict[str, Any] | None = self.get(key, dict)
        return JsonObject(values or {}, f"{self.source}: {key}")

    def renamed(self, names: Mapping[str, str]) -> "JsonObject":
        """These keys, with the value of each key `names[name]` also as `name`."""
        found = {name: self._values[key] for name, key in names.items() if key in self._values}
        return JsonObject({**self._values, **found}, self.source)

    def merged(self, other: "JsonObject") -> "JsonObject":
        """These keys, and the keys of `other` that are absent here."""
        own = {key: value for key, value in self._values.items() if value is not None}
        return JsonObject({**other._values, **own}, self.source)


def read_json(path: Path) -> JsonObject:
    """Read a file that holds one JSON object. ModelError when it is missing, too large or not an object."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_FILE_BYTES:
            raise ModelError(f"{path}: should be at most {MAX_FILE_BYTES} bytes, got {num_bytes}")
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: is not a JSON object: {error}") from None
    return JsonObject(values, str(path))


# Quantised checkpoints: the schemes that `quantization_config` of a config.json may name.
# quantised_weights.py reads their tensors.

# The tensors of a linear layer: values as they are, or packed into 32 bits in the order of
# compressed-tensors, AWQ or GPTQ; or experts in MXFP4.
Layout = Literal["values", "pack-quantized", "awq", "gptq", "mxfp4"]


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """A scheme, by what its tensors are."""

    method: str  # as config.json names it
    layout: Layout
    num_bits: int = 8
    is_float: bool = False  # E4M3
    group_size: int | None = None  # inputs that share a scale; None: all of them
    block_outputs: int | None = 1  # outputs that share a scale; None: all of them
    has_zeros: bool = False
    has_order: bool = False  # groups are not of neighbouring inputs
    scale_name: str = "weight_scale"
    zero_offset: int = 0  # zeros are saved less by so much
    rounds_inputs: bool = False
    # modules that are not quantised: names, or parts of names; "re:" and an expression
    ignored: tuple[str, ...] = ()

    def covers(self, module: str) -> bool:
        """True when the weight of a linear layer, by its name in the checkpoint, is quantised."""
        return self.layout != "mxfp4" and not any(_matches(module, each) for each in self.ignored)


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."


def read_quantization(keys: JsonObject, supported: tuple[str, ...]) -> Quantization | None:
    """The scheme of a checkpoint; None when it is not quantised.

    keys: the whole config.json. supported: names of METHODS. ModelError: another method, or a variant of a
    method that has no reader.
    """
    if "quantization_config" not in keys:
        return None
    section = keys.section("quantization_config")
    method = section.require("quant_method", str)
    if method not in supported or method not in METHODS:
        raise ModelError(
            f"{section.source}: quant_method {method!r} is not supported; supported are "
            f"{', '.join(supported) or 'none'}"
        )
    return METHODS[method](section)


def _compressed_tensors(keys: JsonObject) -> Quantization:
    saved_as, groups = keys.require("format", str), keys.section("config_groups")
    names = keys.require("config_groups", dict[str, object])
    if len(names) != 1:
        raise ModelError(f"{keys.source}: one group of 'config_groups' is supported, got {', '.join(names)}")
    group = groups.section(next(iter(names)))
    weights, inputs = group.section("weights"), group.section("input_activations")
    kind, num_bits = weights.require("type", str), weights.count("num_bits")
    formats = {
        ("pack-quantized", "int", 4),
        ("pack-quantized", "int", 8),
        ("int-quantized", "int", 8),
        ("float-quantized", "float", 8),
        ("naive-quantized", "int", 8),
        ("naive-quantized", "float", 8),
    }
    if (saved_as, kind, num_bits) not in formats:
        raise ModelError(
            f"{keys.source}: format {saved_as!r} with {kind} weights of {num_bits} bits is not supported"
        )
    block_outputs, group_size = _compressed_groups(weights)
    is_packed = saved_as == "pack-quantized"
    return Quantization(
        method=f"compressed-tensors {saved_as}",
        layout="pack-quantized" if is_packed else "values",
        num_bits=num_bits,
        is_float=kind == "float",
        group_size=group_size,
        block_outputs=block_outputs,
        has_zeros=not weights.flag("symmetric", True),
        has_order=weights.get("actorder", str) == "group",
        rounds_inputs=kind == "int" and inputs.get("num_bits", int) == 8,
        ignored=tuple(keys.get("ignore", list[str]) or ()),
    )


def _compressed_groups(weights: JsonObject) -> tuple[int | None, int | None]:
    """(outputs, inputs) that share a scale."""
    strategy = weights.get("strategy", str) or "tensor"
    match strategy:
        case "tensor":
            return None, None
        case "channel":
            return 1, None
        case "group":
            return 1, weights.count("group_size")
        case "block":
            outputs, inputs = weights.require("block_structure", tuple[int, int])
            return outputs, inputs
    raise ModelError(f"{weights.source}: strategy {strategy!r} is not supported")


def _fp8(keys: JsonObject) -> Quantization:
    block = keys.get("weight_block_size", tuple[int, int])
    return Quantization(
        method="fp8",
        layout="values",
        is_float=True,
        block_outputs=None if block is None else block[0],
        group_size=None if block is None else block[1],
        scale_name="weight_scale" if block is None else "weight_scale_inv",
        ignored=_not_converted(keys),
    )


def _awq(keys: JsonObject) -> Quantization:
    bits, version = keys.count("bits"), keys.get("version", str) or "gemm"
    if bits != 4 or version.lower() != "gemm":
        raise ModelError(
            f"{keys.source}: AWQ of version 'gemm' with 4 bits is supported, got {version!r}, {bits} bits"
        )
    return Quantization(
        method="awq",
        layout="awq",
        num_bits=4,
        group_size=_group_size(keys),
        has_zeros=keys.flag("zero_point", True),
        scale_name="scales",
        ignored=_not_converted(keys),
    )


def _gptq(keys: JsonObject) -> Quantization:
    bits = keys.count("bits")
    if bits not in (4, 8):
        raise ModelError(f"{keys.source}: GPTQ with 4 or 8 bits is supported, got {bits}")
    for key in ("dynamic", "modules_in_block_to_quantize"):
        if key in keys:
            raise ModelError(f"{keys.source}: {key!r} is not supported: all layers should be quantised alike")
    is_second = keys.get("checkpoint_format", str) == "gptq_v2"
    return Quantization(
        method="gptq",
        layout="gptq",
        num_bits=bits,
        group_size=_group_size(keys),
        has_zeros=True,
        has_order=keys.flag("desc_act"),
        scale_name="scales",
        zero_offset=0 if is_second else 1,
        ignored=_not_converted(keys),
    )


def _mxfp4(keys: JsonObject) -> Quantization:
    return Quantization(method="mxfp4", layout="mxfp4", num_bits=4, group_size=32, is_float=True)


def _group_size(keys: JsonObject) -> int | None:
    """-1 stands for all inputs."""
    return None if keys.get("group_size", int) == -1 else keys.count("group_size", 128)


def _not_converted(keys: JsonObject) -> tuple[str, ...]:
    names = ("modules_to_not_convert", "ignored_layers")  # AutoFP8 has the latter
    return ("lm_head", *(module for name in names for module in keys.get(name, list[str]) or ()))


# quant_method -> the scheme by its keys
METHODS: Final[dict[str, Callable[[JsonObject], Quantization]]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
DENSE_METHODS: Final = ("awq", "compressed-tensors", "fp8", "gptq")  # of any linear layer


# Safetensors.

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
PICKLE_SUFFIXES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
# The dtypes that models may have; integers and FP8 are those of quantised weights.
TENSOR_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint, by the header of its file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]  # of a scalar: (1,)

    @property
    def num_bytes(self) -> int:
        """The size of the whole tensor."""
        return math.prod(self.shape) * TENSOR_BYTES[self.dtype]


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model, in order of name; empty when there are none."""
    if (directory / SINGLE_FILE).exists():
        return (directory / SINGLE_FILE,)
    if (directory / INDEX_FILE).exists():
        return tuple(sorted(set(_read_index(directory / INDEX_FILE).values())))
    return ()


def read_entries(directory: Path) -> dict[str, TensorEntry]:
    """Read the headers of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists.

    Reads every header, so that a damaged download is found before anything is loaded. Raises ModelError
    naming the file, and the tensor where one is at fault.
    """
    files = weight_files(directory)
    if not files:
        raise ModelError(_why_no_weights(directory))
    entries = {name: entry for path in files for name, entry in _read_header(path)}
    if files == (directory / SINGLE_FILE,):
        return entries
    index = directory / INDEX_FILE
    for name, path in _read_index(index).items():
        if name not in entries or entries[name].path != path:
            raise ModelError(f"{index}: tensor {name!r} should be in {path.name}, which does not hold it")
    return entries


class SafetensorsCheckpoint:
    """The tensors of a model directory, mapped from their files: nothing is read before it is used."""

    def __init__(self, directory: Path, base_prefix: str = "") -> None:
        """ModelError as in `read_entries`. base_prefix: begins all names, if those of the files lack it."""
        entries = read_entries(directory)
        self._added = "" if any(name.startswith(base_prefix) for name in entries) else base_prefix
        self.entries = {self._added + name: entry for name, entry in entries.items()}
        paths = {entry.path for entry in self.entries.values()}
        self._open_files = {path: _open(path, "pt") for path in sorted(paths)}

    def names(self) -> tuple[str, ...]:
        """As `Checkpoint.names`."""
        return tuple(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """As `Checkpoint.shape`."""
        return self.entries[name].shape

    def num_bytes(self, name: str) -> int:
        """As `Checkpoint.num_bytes`."""
        return self.entries[name].num_bytes

    def slice(self, name: str, dim: int, start: int, stop: int) -> "Tensor":
        """As `Checkpoint.slice`: a view of the mapped file."""
        entry = self.entries[name]
        tensor: Tensor = self._open_files[entry.path].get_tensor(name.removeprefix(self._added))
        return tensor.view(entry.shape).narrow(dim, start, stop - start)

    def sample(self, name: str, num_items: int) -> bytes:
        """Up to `num_items` elements from the middle of a tensor, as fp32."""
        flat = self.slice(name, 0, 0, self.shape(name)[0]).view(-1)
        num_taken = min(num_items, len(flat))
        middle = flat.narrow(0, (len(flat) - num_taken) // 2, num_taken)
        sample: bytes = middle.float().numpy().tobytes()
        return sample


def _open(path: Path, framework: str) -> Any:
    from safetensors import SafetensorError, safe_open  # dummy weights run without it

    try:
        return safe_open(path, framework=framework)
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except SafetensorError as error:
        raise ModelError(f"{path}: is truncated or damaged: {error}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_header(path: Path) -> Iterator[tuple[str, TensorEntry]]:
    file = _open(path, "np")
    for name in file.keys():  # noqa: SIM118  # not a mapping
        header = file.get_slice(name)
        dtype = header.get_dtype()
        if dtype not in TENSOR_BYTES:
            raise ModelError(
                f"{path}: tensor {name!r}: dtype should be one of {', '.join(TENSOR_BYTES)}, got {dtype!r}"
            )
        yield name, TensorEntry(path, dtype, tuple(header.get_shape()) or (1,))


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


DIGEST_BYTES: Final = 16
SAMPLE_ITEMS: Final = 1024  # of each tensor


def fingerprint(
    directory: Path,
    *,
    dummy_seed: int | None = None,
    quantization: str | None = None,
    has_long_factors: bool | None = None,
) -> str:
    """BLAKE2b-128, in hexadecimal, of config.json, the name, dtype and shape of every tensor, and a sample of
    each.

    The fingerprint is part of every KV page's identity, so that pages are shared within one model only. A
    sample, up to 1024 elements from the middle of each tensor, tells a fine-tuned model from its base, which
    has the same shapes: training changes values all over a tensor. Hashing every byte would take a minute or
    two for 140 GB of weights at each start of each worker. Two models that differ only outside the samples
    share a fingerprint, and with it cached pages; only a deliberate edit makes such a pair. With `dummy_seed`
    the weights are a function of config.json and the seed. quantization: of the weights, after loading.
    has_long_factors: whether longrope rotates with its long factors; None: the model has no longrope.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"baton model")
    if quantization is not None:
        _update(digest, f"quantization {quantization}".encode())
    if has_long_factors is not None:
        _update(digest, f"longrope {'long' if has_long_factors else 'short'} factors".encode())
    _update(digest, (directory / "config.json").read_bytes())
    if dummy_seed is not None:
        _update(digest, f"dummy weights {dummy_seed}".encode())
        return digest.hexdigest()
    checkpoint = SafetensorsCheckpoint(directory)
    for name, (_, dtype, shape) in sorted(checkpoint.entries.items()):
        _update(digest, f"{name} {dtype} {shape}".encode())
        _update(digest, checkpoint.sample(name, SAMPLE_ITEMS))
    return digest.hexdigest()


def _update(digest: "hashlib.blake2b", part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))  # parts cannot run into each other
    digest.update(part)
