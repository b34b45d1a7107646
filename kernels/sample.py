"""Choose the next token of every sequence from its logits.

The life of a row:
1. temperature 0: the largest logit, the lowest id among equals. Nothing below applies.
2. The kept set, from thresholds, so that ties are kept or dropped together on every backend:
   top_k keeps each logit >= the k-th largest; top_p keeps each logit >= t, the largest logit t such that
   the tokens >= t hold top_p of the probability that top_k left; min_p keeps probability >= min_p times
   the largest. Probabilities are softmax(logits / temperature).
3. Gumbel-max over the kept set: argmax(logit / temperature - log(-log(u))) is a draw from the softmax.
   u comes from Philox at (seed, choice, position, token id), so a replay of a request draws the same.

Thresholds are found by bisection over the floats as order-preserving integers. B sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.triton_import import jit, kernel, tl, triton

# Philox4x32-10, the counter-based generator of Random123 (Salmon et al., SC'11), in plain torch.
#
# Triton brings its own (`tl.philox`); both give the published known answers.

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Four random 32-bit words for each counter: int64 in [0, 2^32), shape [..., 4].

    key and counter: int64 tensors that broadcast; of each the low 32 bits are used.
    """
    key_0, key_1 = (word & _MASK for word in key)
    word_0, word_1, word_2, word_3 = (word & _MASK for word in counter)
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, which keeps all 64 bits; the shift must not drag the sign in.
        product_0 = word_0 * _MULTIPLIERS[0]
        product_1 = word_2 * _MULTIPLIERS[1]
        word_0 = ((product_1 >> 32) & _MASK) ^ word_1 ^ key_0
        word_2 = ((product_0 >> 32) & _MASK) ^ word_3 ^ key_1
        word_1 = product_1 & _MASK
        word_3 = product_0 & _MASK
        key_0 = (key_0 + _WEYL[0]) & _MASK
        key_1 = (key_1 + _WEYL[1]) & _MASK
    # Two rounds mix every input into every word, so all four have the broadcast shape by now.
    return torch.stack((word_0, word_1, word_2, word_3), dim=-1)


NOT_A_TOKEN: Final = -1  # of a row with a logit that is not a number


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The sampling parameters of each row of a batch; every field is contiguous [B]."""

    temperature_B: Tensor  # float32; 0 is greedy
    top_k_B: Tensor  # int32; below 1: off
    top_p_B: Tensor  # float32; 1 or more: off
    min_p_B: Tensor  # float32; 0: off
    seed_B: Tensor  # int64
    choice_B: Tensor  # int32; which of the n answers to one request
    position_B: Tensor  # int64; of the token that is chosen


def sample(logits_BV: Tensor, sampling: SamplingTensors) -> Tensor:
    """Token ids, int64 [B]. logits_BV: float32, rows may be strided, not modified. Never waits for a GPU."""
    if logits_BV.is_cuda:
        return sample_triton(logits_BV, sampling)
    if native.handles(logits_BV.dtype):
        return _sample_native(logits_BV, sampling)
    return sample_reference(logits_BV, sampling)


@jit
def _ordered_key(x: tl.tensor) -> tl.tensor:
    """uint32 in the order of the fp32 x; -0 equals +0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    flip = (bits >> 31) | -(2**31)  # the sign bit, and for negative numbers every other bit too
    return (bits ^ flip).to(tl.uint32, bitcast=True)


@jit
def _exponent(x: tl.tensor, peak: tl.tensor, inverse_temperature: tl.tensor) -> tl.tensor:
    """(x - peak) / temperature; 0 where x is the peak, an infinite one too."""
    return tl.where(x == peak, 0.0, (x - peak) * inverse_temperature)


