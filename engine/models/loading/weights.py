"""Weights: a checkpoint's tensors, and the part of them that one rank places on its device."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from baton.adapters import TARGETS
from baton.engine.models.adapters import AdaptedProjection, Adapters
from baton.engine.models.loading.checkpoint import Quantization, Shape
from baton.engine.models.loading.dummy_weights import DummyCheckpoint
from baton.engine.models.loading.quantised_weights import (
    Span,
    Stored,
    read_matrix,
    stored_span,
    stored_tensors,
)
from baton.engine.models.parallel import TensorParallel
from baton.errors import ConfigError, ModelError
from baton.kernels.experts import ExpertWeights, LinearHeads, stack_experts
from baton.kernels.linear import LinearWeight, pack_linear, pack_quantised
from baton.kernels.lora import LowRankWeights
from baton.kernels.native import HugeArena
from baton.kernels.quantised import FORMAT_OF, Method, QuantisedMatrix, join_rows, quantise

FLOAT_BYTES: Final = 4  # of scales of a quantised weight, at most
Matrix: TypeAlias = Tensor | QuantisedMatrix  # the weight of a linear layer, [N, K]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes of the checkpoint read, bytes in all), the first time with 0.

A tensor counts whole, though each tensor-parallel rank keeps only its part.
"""


class Checkpoint(Protocol):
    """Named tensors of a whole model. `check_parameters` finds missing ones before a tensor is read."""

    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""

    def shape(self, name: str) -> Shape:
        """The shape of a tensor."""

    def num_bytes(self, name: str) -> int:
        """The size of the whole tensor, as saved."""

    def slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """`[start, stop)` along `dim`, in the saved dtype. May share the checkpoint's memory: copy before
        writing.
        """


class HostCheckpoint:
    """A copy of a checkpoint in host memory; no file is read again."""

    def __init__(self, inner: Checkpoint) -> None:
        self._tensors = {
            name: inner.slice(name, 0, 0, inner.shape(name)[0]).clone() for name in inner.names()
        }

    def names(self) -> tuple[str, ...]:
        """As `Checkpoint.names`."""
        return tuple(self._tensors)

    def shape(self, name: str) -> Shape:
        """As `Checkpoint.shape`."""
        return tuple(self._tensors[name].shape)

    def num_bytes(self, name: str) -> int:
        """As `Checkpoint.num_bytes`."""
        return self._tensors[name].nbytes

    def slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """As `Checkpoint.slice`: a view of the copy."""
        return self._tensors[name].narrow(dim, start, stop - start)


class ReportingCheckpoint:
    """A checkpoint that reports to `progress` how many bytes have been read.

    names: the tensors that will be read, each once.
    """

    def __init__(self, inner: Checkpoint, names: Iterable[str], progress: Progress) -> None:
        self.names, self.shape, self.num_bytes = inner.names, inner.shape, inner.num_bytes
        self._inner = inner
        self._total_bytes = sum(map(inner.num_bytes, names))
        self._progress = progress
        self._done_bytes = 0
        progress(0, self._total_bytes)

    def slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """As `Checkpoint.slice`."""
        part = self._inner.slice(name, dim, start, stop)
        self._done_bytes += self.num_bytes(name)
        self._progress(self._done_bytes, self._total_bytes)
        return part


