"""LoRA adapters on one rank: their weights, the projections that they change, and the rows of a step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from baton.adapters import AdapterFiles
from baton.engine.models.loading.checkpoint import Shape
from baton.errors import ModelError
from baton.kernels.lora import AdapterRows, LowRankWeights
from baton.kernels.native import HugeArena

PEFT_PREFIX: Final = "base_model.model."


class AdaptedProjection(NamedTuple):
    """A linear layer, or one of several that are multiplied at once, as adapters change it on this rank."""

    dim: int  # along which ranks split the layer: 0 the outputs, 1 the inputs
    start: int  # of this rank's part
    stop: int
    change: Callable[[Tensor], Tensor]  # the order of this rank's outputs
    weights: LowRankWeights

    def put(self, slot: int, a_RK: Tensor, b_NR: Tensor, memory: HugeArena) -> None:
        """Keep this rank's part of an adapter, which is given whole, in the adapter's memory."""
        if self.dim == 0:
            b_NR = self.change(b_NR[self.start : self.stop])
        else:
            a_RK = a_RK[:, self.start : self.stop]
        self.weights.put(slot, a_RK, b_NR, memory)


class AdapterTensors(NamedTuple):
    """The weights of an adapter that fit the model: of each projection A [R, K] and B [N, R], fp32."""

    rank: int
    scale: float  # of B @ A
    pairs: dict[str, tuple[Tensor, Tensor]]  # by the name of the projection


class Adapters:
    """The adapters in the slots of one rank, and the slots of the rows of the running step.

    A model makes `projections` as it is built, by the names of their layers in the checkpoint; a pipeline
    stage has those of its layers.
    """

    def __init__(self, device: torch.device, shapes: Mapping[str, Shape]) -> None:
        """shapes: of the weight of each linear layer that adapters may change, in all stages."""
        self.projections: dict[str, AdaptedProjection] = {}
        self.shapes = shapes
        self.rows: AdapterRows | None = None  # None: no row of the step has an adapter
        self.logit_rows: AdapterRows | None = None  # of the rows with wanted logits
        self._device = device
        self._ranks: dict[int, int] = {}  # slot -> rank

    def put(self, slot: int, tensors: AdapterTensors | None) -> None:
        """Place an adapter in a slot, in place of the one there. None: leave the slot free."""
        for projection in self.projections.values():
            projection.weights.remove(slot)
        if tensors is None:
            return
        memory = HugeArena()
        for name, (a_RK, b_NR) in tensors.pairs.items():
            scaled_NR = (b_NR * tensors.scale).to(self._device)
            self.projections[name].put(slot, a_RK.to(self._device), scaled_NR, memory)
        self._ranks[slot] = tensors.rank

    @contextmanager
    def step(self, slots_T: NDArray[np.int32], logit_rows: NDArray[np.int64]) -> Iterator[None]:
        """Within, the rows of the model have the adapters in these slots. Empty: no row has one."""
        if len(slots_T):
            rank = max(self._ranks[int(slot)] for slot in np.unique(slots_T) if slot >= 0)
            self.rows = AdapterRows(slots_T, rank, self._device)
            self.logit_rows = AdapterRows(slots_T[logit_rows], rank, self._device)
        try:
            yield
        finally:
            self.rows = self.logit_rows = None

    def read(self, files: AdapterFiles) -> AdapterTensors:
        """Read the weights of an adapter, from any thread; keep those of this rank's stage.

        Raises ModelError if any do not fit the model.
        """
        try:
            tensors = load(files.weights)
        except (SafetensorError, ValueError, KeyError) as error:
            raise ModelError(f"{files.path}: the weights are not valid safetensors: {error}") from None
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            module, _, part = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
            if module not in self.shapes or part not in ("A.weight", "B.weight"):
                raise ModelError(
                    f"{files.path}: tensor {name!r} is of no projection that adapters may change"
                )
            self._check(files, name, tensor, self.shapes[module], is_a=part[0] == "A")
            found.setdefault(module, {})[part[0]] = tensor.float()
        for module, parts in found.items():
            if len(parts) < 2:
                raise ModelError(f"{files.path}: {module!r} should have lora_A and lora_B")
        own = found.keys() & self.projections.keys()
        pairs = {module: (parts["A"], parts["B"]) for module, parts in found.items() if module in own}
        return AdapterTensors(files.config.rank, files.config.scale, pairs)

    @staticmethod
    def _check(files: AdapterFiles, name: str, tensor: Tensor, shape: Shape, *, is_a: bool) -> None:
        rank = files.config.rank
        expected = (rank, shape[1]) if is_a else (shape[0], rank)
        if tensor.shape != expected or not tensor.is_floating_point():
            got = f"{list(tensor.shape)} {tensor.dtype}"
            raise ModelError(f"{files.path}: tensor {name!r} should be {list(expected)} of floats, got {got}")
        if not all(bound.isfinite() for bound in tensor.float().aminmax()):
            raise ModelError(f"{files.path}: tensor {name!r} has a NaN or an infinity")