@jit
def _weigh(
    row_ptr: tl.tensor,  # [V] fp32
    key: tl.tensor,
    peak: tl.tensor,
    inverse_temperature: tl.tensor,
    vocab_size: int,
    BY_MASS: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(number, weight) of the tokens at or above `key`: probability relative to the peak's, or one each."""
    number_V = tl.zeros([BLOCK_V], tl.int32)
    mass_V = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        token_V = start + tl.arange(0, BLOCK_V)
        x_V = tl.load(row_ptr + token_V, mask=token_V < vocab_size, other=float("-inf"))
        above_V = (token_V < vocab_size) & (_ordered_key(x_V) >= key)
        number_V += above_V.to(tl.int32)
        if BY_MASS:
            mass_V += tl.where(above_V, tl.exp(_exponent(x_V, peak, inverse_temperature)), 0.0)
    number = tl.sum(number_V, axis=0)
    if BY_MASS:
        return number, tl.sum(mass_V, axis=0)
    else:
        return number, number.to(tl.float32)


@jit
def _threshold(
    row_ptr: tl.tensor,  # [V] fp32
    low: tl.tensor,  # the tokens at or above it weigh the target at least
    target: tl.tensor,
    peak: tl.tensor,
    inverse_temperature: tl.tensor,
    vocab_size: int,
    BY_MASS: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tl.tensor:
    """The largest key for which the tokens at or above it weigh the target, or an equivalent lower key."""
    # weight(tokens >= low) >= target > weight(tokens >= high); number_* counts the same tokens.
    high = _ordered_key(peak) + 1
    number_low = vocab_size
    number_high = 0
    # One token between the bounds is the one that the target asks for: no later step changes the set.
    while (high - low > 1) & (number_low - number_high > 1):
        middle = low + ((high - low) >> 1)
        number, weight = _weigh(row_ptr, middle, peak, inverse_temperature, vocab_size, BY_MASS, BLOCK_V)
        if weight >= target:
            low = middle
            number_low = number
        else:
            high = middle
            number_high = number
    return low


@jit
def _best(score_V: tl.tensor, token_V: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(largest score, lowest token that has it)."""
    peak = tl.max(score_V, axis=0)
    return peak, tl.min(tl.where(score_V == peak, token_V, 2**31 - 1), axis=0)


@kernel()
def sample_kernel(
    logits_ptr: tl.tensor,  # [B, V] fp32
    temperature_ptr: tl.tensor,  # [B] fp32
    top_k_ptr: tl.tensor,  # [B] int32
    top_p_ptr: tl.tensor,  # [B] fp32
    min_p_ptr: tl.tensor,  # [B] fp32
    seed_ptr: tl.tensor,  # [B] int64
    choice_ptr: tl.tensor,  # [B] int32
    position_ptr: tl.tensor,  # [B] int64
    out_ptr: tl.tensor,  # [B] int64
    vocab_size: int,
    logits_stride: int,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program samples one row in passes over blocks of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)  # B * V may pass 2^31
    row_ptr = logits_ptr + row * logits_stride
    lane_V = tl.arange(0, BLOCK_V)
    best_V = tl.full([BLOCK_V], float("-inf"), tl.float32)
    chosen_V = tl.zeros([BLOCK_V], tl.int32)
    nan_V = tl.zeros([BLOCK_V], tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        token_V = start + lane_V
        x_V = tl.load(row_ptr + token_V, mask=token_V < vocab_size, other=float("-inf"))
        nan_V |= (x_V != x_V).to(tl.int32)
        chosen_V = tl.where(x_V > best_V, token_V, chosen_V)
        best_V = tl.maximum(best_V, x_V)
    peak, token = _best(best_V, chosen_V)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        inverse_temperature = tl.minimum(1.0 / temperature, 3.0e38)
        floor = tl.full([], 0, tl.uint32)
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < vocab_size):
            floor = _threshold(
                row_ptr, floor, top_k.to(tl.float32), peak, inverse_temperature, vocab_size, False, BLOCK_V
            )
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1:
            _, mass = _weigh(row_ptr, floor, peak, inverse_temperature, vocab_size, True, BLOCK_V)
            floor = _threshold(
                row_ptr, floor, top_p * mass, peak, inverse_temperature, vocab_size, True, BLOCK_V
            )
        min_p = tl.load(min_p_ptr + row)
        seed = tl.load(seed_ptr + row)
        choice = tl.load(choice_ptr + row).to(tl.uint32)
        position = tl.load(position_ptr + row)
        position_low = (position & 0xFFFFFFFF).to(tl.uint32)
        position_high = (position >> 32).to(tl.uint32)
        best_V = tl.full([BLOCK_V], float("-inf"), tl.float32)
        chosen_V = tl.zeros([BLOCK_V], tl.int32) + token
        for start in range(0, vocab_size, BLOCK_V):
            token_V = start + lane_V
            x_V = tl.load(row_ptr + token_V, mask=token_V < vocab_size, other=float("-inf"))
            exponent_V = _exponent(x_V, peak, inverse_temperature)
            kept_V = (token_V < vocab_size) & (_ordered_key(x_V) >= floor) & (tl.exp(exponent_V) >= min_p)
            quad = (start // 4 + tl.arange(0, BLOCK_V // 4)).to(tl.uint32)
            zero = quad * 0
            word_0, word_1, word_2, word_3 = tl.philox(
                seed, quad, zero + position_low, zero + choice, zero + position_high
            )
            word_V = tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))
            # 23 bits and a half: exact in fp32, and never 0 or 1.
            uniform_V = ((word_V >> 9).to(tl.float32) + 0.5) * (2.0**-23)
            score_V = tl.where(kept_V, exponent_V - tl.log(-tl.log(uniform_V)), float("-inf"))
            chosen_V = tl.where(score_V > best_V, token_V, chosen_V)
            best_V = tl.maximum(best_V, score_V)
        _, token = _best(best_V, chosen_V)
    token = tl.where(tl.max(nan_V, axis=0) > 0, -1, token)  # NOT_A_TOKEN
    tl.store(out_ptr + row, token.to(tl.int64))


def sample_triton(logits_BV: Tensor, sampling: SamplingTensors) -> Tensor:
    """`sample` on a GPU."""
    _check(logits_BV, sampling)
    num_rows, vocab_size = logits_BV.shape
    out_B = torch.empty(num_rows, dtype=torch.int64, device=logits_BV.device)
    if num_rows == 0:
        return out_B
    sample_kernel[(num_rows,)](
        logits_BV,
        sampling.temperature_B,
        sampling.top_k_B,
        sampling.top_p_B,
        sampling.min_p_B,
        sampling.seed_B,
        sampling.choice_B,
        sampling.position_B,
        out_B,
        vocab_size,
        logits_BV.stride(0),
        BLOCK_V=max(4, min(4096, triton.next_power_of_2(vocab_size))),
        num_warps=8,
    )
    return out_B


_DTYPES = {"top_k_B": torch.int32, "choice_B": torch.int32, "seed_B": torch.int64, "position_B": torch.int64}


def _check(logits_BV: Tensor, sampling: SamplingTensors) -> None:
    if logits_BV.dim() != 2 or logits_BV.dtype != torch.float32 or logits_BV.stride(1) != 1:
        found = f"{logits_BV.dtype} {tuple(logits_BV.shape)}"
        raise ValueError(f"logits must be float32 [B, V] with adjacent tokens, got {found}")
    for field in fields(sampling):
        values_B: Tensor = getattr(sampling, field.name)
        dtype = _DTYPES.get(field.name, torch.float32)
        if values_B.shape != logits_BV.shape[:1] or values_B.dtype != dtype or not values_B.is_contiguous():
            expected = f"contiguous {dtype} [{logits_BV.shape[0]}]"
            raise ValueError(f"{field.name} must be {expected}, got {values_B.dtype} {tuple(values_B.shape)}")
        if values_B.device != logits_BV.device:
            raise ValueError(f"{field.name} is on {values_B.device}, logits on {logits_BV.device}")


def sample_reference(logits_BV: Tensor, sampling: SamplingTensors) -> Tensor:
    """`sample` in plain torch."""
    is_nan_B = logits_BV.isnan().any(-1)
    chosen_B = logits_BV.argmax(-1).masked_fill_(is_nan_B, NOT_A_TOKEN)
    random_R = ((sampling.temperature_B > 0) & ~is_nan_B).nonzero()[:, 0]
    if random_R.numel() == 0:
        return chosen_B
    rows = SamplingTensors(*(getattr(sampling, field.name)[random_R] for field in fields(sampling)))
    exponent_RV, kept_RV = kept_reference(logits_BV[random_R], rows)
    score_RV = exponent_RV - torch.log(-torch.log(_uniform_reference(rows, logits_BV.shape[1])))
    chosen_B[random_R] = score_RV.masked_fill_(~kept_RV, -torch.inf).argmax(-1)
    return chosen_B


def kept_reference(logits_BV: Tensor, sampling: SamplingTensors) -> tuple[Tensor, Tensor]:
    """((logits - largest) / temperature, which tokens may be drawn), for rows with temperature > 0."""
    vocab_size = logits_BV.shape[1]
    peak_B1 = logits_BV.amax(-1, keepdim=True)
    inverse_temperature_B1 = (1.0 / sampling.temperature_B).clamp(max=3.0e38)[:, None]
    exponent_BV = ((logits_BV - peak_B1) * inverse_temperature_B1).masked_fill_(logits_BV == peak_B1, 0.0)
    kept_BV = exponent_BV.exp() >= sampling.min_p_B[:, None]
    has_k_B = (sampling.top_k_B > 0) & (sampling.top_k_B < vocab_size)
    has_p_B = sampling.top_p_B < 1
    sorted_R = (has_k_B | has_p_B).nonzero()[:, 0]
    if sorted_R.numel() == 0:
        return exponent_BV, kept_BV
    descending_RV, order_RV = logits_BV[sorted_R].sort(-1, descending=True)
    k_R1 = torch.where(has_k_B, sampling.top_k_B, vocab_size)[sorted_R, None].long()
    above_k_RV = descending_RV >= descending_RV.gather(1, k_R1 - 1)
    mass_RV = exponent_BV[sorted_R].gather(1, order_RV).double().exp_().mul_(above_k_RV).cumsum_(-1)
    target_R1 = sampling.top_p_B[sorted_R, None].double() * mass_RV[:, -1:]
    last_R1 = torch.where(has_p_B[sorted_R, None], (mass_RV < target_R1).sum(-1, keepdim=True), k_R1 - 1)
    kept_BV[sorted_R] &= logits_BV[sorted_R] >= descending_RV.gather(1, last_R1)
    return exponent_BV, kept_BV


def _uniform_reference(sampling: SamplingTensors, vocab_size: int) -> Tensor:
    """fp32 in (0, 1), [B, V]: word v % 4 of the counter (v // 4, position low, choice, position high)."""
    quad_Q = torch.arange((vocab_size + 3) // 4, device=sampling.seed_B.device)
    seed_B1, position_B1 = sampling.seed_B[:, None], sampling.position_B[:, None]
    counter = (quad_Q, position_B1, sampling.choice_B[:, None].long(), position_B1 >> 32)
    word_BV = philox((seed_B1, seed_B1 >> 32), counter).flatten(1)[:, :vocab_size]
    return ((word_BV >> 9).float() + 0.5) * 2.0**-23


def _sample_native(logits_BV: Tensor, sampling: SamplingTensors) -> Tensor:
    _check(logits_BV, sampling)
    num_rows, vocab_size = logits_BV.shape
    scratch = torch.empty((native.num_threads(), 2 * vocab_size))
    tokens_B = torch.empty(num_rows, dtype=torch.int64)
    native.function("baton_sample", "pn" + 9 * "p" + "nn")(
        logits_BV.data_ptr(),
        logits_BV.stride(0),
        *(getattr(sampling, field.name).data_ptr() for field in fields(sampling)),
        scratch.data_ptr(),
        tokens_B.data_ptr(),
        num_rows,
        vocab_size,
    )
    return tokens_B
