"""The KV part of the GPU suite, with its stand-ins on a CPU."""

from collections.abc import Iterator

import pytest
import torch

from baton.bench.gpu import kv
from baton.bench.gpu.kv import Moved
from baton.bench.gpu.session import FULL, TOY, Session, WrongResult
from baton.kernels.pages import Offsets
from baton.kvtransfer.protocol.transfer_plan import TransferPlan
from baton.kvtransfer.transports.pages import HostPages

TOY_SESSION = Session(torch.device("cpu"), TOY)


def test_every_row_names_its_stand_in_for_the_gpu() -> None:
    stages = (kv.gather, kv.scatter, kv.cuda_ipc)
    rows = [row for stage in stages for row in stage(TOY_SESSION)]
    assert len(rows) == 10
    for row in rows:
        assert row.value is not None and row.limit is None and "stands in" in row.note


def test_wrong_pages_have_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(self: HostPages, plan: TransferPlan, offset_N: Offsets, staging: torch.Tensor) -> None:
        staging.zero_()

    monkeypatch.setattr(HostPages, "pack", pack)
    with pytest.raises(WrongResult, match="gather of pages: the bytes differ"):
        next(kv.gather(TOY_SESSION))


def test_bar_is_on_the_largest_push_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(session: Session, transport: str) -> Iterator[Moved]:
        yield Moved(4, 2**23, seconds=9.0, copy_s=1.0)
        yield Moved(FULL.kv_moved_units[-1], 2**30, seconds=1.0, copy_s=0.9)

    monkeypatch.setattr(kv, "move", move)
    rows = list(kv.cuda_ipc(Session(torch.device("cuda"), FULL)))
    assert [(row.name, row.limit, row.met) for row in rows] == [
        ("cuda_ipc, 8.00 MiB", None, None),
        ("cuda_ipc, 1,024 MiB", ">= 85", True),
    ]


@pytest.mark.slow
def test_transport_that_does_not_open_is_a_failure() -> None:
    with pytest.raises(RuntimeError, match="the destination's process has ended"):
        next(kv.move(TOY_SESSION, "nccl"))
