"""Two processes that move pages over one transport, with nothing of an endpoint around it.

1. The bench starts a source, the source a destination. Both know the move, so both know all pages.
2. The destination grants its pages to one landing, which takes every piece, and says where its door is.
3. The source pushes pieces of each size, rounds of them alternating with copies within its own memory.
   Before that each size is pushed once, and the destination's bytes are compared with the source's.
4. The source prints what it measured and ends; so does the destination, when its input ends.
"""

import hashlib
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Final, Literal, Self

import msgspec
import torch
from torch import Tensor

from baton.bench.timing import wall_seconds
from baton.errors import TransferFailed
from baton.kvtransfer.cuda_ipc import CudaIpcDoor, CudaIpcTransport, SharedDevicePool
from baton.kvtransfer.group import GroupTransport
from baton.kvtransfer.group_door import GroupDoor, Knock, ask_for_meeting
from baton.kvtransfer.group_receiver import GroupReceiver
from baton.kvtransfer.landing import Landing, Landings
from baton.kvtransfer.page_memory import PageMemory, SharedPool
from baton.kvtransfer.pair import GroupSettings
from baton.kvtransfer.pair_channel import payload_bytes
from baton.kvtransfer.shm import ShmTransport
from baton.kvtransfer.shm_door import ShmDoor
from baton.kvtransfer.transfer_plan import plan_transfer
from baton.kvtransfer.transport import OutgoingTransfer, Piece, TransferStatus, Transport
from baton.layout import PageLayout

Way = Literal["cuda_ipc", "nccl", "shm", "gloo"]

KEY: Final = b"a key for this bench alone"
TRANSFER: Final = b"the one transfer"  # 16 bytes each
WRITER: Final = b"the one source.."
EPOCH: Final = 1
NUM_ROUNDS: Final = 9
TIMEOUT_S: Final = 120.0
SETTINGS: Final = GroupSettings(connect_s=60.0, stall_s=20.0)
NCCL_SHARES_A_GPU: Final = "NCCL_MULTI_RANK_GPU_ENABLE=1"


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """What moves: pieces of `num_units` pages each, to a pool that is cut alike."""

    way: Way
    layout: PageLayout
    num_pages: int  # of either pool
    num_units: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.way in ("cuda_ipc", "nccl") else "cpu")

    def pages(self, seed: int) -> tuple[int, ...]:
        return tuple(random.Random(seed).sample(range(self.num_pages), max(self.num_units)))


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one size: from push to DONE, and of a contiguous copy of as many bytes in one process."""

    num_units: int
    num_bytes: int
    seconds: float
    copy_s: float


class DoorAt(msgspec.Struct, frozen=True, kw_only=True):
    """Of one of the two kinds."""

    address: str = ""
    port: int = 0


def measure(move: Move) -> list[Moved]:
    """One entry a size. RuntimeError when it fails: the last line of the two processes, then all of them."""
    command = ["env", NCCL_SHARES_A_GPU, *_command("source", move)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = ended.stdout.strip().splitlines()
    if ended.returncode or not lines:
        complaints = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise RuntimeError("\n".join((f"{move.way}: {complaints[-1]}", *complaints)))
    return msgspec.json.decode(lines[-1], type=list[Moved])


def run_source(move: Move) -> list[Moved]:
    with DestinationProcess(move) as destination:
        source = Source(move, destination.door)
        try:
            return [source.measure(num_units, destination) for num_units in move.num_units]
        finally:
            source.close()


class Source:
    def __init__(self, move: Move, door: DoorAt) -> None:
        self._plan = plan_transfer(move.layout, move.layout, 0, 0)
        self._pages = move.pages(seed=1)
        self._ended = threading.Event()
        shape = (move.num_pages, move.layout.page_bytes)
        self._pool = torch.empty(shape, dtype=torch.uint8, device=move.device).random_()
        self._target = torch.empty_like(self._pool.view(-1))
        self._transport = self._transport_to(move, door)
        self._transfer = OutgoingTransfer(
            id=TRANSFER,
            epoch=EPOCH,
            plan=self._plan,
            source_pages=self._pages,
            destination_pages=move.pages(seed=2),
            destination_generations=(1,) * len(self._pages),
        )
        self._transport.open()

    def measure(self, num_units: int, destination: "DestinationProcess") -> Moved:
        piece = Piece(self._transfer, 0, num_units)
        self._push(piece)
        if destination.digest(num_units) != digest_of(self._pool, self._pages[:num_units]):
            raise TransferFailed(f"{num_units} pages arrived with other bytes")
        content = self._pool.view(-1)[: piece.num_bytes]
        copy = partial(self._target[: piece.num_bytes].copy_, content)
        copy()
        times = [(self._push(piece), wall_seconds(copy, content.device)) for _ in range(NUM_ROUNDS)]
        return Moved(
            num_units=num_units,
            num_bytes=piece.num_bytes,
            seconds=median(seconds for seconds, _ in times),
            copy_s=median(copy_s for _, copy_s in times),
        )

    def close(self) -> None:
        self._transport.close()

    def _transport_to(self, move: Move, door: DoorAt) -> Transport:
        pool = self._pool
        if move.way == "cuda_ipc":
            return CudaIpcTransport(door.address, KEY, pool, WRITER, on_end=self._note_end)
        if move.way == "shm":
            return ShmTransport(door.address, KEY, PageMemory.of(pool), WRITER, on_end=self._note_end)
        knock = Knock(name=move.way, layout=move.layout, rank=0, payload_bytes=payload_bytes(self._plan))
        meet = partial(ask_for_meeting, (SETTINGS.host, door.port), KEY, knock, SETTINGS.connect_s)
        return GroupTransport(move.way, meet, pool, self._plan, settings=SETTINGS, on_end=self._note_end)

    def _note_end(self, ticket: int) -> None:
        self._ended.set()

    def _push(self, piece: Piece) -> float:
        """Seconds until the destination has it."""
        self._ended.clear()
        started_s = perf_counter()
        ticket = self._transport.push(piece)
        if not self._ended.wait(TIMEOUT_S):
            raise TransferFailed(f"{piece.num_bytes} bytes did not arrive within {TIMEOUT_S:g} s")
        seconds = perf_counter() - started_s
        progress = self._transport.poll(ticket)
        self._transport.forget(ticket)
        if progress.status is not TransferStatus.DONE:
            raise TransferFailed(progress.reason)
        return seconds


class DestinationProcess:
    def __init__(self, move: Move) -> None:
        command = _command("destination", move)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.door = msgspec.json.decode(self._read_line(), type=DoorAt)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # nothing in it is worth a farewell
        self._process.communicate()

    def digest(self, num_units: int) -> str:
        """Of what it has of that many units."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_units}\n".encode())
        self._process.stdin.flush()
        return self._read_line().decode().strip()

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TransferFailed("the destination's process has ended")
        return line


