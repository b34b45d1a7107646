import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
sys.modules["triton"] = None  # importing it now fails, as on a machine without it
import torch
from baton.kernels import pages, paged_attention, prefill_attention, rms_norm
from baton.kernels import sample, silu_mul, store_kv
assert silu_mul.silu_mul(torch.ones(2, 6)).shape == (2, 3)
three, int64s = torch.ones(3, 2, 6), torch.zeros(3, dtype=torch.int64)
table, kv_pages = torch.ones(4, 6), torch.ones(1, 2, 2, 4, 6)
for launch in (
    lambda: silu_mul.silu_mul_triton(torch.ones(2, 6)),
    lambda: store_kv.rope_and_store_triton(three, three, three, table, int64s, kv_pages, int64s),
):
    try:
        launch()
    except RuntimeError as error:
        print(error)
"""


def test_ops_run_on_the_cpu_and_launchers_name_the_missing_package() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["tensors on a GPU need Triton: pip install triton"] * 2
