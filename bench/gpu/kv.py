"""KV pages on a GPU: packed and unpacked beside a copy of the same bytes, and moved between two processes.

Without CUDA each kind has a stand-in with the same code around it, as the notes say: the CPU's own gather and
scatter, shm for cuda_ipc, gloo for NCCL.

Two processes move pages over one transport without an endpoint:

1. The suite starts a source, the source a destination. Both know the move, so both know all pages.
2. The destination grants its pages to one registration for all pieces, and tells its listener's address.
3. The source pushes each size once, and compares the destination's bytes with its own.
4. The source times pushes of each size in rounds that alternate with copies within its own memory.
"""

import hashlib
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from statistics import median
from time import perf_counter
from typing import Final, Literal, Self

import msgspec
import torch
from torch import Tensor

from baton.bench.gpu.session import Session, require_equal
from baton.bench.machine import Call, seconds_per_call, synchronize, wall_seconds
from baton.bench.processes import Child
from baton.bench.report import Row, format_number
from baton.errors import TransferFailed
from baton.kernels.pages import copy_pages
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import Offsets, TransferPlan, plan_transfer
from baton.kvtransfer.transports.base import LocalRank, Transport
from baton.kvtransfer.transports.pages import DevicePages, PagePacking, SharedPool, packing_of
from baton.kvtransfer.transports.receive_registration import ReceiveRegistration
from baton.kvtransfer.transports.registry import TRANSPORTS
from baton.kvtransfer.transports.transfer_queue import OutgoingTransfer, Piece, PieceOutcome
from baton.pages import PageLayout

Way = Literal["cuda_ipc", "nccl", "shm", "gloo"]
KEY: Final = b"a key for this bench alone"
TRANSFER: Final = b"the one transfer"  # 16 bytes each
WRITER: Final = b"the one source.."
EPOCH: Final = 1
PAGE_SIZE: Final = 16
LEAST_NCCL: Final = (2, 30)  # the first with NCCL_MULTI_RANK_GPU_ENABLE
BAR_PERCENT: Final = 85.0
NUM_ROUNDS: Final = 9
TIMEOUT_S: Final = 120.0
HOST: Final = "127.0.0.1"
NCCL_SHARES_A_GPU: Final = "NCCL_MULTI_RANK_GPU_ENABLE=1"


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces of `num_units` pages each, and the transport that moves them to a pool of the same layout."""

    way: Way
    layout: PageLayout
    num_pages: int  # of either pool
    num_units: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.way in ("cuda_ipc", "nccl") else "cpu")

    @property
    def transport(self) -> Transport:
        """Return the registry's entry."""
        return TRANSPORTS[self.way]

    def rank(self, pool: Tensor, shared: SharedPool | None = None) -> LocalRank:
        """Return either end, with this pool."""
        return LocalRank(
            pool, layout=self.layout, rank=0, host=HOST, key=KEY, incarnation=WRITER, shared=shared
        )

    def peer(self, address: str) -> PeerRank:
        """Return the destination, as its source reaches it."""
        listeners = RankListenerAddresses(
            incarnation=WRITER, host=HOST, device="cpu", addresses={self.way: address}
        )
        return PeerRank(host=HOST, layout=self.layout, rank=0, listeners=listeners)

    def pages(self, seed: int) -> tuple[int, ...]:
        return tuple(random.Random(seed).sample(range(self.num_pages), max(self.num_units)))


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one size: seconds from push to DONE, and of a copy of as many bytes in one process."""

    num_units: int
    num_bytes: int
    seconds: float
    copy_s: float


def measure(move: Move) -> list[Moved]:
    """Return one entry a size. RuntimeError has the last line of the two processes, then all their lines."""
    command = ["env", NCCL_SHARES_A_GPU, sys.executable, *_arguments("source", move)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = ended.stdout.strip().splitlines()
    if ended.returncode or not lines:
        complaints = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise RuntimeError("\n".join((f"{move.way}: {complaints[-1]}", *complaints)))
    return msgspec.json.decode(lines[-1], type=list[Moved])


def run_source(move: Move) -> list[Moved]:
    """Measure every size, in the process of the source."""
    with DestinationProcess(move) as destination:
        source = Source(move, destination.address)
        try:
            return [source.measure(num_units, destination) for num_units in move.num_units]
        finally:
            source.close()


class Source:
    """The source's pool and transport."""

    def __init__(self, move: Move, address: str) -> None:
        self._plan = plan_transfer(move.layout, move.layout, 0, 0)
        self._pages = move.pages(seed=1)
        shape = (move.num_pages, move.layout.page_bytes)
        self._pool = torch.empty(shape, dtype=torch.uint8, device=move.device).random_()
        self._target = torch.empty_like(self._pool.view(-1))
        self._sender = move.transport.connect(move.rank(self._pool), move.peer(address))
        self._transfer = OutgoingTransfer(
            id=TRANSFER,
            epoch=EPOCH,
            plan=self._plan,
            source_pages=self._pages,
            destination_pages=move.pages(seed=2),
            destination_generations=(1,) * len(self._pages),
        )
        self._sender.open()

    def measure(self, num_units: int, destination: "DestinationProcess") -> Moved:
        """Check and time one size."""
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
        """Close the transport."""
        self._sender.close()

    def _push(self, piece: Piece) -> float:
        """Return the seconds until the destination has the piece."""
        ended: Future[PieceOutcome] = Future()
        started_s = perf_counter()
        self._sender.push(piece, ended.set_result)
        try:
            outcome = ended.result(TIMEOUT_S)
        except TimeoutError:
            raise TransferFailed(f"{piece.num_bytes} bytes did not arrive within {TIMEOUT_S:g} s") from None
        seconds = perf_counter() - started_s
        if not outcome.is_done:
            raise TransferFailed(outcome.reason)
        return seconds