class Parameters:
    """Reads the parameters of one rank, in the model's dtype and on its device.

    Raises ModelError for a tensor with a NaN or an infinity in the model's dtype: the model's logits would be
    NaN.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        *,
        batch_invariant: bool = True,
        quantization: Method | None = None,
        scheme: Quantization | None = None,
        adapters: Adapters | None = None,
        layers: range | None = None,
        expert_ranks: TensorParallel | None = None,
    ) -> None:
        """batch_invariant: see `pack_linear`. quantization: of the weights of linear layers, when read.

        scheme: of the checkpoint. adapters: gets the projections that adapters may change. layers: those of
        the rank's pipeline stage; None: all. expert_ranks: ranks that have whole experts each; None: the
        ranks split every expert.
        """
        self.tp = tp
        self.dtype = dtype
        self.device = device
        self.batch_invariant = batch_invariant
        self.quantization = quantization
        self.scheme = scheme
        self.adapters = adapters
        self.layers = layers
        self.expert_ranks = expert_ranks
        self._packed_memory = HugeArena()
        self._checkpoint = checkpoint
        self._prefix = ""
        self._is_transposed = False

    def scope(self, name: str) -> "Parameters":
        """The parameters with names that begin with `name` and a dot."""
        scoped = copy(self)
        scoped._prefix = f"{self._prefix}{name}."
        return scoped

    def in_shards(self, num_shards: int) -> "Parameters":
        """The parameters in fewer shards than there are ranks: neighbouring ranks read the same shard."""
        view = copy(self)
        view.tp = TensorParallel(self.tp.rank * num_shards // self.tp.size, num_shards)
        return view

    def in_fp32(self) -> "Parameters":
        """The same parameters, read in fp32."""
        view = copy(self)
        view.dtype = torch.float32
        return view

    def transposed(self, name: str) -> "Parameters":
        """As `scope`; the checkpoint has the matrices transposed: inputs first."""
        scoped = self.scope(name)
        scoped._is_transposed = True
        return scoped

    def whole(self, name: str, shape: Shape) -> Tensor:
        """The whole parameter."""
        return self._read_matrix(name, shape, 0, 0, shape[0])

    def shard(self, name: str, shape: Shape, dim: int) -> Tensor:
        """This rank's part along `dim`; ConfigError when it cannot be split evenly. shape: of the whole."""
        start, stop = self.tp.shard(shape[dim], what=self._prefix + name)
        return self._read_matrix(name, shape, dim, start, stop)

    def matrix(self, name: str, shape: tuple[int, int], dim: int | None) -> Matrix:
        """This rank's part along `dim` of the weight of linear layer `name`; None: the whole weight.

        shape: of the whole. ConfigError as in `shard`, also for a part that the scheme cannot cut.
        """
        scheme, module = self.scheme, self._prefix + name
        if scheme is None or not scheme.covers(module):
            weight = f"{name}.weight"
            return self.whole(weight, shape) if dim is None else self.shard(weight, shape, dim)
        spans = self._spans(module, shape, dim)
        parts = {
            part: self.stored(f"{name}.{part}", tensor, spans)
            for part, tensor in stored_tensors(scheme, shape).items()
        }
        return self._decode(module, shape, parts, spans)

    def adapted(
        self,
        name: str,
        shape: tuple[int, int],
        dim: int,
        change: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> AdaptedProjection | None:
        """The adapters' part of linear layer `name`; None: no adapter may change the layer.

        shape, dim: as in `matrix`. change: as in `change_rows`, of the weight.
        """
        if self.adapters is None or name not in TARGETS:
            return None
        start, stop = self.tp.shard(shape[dim], what=self._prefix + name)
        own = (stop - start, shape[1]) if dim == 0 else (shape[0], stop - start)
        weights = LowRankWeights(*own, self.dtype, self.device)
        projection = AdaptedProjection(dim, start, stop, change, weights)
        self.adapters.projections[self._prefix + name] = projection
        return projection

    def expert_range(self, num_experts: int) -> range:
        """The experts that this rank holds, in part or whole.

        ConfigError when the experts cannot be divided evenly among the ranks.
        """
        if self.expert_ranks is None:
            return range(num_experts)
        return range(*self.expert_ranks.shard(num_experts, what="experts"))

    def expert_parameters(self) -> "Parameters":
        """A view that reads this rank's part of one expert: the whole expert with expert parallelism."""
        return self if self.expert_ranks is None else self.in_shards(1)

    def stacked_parameter(self, name: str, shape: Shape, dim: int | None) -> Tensor:
        """This rank's part of a tensor that holds one parameter of all experts, [X, ...].

        With expert parallelism: the rows of this rank's experts. Otherwise: all experts, cut along `dim`
        (None: whole).
        """
        if self.expert_ranks is None:
            return self.whole(name, shape) if dim is None else self.shard(name, shape, dim)
        own = self.expert_range(shape[0])
        return self._read_matrix(name, shape, 0, own.start, own.stop)

    def stacked_matrices(self, name: str, num_experts: int, shape: tuple[int, int], dim: int) -> list[Matrix]:
        """The matrices of this rank's experts, each as in `matrix`.

        The scheme stores each part of all experts in one tensor, `name_part`.
        """
        assert self.scheme is not None
        module, own = self._prefix + name, self.expert_range(num_experts)
        spans = self._spans(module, shape, dim if self.expert_ranks is None else None)
        parts: dict[str, Tensor] = {}
        for part, of_one in stored_tensors(self.scheme, shape).items():
            tensor = of_one.stacked(num_experts)
            if self.expert_ranks is None:
                parts[part] = self.stored(f"{name}_{part}", tensor, spans)
            else:
                parts[part] = self._read_stored(f"{name}_{part}", tensor, 0, own.start, own.stop)
        of_each = [{part: tensor[index] for part, tensor in parts.items()} for index in range(len(own))]
        return [
            self._decode(f"{module}.{expert}", shape, one, spans)
            for expert, one in zip(own, of_each, strict=True)
        ]

    def _spans(self, module: str, shape: tuple[int, int], dim: int | None) -> tuple[Span, Span]:
        """This rank's outputs and inputs."""
        outputs, inputs = (0, shape[0]), (0, shape[1])
        if dim is None:
            return outputs, inputs
        mine = self.tp.shard(shape[dim], what=module)
        return (mine, inputs) if dim == 0 else (outputs, mine)

    def _decode(
        self, module: str, shape: tuple[int, int], parts: dict[str, Tensor], spans: tuple[Span, Span]
    ) -> Matrix:
        assert self.scheme is not None
        try:
            weight = read_matrix(self.scheme, parts, spans)
        except ModelError as error:
            raise ModelError(f"{module!r}, {self.scheme.method}: {error}") from None
        return weight.to(self.dtype) if isinstance(weight, Tensor) else weight

    def stored(self, name: str, tensor: Stored, spans: tuple[Span, Span]) -> Tensor:
        """The part of a stored tensor that covers the outputs and inputs in `spans`, in its own dtype."""
        full, dim, start, stop = self._prefix + name, 0, 0, tensor.shape[0]
        cut = None
        for axis, span in zip((tensor.outputs, tensor.inputs), spans, strict=True):
            if axis is None:
                continue
            first, last = stored_span(full, tensor, axis, span)
            if (first, last) != (0, tensor.shape[axis.dim]):
                assert cut is None, "a rank has all inputs or all outputs"
                cut, dim, start, stop = axis, axis.dim, first, last
        return self._read_stored(name, tensor, dim, start, stop)

    def _read_stored(self, name: str, tensor: Stored, dim: int, start: int, stop: int) -> Tensor:
        part = self._checkpoint.slice(self._prefix + name, dim, start, stop)
        if part.dtype != tensor.dtype and not (tensor.dtype is None and part.is_floating_point()):
            expected = tensor.dtype or "a float"
            raise ModelError(f"tensor {self._prefix + name!r} should be {expected}, got {part.dtype}")
        return part.clone() if self.device.type == "cpu" else part.to(self.device)

    def _read_matrix(self, name: str, shape: Shape, dim: int, start: int, stop: int) -> Tensor:
        if self._is_transposed and len(shape) == 2:
            return self._read(name, shape[::-1], 1 - dim, start, stop).T
        return self._read(name, shape, dim, start, stop)

    def join(self, parts: list[Tensor]) -> Tensor:
        """The parts one after another along the first dimension."""
        return torch.cat(parts)

    def join_matrices(self, parts: list[Matrix]) -> Matrix:
        """As `join`; parts in different formats are dequantised."""
        matrices = [part for part in parts if isinstance(part, QuantisedMatrix)]
        joined = join_rows(matrices) if len(matrices) == len(parts) else None
        return self.join([*map(self.dequantised, parts)]) if joined is None else joined

    def dequantised(self, weight: Matrix) -> Tensor:
        """The weight in the dtype of the model."""
        return weight if isinstance(weight, Tensor) else weight.dequantised().to(self.dtype)

    def pack(self, weight_NK: Matrix, *, num_splits: int = 1) -> LinearWeight:
        """The weight as `linear` multiplies by it; a copy where the device needs another layout.

        num_splits: of calls of `linear`. ConfigError: the weight cannot be cut into groups.
        """
        if isinstance(weight_NK, QuantisedMatrix):
            return pack_quantised(weight_NK, self.dtype, self._packed_memory, num_splits=num_splits)
        return self._pack(weight_NK, self.quantization, num_splits)

    def pack_head(self, weight_VE: Tensor) -> LinearWeight:
        """As `pack`; int8 instead of int4: an error of a logit is not averaged over further layers."""
        return self._pack(weight_VE, "int8" if self.quantization == "int4" else self.quantization)

    def _pack(self, weight_NK: Tensor, method: Method | None, num_splits: int = 1) -> LinearWeight:
        if method is None:
            return pack_linear(weight_NK, self._packed_memory, batch_invariant=self.batch_invariant)
        matrix = quantise(weight_NK, method, num_splits=num_splits)
        if matrix is None:
            what, unit = f"quantization {method}: {self._prefix.rstrip('.')}", FORMAT_OF[method].group_unit
            raise ConfigError(
                f"{what}: {weight_NK.shape[1]} inputs in {num_splits} parts cannot be cut into groups of a "
                f"multiple of {unit}"
            )
        return pack_quantised(matrix, self.dtype, self._packed_memory, num_splits=num_splits)

    def pack_router(self, weight_XK: Tensor) -> LinearWeight:
        """As `pack`, never rounded: a small error of a router's logit sends a token to another expert."""
        return pack_linear(weight_XK, self._packed_memory, batch_invariant=self.batch_invariant)

    def pack_heads(self, weight_HNK: Tensor) -> LinearHeads:
        """A weight of each head, never rounded: together they are small."""
        pack = partial(pack_linear, memory=self._packed_memory, batch_invariant=self.batch_invariant)
        weights = tuple(map(pack, weight_HNK))
        if self.device.type == "cuda":
            return LinearHeads(stack_experts(weights, None))
        return LinearHeads(ExpertWeights(weights, None))

    def pack_experts(self, weights_NK: Sequence[Matrix], bias_XN: Tensor | None = None) -> ExpertWeights:
        """One projection of all experts as `Mixture` multiplies by it. bias_XN: fp32, of each expert.

        Experts in different formats are dequantised.
        """
        formats = {weight.format if isinstance(weight, QuantisedMatrix) else None for weight in weights_NK}
        if len(formats) > 1:
            weights_NK = [*map(self.dequantised, weights_NK)]
        weights = tuple(map(self.pack, weights_NK))
        if self.device.type == "cuda":
            return stack_experts(weights, bias_XN)
        return ExpertWeights(weights, bias_XN)

    def rows(self, name: str, shape: Shape) -> Tensor:
        """This rank's rows of a table: as many on every rank, with zero rows after an uneven end."""
        size = shape[0]
        num_rows = -(-size // self.tp.size)
        start, stop = (min(size, (self.tp.rank + i) * num_rows) for i in (0, 1))
        rows = self._read(name, shape, 0, start, stop)
        return functional.pad(rows, (0, 0, 0, num_rows - len(rows))) if len(rows) < num_rows else rows

    def _read(self, name: str, shape: Shape, dim: int, start: int, stop: int) -> Tensor:
        """shape: declared by the model; `check_parameters` has compared it with the checkpoint."""
        tensor = self._checkpoint.slice(self._prefix + name, dim, start, stop)
        # The checkpoint's tensors are views of a mapped file; a model keeps its own copy.
        placed = tensor.to(device=self.device, dtype=self.dtype)
        if placed.numel() and not all(bound.isfinite() for bound in placed.aminmax()):
            raise ModelError(f"tensor {self._prefix + name!r} has a NaN or an infinity in {self.dtype}")
        return placed.clone() if placed.data_ptr() == tensor.data_ptr() else placed


def change_rows(weight: Matrix, change: Callable[[Tensor], Tensor]) -> Matrix:
    """The outputs that `change` makes of a tensor [N, ...]."""
    return change(weight) if isinstance(weight, Tensor) else weight.change_rows(change)


def chunk_inputs(weight: Matrix, num_parts: int) -> tuple[Matrix, ...]:
    """Equal parts along the inputs."""
    return weight.chunk(num_parts, dim=1) if isinstance(weight, Tensor) else weight.chunk_inputs(num_parts)


class ParameterSurvey(Parameters):
    """Records the name and the shape of each parameter that a model reads, and places none."""

    def __init__(
        self,
        scheme: Quantization | None = None,
        layers: range | None = None,
        expert_ranks: TensorParallel | None = None,
    ) -> None:
        super().__init__(
            DummyCheckpoint({}, dtype=torch.float32, deviation=0.0, seed=0),
            TensorParallel(),
            torch.float32,
            torch.device("meta"),
            scheme=scheme,
            layers=layers,
            expert_ranks=expert_ranks,
        )
        self.shapes: dict[str, Shape] = {}
        self.stored_bytes: dict[str, int] = {}  # of an element, where the dtype of the model does not matter
        self.weights: dict[str, Shape] = {}  # module -> shape of a quantised weight
        self.adapted_layers: dict[str, Shape] = {}  # module -> shape of a weight that adapters may change

    def adapted(
        self,
        name: str,
        shape: tuple[int, int],
        dim: int,
        change: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> AdaptedProjection | None:
        """Record the layer; see `Parameters.adapted`."""
        if name in TARGETS:
            self.adapted_layers[self._prefix + name] = shape
        return None

    def join(self, parts: list[Tensor]) -> Tensor:
        """The first part: concatenating meta tensors would import torch's compiler, which takes seconds."""
        return parts[0]

    def _read(self, name: str, shape: Shape, dim: int, start: int, stop: int) -> Tensor:
        self.shapes[self._prefix + name] = shape
        return torch.empty(shape, device=self.device).narrow(dim, start, stop - start)

    def _read_stored(self, name: str, tensor: Stored, dim: int, start: int, stop: int) -> Tensor:
        self.stored_bytes[self._prefix + name] = (
            FLOAT_BYTES if tensor.dtype is None else tensor.dtype.itemsize
        )
        return self._read(name, tensor.shape, dim, start, stop)

    def _decode(
        self, module: str, shape: tuple[int, int], parts: dict[str, Tensor], spans: tuple[Span, Span]
    ) -> Matrix:
        self.weights[module] = shape
        return torch.empty(shape, device=self.device)
