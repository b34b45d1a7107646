"""The experts of a mixture: each token goes through the feed-forward layers with the highest router scores.

Rows, one for each token and chosen expert, are sorted by expert, so that each expert multiplies its rows at
once: one C kernel on a CPU (csrc/experts.c), grouped products of `linear_kernel` on a GPU. A token's result
has the same bits in any batch.

`down` is cut along its inputs into two splits. The outputs of a token's experts make four sums: one for each
split of `down` and each half of all experts. The two halves are added first, then the splits. So two ranks
add the same numbers as one rank, whether they split each expert or have half of the experts each.

Shapes: T tokens, X experts, C chosen experts of a token, R = T * C rows, E hidden, F feed-forward width of an
expert, N outputs, K inputs, S splits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.gated import Activation, gated
from baton.kernels.linear import LinearWeight, launch_linear, linear
from baton.kernels.triton.kernel import kernel, runs_triton, tl, triton


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One projection of all experts, each [N, K].

    On a GPU all experts are one weight, `stacked`, with X as first dimension of its tensors.
    """

    weights: tuple[LinearWeight, ...]
    bias_XN: Tensor | None  # fp32
    stacked: LinearWeight | None = None

    @property
    def num_experts(self) -> int:
        """X."""
        return len(self.weights) if self.stacked is None else len(self.stacked.data)

    @property
    def num_outputs(self) -> int:
        """N."""
        return (self.stacked or self.weights[0]).num_outputs