class DestinationProcess:
    """The process of the destination."""

    def __init__(self, move: Move) -> None:
        self._child = Child(*_arguments("destination", move))
        self.address = msgspec.json.decode(self._read(self._child.read()), type=str)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()

    def digest(self, num_units: int) -> str:
        """Return the digest of so many of the destination's units."""
        return self._read(self._child.ask(str(num_units)))

    def _read(self, line: str) -> str:
        if not line:
            raise TransferFailed("the destination's process has ended")
        return line


class Destination:
    """The destination's pool and listener."""

    def __init__(self, move: Move) -> None:
        self.pages = move.pages(seed=2)
        shape = (move.num_pages, move.layout.page_bytes)
        shared = SharedPool() if move.way == "shm" else None
        if shared is None:
            self.pool = torch.zeros(shape, dtype=torch.uint8, device=move.device)
        else:
            self.pool = shared.zeros(shape, torch.uint8)
        rank = move.rank(self.pool, shared)
        rank.registrations.add(
            ReceiveRegistration(
                id=TRANSFER,
                epoch=EPOCH,
                plan=plan_transfer(move.layout, move.layout, 0, 0),
                num_units=len(self.pages),
                pages=self.pages,
                writer=WRITER,
                may_write_directly=rank.generations is not None,
            )
        )
        if rank.generations is not None:
            rank.generations.grant(self.pages, (1,) * len(self.pages))
        listener = move.transport.listen(rank)
        if listener is None:
            raise TransferFailed(f"{move.way} cannot reach a pool on {move.device}")
        self.address = listener.address


def serve_destination(move: Move) -> None:
    """Answer each number of units on stdin with their digest."""
    destination = Destination(move)
    _print(msgspec.json.encode(destination.address).decode())
    for line in sys.stdin:
        _print(digest_of(destination.pool, destination.pages[: int(line)]))


