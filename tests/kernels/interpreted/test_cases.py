import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.gpu.kernels import read_sum
from tests.kernels.cases import CASES, Case, check
from tests.kernels.sampling_cases import Filters, mixed_outcome

# In fp16 a kernel differs from that in bf16 by the types alone.
SLOW = re.compile(r"-float16$|experts-70.*-bfloat16$")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(each, id=each.name, marks=pytest.mark.slow if SLOW.search(each.name) else ())
        for each in CASES
    ],
)
def test_interpreted_kernel_agrees_with_its_reference(case: Case) -> None:
    check(case, torch.device("cpu"))


FILTERS = st.builds(
    Filters,
    temperature=st.sampled_from((0.0, 1e-6, 0.3, 1.0, 2.5)),
    top_k=st.sampled_from((-1, 0, 1, 2, 5, 40, 6000)),
    top_p=st.sampled_from((1e-7, 0.1, 0.5, 0.93, 1.0)),
    min_p=st.sampled_from((0.0, 0.07, 0.6, 1.0)),
)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(FILTERS, min_size=1, max_size=4),
    vocab_size=st.one_of(st.integers(1, 150), st.integers(4090, 8200)),
    spread=st.sampled_from((0.0, 0.01, 1.0, 3.0, 20.0)),
    steps=st.sampled_from((0, 1, 7)),  # logits in multiples of 1 / steps: ties
    seed=st.integers(0, 2**16),
)
def test_interpreted_sampling_draws_the_tokens_of_the_reference(
    rows: list[Filters], vocab_size: int, spread: float, steps: int, seed: int
) -> None:
    logits = torch.randn((len(rows), vocab_size), generator=torch.Generator().manual_seed(seed)) * spread
    logits = (logits * steps).round() / steps if steps else logits
    check(Case("mixed", lambda device: mixed_outcome(logits.to(device), rows)), torch.device("cpu"))


@pytest.mark.parametrize("top_k", [0, 700])
def test_interpreted_token_does_not_depend_on_the_batch(top_k: int) -> None:
    row = torch.randn((1, 9000), generator=torch.Generator().manual_seed(1)) * 3
    others = torch.randn((3, 9000), generator=torch.Generator().manual_seed(2))
    ours, plain = Filters(top_k=top_k, top_p=0.9, temperature=0.7), Filters()
    alone = mixed_outcome(row, [ours]).kernel
    assert torch.equal(mixed_outcome(torch.cat((row, others)), [ours, plain, plain, plain]).kernel[:1], alone)


@pytest.mark.parametrize("num_values", [1, 8192, 3 * 8192 + 5])
def test_read_kernel_of_the_gpu_suite_reads_every_value_once(num_values: int) -> None:
    values = torch.arange(num_values, dtype=torch.float32) % 7
    assert read_sum(values, torch.empty(2)).sum() == values.sum()
