"""All layers of a decoder in one native call, for a CPU rank that works alone.

In a decode step of a small model, calling the kernels one by one from Python takes longer than the kernels.
The result is the same to the bit as that of the single kernels.

Shapes: T tokens, R wanted rows, E hidden, H query heads, K kv heads, D head dim, M positions.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.experts import Mixture, WeightArguments
from baton.kernels.linear import LinearWeight
from baton.kernels.ragged_attention import AttentionArguments, RaggedBatch, describe_heads, native_handles

# Reports during a forward pass, so that finished layers can be sent while later layers run.

OnLayers: TypeAlias = Callable[[int, int], None]  # of layers [first, stop)


class LayerGroups(NamedTuple):
    """Reports, during a forward pass, that the keys and values of a group of layers are in their pages.

    On a GPU they are in their pages for all work that follows on the current stream.
    """

    ranges: Sequence[tuple[int, int]]  # [first, stop) of each group, in order
    on_layers: OnLayers


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayer:
    """The weights of one layer; biases are fp32, norms in the model's dtype."""

    input_norm_E: Tensor
    post_norm_E: Tensor
    query_norm_D: Tensor | None
    key_norm_D: Tensor | None
    qkv: tuple[LinearWeight, Tensor | None]
    out: tuple[LinearWeight, Tensor | None]
    gate_up: tuple[LinearWeight, Tensor | None] | None  # beside experts: of the one that all tokens share
    down: tuple[LinearWeight, Tensor | None] | None
    window: int | None
    router: tuple[LinearWeight, Tensor | None] | None = None
    experts: Mixture | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """The sizes that all layers of a stack share."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int  # the most of any layer
    eps: float
    num_splits: int  # parts in which `out` and `down` are summed


class DecoderStack:
    """Keeps the weights alive and their addresses in the order that csrc/decoder.c reads."""

    def __init__(
        self, layers: Sequence[StackLayer], final_norm_E: Tensor | None, cos_sin_MD: Tensor, shape: StackShape
    ) -> None:
        """final_norm_E: None: more layers follow elsewhere, on all rows."""
        self._kept = (tuple(layers), final_norm_E, cos_sin_MD)
        self._shape = shape
        self._is_last = final_norm_E is not None
        self._dtype = layers[0].input_norm_E.dtype
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._decoder = _Decoder(
            layers=ctypes.addressof(self._layers),
            # Only the sum with the residual is wanted where more layers follow: any weight serves.
            final_norm=(layers[0].input_norm_E if final_norm_E is None else final_norm_E).data_ptr(),
            cos_sin=cos_sin_MD.data_ptr(),
            num_layers=len(layers),
            hidden=shape.hidden,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate=shape.intermediate,
            eps=shape.eps,
            dtype=native.DTYPE_CODES[self._dtype],
            splits=shape.num_splits,
        )
        num_logits = max(0 if layer.router is None else layer.router[0].num_outputs for layer in layers)
        widths = (2 * shape.hidden, self._qkv_width, shape.num_heads * shape.head_dim, 3 * shape.intermediate)
        # Elements a token, as lay_out() in csrc/decoder.c; the logits are fp32.
        self._scratch_width = sum(widths) + num_logits * 4 // self._dtype.itemsize
        self._mixture = next((layer.experts for layer in layers if layer.experts is not None), None)

    @property
    def _qkv_width(self) -> int:
        return (self._shape.num_heads + 2 * self._shape.num_kv_heads) * self._shape.head_dim

    def run(
        self,
        residual_TE: Tensor,
        rows_R: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        batch: RaggedBatch,
        kv_pool: Tensor,
        groups: LayerGroups | None = None,
    ) -> Tensor:
        """Normed final states of rows_R, [R, E]. residual_TE: the input of the first layer, used up.

        Without a final norm, the output of the last layer is in residual_TE, which is returned.

        kv_pool: [num_pages, num_layers, 2, K, page_size, R], contiguous, rows as in kv_rows.py.
        Positions, slots and rows: int64.
        groups: the run stops after each group and reports it.
        """
        self._check(residual_TE, rows_R, positions_T, slots_T, kv_pool)
        num_tokens = len(residual_TE)
        num_rows = len(rows_R) if self._is_last else num_tokens
        scratch = torch.empty(num_tokens * self._scratch_width, dtype=self._dtype)
        mixture = self._mixture  # those of all layers have the same sizes
        experts_scratch = None if mixture is None else mixture.new_scratch(num_tokens)
        out_RE = torch.empty((num_rows, self._shape.hidden), dtype=self._dtype)
        page_size = kv_pool.shape[4]
        arguments = AttentionArguments.from_buffer_copy(batch.arguments)
        num_heads, head_dim = self._shape.num_heads, self._shape.head_dim
        describe_heads(arguments, num_heads, head_dim, self._dtype, kv_pool[:, 0], head_dim**-0.5, head_dim)
        step = _Step(
            residual=residual_TE.data_ptr(),
            output=out_RE.data_ptr(),
            positions=positions_T.data_ptr(),
            slots=slots_T.data_ptr(),
            rows=rows_R.data_ptr(),
            num_tokens=num_tokens,
            num_rows=num_rows,
            pool=kv_pool.data_ptr(),
            page_size=page_size,
            attention=arguments,
            tile_starts=batch.scratch.data_ptr(),
            scratch=scratch.data_ptr(),
            experts_scratch=None if experts_scratch is None else experts_scratch.data_ptr(),
        )
        run = native.function("baton_decoder", "pp")
        for first, stop in [(0, len(self._layers))] if groups is None else groups.ranges:
            step.first_layer, step.stop_layer = first, stop
            run(ctypes.addressof(self._decoder), ctypes.addressof(step))
            if groups is not None:
                groups.on_layers(first, stop)
        return out_RE if self._is_last else residual_TE

    def _check(
        self, residual_TE: Tensor, rows_R: Tensor, positions_T: Tensor, slots_T: Tensor, kv_pool: Tensor
    ) -> None:
        shape = self._shape
        if residual_TE.shape[1] != shape.hidden or not residual_TE.is_contiguous():
            found = list(residual_TE.shape)
            raise ValueError(f"residual must be contiguous [T, {shape.hidden}], got {found}")
        expected = (len(self._layers), 2, shape.num_kv_heads)
        if kv_pool.shape[1:4] != expected or not kv_pool.is_contiguous():
            raise ValueError(f"pages must be contiguous {expected}, got {tuple(kv_pool.shape[1:])}")
        if residual_TE.dtype != self._dtype:
            raise ValueError(f"expected {self._dtype}, got {residual_TE.dtype}")
        for indices in (rows_R, positions_T, slots_T):
            if indices.dtype != torch.int64 or not indices.is_contiguous():
                raise ValueError(f"positions, slots and rows must be contiguous int64, got {indices.dtype}")
        if not len(positions_T) == len(slots_T) == len(residual_TE):
            raise ValueError(f"{len(residual_TE)} tokens, {len(positions_T)} positions, {len(slots_T)} slots")


def can_stack(layers: Sequence[StackLayer], shape: StackShape) -> bool:
    """True when the native call takes these weights: packed, with experts of one size, and heads it has room
    for.
    """
    products = [
        product
        for layer in layers
        for product in (layer.qkv, layer.out, layer.gate_up, layer.down, layer.router)
        if product is not None
    ]
    mixtures = [layer.experts for layer in layers if layer.experts is not None]
    sizes = {(each.num_experts, each.routing.top_k, each.gate_up.num_outputs) for each in mixtures}
    return (
        all(weight.is_packed for weight, _ in products)
        and len(sizes) <= 1
        and all(mixture.arguments is not None for mixture in mixtures)
        and native_handles(products[0][0].dtype, shape.num_heads // shape.num_kv_heads, shape.head_dim)
    )


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", _POINTER),
        ("post_norm", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("qkv", WeightArguments),
        ("out", WeightArguments),
        ("gate_up", WeightArguments),
        ("down", WeightArguments),
        ("router", WeightArguments),
        ("experts", _POINTER),
        ("window", _SIZE),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", _POINTER),
        ("final_norm", _POINTER),
        ("cos_sin", _POINTER),
        ("num_layers", _SIZE),
        ("hidden", _SIZE),
        ("num_heads", _SIZE),
        ("num_kv_heads", _SIZE),
        ("head_dim", _SIZE),
        ("intermediate", _SIZE),
        ("eps", ctypes.c_float),
        ("dtype", ctypes.c_int),
        ("splits", ctypes.c_int),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("residual", _POINTER),
        ("output", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("rows", _POINTER),
        ("num_tokens", _SIZE),
        ("num_rows", _SIZE),
        ("pool", _POINTER),
        ("page_size", _SIZE),
        ("attention", AttentionArguments),
        ("tile_starts", _POINTER),
        ("scratch", _POINTER),
        ("experts_scratch", _POINTER),
        ("first_layer", _SIZE),
        ("stop_layer", _SIZE),
    )


def _layer(layer: StackLayer) -> _Layer:
    def address(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    def weight(linear: tuple[LinearWeight, Tensor | None] | None) -> WeightArguments:
        if linear is None:
            return WeightArguments()
        packed, bias_N = linear
        sizes = packed.num_outputs, packed.num_inputs, packed.group, packed.format
        return WeightArguments(packed.data.data_ptr(), address(bias_N), *sizes)

    experts = None if layer.experts is None else layer.experts.arguments
    return _Layer(
        address(layer.input_norm_E),
        address(layer.post_norm_E),
        address(layer.query_norm_D),
        address(layer.key_norm_D),
        weight(layer.qkv),
        weight(layer.out),
        weight(layer.gate_up),
        weight(layer.down),
        weight(layer.router),
        None if experts is None else ctypes.addressof(experts),
        layer.window or 0,
    )