def digest_of(pool: Tensor, pages: Sequence[int]) -> str:
    """Return the digest of these pages."""
    content = pool[list(pages)].cpu().contiguous()
    return hashlib.blake2b(content.numpy().data, digest_size=16).hexdigest()


def _arguments(role: str, move: Move) -> list[str]:
    return ["-m", "baton.bench.gpu.kv", role, msgspec.json.encode(move).decode()]


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def gather(session: Session) -> Iterator[Row]:
    """Pack scattered pages into staging, in percent of a copy of as many bytes."""
    pool = _pool(session)
    for peer in _peers(session):
        plan = plan_transfer(_layout(session, 1), peer, 0, 0)
        for num_units in session.sizes.kv_units:
            yield _packing_row(session, "gather", pool, plan, num_units)


def scatter(session: Session) -> Iterator[Row]:
    """Unpack staging into scattered pages."""
    pool = _pool(session)
    for peer in _peers(session):
        plan = plan_transfer(peer, _layout(session, 1), 0, 0)
        for num_units in session.sizes.kv_units:
            yield _packing_row(session, "scatter", pool, plan, num_units)


def cuda_ipc(session: Session) -> Iterator[Row]:
    """Measure from push to DONE between two processes, in percent of a contiguous copy within one."""
    way: Way = "cuda_ipc" if session.device.type == "cuda" else "shm"
    for moved in measure(_move(session, way)):
        percent = 100 * moved.copy_s / moved.seconds
        name = f"cuda_ipc, {_size(moved.num_bytes)}"
        note = f"{_gbps(moved.num_bytes, moved.seconds)}, copy {_gbps(moved.num_bytes, moved.copy_s)}"
        note += _stand_in(session, "shm between two processes")
        is_largest = (
            moved.num_units == session.sizes.kv_moved_units[-1]
        )  # small pushes cost most before they move
        yield session.bar(name, percent, "% of copy", BAR_PERCENT if is_largest else None, note)


def nccl(session: Session) -> Iterator[Row]:
    """Measure from push to DONE between two ranks on one GPU."""
    has_gpu = session.device.type == "cuda"
    if has_gpu:
        missing = _missing_nccl()
        if missing:
            yield Row("nccl, two ranks on one GPU", None, "", note=missing)
            return
    for moved in measure(_move(session, "nccl" if has_gpu else "gloo")):
        yield _pair_row(session, moved)


def _pair_row(session: Session, moved: Moved) -> Row:
    percent = format_number(100 * moved.copy_s / moved.seconds)
    note = f"{percent} % of a copy" + _stand_in(session, "gloo between two processes")
    gbps = moved.num_bytes / moved.seconds / 1e9
    return Row(f"nccl, two ranks on one GPU, {_size(moved.num_bytes)}", gbps, "GB/s", note=note)


def _missing_nccl() -> str:
    """Return why two ranks cannot share a GPU here; empty when they can."""
    if not torch.distributed.is_nccl_available():
        return "this build of torch has no NCCL"
    version = torch.cuda.nccl.version()
    if version[:2] < LEAST_NCCL:
        least = ".".join(map(str, LEAST_NCCL))
        return f"NCCL {'.'.join(map(str, version))}: two ranks on one GPU need {least}"
    return ""