def stack_experts(weights: Sequence[LinearWeight], bias_XN: Tensor | None) -> ExpertWeights:
    """The weights of all experts, which are laid out alike, in one."""
    first = weights[0]
    if any((each.format, each.group) != (first.format, first.group) for each in weights):
        raise ValueError("stack_experts: the weights are laid out in several ways")
    vectors = [each.vectors for each in weights if each.vectors is not None]
    stacked = replace(
        first,
        data=torch.stack([each.data for each in weights]),
        vectors=torch.stack(vectors) if vectors else None,
    )
    return ExpertWeights((), bias_XN, stacked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The choice of a token's experts by their scores, and their weights.

    A score is the softmax of the logits, or the sigmoid of one. Experts are in groups of neighbours, of which
    a token chooses some before it chooses among their experts. The score of a group is that of its best
    expert; with sigmoids it is the sum of the best two.
    """

    top_k: int
    normalises: bool  # the weights of a token sum to `scale`; otherwise they are scores times `scale`
    uses_sigmoid: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0
    bias_X: Tensor | None = None  # fp32: experts and groups are chosen, not weighed, by sigmoid + bias


class LinearHeads:
    """One weight [N, K] for each head. Heads are multiplied as the experts of a mixture are."""

    def __init__(self, heads: ExpertWeights) -> None:
        self._heads = heads
        self._addresses = _addresses(heads)  # kept alive for the C kernel
        is_packed = bool(heads.weights) and all(weight.is_packed for weight in heads.weights)
        self._arguments = _weights(heads, self._addresses) if is_packed else None

    def __call__(self, x_THK: Tensor) -> Tensor:
        """Each head's inputs times its weight, [T, H, N]. A token has the same bits in any batch."""
        heads_HTK = x_THK.transpose(0, 1).contiguous()
        num_heads, num_tokens, num_inputs = heads_HTK.shape
        rows_RK = heads_HTK.view(-1, num_inputs)
        starts_H1 = torch.arange(num_heads + 1, device=x_THK.device) * num_tokens
        if self._heads.stacked is not None:
            out_RN = linear_experts_triton(rows_RK, self._heads, starts_H1.to(torch.int32))
        elif self._arguments is None:
            out_RN = torch.cat([*map(linear, heads_HTK, self._heads.weights)])
        else:
            out_RN = rows_RK.new_empty((len(rows_RK), self._heads.num_outputs))
            native.function("baton_linear_experts", "pnppnpnii")(
                rows_RK.data_ptr(),
                num_inputs * rows_RK.element_size(),
                ctypes.addressof(self._arguments),
                starts_H1.data_ptr(),
                num_heads,
                out_RN.data_ptr(),
                out_RN.shape[1] * out_RN.element_size(),
                native.DTYPE_CODES[x_THK.dtype],
                native.DTYPE_CODES[x_THK.dtype],
            )
        return out_RN.view(num_heads, num_tokens, out_RN.shape[1]).transpose(0, 1)


class Mixture:
    """The weights of the experts of one layer on one rank, and how they are chosen."""

    def __init__(
        self,
        gate_up: ExpertWeights,
        down: Sequence[ExpertWeights],
        routing: Routing,
        *,
        activation: Activation,
        out_dtype: torch.dtype,
        num_experts: int | None = None,
        first_expert: int = 0,
        keeps_splits: bool = False,
    ) -> None:
        """gate_up: N = 2 * F, the gate first. down: one or two splits.

        num_experts: of all ranks; None: this rank has all. first_expert: of this rank. keeps_splits: the
        caller adds the splits of `down`, after it has added the ranks.
        """
        self.gate_up, self.down = gate_up, tuple(down)
        self.routing, self.activation = routing, activation
        self.out_dtype, self.keeps_splits = out_dtype, keeps_splits
        self.num_here = gate_up.num_experts
        self.num_experts = num_experts or self.num_here
        self.first_expert = first_expert
        weights = (gate_up, *self.down)
        self._addresses = [_addresses(each) for each in weights]  # kept alive for the C kernel
        is_packed = all(each.weights and all(one.is_packed for one in each.weights) for each in weights)
        self.arguments = _arguments(self, self._addresses) if is_packed else None

    @property
    def num_first_half(self) -> int:
        """The number of experts in the first half of all; their outputs are added first."""
        return (self.num_experts + 1) // 2

    def __call__(self, x_TE: Tensor, logits_TX: Tensor, shared_TN: Tensor | None = None) -> Tensor:
        """The weighted sum of the outputs of each token's experts on this rank, in `out_dtype`.

        [T, N], or with `keeps_splits` [S, T, N].

        x_TE: contiguous. logits_TX: of all experts, fp32, contiguous; of equal logits the first expert is
        chosen. shared_TN: the output of an expert that all tokens share, contiguous in the dtype of x; it is
        weighed by the sigmoid of one more logit, after those of the experts, and added to the first half of
        the experts in the first split.
        """
        if runs_triton(x_TE) and self.gate_up.stacked is not None:
            return experts_triton(x_TE, logits_TX, self, shared_TN)
        if self.arguments is None:
            return experts_reference(x_TE, logits_TX, self, shared_TN)
        return self._run(x_TE, logits_TX, shared_TN)

    def new_output(self, num_tokens: int, device: torch.device) -> Tensor:
        """Memory of the result of a call with so many tokens."""
        width = self.down[0].num_outputs
        shape = (len(self.down), num_tokens, width) if self.keeps_splits else (num_tokens, width)
        return torch.empty(shape, dtype=self.out_dtype, device=device)

    def _run(self, x_TE: Tensor, logits_TX: Tensor, shared_TN: Tensor | None) -> Tensor:
        assert self.arguments is not None
        num_tokens = len(x_TE)
        if not x_TE.is_contiguous() or not logits_TX.is_contiguous() or logits_TX.dtype != torch.float32:
            raise ValueError("experts: x and the fp32 logits must be contiguous")
        num_logits = self.num_experts + (shared_TN is not None)
        if x_TE.shape[1] != self.gate_up.weights[0].num_inputs or logits_TX.shape[0] != num_tokens:
            raise ValueError(f"experts: x {list(x_TE.shape)}, logits {list(logits_TX.shape)}")
        if logits_TX.shape[1] < num_logits or not (shared_TN is None or shared_TN.is_contiguous()):
            raise ValueError(f"experts: {num_logits} logits a token are needed, got {list(logits_TX.shape)}")
        out = self.new_output(num_tokens, x_TE.device)
        scratch = self.new_scratch(num_tokens)
        native.function("baton_experts", "pppnppnp")(
            ctypes.addressof(self.arguments),
            x_TE.data_ptr(),
            logits_TX.data_ptr(),
            logits_TX.shape[1],
            None if shared_TN is None else shared_TN.data_ptr(),
            out.data_ptr(),
            num_tokens,
            scratch.data_ptr(),
        )
        return out

    def new_scratch(self, num_tokens: int) -> Tensor:
        """Memory of the C kernel for a call with so many tokens."""
        sizes = (ctypes.c_int64 * 2)()
        assert self.arguments is not None
        arguments = ctypes.addressof(self.arguments)
        native.function("baton_experts_sizes", "pnp")(arguments, num_tokens, ctypes.addressof(sizes))
        return torch.empty(sizes[1], dtype=torch.uint8)


# The C kernel.


class WeightArguments(ctypes.Structure):
    """`struct weight` and `struct expert_weights` of csrc/ops.h, field by field."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_columns", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("format", ctypes.c_int64),
    )


class ExpertsArguments(ctypes.Structure):
    """`struct experts` of csrc/experts.c, field by field."""

    _fields_ = (
        ("gate_up", WeightArguments),
        ("down", WeightArguments * 2),
        ("num_experts", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("num_here", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("num_chosen_groups", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("uses_sigmoid", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("splits", ctypes.c_int),
        ("keeps_splits", ctypes.c_int),
        ("normalises", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("y_dtype", ctypes.c_int),
    )


def _arguments(mixture: Mixture, addresses: Sequence[Tensor]) -> ExpertsArguments:
    """addresses: of gate_up and the splits of down."""
    routing = mixture.routing
    arguments = ExpertsArguments(
        gate_up=_weights(mixture.gate_up, addresses[0]),
        num_experts=mixture.num_experts,
        first=mixture.first_expert,
        num_here=mixture.num_here,
        top_k=routing.top_k,
        num_groups=routing.num_groups,
        num_chosen_groups=routing.num_chosen_groups,
        bias=None if routing.bias_X is None else routing.bias_X.data_ptr(),
        scale=routing.scale,
        uses_sigmoid=routing.uses_sigmoid,
        kind=mixture.activation.kind,
        alpha=mixture.activation.alpha,
        limit=mixture.activation.limit,
        splits=len(mixture.down),
        keeps_splits=mixture.keeps_splits,
        normalises=routing.normalises,
        dtype=native.DTYPE_CODES[mixture.gate_up.weights[0].dtype],
        y_dtype=native.DTYPE_CODES[mixture.out_dtype],
    )
    for index, down in enumerate(mixture.down):
        arguments.down[index] = _weights(down, addresses[index + 1])
    return arguments


def _addresses(experts: ExpertWeights) -> Tensor:
    return torch.tensor([weight.data.data_ptr() for weight in experts.weights], dtype=torch.int64)


def _weights(experts: ExpertWeights, addresses: Tensor) -> WeightArguments:
    first, bias_XN = experts.weights[0], experts.bias_XN
    return WeightArguments(
        packed=addresses.data_ptr(),
        bias=None if bias_XN is None else bias_XN.data_ptr(),
        num_columns=first.num_outputs,
        num_inputs=first.num_inputs,
        group=first.group,
        format=first.format,
    )


# Plain torch.


def route_reference(logits_TX: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """(weights fp32, experts int64) of each token, [T, C] each, in descending order of the scores."""
    ranked_TX = logits_TX.float()
    scores_TX = ranked_TX.sigmoid() if routing.uses_sigmoid else ranked_TX.softmax(dim=1)
    if routing.uses_sigmoid:
        ranked_TX = scores_TX if routing.bias_X is None else scores_TX + routing.bias_X
    if routing.num_groups > 1:
        groups_TGX = ranked_TX.unflatten(1, (routing.num_groups, -1))
        best_TG = groups_TGX.topk(2 if routing.uses_sigmoid else 1, dim=2).values.sum(dim=2)
        order_TG = best_TG.argsort(dim=1, descending=True, stable=True)
        others_TG = order_TG[:, routing.num_chosen_groups :, None].expand(-1, -1, groups_TGX.shape[2])
        ranked_TX = groups_TGX.scatter(1, others_TG, float("-inf")).flatten(1)
    chosen_TC = ranked_TX.argsort(dim=1, descending=True, stable=True)[:, : routing.top_k]
    weights_TC = scores_TX.gather(1, chosen_TC)
    if routing.normalises:
        weights_TC = weights_TC / weights_TC.sum(1, keepdim=True)
    return weights_TC * routing.scale, chosen_TC


def experts_reference(
    x_TE: Tensor, logits_TX: Tensor, mixture: Mixture, shared_TN: Tensor | None = None
) -> Tensor:
    """`Mixture` in plain torch, an expert after another."""
    num_experts, num_splits = mixture.num_experts, len(mixture.down)
    weights_TC, chosen_TC = route_reference(logits_TX[:, :num_experts], mixture.routing)
    out = mixture.new_output(len(x_TE), x_TE.device)
    sums_S2TN = torch.zeros((num_splits, 2, len(x_TE), out.shape[-1]), device=x_TE.device)
    for expert in chosen_TC.unique().tolist():
        index = expert - mixture.first_expert
        if not 0 <= index < mixture.num_here:
            continue
        token_R, choice_R = (chosen_TC == expert).nonzero(as_tuple=True)
        activated_RF = gated(_product(x_TE[token_R], mixture.gate_up, index, x_TE.dtype), mixture.activation)
        inputs = activated_RF.chunk(num_splits, dim=1)
        for sums_2TN, down, input_RK in zip(sums_S2TN, mixture.down, inputs, strict=True):
            out_RN = _product(input_RK, down, index, torch.float32)
            sum_TN = sums_2TN[int(expert >= mixture.num_first_half)]
            sum_TN.index_add_(0, token_R, out_RN * weights_TC[token_R, choice_R, None])
    if shared_TN is not None:
        sums_S2TN[0, 0] += logits_TX[:, num_experts, None].sigmoid() * shared_TN
    sums_STN = sums_S2TN.sum(1)
    return out.copy_(sums_STN if mixture.keeps_splits else sums_STN.sum(0))


def _weight(experts: ExpertWeights, expert: int) -> LinearWeight:
    """One expert's weight, without `arrivals`: so `linear` computes it in plain torch."""
    if experts.weights:
        return experts.weights[expert]
    assert experts.stacked is not None and not experts.stacked.group
    return replace(experts.stacked, data=experts.stacked.data[expert], arrivals=None)


def _product(x_RK: Tensor, experts: ExpertWeights, expert: int, out_dtype: torch.dtype) -> Tensor:
    bias_N = None if experts.bias_XN is None else experts.bias_XN[expert]
    return linear(x_RK, _weight(experts, expert), bias_N, out_dtype=out_dtype)


# Triton.


@kernel()
def route_kernel(
    logits_ptr: tl.tensor,  # [T, X] fp32
    bias_ptr: tl.tensor,  # [X] fp32, read when HAS_BIAS
    weights_ptr: tl.tensor,  # [T, C] fp32
    chosen_ptr: tl.tensor,  # [T, C] int64
    num_experts: int,
    logits_stride: int,
    scale: float,
    TOP_K: tl.constexpr,  # C
    NORMALISES: tl.constexpr,
    USES_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,  # >= NUM_GROUPS
) -> None:
    """One program chooses the experts of one token."""
    token = tl.program_id(0).to(tl.int64)
    expert_X, choice_C = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_C)
    logit_ptr_X = logits_ptr + token * logits_stride + expert_X
    logit_X = tl.load(logit_ptr_X, mask=expert_X < num_experts, other=float("-inf"))
    highest = tl.max(logit_X, axis=0)
    rest_X = logit_X
    if USES_SIGMOID:
        score_X = 1.0 / (1.0 + tl.exp(-logit_X))
        rest_X = score_X
        if HAS_BIAS:
            rest_X += tl.load(bias_ptr + expert_X, mask=expert_X < num_experts, other=0.0)
        rest_X = tl.where(expert_X < num_experts, rest_X, float("-inf"))
    if NUM_GROUPS > 1:
        group_X, group_G = expert_X // (num_experts // NUM_GROUPS), tl.arange(0, BLOCK_G)
        score_G = tl.full([BLOCK_G], float("-inf"), tl.float32)
        for group in tl.static_range(NUM_GROUPS):
            own_X = tl.where(group_X == group, rest_X, float("-inf"))
            group_score = tl.max(own_X, axis=0)
            if USES_SIGMOID:
                second_X = tl.where(expert_X == tl.argmax(own_X, axis=0), float("-inf"), own_X)
                group_score += tl.max(second_X, axis=0)
            score_G = tl.where(group_G == group, group_score, score_G)
        kept_X = expert_X < 0
        for _ in tl.static_range(NUM_CHOSEN_GROUPS):
            best_group = tl.minimum(tl.argmax(score_G, axis=0), NUM_GROUPS - 1)
            kept_X = kept_X | (group_X == best_group)
            score_G = tl.where(group_G == best_group, float("-inf"), score_G)
        rest_X = tl.where(kept_X, rest_X, float("-inf"))
    weight_C = tl.zeros([BLOCK_C], tl.float32)
    chosen_C = tl.zeros([BLOCK_C], tl.int64)
    total = tl.cast(0.0, tl.float32)
    for choice in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(rest_X, axis=0), num_experts - 1)
        if USES_SIGMOID:
            weight = tl.sum(tl.where(expert_X == best, score_X, 0.0), axis=0)
        else:
            weight = tl.exp(tl.max(rest_X, axis=0) - highest)
        weight_C = tl.where(choice_C == choice, weight, weight_C)
        chosen_C = tl.where(choice_C == choice, best, chosen_C)
        total += weight
        rest_X = tl.where(expert_X == best, float("-inf"), rest_X)
    if not NORMALISES:
        total = tl.cast(1.0, tl.float32) if USES_SIGMOID else tl.sum(tl.exp(logit_X - highest), axis=0)
    tl.store(weights_ptr + token * TOP_K + choice_C, weight_C / total * scale, mask=choice_C < TOP_K)
    tl.store(chosen_ptr + token * TOP_K + choice_C, chosen_C, mask=choice_C < TOP_K)


