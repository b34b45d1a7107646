"""Sampling on the CPU: tokens that may be drawn, their frequencies, and the C kernel against the reference.

Shapes: B rows, V vocabulary.
"""

import math
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels import native
from baton.kernels.sample import (
    ALL_BANNED,
    NOT_A_TOKEN,
    kept_reference,
    philox,
    sample,
    sample_reference,
)
from tests.kernels.outcomes import normal
from tests.kernels.sampling_cases import FILTERS, Filters, awkward_logits, sampling_tensors

CPU = torch.device("cpu")
filters = st.builds(
    Filters,
    temperature=st.sampled_from((0.0, 1e-6, 0.3, 1.0, 2.5)),
    top_k=st.sampled_from((-1, 0, 1, 2, 5, 40, 1000)),
    top_p=st.sampled_from((1e-7, 0.1, 0.5, 0.93, 1.0)),
    min_p=st.sampled_from((0.0, 0.07, 0.6, 1.0)),
)


def logits_of(num_rows: int, vocab_size: int, spread: float, tied: bool) -> Tensor:
    logits = normal(num_rows, vocab_size, dtype=torch.float32, device=CPU) * spread
    return logits.round() if tied else logits


@given(
    num_rows=st.integers(0, 6),
    vocab_size=st.integers(2, 150),
    spread=st.sampled_from((0.0, 1.0, 3.0, 20.0)),
    tied=st.booleans(),
    settings=filters,
)
def test_tokens_equal_those_of_the_reference(
    num_rows: int, vocab_size: int, spread: float, tied: bool, settings: Filters
) -> None:
    logits = logits_of(num_rows, vocab_size, spread, tied)
    sampling = sampling_tensors(num_rows, settings)
    before = logits.clone()
    drawn = sample(logits, sampling)
    assert drawn.tolist() == sample_reference(logits, sampling).tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("name", FILTERS)
def test_infinities_and_ties_are_drawn_as_by_the_reference(name: str) -> None:
    for vocab_size in (16, 61, 333):
        logits = awkward_logits(vocab_size, CPU)
        sampling = sampling_tensors(len(logits), FILTERS[name])
        tokens = sample(logits, sampling).tolist()
        assert tokens == sample_reference(logits, sampling).tolist()
        assert all(0 <= token < vocab_size for token in tokens[:4])
        assert tokens[3] < vocab_size // 3  # beyond lie only -inf
        assert tokens[4] == ALL_BANNED
        assert tokens[5] == vocab_size // 2  # the infinite logit


@pytest.mark.parametrize("settings", [Filters(top_k=2), Filters(top_p=0.7), Filters(min_p=0.3)])
def test_minus_zero_ties_with_zero(settings: Filters) -> None:
    logits = torch.tensor([0.5, *(-0.0, 0.0) * 9, *[-9.0] * 4]).repeat(400, 1)
    tokens = sample(logits, sampling_tensors(400, settings))
    assert tokens.tolist() == sample_reference(logits, sampling_tensors(400, settings)).tolist()
    assert set(tokens.tolist()) == set(range(19))


def test_rows_may_be_strided() -> None:
    logits, sampling = logits_of(7, 130, 2.0, tied=False), sampling_tensors(7, FILTERS["all"])
    assert torch.equal(sample(logits[:, :97], sampling), sample(logits[:, :97].contiguous(), sampling))


def test_row_is_drawn_by_its_own_settings_in_any_batch() -> None:
    logits, sampling = logits_of(64, 203, 2.0, tied=True), sampling_tensors(64, FILTERS["all"])
    mixed = replace(
        sampling,
        top_k_B=torch.tensor([0, 4, -1, 300] * 16, dtype=torch.int32),
        temperature_B=torch.tensor([1.5, 0.5, 0.0, 1.0] * 16),
    )
    for tensors in (sampling, mixed):
        together = sample(logits, tensors)
        for row in range(64):
            alone = tensors.take(torch.tensor([row]))
            assert torch.equal(sample(logits[[row]], alone), together[[row]])


def test_draw_in_another_thread_is_the_same() -> None:
    logits, sampling = logits_of(64, 203, 2.0, tied=False), sampling_tensors(64, FILTERS["top_p"])
    drawn: list[Tensor] = []
    thread = threading.Thread(target=lambda: drawn.append(sample(logits, sampling)))
    thread.start()
    thread.join()
    assert torch.equal(drawn[0], sample(logits, sampling))


# The draw, by its definition. The C kernel draws the tokens of the reference, so one of both is enough.


