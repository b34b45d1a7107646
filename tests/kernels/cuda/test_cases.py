import pytest
import torch

from tests.kernels.cases import CASES, Case, check

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_agrees_with_its_reference_on_the_device(case: Case) -> None:
    check(case, torch.device("cuda"))
