import pytest
import torch

from tests.kernels.cases import CASES, Case, check


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_interpreted_kernel_agrees_with_its_reference(case: Case) -> None:
    check(case, torch.device("cpu"))
