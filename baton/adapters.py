"""LoRA adapters in PEFT's format: what a request says of its adapter, and the files that it names.

An adapter is known by the digest of its files, never by its name: page keys hold the digest, and a worker
that reads other files under the path refuses the request. This module imports no torch.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from baton.errors import ConfigError, ModelError, shown
from baton.messages.bounds import MAX_NAME_CHARS

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DIGEST_BYTES: Final = 32
MAX_RANK: Final = 512
MAX_ALPHA: Final = 1e6
MAX_FILE_BYTES: Final = 2**31  # a message between ranks holds them
# Keys of the config that change the weights in a way that no kernel here computes, when they are set.
UNSUPPORTED: Final = (
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "fan_in_fan_out",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
)
# Values of `init_lora_weights`, by how they begin, that change the base weights before training. The adapter
# fits the changed weights alone.
CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
AdapterPath: TypeAlias = Annotated[str, Meta(min_length=1, max_length=4096)]
AdapterDigest: TypeAlias = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The adapter of a request."""

    path: AdapterPath  # a folder, on the machine of every worker
    digest: AdapterDigest  # of its files

    def salt(self, salt: bytes) -> bytes:
        """Return the salt of the adapter's pages, by the salt of the same pages without an adapter."""
        return blake2b(self.digest + salt, digest_size=DIGEST_BYTES, person=b"baton-adapter").digest()


class NamedAdapter(NamedTuple):
    """An adapter as requests name it, beside the model."""

    name: str
    adapter: Adapter
    created_s: int  # when it was loaded, in seconds since 1970


def named_paths(modules: Sequence[str]) -> dict[str, str]:
    """Return the path of each name in `name=path`. Raises ConfigError."""
    pairs = [module.partition("=") for module in modules]
    for module, (name, _, path) in zip(modules, pairs, strict=True):
        if not path or not 0 < len(name) <= MAX_NAME_CHARS:
            raise ConfigError(f"gateway.lora_modules: expected name=path, got {module!r}")
    found = {name: str(Path(path).resolve()) for name, _, path in pairs}
    if len(found) < len(modules):
        raise ConfigError("gateway.lora_modules: a name is there twice")
    return found


class AdapterConfig(NamedTuple):
    """The parts of adapter_config.json that the computation needs."""

    rank: int
    scale: float  # of B @ A


class AdapterFiles(NamedTuple):
    """The files of an adapter, read once, so that the digest is of the weights that are used."""

    path: str
    config: AdapterConfig
    weights: bytes  # in safetensors' format
    digest: bytes


def read_adapter(path: str, max_rank: int = MAX_RANK) -> AdapterFiles:
    """Read the files of an adapter; the tensors are not looked at.

    Raises ModelError, naming the file and the key, for a config that asks for more than LoRA of linear layers
    of up to `max_rank`.
    """
    folder = Path(path)
    try:
        is_pickle = (folder / "adapter_model.bin").exists() and not (folder / WEIGHTS_FILE).exists()
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: cannot be read: {error}") from None
    if is_pickle:
        raise ModelError(f"{folder}: adapter_model.bin is a pickle, which is never read: save safetensors")
    raw_config, weights = _read(folder / CONFIG_FILE), _read(folder / WEIGHTS_FILE)
    try:
        keys = msgspec.json.decode(raw_config, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{folder / CONFIG_FILE}: is not a JSON object: {error}") from None
    config = _read_config(keys, str(folder / CONFIG_FILE), max_rank)
    digest = blake2b(struct.pack("<Q", len(raw_config)) + raw_config, digest_size=DIGEST_BYTES)
    digest.update(weights)
    return AdapterFiles(path, config, weights, digest.digest())


def _read(path: Path) -> bytes:
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_FILE_BYTES:
            raise ModelError(f"{path}: should be at most {MAX_FILE_BYTES} bytes, got {num_bytes}")
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ModelError(f"{path}: cannot be read: {error}") from None


def _read_config(keys: Mapping[str, Any], source: str, max_rank: int) -> AdapterConfig:
    if keys.get("peft_type") != "LORA":
        raise ModelError(f"{source}: peft_type should be 'LORA', got {keys.get('peft_type')!r}")
    for key in UNSUPPORTED:
        if keys.get(key):
            raise ModelError(f"{source}: {key!r} is not supported")
    if keys.get("bias", "none") != "none":
        raise ModelError(f"{source}: bias {keys['bias']!r} is not supported, only 'none' is")
    start = keys.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise ModelError(
            f"{source}: 'init_lora_weights' {start!r} is not supported, because the adapter fits other base "
            f"weights: convert it to plain LoRA (in PEFT, path_initial_model_for_weight_conversion)"
        )
    targets = keys.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if str(target).rpartition(".")[2] not in TARGETS:
            raise ModelError(
                f"{source}: target {target!r} is not supported; supported are {', '.join(TARGETS)}"
            )
    rank, alpha = keys.get("r"), keys.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise ModelError(f"{source}: 'r' should be 1 to {max_rank} (--max-lora-rank), got {rank!r}")
    if not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
        raise ModelError(
            f"{source}: 'lora_alpha' should be a number up to {MAX_ALPHA:,.0f}, got {shown(alpha)}"
        )
    return AdapterConfig(rank, alpha / (math.sqrt(rank) if keys.get("use_rslora") else rank))