def _packing_row(session: Session, verb: str, pool: Tensor, plan: TransferPlan, num_units: int) -> Row:
    packing, num_bytes = packing_of(pool), num_units * plan.unit_bytes
    side = plan.source if verb == "gather" else plan.destination
    pages = random.Random(num_units).sample(range(len(pool)), len(pool))
    # Every call has pages and staging of its own: data that fits into a cache is measured from the cache.
    offsets = [
        side.offsets(0, num_units, pages[first : first + num_units])
        for first in range(0, len(pages) - num_units + 1, num_units)
    ]
    staging = packing.staging(len(offsets) * num_bytes)
    parts = list(staging.split(num_bytes))
    _check(verb, packing, pool, plan, offsets[0], parts[0])
    calls = [
        _call(verb, packing, plan, offset_N, part) for offset_N, part in zip(offsets, parts, strict=True)
    ]
    contiguous = pool.view(-1)[: len(staging)].split(num_bytes)
    copies: list[Call] = [partial(part.copy_, source) for part, source in zip(parts, contiguous, strict=True)]
    seconds, copy_s = (seconds_per_call(each, session.device) for each in (calls, copies))
    note = f"{_gbps(2 * num_bytes, seconds)} read and written, copy {_gbps(2 * num_bytes, copy_s)}"
    note += _stand_in(session, "the CPU's own " + verb)
    name = f"kv {verb}, {_size(num_bytes)} in runs of {_size(plan.run_bytes)}"
    return session.bar(name, 100 * copy_s / seconds, "% of copy", BAR_PERCENT, note)


def _call(verb: str, packing: PagePacking, plan: TransferPlan, offset_N: Offsets, part: Tensor) -> Call:
    """Return the call; on a GPU the kernel alone, as a graph cannot hold the copy of its row numbers."""
    if not isinstance(packing, DevicePages):
        return partial(packing.pack if verb == "gather" else packing.unpack, plan, offset_N, part)
    rows = packing.rows(plan, offset_N)
    content, staging = packing.content.view(-1, plan.row_bytes), part.view(-1, plan.row_bytes)
    if verb == "gather":
        return partial(copy_pages, content, rows, staging, None)
    return partial(copy_pages, staging, None, content, rows)


def _check(
    verb: str, packing: PagePacking, pool: Tensor, plan: TransferPlan, offset_N: Offsets, part: Tensor
) -> None:
    """Compare the packing of transports with plain indexing by runs."""
    if verb == "gather":
        packing.note_written()
        packing.pack(plan, offset_N, part)
    else:
        part.random_()
        synchronize(pool.device)
        packing.unpack(plan, offset_N, part)
    packing.finish()
    runs = torch.from_numpy(offset_N // plan.run_bytes).to(pool.device)
    expected = pool.view(-1, plan.run_bytes)[runs].view(-1)
    require_equal(f"{verb} of pages", part, expected)


def _pool(session: Session) -> Tensor:
    layout = _layout(session, 1)
    pool = torch.empty(
        session.sizes.num_kv_pages, layout.page_bytes, dtype=torch.uint8, device=session.device
    )
    return pool.random_()


def _peers(session: Session) -> tuple[PageLayout, PageLayout]:
    """Return the layout of a rank with equal pages, and of a rank with half of the heads: many short runs."""
    return _layout(session, 1), _layout(session, 2)


def _layout(session: Session, tp_size: int) -> PageLayout:
    model = session.sizes.model
    return PageLayout(
        tp_size=tp_size,
        page_size=PAGE_SIZE,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype="bfloat16",
    )


def _move(session: Session, way: Way) -> Move:
    return Move(
        way=way,
        layout=_layout(session, 1),
        num_pages=max(session.sizes.num_kv_pages, *session.sizes.kv_moved_units),
        num_units=session.sizes.kv_moved_units,
    )


def _stand_in(session: Session, what: str) -> str:
    return "" if session.device.type == "cuda" else f"; {what} stands in"


def _size(num_bytes: int) -> str:
    large = num_bytes >= 2**20
    return f"{format_number(num_bytes / (2**20 if large else 1024))} {'MiB' if large else 'KiB'}"


def _gbps(num_bytes: int, seconds: float) -> str:
    return f"{format_number(num_bytes / seconds / 1e9)} GB/s"


def main() -> None:
    """Run the role that the arguments name."""
    role, text = sys.argv[1:]
    move = msgspec.json.decode(text, type=Move)
    if role == "source":
        _print(msgspec.json.encode(run_source(move)).decode())
    else:
        serve_destination(move)


if __name__ == "__main__":
    main()