class Destination:
    def __init__(self, move: Move) -> None:
        self.pages = move.pages(seed=2)
        self._landings = Landings(move.num_pages)
        self._landings.add(
            Landing(
                id=TRANSFER,
                epoch=EPOCH,
                plan=plan_transfer(move.layout, move.layout, 0, 0),
                num_units=len(self.pages),
                pages=self.pages,
                writer=WRITER,
                may_write_directly=move.way in ("cuda_ipc", "shm"),
            )
        )
        shape = (move.num_pages, move.layout.page_bytes)
        if move.way == "shm":
            shared = SharedPool()
            self.pool = shared.zeros(shape, torch.uint8)
            shared.generations.grant(self.pages, (1,) * len(self.pages))
            self.door = DoorAt(address=ShmDoor(shared, self._landings, KEY, _ignore).address)
            return
        self.pool = torch.zeros(shape, dtype=torch.uint8, device=move.device)
        if move.way == "cuda_ipc":
            device_pool = SharedDevicePool(self.pool)
            device_pool.generations.grant(self.pages, (1,) * len(self.pages))
            self.door = DoorAt(address=CudaIpcDoor(device_pool, self._landings, KEY, _ignore).address)
            return
        receiver = GroupReceiver(move.way, self._landings, self.pool, settings=SETTINGS)
        self.door = DoorAt(port=GroupDoor(receiver, move.layout, 0, KEY).address[1])


def serve_destination(move: Move) -> None:
    """Until its input ends: a number of units, a line with their digest."""
    destination = Destination(move)
    _print(msgspec.json.encode(destination.door).decode())
    for line in sys.stdin:
        _print(digest_of(destination.pool, destination.pages[: int(line)]))


def digest_of(pool: Tensor, pages: Sequence[int]) -> str:
    content = pool[list(pages)].cpu().contiguous()
    return hashlib.blake2b(content.numpy().data, digest_size=16).hexdigest()


def _command(role: str, move: Move) -> list[str]:
    return [sys.executable, "-m", "baton.bench.gpu_kv_ends", role, msgspec.json.encode(move).decode()]


def _ignore(transfers: list[bytes]) -> None:
    """A source that dies has nothing open that anybody waits for."""


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    role, text = sys.argv[1:]
    move = msgspec.json.decode(text, type=Move)
    if role == "source":
        _print(msgspec.json.encode(run_source(move)).decode())
    else:
        serve_destination(move)


if __name__ == "__main__":
    main()
