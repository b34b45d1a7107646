"""A training run on disk: weights and optimizer moments as safetensors, the rest as JSON in its header."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

MOMENTS: Final = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps per parameter


def save_checkpoint(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Replace `path` at once: a reader finds the old file or the new one, never half of either."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        for moment, value in optimizer.state[parameter].items():
            tensors[f"{name}/{moment}"] = value
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"state": json.dumps(state)})
    partial.replace(path)


@torch.no_grad()
def load_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill `model` and `optimizer` from what `save_checkpoint` wrote; returns its state.

    A parameter that had not been trained yet has no moments; its first step makes them.
    """
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        for name, parameter in model.named_parameters():
            parameter.copy_(file.get_tensor(name))
            for moment in MOMENTS:
                if f"{name}/{moment}" in names:
                    optimizer.state[parameter][moment] = file.get_tensor(f"{name}/{moment}")
        state: dict[str, Any] = json.loads(file.metadata()["state"])
    return state
