# ruff: noqa: SIM102
"""Choose the next token of every sequence from its logits.

The life of a row:
0. A logit that is not a number: NOT_A_TOKEN. No logit above -inf: ALL_BANNED. Nothing below applies.
1. temperature 0: the largest logit, the lowest id among equals. Nothing below applies.
2. The kept set, from thresholds, so that ties are kept or dropped together on every backend:
   top_k keeps each logit >= the k-th largest; top_p keeps each logit >= t, the largest logit t such that
   the tokens >= t hold top_p of the probability that top_k left; min_p keeps probability >= min_p times
   the largest. Probabilities are softmax(logits / temperature).
3. Gumbel-max over the kept set: argmax(logit / temperature - log(-log(u))) is a draw from the softmax.
   u comes from Philox at (seed, choice, position, token id), so a replay of a request draws the same.

Thresholds are found on the floats as order-preserving integers: by bisection on the CPU, by radix select over
histograms on a GPU. B sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from itertools import product
from typing import Final

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.triton.kernel import jit, kernel, runs_triton, tl, triton

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


# Of rows that give no token.
NOT_A_TOKEN: Final = -1  # a logit is not a number
ALL_BANNED: Final = -2  # every logit is -inf


_DTYPES: Final = {
    "temperature_B": torch.float32,
    "top_k_B": torch.int32,
    "top_p_B": torch.float32,
    "min_p_B": torch.float32,
    "seed_B": torch.int64,
    "choice_B": torch.int32,
    "position_B": torch.int64,
}


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The sampling parameters of each row of a batch; every tensor is contiguous [B].

    The flags spare launches on a GPU. False promises that no row draws, has top_k, or has top_p.
    """

    temperature_B: Tensor  # float32; 0 is greedy
    top_k_B: Tensor  # int32; below 1: off
    top_p_B: Tensor  # float32; 1 or more: off
    min_p_B: Tensor  # float32; 0: off
    seed_B: Tensor  # int64
    choice_B: Tensor  # int32; which of the n answers to one request
    position_B: Tensor  # int64; of the token that is chosen
    _: KW_ONLY
    has_random: bool = True
    has_top_k: bool = True
    has_top_p: bool = True

    @classmethod
    def greedy(cls, num_rows: int) -> SamplingTensors:
        """The parameters of so many rows on a CPU that take the token of the largest logit."""
        tensors = (torch.zeros(num_rows, dtype=dtype) for dtype in _DTYPES.values())
        return cls(*tensors, has_random=False, has_top_k=False, has_top_p=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the fields."""
        return tuple(getattr(self, name) for name in _DTYPES)

    def take(self, rows_R: Tensor) -> SamplingTensors:
        """The parameters of some rows, in their order. rows_R: int64."""
        return SamplingTensors(*(values_B[rows_R] for values_B in self.tensors))


def sample(logits_BV: Tensor, sampling: SamplingTensors) -> Tensor:
    """Token ids, int64 [B], or NOT_A_TOKEN or ALL_BANNED. Never waits for a GPU.

    logits_BV: float32, rows may be strided, not modified.
    """
    if runs_triton(logits_BV):
        return sample_triton(logits_BV, sampling)
    if native.handles(logits_BV.dtype):
        tokens_B, peaks_B = torch.empty((2, len(logits_BV)), dtype=torch.int64).unbind()
        _sample_native(logits_BV, sampling, tokens_B, peaks_B)
        return tokens_B
    return sample_reference(logits_BV, sampling)


def sample_rows(
    logits_BV: Tensor,
    sampling: SamplingTensors,
    tokens_B: Tensor,
    peaks_B: Tensor,
    rows_N: Tensor,
    masks_NW: Tensor | None = None,
) -> None:
    """Draw the tokens of some rows on a CPU, into their places in tokens_B.

    peaks_B gets the token of the largest logit of each of these rows that has a token, the lowest id among
    equals. All are int64; rows_N are distinct. masks_NW: as those of `mask_logits`, which may change these
    rows.
    """
    if masks_NW is not None:
        _check_masks(logits_BV, rows_N, masks_NW)
    if native.handles(logits_BV.dtype):
        _sample_native(logits_BV, sampling, tokens_B, peaks_B, rows_N, masks_NW)
        return
    if masks_NW is not None:
        mask_logits(logits_BV, rows_N, masks_NW)
    tokens_B[rows_N] = sample_reference(logits_BV[rows_N], sampling.take(rows_N))
    peaks_B[rows_N] = logits_BV[rows_N].argmax(-1)


# The kernels. A program takes one part of one row. Parts have a fixed size, so a token does not depend on the
# rest of the batch. The programs of a row add integers, so the order of the sums does not matter.
#
# 1. peak_kernel: the largest logit of each part. With top_k it also fills the histogram of round 0.
# 2. select_kernel, once for each other round, is a radix select. A round fills a histogram of one digit of
#    the keys that share the digits found so far; the next launch reads the digit off that histogram. The
#    rounds of top_k weigh each token 1, the three rounds of top_p after them by its probability.
# 3. draw_kernel: the largest score among the kept tokens of each part.
# 4. join_parts_kernel: the largest among the parts of a row.
#
# An `if` on a constant stays apart from an `if` on a value (SIM102), so that the compiler drops the branch.
#
# Greedy rows take 2 launches (1 and 4), random rows 3, with top_k 5, with top_p 6, with both 8.

PART: Final = 4096  # tokens of a program
NUM_BINS: Final = 2048  # of a digit: a key has digits of 11, 11 and 10 bits
NUM_DIGITS: Final = 3
MAX_VOCAB_SIZE: Final = 2**22  # the sum of probabilities in units of 2^-40 fits 63 bits


@jit
def _ordered_key(x: tl.tensor) -> tl.tensor:
    """uint32 in the order of the fp32 x; -0 equals +0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    flip = (bits >> 31) | -(2**31)  # the sign bit, and for negative numbers every other bit too
    return (bits ^ flip).to(tl.uint32, bitcast=True)


@jit
def _exponent(x: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """(x - peak) / temperature; 0 where x is the peak, an infinite one too."""
    return tl.where(x == peak, 0.0, (x - peak) * tl.minimum(1.0 / temperature, 3.0e38))


@jit
def _best(score_V: tl.tensor, token_V: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(largest score, lowest token that has it)."""
    peak = tl.max(score_V, axis=0)
    return peak, tl.min(tl.where(score_V == peak, token_V, 2**31 - 1), axis=0)


@jit
def _best_of_parts(
    score_ptr: tl.tensor,  # [parts] fp32, of one row
    token_ptr: tl.tensor,  # [parts] int32
    num_parts: tl.tensor,
    MAX_PARTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(largest score, lowest token that has it).

    The token is -1, NOT_A_TOKEN, if one of the parts has -1, and -2, ALL_BANNED, if no score is above -inf.
    """
    part_P = tl.arange(0, MAX_PARTS)
    score_P = tl.load(score_ptr + part_P, mask=part_P < num_parts, other=float("-inf"))
    token_P = tl.load(token_ptr + part_P, mask=part_P < num_parts, other=2**31 - 1)
    peak, token = _best(score_P, token_P)
    token = tl.where(peak == float("-inf"), -2, token)
    return peak, tl.where(tl.min(token_P, axis=0) < 0, -1, token)


@jit
def _digit(key_V: tl.tensor, DIGIT: tl.constexpr) -> tl.tensor:
    """int32 digits of keys."""
    if DIGIT == 0:
        digit_V = key_V >> 21
    elif DIGIT == 1:
        digit_V = (key_V >> 10) & 2047
    else:
        digit_V = key_V & 1023
    return digit_V.to(tl.int32)


@jit
def _after_round(
    histogram_ptr: tl.tensor,  # [rounds, NUM_BINS] int64, of one row
    state_ptr: tl.tensor,  # [rounds, 2] int64
    top_k: tl.tensor,
    top_p: tl.tensor,
    ROUND: tl.constexpr,
    DIGIT: tl.constexpr,
    BY_MASS: tl.constexpr,
    NUM_BINS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(low, target) after a round with a complete histogram.

    low: uint32, the known digits of the threshold, 0 for the others. target: int64, the weight that the
    threshold still needs from tokens with the digits of low.
    """
    bin_N = tl.arange(0, NUM_BINS)
    weight_N = tl.load(histogram_ptr + ROUND * NUM_BINS + bin_N)
    total = tl.sum(weight_N, axis=0)
    if DIGIT > 0:
        low = tl.load(state_ptr + 2 * ROUND - 2).to(tl.uint32)
        target = tl.load(state_ptr + 2 * ROUND - 1)
    else:
        low = tl.zeros([], tl.uint32)
        if BY_MASS:
            share = top_p.to(tl.float64) * total.to(tl.float64)
            target = share.to(tl.int64)
            target = tl.maximum(target + (target.to(tl.float64) < share).to(tl.int64), 1)
        else:
            target = top_k.to(tl.int64)
    at_or_above_N = total - tl.cumsum(weight_N, axis=0) + weight_N  # falls from bin to bin
    digit = tl.sum((at_or_above_N >= target).to(tl.int32), axis=0) - 1
    above = tl.max(tl.where(at_or_above_N < target, at_or_above_N, 0), axis=0)
    SHIFT: tl.constexpr = 21 - 11 * DIGIT if DIGIT < 2 else 0
    return low | (digit.to(tl.uint32) << SHIFT), target - above


@kernel()
def peak_kernel(
    logits_ptr: tl.tensor,  # [B, V] fp32
    temperature_ptr: tl.tensor,  # [B] fp32
    top_k_ptr: tl.tensor,  # [B] int32
    score_ptr: tl.tensor,  # [B, parts] fp32
    token_ptr: tl.tensor,  # [B, parts] int32; -1 beside a NaN
    histogram_ptr: tl.tensor,  # [B, rounds, NUM_BINS] int64, zeros
    vocab_size: int,
    logits_stride: int,
    NUM_ROUNDS: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    NUM_BINS: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """One program finds the largest logit of one part, and fills round 0."""
    row = tl.program_id(0).to(tl.int64)  # B * V may pass 2^31
    part = tl.program_id(1)
    token_V = part * PART + tl.arange(0, PART)
    inside_V = token_V < vocab_size
    x_V = tl.load(logits_ptr + row * logits_stride + token_V, mask=inside_V, other=float("-inf"))
    is_nan_V = x_V != x_V
    score, token = _best(tl.where(is_nan_V, float("-inf"), x_V), token_V)
    has_nan = tl.max(is_nan_V.to(tl.int32), axis=0) > 0
    slot = row * tl.num_programs(1) + part
    tl.store(score_ptr + slot, score)
    tl.store(token_ptr + slot, tl.where(has_nan, -1, token))
    if HAS_TOP_K:
        top_k = tl.load(top_k_ptr + row)
        if (tl.load(temperature_ptr + row) > 0) & (top_k > 0) & (top_k < vocab_size):
            # Most first digits are among a few: each program counts its own before it adds.
            number_N = tl.histogram(_digit(_ordered_key(x_V), 0), NUM_BINS, mask=inside_V)
            bin_ptr_N = histogram_ptr + row * (NUM_ROUNDS * NUM_BINS) + tl.arange(0, NUM_BINS)
            tl.atomic_add(bin_ptr_N, number_N.to(tl.int64), mask=number_N > 0, sem="relaxed")


@kernel()
def select_kernel(
    logits_ptr: tl.tensor,  # [B, V] fp32
    temperature_ptr: tl.tensor,  # [B] fp32
    top_k_ptr: tl.tensor,  # [B] int32
    top_p_ptr: tl.tensor,  # [B] fp32
    score_ptr: tl.tensor,  # [B, parts] fp32
    token_ptr: tl.tensor,  # [B, parts] int32
    histogram_ptr: tl.tensor,  # [B, rounds, NUM_BINS] int64: complete before ROUND, zeros from there
    state_ptr: tl.tensor,  # [B, rounds, 2] int64: (low, target) after each round; written: ROUND - 1
    vocab_size: int,
    logits_stride: int,
    ROUND: tl.constexpr,
    NUM_ROUNDS: tl.constexpr,
    BY_MASS: tl.constexpr,  # a round of top_p, not of top_k
    HAS_TOP_K: tl.constexpr,
    NUM_BINS: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
) -> None:
    """One program adds one part of one row to the histogram of a round."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row_histogram_ptr = histogram_ptr + row * (NUM_ROUNDS * NUM_BINS)
    row_state_ptr = state_ptr + row * (NUM_ROUNDS * 2)
    DIGIT: tl.constexpr = ROUND % 3
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    has_k = (top_k > 0) & (top_k < vocab_size)
    filtered = has_k
    if BY_MASS:
        filtered = (top_p < 1) | (has_k & (DIGIT == 0))  # round 3 also stores the result of round 2
    slot = row * tl.num_programs(1)
    peak, token = _best_of_parts(score_ptr + slot, token_ptr + slot, tl.num_programs(1), MAX_PARTS)
    if (temperature > 0) & (token >= 0) & filtered:
        low = tl.zeros([], tl.uint32)  # of this filter
        floor = tl.zeros([], tl.uint32)  # set by top_k, for top_p
        target = tl.zeros([], tl.int64)
        if DIGIT > 0:
            low, target = _after_round(
                row_histogram_ptr, row_state_ptr, top_k, top_p, ROUND - 1, DIGIT - 1, BY_MASS, NUM_BINS
            )
            if BY_MASS and HAS_TOP_K:
                if has_k:
                    floor = tl.load(row_state_ptr + 4).to(tl.uint32)  # low after round 2
        elif HAS_TOP_K:
            if has_k:
                floor, target = _after_round(
                    row_histogram_ptr, row_state_ptr, top_k, top_p, ROUND - 1, 2, False, NUM_BINS
                )
                low = floor
        if (ROUND > 0) & (part == 0):
            tl.store(row_state_ptr + 2 * ROUND - 2, low.to(tl.int64))
            tl.store(row_state_ptr + 2 * ROUND - 1, target)
        token_V = part * PART + tl.arange(0, PART)
        inside_V = token_V < vocab_size
        x_V = tl.load(logits_ptr + row * logits_stride + token_V, mask=inside_V, other=float("-inf"))
        key_V = _ordered_key(x_V)
        counted_V = inside_V & (key_V >= floor)
        if DIGIT > 0:
            KNOWN: tl.constexpr = 32 - 11 * DIGIT  # the lowest known bit
            counted_V = counted_V & ((key_V >> KNOWN) == (low >> KNOWN))
        round_ptr = row_histogram_ptr + ROUND * NUM_BINS
        digit_V = _digit(key_V, DIGIT)
        weight_V = tl.full([PART], 1, tl.int64)
        if BY_MASS:
            unit = tl.where(top_p < 1, 2.0**40, 0.0)
            weight_V = (tl.exp(_exponent(x_V, peak, temperature)) * unit).to(tl.int64)
        tl.atomic_add(round_ptr + digit_V, weight_V, mask=counted_V & (weight_V > 0), sem="relaxed")


@kernel()
def draw_kernel(
    logits_ptr: tl.tensor,  # [B, V] fp32
    temperature_ptr: tl.tensor,  # [B] fp32
    top_k_ptr: tl.tensor,  # [B] int32
    top_p_ptr: tl.tensor,  # [B] fp32
    min_p_ptr: tl.tensor,  # [B] fp32
    seed_ptr: tl.tensor,  # [B] int64
    choice_ptr: tl.tensor,  # [B] int32
    position_ptr: tl.tensor,  # [B] int64
    score_ptr: tl.tensor,  # [B, parts] fp32
    token_ptr: tl.tensor,  # [B, parts] int32
    histogram_ptr: tl.tensor,  # [B, rounds, NUM_BINS] int64
    state_ptr: tl.tensor,  # [B, rounds, 2] int64
    drawn_score_ptr: tl.tensor,  # [B, parts] fp32, written for rows that draw
    drawn_token_ptr: tl.tensor,  # [B, parts] int32
    vocab_size: int,
    logits_stride: int,
    NUM_ROUNDS: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    NUM_BINS: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
) -> None:
    """One program finds the largest score among the kept tokens of one part."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = row * tl.num_programs(1)
    temperature = tl.load(temperature_ptr + row)
    peak, token = _best_of_parts(score_ptr + slot, token_ptr + slot, tl.num_programs(1), MAX_PARTS)
    if (temperature > 0) & (token >= 0):
        row_histogram_ptr = histogram_ptr + row * (NUM_ROUNDS * NUM_BINS)
        row_state_ptr = state_ptr + row * (NUM_ROUNDS * 2)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        floor = tl.zeros([], tl.uint32)
        if HAS_TOP_K:
            if (top_k > 0) & (top_k < vocab_size):
                if HAS_TOP_P:
                    floor = tl.load(row_state_ptr + 4).to(tl.uint32)
                else:
                    floor, _ = _after_round(
                        row_histogram_ptr, row_state_ptr, top_k, top_p, 2, 2, False, NUM_BINS
                    )
        if HAS_TOP_P:
            if top_p < 1:
                floor, _ = _after_round(
                    row_histogram_ptr, row_state_ptr, top_k, top_p, NUM_ROUNDS - 1, 2, True, NUM_BINS
                )
        token_V = part * PART + tl.arange(0, PART)
        inside_V = token_V < vocab_size
        x_V = tl.load(logits_ptr + row * logits_stride + token_V, mask=inside_V, other=float("-inf"))
        exponent_V = _exponent(x_V, peak, temperature)
        min_p = tl.load(min_p_ptr + row)
        kept_V = inside_V & (_ordered_key(x_V) >= floor) & (tl.exp(exponent_V) >= min_p)
        quad = (part * (PART // 4) + tl.arange(0, PART // 4)).to(tl.uint32)
        zero = quad * 0
        choice = tl.load(choice_ptr + row).to(tl.uint32)
        position = tl.load(position_ptr + row)
        position_low = (position & 0xFFFFFFFF).to(tl.uint32)
        position_high = (position >> 32).to(tl.uint32)
        word_0, word_1, word_2, word_3 = tl.philox(
            tl.load(seed_ptr + row), quad, zero + position_low, zero + choice, zero + position_high
        )
        word_V = tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))
        # 23 bits and a half: exact in fp32, and never 0 or 1.
        uniform_V = ((word_V >> 9).to(tl.float32) + 0.5) * (2.0**-23)
        score_V = tl.where(kept_V, exponent_V - tl.log(-tl.log(uniform_V)), float("-inf"))
        score, token = _best(score_V, token_V)
        tl.store(drawn_score_ptr + slot + part, score)
        tl.store(drawn_token_ptr + slot + part, token)


@kernel()
def join_parts_kernel(
    temperature_ptr: tl.tensor,  # [B] fp32
    score_ptr: tl.tensor,  # [B, parts] fp32
    token_ptr: tl.tensor,  # [B, parts] int32
    drawn_score_ptr: tl.tensor,  # [B, parts] fp32
    drawn_token_ptr: tl.tensor,  # [B, parts] int32
    out_ptr: tl.tensor,  # [B] int64
    num_parts: int,
    HAS_RANDOM: tl.constexpr,
    MAX_PARTS: tl.constexpr,
) -> None:
    """One program chooses the token of one row."""
    row = tl.program_id(0).to(tl.int64)
    slot = row * num_parts
    _, token = _best_of_parts(score_ptr + slot, token_ptr + slot, num_parts, MAX_PARTS)
    if HAS_RANDOM:
        if (tl.load(temperature_ptr + row) > 0) & (token >= 0):
            _, token = _best_of_parts(drawn_score_ptr + slot, drawn_token_ptr + slot, num_parts, MAX_PARTS)
    tl.store(out_ptr + row, token.to(tl.int64))


def sample_triton(logits_BV: Tensor, sampling: SamplingTensors) -> Tensor:
    """`sample` on a GPU."""
    _check(logits_BV, sampling)
    num_rows, vocab_size = logits_BV.shape
    out_B = torch.empty(num_rows, dtype=torch.int64, device=logits_BV.device)
    if num_rows == 0:
        return out_B
    num_parts = triton.cdiv(vocab_size, PART)
    # Tensors of their own, not slices: Triton compiles anew for pointers that 16 does not divide.
    peaks, draws = (
        (
            torch.empty(shape, device=logits_BV.device),
            torch.empty(shape, dtype=torch.int32, device=logits_BV.device),
        )
        for shape in 2 * [(num_rows, num_parts)]
    )
    max_parts = triton.next_power_of_2(num_parts)
    _find_candidates(logits_BV, sampling, peaks, draws, max_parts)
    join_parts_kernel[(num_rows,)](
        sampling.temperature_B,
        *peaks,
        *draws,
        out_B,
        num_parts,
        HAS_RANDOM=sampling.has_random,
        MAX_PARTS=max_parts,
        num_warps=1,
    )
    return out_B


def warm_up(logits_BV: Tensor) -> None:
    """Compile every kernel that `sample` may launch for logits of this width; on a CPU there is none.

    Takes seconds where Triton's cache is empty. Otherwise the first request with top_p would wait for them.
    """
    if logits_BV.is_cuda:
        warm_up_triton(logits_BV)


def warm_up_triton(logits_BV: Tensor) -> None:
    """`warm_up` on a GPU."""
    one_B = torch.ones(len(logits_BV), device=logits_BV.device)
    sampling = SamplingTensors(*(one_B.to(dtype) for dtype in _DTYPES.values()), has_random=False)
    sample_triton(logits_BV, sampling)
    for has_top_k, has_top_p in product((False, True), repeat=2):
        random = replace(sampling, has_random=True, has_top_k=has_top_k, has_top_p=has_top_p)
        sample_triton(logits_BV, random)


def _find_candidates(
    logits_BV: Tensor,
    sampling: SamplingTensors,
    peaks: tuple[Tensor, Tensor],  # scores and tokens, [B, parts]; written
    draws: tuple[Tensor, Tensor],
    max_parts: int,
) -> None:
    """The kernels of parts, in order."""
    num_rows, vocab_size = logits_BV.shape
    has_k, has_p = sampling.has_random and sampling.has_top_k, sampling.has_random and sampling.has_top_p
    num_rounds = NUM_DIGITS * (has_k + has_p)
    histogram = torch.zeros((num_rows, num_rounds, NUM_BINS), dtype=torch.int64, device=logits_BV.device)
    state = histogram.new_empty((num_rows, num_rounds, 2))
    grid, sizes = (num_rows, peaks[0].shape[1]), (vocab_size, logits_BV.stride(0))
    options = {
        "NUM_ROUNDS": num_rounds,
        "HAS_TOP_K": has_k,
        "NUM_BINS": NUM_BINS,
        "PART": PART,
        "num_warps": 8,
    }
    temperature_B, top_k_B, top_p_B = sampling.temperature_B, sampling.top_k_B, sampling.top_p_B
    peak_kernel[grid](logits_BV, temperature_B, top_k_B, *peaks, histogram, *sizes, **options)
    if not sampling.has_random:
        return
    options["MAX_PARTS"] = max_parts
    filters_B = temperature_B, top_k_B, top_p_B
    for round_ in range(1 if has_k else 0, num_rounds):
        by_mass = round_ >= NUM_DIGITS or not has_k
        select_kernel[grid](
            logits_BV, *filters_B, *peaks, histogram, state, *sizes, ROUND=round_, BY_MASS=by_mass, **options
        )
    draw_kernel[grid](
        logits_BV,
        *filters_B,
        sampling.min_p_B,
        sampling.seed_B,
        sampling.choice_B,
        sampling.position_B,
        *peaks,
        histogram,
        state,
        *draws,
        *sizes,
        HAS_TOP_P=has_p,
        **options,
    )


def _check(logits_BV: Tensor, sampling: SamplingTensors) -> None:
    if logits_BV.dim() != 2 or logits_BV.dtype != torch.float32 or logits_BV.stride(1) != 1:
        found = f"{logits_BV.dtype} {tuple(logits_BV.shape)}"
        raise ValueError(f"logits must be float32 [B, V] with adjacent tokens, got {found}")
    if logits_BV.shape[1] > MAX_VOCAB_SIZE:
        raise ValueError(f"a vocabulary has at most {MAX_VOCAB_SIZE} tokens, got {logits_BV.shape[1]}")
    for (name, dtype), values_B in zip(_DTYPES.items(), sampling.tensors, strict=True):
        if values_B.shape != logits_BV.shape[:1] or values_B.dtype != dtype or not values_B.is_contiguous():
            expected = f"contiguous {dtype} [{logits_BV.shape[0]}]"
            raise ValueError(f"{name} must be {expected}, got {values_B.dtype} {tuple(values_B.shape)}")
        if values_B.device != logits_BV.device:
            raise ValueError(f"{name} is on {values_B.device}, logits on {logits_BV.device}")


def sample_reference(logits_BV: Tensor, sampling: SamplingTensors) -> Tensor:
    """`sample` in plain torch."""
    peak_B = logits_BV.amax(-1)
    has_token_B = peak_B > -torch.inf
    none_B = torch.where(peak_B.isnan(), NOT_A_TOKEN, ALL_BANNED)
    chosen_B = torch.where(has_token_B, logits_BV.argmax(-1), none_B)
    random_R = ((sampling.temperature_B > 0) & has_token_B).nonzero()[:, 0]
    if random_R.numel() == 0:
        return chosen_B
    rows = sampling.take(random_R)
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


def _sample_native(
    logits_BV: Tensor,
    sampling: SamplingTensors,
    tokens_B: Tensor,
    peaks_B: Tensor,
    rows_N: Tensor | None = None,
    masks_NW: Tensor | None = None,
) -> None:
    """As `sample_rows`, of all rows without `rows_N`."""
    _check(logits_BV, sampling)
    num_rows, vocab_size = logits_BV.shape
    scratch = torch.empty((native.num_threads(), 2 * vocab_size))
    native.function("baton_sample", "pn" + 10 * "p" + "nppnn")(
        logits_BV.data_ptr(),
        logits_BV.stride(0),
        *(values_B.data_ptr() for values_B in sampling.tensors),
        None if rows_N is None else rows_N.data_ptr(),
        None if masks_NW is None else masks_NW.data_ptr(),
        scratch.data_ptr(),
        len(scratch),
        tokens_B.data_ptr(),
        peaks_B.data_ptr(),
        num_rows if rows_N is None else len(rows_N),
        vocab_size,
    )


# Masks of structured output. Shapes: R rows of the logits, N masked rows, W words of a mask.

WORD_BITS: Final = 32


def num_mask_words(vocab_size: int) -> int:
    """The words of a mask."""
    return -(-vocab_size // WORD_BITS)


def mask_logits(logits_RV: Tensor, rows_N: Tensor, masks_NW: Tensor) -> None:
    """Set logits to -inf, in place, where a mask has no bit.

    logits_RV: fp32, rows may be strided. rows_N: int64, the row of each mask; distinct, which the caller
    guarantees. masks_NW: int32; token v has bit v % 32 of word v // 32. On a GPU nothing waits for it.
    """
    _check_masks(logits_RV, rows_N, masks_NW)
    bits_B = torch.arange(WORD_BITS, device=masks_NW.device, dtype=torch.int32)
    allowed_NV = ((masks_NW[:, :, None] >> bits_B) & 1).flatten(1)[:, : logits_RV.shape[1]]
    logits_RV[rows_N] = logits_RV[rows_N].masked_fill_(allowed_NV == 0, float("-inf"))


def _check_masks(logits_RV: Tensor, rows_N: Tensor, masks_NW: Tensor) -> None:
    expected = (len(rows_N), num_mask_words(logits_RV.shape[1]))
    if tuple(masks_NW.shape) != expected or not masks_NW.is_contiguous() or masks_NW.dtype != torch.int32:
        raise ValueError(f"masks must be int32 and contiguous {expected}, got {tuple(masks_NW.shape)}")
    if logits_RV.dtype != torch.float32 or logits_RV.stride(1) != 1:
        raise ValueError(f"logits must be float32 with adjacent columns, got {logits_RV.dtype}")