def kept_tokens(logits: list[float], filters: Filters) -> set[int]:
    """From the definition, in float64, by sorting."""
    descending = sorted(logits, reverse=True)
    if 0 < filters.top_k < len(logits):
        descending = [logit for logit in descending if logit >= descending[filters.top_k - 1]]
    peak = descending[0]
    mass = [math.exp((logit - peak) / filters.temperature) for logit in descending]
    threshold = descending[-1]
    if filters.top_p < 1:
        above = (sum(mass[: rank + 1]) >= filters.top_p * sum(mass) for rank in range(len(mass)))
        threshold = next(logit for logit, enough in zip(descending, above, strict=True) if enough)
    return {
        token
        for token, logit in enumerate(logits)
        if logit >= threshold and math.exp((logit - peak) / filters.temperature) >= filters.min_p
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", [name for name in FILTERS if name not in ("greedy", "cold")])
def test_kept_set_is_the_sorted_one(name: str, tied: bool) -> None:
    logits = normal(40, 53, dtype=torch.float32, device=CPU) * 2
    logits = logits.round() if tied else logits
    _, kept = kept_reference(logits, sampling_tensors(40, FILTERS[name]))
    for row, expected in zip(kept, logits.tolist(), strict=True):
        assert set(row.nonzero()[:, 0].tolist()) == kept_tokens(expected, FILTERS[name])


@pytest.mark.parametrize("name", ["plain", "hot", "top_k", "top_p", "min_p", "all"])
def test_frequencies_are_the_softmax_over_the_kept_set(name: str) -> None:
    filters, num_draws, vocab_size = FILTERS[name], 20_000, 30
    logits = normal(1, vocab_size, dtype=torch.float32, device=CPU) * 2
    sampling = replace(
        sampling_tensors(num_draws, filters),
        seed_B=torch.full((num_draws,), 1234, dtype=torch.int64),
        choice_B=torch.zeros(num_draws, dtype=torch.int32),
        position_B=torch.arange(num_draws),
    )
    counts = torch.bincount(sample(logits.expand(num_draws, -1), sampling), minlength=vocab_size).double()
    kept = kept_tokens(logits[0].tolist(), filters)
    outside = [token for token in range(vocab_size) if token not in kept]
    assert counts[outside].sum() == 0
    likely = (logits[0].double() / filters.temperature).index_fill(0, torch.tensor(outside).long(), -math.inf)
    expected = torch.softmax(likely, dim=0) * num_draws
    frequent = expected >= 5
    chi_square = ((counts - expected).square() / expected)[frequent].sum()
    degrees = int(frequent.sum()) - 1
    # Wilson and Hilferty's normal approximation, at five standard deviations.
    bound = degrees * (1 - 2 / (9 * degrees) + 5 * math.sqrt(2 / (9 * degrees))) ** 3
    assert chi_square < bound


def test_greedy_takes_the_lowest_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-5.0, -5.0, -5.0, -5.0]])
    assert sample(logits, sampling_tensors(2, FILTERS["greedy"])).tolist() == [1, 0]


def test_draw_depends_on_seed_choice_and_position_alone() -> None:
    logits = torch.zeros(200, 997)  # flat, so that equal draws are no accident
    same = sampling_tensors(200, Filters())
    assert torch.equal(sample(logits, same), sample(logits, same))
    for change in (
        replace(same, seed_B=same.seed_B + 1),
        replace(same, seed_B=same.seed_B + 2**32),
        replace(same, choice_B=same.choice_B + 1),
        replace(same, position_B=same.position_B + 1),
        replace(same, position_B=same.position_B + 2**32),
    ):
        assert (sample(logits, same) == sample(logits, change)).sum() < 10


@pytest.mark.parametrize("vocab_size", [1, 16, 35])
def test_row_with_nan_gives_no_token_and_other_rows_theirs(vocab_size: int) -> None:
    logits = normal(vocab_size + 1, vocab_size, dtype=torch.float32, device=CPU)
    logits[torch.arange(vocab_size), torch.arange(vocab_size)] = math.nan  # each place once
    for filters in FILTERS.values():
        sampling = sampling_tensors(vocab_size + 1, filters)
        *bad, good = sample(logits, sampling).tolist()
        assert bad == [NOT_A_TOKEN] * vocab_size
        assert good == sample(logits.nan_to_num(), sampling).tolist()[-1]


@pytest.mark.parametrize("vocab_size", [1, 16, 35])
def test_row_of_minus_infinity_is_all_banned_and_one_with_nan_besides_is_no_number(vocab_size: int) -> None:
    logits = torch.full((3, vocab_size), -math.inf)
    logits[1, -1], logits[2, -1] = math.nan, -1e38
    for filters in FILTERS.values():
        tokens = sample(logits, sampling_tensors(3, filters)).tolist()
        assert tokens == [ALL_BANNED, NOT_A_TOKEN, vocab_size - 1]


# The generator.

# philox4x32-10 from the known-answer vectors that Random123 publishes: counter, key, words.
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (*PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    counter_0, counter_1, counter_2, counter_3 = (torch.tensor(word) for word in counter)
    got = philox((torch.tensor(key[0]), torch.tensor(key[1])), (counter_0, counter_1, counter_2, counter_3))
    assert tuple(got.tolist()) == words


def test_philox_broadcasts_and_ignores_high_bits() -> None:
    zero, column, row = torch.tensor(0), torch.arange(3), torch.arange(2)[:, None]
    words = philox((zero, zero), (column, row, zero, zero))
    high = philox((zero + 2**32, zero), (column, row, zero - 2**32, zero))
    assert words.shape == (2, 3, 4)
    assert torch.equal(words, high)
    assert len(set(words.flatten().tolist())) == words.numel()


def test_threads_beyond_the_scratch_have_their_own() -> None:
    """Another engine may raise the number of threads between the caller's look at it and the call."""
    num_rows, vocab_size = 64, 4096
    logits_BV = logits_of(num_rows, vocab_size, 3.0, tied=False)
    sampling = sampling_tensors(num_rows, Filters(temperature=1.0, top_k=7, top_p=0.9, min_p=0.0))
    expected_B, before = sample(logits_BV.clone(), sampling), native.num_threads()
    scratch, (tokens_B, peaks_B) = torch.full((2, 2 * vocab_size), 7.0), torch.empty((2, num_rows)).long()
    try:
        native.set_num_threads(4)
        for _ in range(20):
            native.function("baton_sample", "pn" + 10 * "p" + "nppnn")(
                logits_BV.data_ptr(),
                logits_BV.stride(0),
                *(values_B.data_ptr() for values_B in sampling.tensors),
                None,
                None,
                scratch.data_ptr(),
                1,
                tokens_B.data_ptr(),
                peaks_B.data_ptr(),
                num_rows,
                vocab_size,
            )
    finally:
        native.set_num_threads(before)
    assert torch.equal(tokens_B, expected_B) and (scratch[1] == 7.0).all()
