import pytest
import torch

from baton.kernels import paged_attention
from tests.kernels.attention_cases import Shape, decode_outcome
from tests.kernels.cases import CASES, Case, check


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_interpreted_kernel_agrees_with_its_reference(case: Case) -> None:
    check(case, torch.device("cpu"))


def test_long_sequence_is_split_inside_a_batch_that_fills_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "TARGET_PROGRAMS", 16)
    monkeypatch.setattr(paged_attention, "MOST_KEYS", 48)
    shape = Shape(page_size=16, num_kv_heads=1, group_size=2, head_dim=16)
    case = Case("balance", lambda device: decode_outcome([170, 3, 48, 0], shape, torch.float32, device))
    check(case, torch.device("cpu"))