@kernel(varying=("num_rows", "num_tokens"))
def combine_kernel(
    splits_ptr: tl.tensor,  # [NUM_SPLITS, R, N] fp32, contiguous
    weights_ptr: tl.tensor,  # [T, C] fp32
    chosen_ptr: tl.tensor,  # [T, C] int64
    row_of_ptr: tl.tensor,  # [T, C] int64
    shared_ptr: tl.tensor,  # [T, N], contiguous, read when HAS_SHARED
    logits_ptr: tl.tensor,  # [T, X + 1] fp32, contiguous, the same
    out_ptr: tl.tensor,  # [T, N], with KEEPS_SPLITS [NUM_SPLITS, T, N]; contiguous
    num_rows: int,  # R
    num_tokens: int,  # T
    width: int,  # N
    num_first_half: int,  # experts
    first: int,  # expert of this rank
    stop: int,  # of the experts of this rank
    logits_stride: int,  # X + 1
    TOP_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    KEEPS_SPLITS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program adds the rows of one token in a block of columns."""
    token = tl.program_id(0).to(tl.int64)  # R * N may pass 2^31
    column_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = column_N < width
    total_N = tl.zeros([BLOCK_N], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        first_half_N, second_half_N = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
        for choice in tl.static_range(TOP_K):
            expert = tl.load(chosen_ptr + token * TOP_K + choice)
            # Rows of experts on other ranks do not exist.
            is_here_N = column_N < tl.where((expert >= first) & (expert < stop), width, 0)
            row = tl.load(row_of_ptr + token * TOP_K + choice) + split * tl.cast(num_rows, tl.int64)
            weight = tl.load(weights_ptr + token * TOP_K + choice)
            term_N = weight * tl.load(splits_ptr + row * width + column_N, mask=is_here_N, other=0.0)
            first_half_N += tl.where(expert < num_first_half, term_N, 0.0)
            second_half_N += tl.where(expert < num_first_half, 0.0, term_N)
        if HAS_SHARED and split == 0:
            gate = 1.0 / (1.0 + tl.exp(-tl.load(logits_ptr + (token + 1) * logits_stride - 1)))
            shared_N = tl.load(shared_ptr + token * width + column_N, mask=inside_N, other=0.0)
            first_half_N += gate * shared_N.to(tl.float32)
        split_N = first_half_N + second_half_N
        total_N += split_N
        if KEEPS_SPLITS:
            out_row = token + split * tl.cast(num_tokens, tl.int64)
            out_ptr_N = out_ptr + out_row * width + column_N
            tl.store(out_ptr_N, split_N.to(out_ptr.dtype.element_ty), mask=inside_N)
    if not KEEPS_SPLITS:
        tl.store(out_ptr + token * width + column_N, total_N.to(out_ptr.dtype.element_ty), mask=inside_N)


def experts_triton(
    x_TE: Tensor, logits_TX: Tensor, mixture: Mixture, shared_TN: Tensor | None = None
) -> Tensor:
    """`Mixture` on a GPU, without a wait for the host."""
    num_experts, num_here = mixture.num_experts, mixture.num_here
    top_k, device = mixture.routing.top_k, x_TE.device
    weights_TC, chosen_TC = route_triton(logits_TX[:, :num_experts], mixture.routing)
    expert_R = chosen_TC.flatten()
    if num_here < num_experts:  # the rows of this rank's experts come first
        expert_R = (expert_R - mixture.first_expert) % num_experts
    order_R = expert_R.argsort(stable=True)
    bounds = torch.arange(num_here + 1, device=device)
    starts_X1 = torch.searchsorted(expert_R[order_R], bounds).to(torch.int32)
    activated_RF = linear_experts_triton(
        x_TE, mixture.gate_up, starts_X1, order_R // top_k, gate=mixture.activation
    )
    num_rows, width = len(order_R), mixture.down[0].num_outputs
    splits_SRN = torch.empty((len(mixture.down), num_rows, width), dtype=torch.float32, device=device)
    for out_RN, down, input_RK in zip(
        splits_SRN, mixture.down, activated_RF.chunk(len(mixture.down), dim=1), strict=True
    ):
        linear_experts_triton(input_RK, down, starts_X1, out_RN=out_RN)
    row_of_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(num_rows, device=device))
    return combine_triton(splits_SRN, mixture, weights_TC, chosen_TC, row_of_R, logits_TX, shared_TN)


def combine_triton(
    splits_SRN: Tensor,
    mixture: Mixture,
    weights_TC: Tensor,
    chosen_TC: Tensor,
    row_of_R: Tensor,
    logits_TX: Tensor,
    shared_TN: Tensor | None,
) -> Tensor:
    """The weighted sum of each token's rows, and of the shared expert's output, as in `Mixture`.

    row_of_R: the row of each choice in a split; rows of experts on other ranks are not read.
    """
    num_tokens, top_k = weights_TC.shape
    num_splits, num_rows, width = splits_SRN.shape
    out = mixture.new_output(num_tokens, splits_SRN.device)
    if not out.numel():
        return out
    block_N = min(1024, triton.next_power_of_2(width))
    combine_kernel[(num_tokens, triton.cdiv(width, block_N))](
        splits_SRN,
        weights_TC,
        chosen_TC,
        row_of_R,
        logits_TX if shared_TN is None else shared_TN,
        logits_TX,
        out,
        num_rows,
        num_tokens,
        width,
        mixture.num_first_half,
        mixture.first_expert,
        mixture.first_expert + mixture.num_here,
        logits_TX.stride(0),
        TOP_K=top_k,
        NUM_SPLITS=num_splits,
        KEEPS_SPLITS=mixture.keeps_splits,
        HAS_SHARED=shared_TN is not None,
        BLOCK_N=block_N,
        enable_fp_fusion=False,
    )
    return out


def route_triton(logits_TX: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """`route_reference` on a GPU."""
    (num_tokens, num_experts), top_k = logits_TX.shape, routing.top_k
    if logits_TX.dtype != torch.float32 or logits_TX.stride(1) != 1 or top_k > num_experts:
        raise ValueError(f"route: {top_k} of {num_experts} experts need adjacent fp32 logits")
    weights_TC = logits_TX.new_empty((num_tokens, top_k))
    chosen_TC = torch.empty((num_tokens, top_k), dtype=torch.int64, device=logits_TX.device)
    if num_tokens:
        route_kernel[(num_tokens,)](
            logits_TX,
            logits_TX if routing.bias_X is None else routing.bias_X,
            weights_TC,
            chosen_TC,
            num_experts,
            logits_TX.stride(0),
            routing.scale,
            TOP_K=top_k,
            NORMALISES=routing.normalises,
            USES_SIGMOID=routing.uses_sigmoid,
            HAS_BIAS=routing.bias_X is not None,
            NUM_GROUPS=routing.num_groups,
            NUM_CHOSEN_GROUPS=routing.num_chosen_groups,
            BLOCK_X=triton.next_power_of_2(num_experts),
            BLOCK_C=triton.next_power_of_2(top_k),
            BLOCK_G=triton.next_power_of_2(routing.num_groups),
        )
    return weights_TC, chosen_TC


def linear_experts_triton(
    x_TK: Tensor,
    experts: ExpertWeights,
    starts_X1: Tensor,
    row_of_R: Tensor | None = None,
    *,
    gate: Activation | None = None,
    out_RN: Tensor | None = None,
) -> Tensor:
    """Rows [starts[e], starts[e + 1]) times the weight of expert e, with the bits of `linear_triton`.

    row_of_R: int64, the row of x that each row multiplies; None: its own. starts_X1: int32. out_RN: made anew
    in the dtype of x by default.
    """
    weight = experts.stacked
    if weight is None or x_TK.stride(-1) != 1 or x_TK.shape[1] != weight.num_inputs:
        raise ValueError(f"linear_experts: x {list(x_TK.shape)} does not fit the experts")
    if out_RN is None:
        width = weight.num_outputs if gate is None else weight.num_outputs // 2
        num_rows = len(x_TK) if row_of_R is None else len(row_of_R)
        out_RN = torch.empty((num_rows, width), dtype=x_TK.dtype, device=x_TK.device)
    if not out_RN.numel():
        return out_RN
    return launch_linear(
        x_TK,
        weight,
        experts.bias_XN,
        out_RN,
        starts_X1,
        gate=gate,
        starts_X1=starts_X1,
        row_of_R=row_of_R,
    )
