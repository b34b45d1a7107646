"""Pages from a GPU of this process to one of another's, byte for byte: cuda_ipc and NCCL."""

import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from baton.errors import TransferFailed
from baton.kernels.copy_runs import copy_runs_reference
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistration, ReceiveRegistrations
from baton.kvtransfer.transports.base import OutgoingTransfer, Piece, TransferProgress, TransferStatus
from baton.kvtransfer.transports.cuda_ipc import CudaIpcListener, CudaIpcTransport, SharedDevicePool
from baton.kvtransfer.transports.group_receiver import (
    GroupListener,
    GroupReceiver,
    RendezvousRequest,
    request_rendezvous,
)
from baton.kvtransfer.transports.rank_pair import GroupSettings, payload_bytes
from baton.kvtransfer.transports.torch_distributed import GroupTransport
from baton.pages import PageLayout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

KEY = b"the key of the tests' cluster"
WRITER = b"source incarnati"
SETTINGS = GroupSettings(connect_s=60.0, stall_s=10.0)
NUM_PAGES = 40
NUM_UNITS = 24
EPOCH = 1


def layout(tp_size: int, page_size: int) -> PageLayout:
    return PageLayout(
        tp_size=tp_size, page_size=page_size, num_layers=4, num_kv_heads=4, head_dim=64, dtype="bfloat16"
    )


SOURCE = layout(1, 16)
DESTINATIONS = {"equal": layout(1, 16), "tp": layout(2, 16), "pages": layout(1, 32)}


class Doors(msgspec.Struct):
    ipc: str
    group: tuple[str, int]
    pages: tuple[int, ...]


def pool_of(cut: PageLayout) -> Tensor:
    return torch.zeros(NUM_PAGES, cut.page_bytes, dtype=torch.uint8, device="cuda")


@pytest.fixture(params=DESTINATIONS)
def destination(request: pytest.FixtureRequest) -> Iterator[tuple[PageLayout, "subprocess.Popen[bytes]"]]:
    command = [sys.executable, "-m", "tests.unit.kvtransfer.test_device_transports", request.param]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[3], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield DESTINATIONS[request.param], process
    process.kill()
    process.communicate()


def ask(process: "subprocess.Popen[bytes]", line: str) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()
    return process.stdout.readline()


def wait(poll: Callable[[], TransferProgress]) -> TransferProgress:
    while not (progress := poll()).status.is_final:
        torch.cuda._sleep(10**5)
        torch.cuda.synchronize()
    return progress


@pytest.mark.parametrize("name", ["cuda_ipc", "nccl"])
def test_pages_of_a_gpu_arrive_byte_for_byte(
    name: str, destination: tuple[PageLayout, "subprocess.Popen[bytes]"], tmp_path: Path
) -> None:
    cut, process = destination
    plan = plan_transfer(SOURCE, cut, 0, 0)
    transfer_id = secrets.token_bytes(16)
    doors = msgspec.json.decode(ask(process, f"land {name} {transfer_id.hex()}"), type=Doors)
    pool = pool_of(SOURCE)
    transport: CudaIpcTransport | GroupTransport
    if name == "cuda_ipc":
        transport = CudaIpcTransport(doors.ipc, KEY, pool, WRITER)
    else:
        rendezvous_request = RendezvousRequest(
            name="nccl", layout=SOURCE, rank=0, payload_bytes=payload_bytes(plan)
        )
        meet = partial(request_rendezvous, doors.group, KEY, rendezvous_request, SETTINGS.connect_s)
        transport = GroupTransport("nccl", meet, pool, plan, settings=SETTINGS)
    try:
        transport.open()
    except TransferFailed as error:
        transport.close()
        if name == "nccl" and torch.cuda.device_count() == 1:
            pytest.skip(f"two ranks on one GPU: {error}")  # NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1 can
        raise
    transfer = OutgoingTransfer(
        id=transfer_id,
        epoch=EPOCH,
        plan=plan,
        source_pages=tuple(torch.randperm(NUM_PAGES)[:NUM_UNITS].tolist()),
        destination_pages=doors.pages,
        destination_generations=(1,) * len(doors.pages),
    )
    pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8, device="cuda"))
    for piece in (Piece(transfer, 0, 5), Piece(transfer, 5, NUM_UNITS)):
        progress = wait(partial(transport.poll, transport.push(piece)))
        assert progress.status == TransferStatus.DONE, progress
    expected = pool_of(cut).view(-1).cpu()
    runs = plan.runs(0, NUM_UNITS, transfer.source_pages, doors.pages)
    copy_runs_reference(
        pool.view(-1).cpu(), expected, runs.source_offset_N, runs.destination_offset_N, runs.run_bytes
    )
    ask(process, f"save {tmp_path / 'pool'}")
    assert (tmp_path / "pool").read_bytes() == expected.numpy().tobytes()
    transport.close()


class _Destination:
    """Serves both transports, in a process of its own."""

    def __init__(self, cut: PageLayout) -> None:
        self.plan = plan_transfer(SOURCE, cut, 0, 0)
        self.pool = pool_of(cut)
        self.registrations = ReceiveRegistrations(NUM_PAGES)
        self.shared = SharedDevicePool(self.pool)
        self.ipc = CudaIpcListener(self.shared, self.registrations, KEY, lambda transfers: None)
        self.receiver = GroupReceiver("nccl", self.registrations, self.pool, settings=SETTINGS)
        self.group = GroupListener(self.receiver, cut, 0, KEY)
        self.pages = tuple(range(NUM_PAGES))[::-1][: self.plan.destination.num_pages(NUM_UNITS)]

    def obey(self, verb: str, *arguments: str) -> str:
        if verb == "land":
            self._grant(bytes.fromhex(arguments[1]), may_write_directly=arguments[0] == "cuda_ipc")
        elif verb == "save":
            torch.cuda.synchronize()
            Path(arguments[0]).write_bytes(self.pool.cpu().numpy().tobytes())
        doors = Doors(self.ipc.address, self.group.address, self.pages)
        return msgspec.json.encode(doors).decode()

    def _grant(self, transfer: bytes, *, may_write_directly: bool) -> None:
        self.shared.generations.grant(self.pages, (1,) * len(self.pages))
        self.registrations.add(
            ReceiveRegistration(
                id=transfer,
                epoch=EPOCH,
                plan=self.plan,
                num_units=NUM_UNITS,
                pages=self.pages,
                writer=WRITER,
                may_write_directly=may_write_directly,
            )
        )


def main(name: str) -> None:
    destination = _Destination(DESTINATIONS[name])
    for line in sys.stdin:
        sys.stdout.write(destination.obey(*line.split()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
