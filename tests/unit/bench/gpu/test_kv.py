"""The KV part of the GPU suite, with its stand-ins on a CPU."""

from pathlib import Path
from typing import cast

import pytest
import torch

from baton.bench.gpu import kv
from baton.bench.gpu.kv import Move, Moved, measure
from baton.bench.gpu.session import FULL, Session
from baton.bench.gpu.suite import STAGES
from baton.kvtransfer.protocol.transfer_plan import Offsets, TransferPlan
from baton.kvtransfer.transports.pages import HostPages
from baton.pages import PageLayout
from tests.unit.bench.gpu.toy import run_toy

KV_STAGES = [stage for stage in STAGES if stage.name in ("kv gather", "kv scatter", "cuda_ipc", "nccl")]
MOVED = Moved(num_units=4, num_bytes=2**23, seconds=2e-3, copy_s=1e-3)


def test_every_row_says_what_stands_in_for_the_gpu(tmp_path: Path) -> None:
    report = run_toy(KV_STAGES, tmp_path)
    assert not report.extra["failures"]
    assert len(report.rows) == 12
    for row in report.rows:
        assert row.value is not None and row.limit is None and "stands in" in row.note
    assert [row.note for row in report.rows if "gloo" in row.note]


def test_pages_that_arrive_wrong_have_no_figure_and_cost_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def pack(self: HostPages, plan: TransferPlan, offset_N: Offsets, staging: torch.Tensor) -> None:
        staging.zero_()

    def move(move: Move) -> list[Moved]:
        if move.way == "shm":
            raise RuntimeError("shm: no door")
        return [MOVED]

    monkeypatch.setattr(HostPages, "pack", pack)
    monkeypatch.setattr(kv, "measure", move)
    report = run_toy(KV_STAGES, tmp_path)
    assert cast(dict[str, str], report.extra["failures"]).keys() == {"kv gather", "cuda_ipc"}
    failed = {row.name: row.note for row in report.rows if row.value is None}
    assert failed == {
        "kv gather": "WrongResult: gather of pages: the bytes differ",
        "cuda_ipc": "RuntimeError: shm: no door",
    }
    assert report.rows[-1].name == "nccl, two ranks on one GPU, 8.00 MiB"
    assert report.rows[-1].value == pytest.approx(4.19, abs=0.01)


def test_the_bar_is_on_the_largest_push_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = Moved(num_units=4, num_bytes=2**23, seconds=9.0, copy_s=1.0), FULL.kv_moved_units[-1]
    moved = [small, Moved(num_units=large, num_bytes=2**30, seconds=1.0, copy_s=0.9)]
    monkeypatch.setattr(kv, "measure", lambda move: moved)
    rows = list(kv.cuda_ipc(Session(torch.device("cuda"), FULL)))
    assert [(row.name, row.limit, row.met) for row in rows] == [
        ("cuda_ipc, 8.00 MiB", None, None),
        ("cuda_ipc, 1,024 MiB", ">= 85", True),
    ]


@pytest.mark.parametrize(
    ("is_available", "version", "why"),
    [(False, (2, 30, 1), "no NCCL"), (True, (2, 27, 5), "NCCL 2.27.5: two ranks on one GPU need 2.30")],
)
def test_without_the_right_nccl_a_row_says_why(
    is_available: bool, version: tuple[int, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    (row,) = kv.nccl(Session(torch.device("cuda"), FULL))
    assert (row.value, row.met) == (None, None) and why in row.note


def test_processes_that_fail_are_quoted() -> None:
    layout = PageLayout(tp_size=1, page_size=16, num_layers=1, num_kv_heads=1, head_dim=16, dtype="bfloat16")
    with pytest.raises(RuntimeError, match="gloo: .*has ended\n(.*\n)*ValueError: Sample larger"):
        measure(Move(way="gloo", layout=layout, num_pages=1, num_units=(2,)))
