"""Random LoRA adapters in PEFT's format, and the weights of a model that has one merged in."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from baton.adapters import CONFIG_FILE, TARGETS, WEIGHTS_FILE, Adapter, read_adapter

MODEL_FILE = "model.safetensors"


def save_adapter(
    model: Path,
    folder: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Iterable[str] = TARGETS,
    deviation: float = 0.3,
    **keys: Any,
) -> Adapter:
    """Write an adapter of a saved model. keys: more of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    targets, tensors = tuple(targets), {}
    for name, weight in load_file(model / MODEL_FILE).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets and module != name:
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                tensor = torch.randn(shape, generator=random) * deviation
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = tensor
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2, "target_modules": [*targets], **keys}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS_FILE)
    return Adapter(str(folder), read_adapter(str(folder)).digest)


def save_merged(model: Path, adapter: Adapter, folder: Path) -> None:
    """Write the model with W + scale * B @ A in place of each W that the adapter changes."""
    shutil.copytree(model, folder)
    files = read_adapter(adapter.path)
    weights, changes = load_file(model / MODEL_FILE), load_file(Path(adapter.path) / WEIGHTS_FILE)
    for name, a in changes.items():
        if ".lora_A." in name:
            target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            b = changes[name.replace("lora_A", "lora_B")]
            change = files.config.scale * (b.double() @ a.double())
            weights[target] = (weights[target].double() + change).float()
    save_file(weights, folder / MODEL_FILE)
