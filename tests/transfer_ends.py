"""The two ends of transfers without an endpoint: each lives in a test's process, or as a `Remote`."""

import hashlib
import importlib.util
import math
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor

from baton.clock import Clock, SystemClock
from baton.errors import TransferFailed, how_to_install
from baton.kernels.kv_rows import decode_rows, encode_rows
from baton.kernels.pages import Offsets
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import Pages, TransferPlan, plan_transfer
from baton.kvtransfer.transports.base import (
    AUTO,
    LocalRank,
    Piece,
    PieceOutcome,
    RankSettings,
    Sender,
    TransportListener,
)
from baton.kvtransfer.transports.pages import PagePacking, SharedPool
from baton.kvtransfer.transports.rank_pair import (
    GlooChannel,
    PairGroup,
    PairStore,
    Work,
    join_gloo,
    staging,
)
from baton.kvtransfer.transports.receive_registration import ReceiveRegistration
from baton.kvtransfer.transports.registry import TRANSPORTS
from baton.kvtransfer.transports.tcp import TcpReceiver, TcpSender, TcpSettings
from baton.kvtransfer.transports.torch_distributed import (
    GlooTransport,
    GroupSender,
    GroupSettings,
    GroupTransport,
)
from baton.messages.bounds import Kind
from baton.pages import PageLayout
from baton.rpc.auth import PAGES, KeyRing, LinkKeys
from baton.rpc.connection import DroppedPeers
from tests.layouts import a_layout

KEY: Final = b"the key of the tests' cluster"
RING: Final = KeyRing.of(KEY, Kind.WORKER)
PAGE_KEYS: Final = LinkKeys(RING, PAGES)
PACKAGES: Final = {"nixl": "nixl", "mooncake": "mooncake"}  # transport -> the Python package that it needs
TCP: Final = TcpSettings(connect_s=5.0, stall_s=2.0, part_s=20.0)
GROUP: Final = GroupSettings(connect_s=10.0, stall_s=2.0)
DEADLINE_S: Final = 20.0
WRITER: Final = b"source incarnati"
LAYOUT: Final = a_layout(num_kv_heads=4, head_dim=32, dtype="bfloat16")


def is_installed(name: str) -> bool:
    """Return True when the transport's library is installed; Baton's own transports need none."""
    return name not in PACKAGES or importlib.util.find_spec(PACKAGES[name]) is not None


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test where the library of the transport is missing."""
    reason = f"{name} is not installed: {how_to_install(name)}"
    return pytest.mark.skipif(not is_installed(name), reason=reason)


# Parameters of tests: the transports whose libraries may be missing.
OPTIONAL: Final = [pytest.param(name, marks=needs(name)) for name in PACKAGES]


class PlannedTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer as both ends know it."""

    id: str
    source: PageLayout
    destination: PageLayout
    num_units: int
    source_pages: tuple[int, ...]
    pages: tuple[int, ...]
    epoch: int = 1
    generation: int = 1
    source_rank: int = 0
    rank: int = 0

    @property
    def plan(self) -> TransferPlan:
        return plan_transfer(self.source, self.destination, self.source_rank, self.rank)

    def piece(self, first: int, stop: int, *, is_bulk: bool = False) -> Piece:
        return Piece(
            transfer=bytes.fromhex(self.id),
            epoch=self.epoch,
            plan=self.plan,
            source_pages=self.source_pages,
            destination_pages=self.pages,
            destination_generations=(self.generation,) * len(self.pages),
            first=first,
            stop=stop,
            is_bulk=is_bulk,
        )


def local_rank(
    pages: Tensor,
    *,
    layout: PageLayout = LAYOUT,
    rank: int = 0,
    keys: KeyRing = RING,
    shared: SharedPool | None = None,
    on_writer_death: Callable[[list[bytes]], None] = lambda registrations: None,
    clock: Clock | None = None,
) -> LocalRank:
    """Return a rank of this process with these pages; its layout matters to gloo and NCCL alone."""
    settings = RankSettings(
        keys=keys.generations,
        layout=layout,
        rank=rank,
        host="127.0.0.1",
        transport=AUTO,
    )
    return LocalRank(
        pages,
        settings,
        WRITER,
        shared=shared,
        on_writer_death=on_writer_death,
        clock=clock or SystemClock(),
        dropped=DroppedPeers(),
    )


def piece_of(
    plan: TransferPlan,
    source_pages: tuple[int, ...],
    pages: tuple[int, ...] | None = None,
    *,
    first: int = 0,
    transfer: bytes = b"a" * 16,
    is_bulk: bool = False,
) -> Piece:
    """Return the last units of a transfer with a unit a page. pages: the destination's, if not the same."""
    pages = source_pages if pages is None else pages
    return Piece(
        transfer=transfer,
        epoch=1,
        plan=plan,
        source_pages=source_pages,
        destination_pages=pages,
        destination_generations=(1,) * len(pages),
        first=first,
        stop=len(pages),
        is_bulk=is_bulk,
    )


def registration_of(piece: Piece) -> ReceiveRegistration:
    """Return the piece's transfer as its destination grants it, with a unit a page."""
    return ReceiveRegistration(
        id=piece.transfer,
        epoch=piece.epoch,
        plan=piece.plan,
        num_units=len(piece.destination_pages),
        pages=piece.destination_pages,
        writer=WRITER,
    )


class Push:
    """A piece that was pushed, and its outcome once it has ended."""

    def __init__(self, sender: Sender, piece: Piece) -> None:
        self._outcome: Future[PieceOutcome] = Future()
        sender.push(piece, self._outcome.set_result)

    @property
    def has_ended(self) -> bool:
        return self._outcome.done()

    def outcome(self, timeout_s: float = DEADLINE_S) -> PieceOutcome:
        return self._outcome.result(None if timeout_s == math.inf else timeout_s)


class ObservedGroup(PairGroup):
    """A gloo group that reports every message before it is sent."""

    def __init__(self, group: PairGroup, on_send: Callable[[int], None]) -> None:
        self._group = group
        self._on_send = on_send  # called with the tag

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Work:
        self._on_send(tag)
        return self._group.send(tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Work:
        return self._group.recv(tensors, srcRank, tag)

    def abort(self) -> None:
        self._group.abort()


class ObservedGloo(GlooTransport):
    """Gloo whose messages are counted. `on_send` is called with the sending rank, the tag and the count."""

    def __init__(self) -> None:
        self.num_sent: Counter[tuple[int, int]] = Counter()  # (rank, tag)
        self.on_send: Callable[[int, int, int], None] = lambda rank, tag, number: None

    def join(
        self, store: PairStore, rank: int, host: str, packing: PagePacking, num_bytes: int, timeout_s: float
    ) -> GlooChannel:
        def note(tag: int) -> None:
            self.num_sent[rank, tag] += 1
            self.on_send(rank, tag, self.num_sent[rank, tag])

        group = ObservedGroup(join_gloo(store, rank, host, timeout_s), note)
        return GlooChannel(group, 1 - rank, staging(num_bytes))


class Destination:
    """A rank that listens with every transport that its pool allows."""

    def __init__(
        self, layout: PageLayout, num_pages: int, rank: int = 0, key: str = KEY.hex(), device: str = "cpu"
    ) -> None:
        torch.set_num_threads(1)
        self.pool = SharedPool()
        shape = (num_pages, layout.page_bytes)
        if device == "cpu":
            self.pages = self.pool.zeros(shape, torch.uint8)
        else:
            self.pages = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.orphans: list[str] = []
        self.safe: list[str] = []
        self.rank = local_rank(
            self.pages,
            layout=layout,
            rank=rank,
            keys=KeyRing.of(bytes.fromhex(key), Kind.WORKER),
            shared=self.pool if device == "cpu" else None,
            on_writer_death=self._note_orphans,
        )
        self.registrations = self.rank.registrations
        self.receiver = TcpReceiver(self.rank, settings=TCP)
        self._listeners: dict[str, TransportListener] = {"tcp": self.receiver}
        for name, transport in TRANSPORTS.items():
            if name == "tcp" or not is_installed(name):
                continue
            if (listener := transport.listen(self.rank)) is not None:
                self._listeners[name] = listener

    def renew(self, layout: PageLayout, num_pages: int, rank: int, device: str) -> None:
        """Close everything, and begin again with another pool."""
        self.close()
        self.__init__(layout, num_pages, rank, device=device)  # type: ignore[misc]

    def _note_orphans(self, transfers: list[bytes]) -> None:
        self.orphans += [transfer.hex() for transfer in transfers]

    def addresses(self) -> dict[str, str]:
        return {name: listener.address for name, listener in self._listeners.items()}

    def grant(self, grant: dict[str, Any]) -> None:
        granted = msgspec.convert(grant, PlannedTransfer)
        assert self.rank.generations is not None
        self.rank.generations.grant(granted.pages, [granted.generation] * len(granted.pages))
        self.registrations.add(
            ReceiveRegistration(
                id=bytes.fromhex(granted.id),
                epoch=granted.epoch,
                plan=granted.plan,
                num_units=granted.num_units,
                pages=granted.pages,
                writer=WRITER,
                may_write_directly=True,
            )
        )

    def end(self, grant: dict[str, Any]) -> None:
        """Take the pages back, as after an abort. `safe` lists the transfer once nothing writes them."""
        ended = msgspec.convert(grant, PlannedTransfer)
        assert self.rank.generations is not None
        self.rank.generations.revoke(ended.pages)
        self.registrations.close(bytes.fromhex(ended.id), lambda: self.safe.append(ended.id))

    def release(self, transfer: str) -> None:
        self.registrations.release(bytes.fromhex(transfer))

    def is_safe(self, transfer: str) -> bool:
        return transfer in self.safe

    def digest(self) -> str:
        return digest(self.pages.cpu())

    def num_streams(self) -> int:
        """Return the number of streams and strangers that the tcp receiver serves now."""
        return sum(thread.name == "tcp-answer" for thread in threading.enumerate())

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        self.rank.close()
        self.pool.close()


class Source:
    """A rank with random pages, and its sender to one destination."""

    def __init__(
        self, layout: PageLayout, num_pages: int, rank: int = 0, key: str = KEY.hex(), device: str = "cpu"
    ) -> None:
        torch.set_num_threads(1)
        self.pages = source_pages(layout.page_bytes, num_pages).to(device)
        self.rank = local_rank(
            self.pages, layout=layout, rank=rank, keys=KeyRing.of(bytes.fromhex(key), Kind.WORKER)
        )
        self.sender: Sender
        self._pushes: list[Push] = []

    def open(self, name: str, addresses: dict[str, str], layout: PageLayout, rank: int = 0) -> None:
        """Open the sender of a transport. layout, rank: the destination's."""
        peer = peer_rank(name, addresses[name], layout, rank)
        transport = TRANSPORTS[name]
        if name == "tcp":
            self.sender = TcpSender(self.rank, ("127.0.0.1", int(addresses[name])), TCP)
        elif isinstance(transport, GroupTransport):
            self.sender = GroupSender(transport, self.rank, peer, GROUP)
        else:
            self.sender = transport.connect(self.rank, peer)
        try:
            self.sender.open()
        except TransferFailed:
            self.sender.close()
            raise

    def push(self, grant: dict[str, Any], first: int, stop: int) -> int:
        """Push units; return the number of the push, for `has_ended` and `outcome`."""
        piece = msgspec.convert(grant, PlannedTransfer).piece(first, stop)
        self._pushes.append(Push(self.sender, piece))
        return len(self._pushes) - 1

    def has_ended(self, number: int) -> bool:
        return self._pushes[number].has_ended

    def is_done(self, number: int) -> bool:
        return self._pushes[number].outcome().is_done

    def outcome(self, number: int) -> PieceOutcome:
        return self._pushes[number].outcome()

    def keep_pushing(self, grant: dict[str, Any], num_units: int) -> None:
        """Push the whole transfer again and again: whenever this process is stopped, it is writing."""
        piece = msgspec.convert(grant, PlannedTransfer).piece(0, num_units)

        def push() -> None:
            while Push(self.sender, piece).outcome(math.inf).is_done:
                continue

        threading.Thread(target=push, daemon=True).start()

    def abort(self, transfer: str) -> None:
        self.sender.abort(bytes.fromhex(transfer))

    def close(self) -> None:
        self.sender.close()


def peer_rank(name: str, address: str, layout: PageLayout, rank: int = 0) -> PeerRank:
    """Return a destination on this host that listens with one transport."""
    listeners = RankListenerAddresses(
        incarnation=b"d" * 16, host="here", device="cpu", addresses={name: address}
    )
    return PeerRank(host="127.0.0.1", layout=layout, rank=rank, listeners=listeners)


def source_pages(page_bytes: int, num_pages: int) -> Tensor:
    """Return pages that are the same in every process, and finite numbers in every dtype."""
    generator = torch.Generator().manual_seed(num_pages)
    content = torch.randint(0, 256, (num_pages, page_bytes), dtype=torch.uint8, generator=generator)
    return content & 0xBF


def grant_of(
    source: PageLayout, destination: PageLayout, num_units: int, pool_pages: int, seed: int = 0, **rest: Any
) -> PlannedTransfer:
    """Return a transfer between scattered pages of two pools."""
    plan = plan_transfer(source, destination, rest.get("source_rank", 0), rest.get("rank", 0))
    choose = random.Random(seed)
    return PlannedTransfer(
        id=choose.randbytes(16).hex(),
        source=source,
        destination=destination,
        num_units=num_units,
        source_pages=tuple(choose.sample(range(pool_pages), plan.source.num_pages(num_units))),
        pages=tuple(choose.sample(range(pool_pages), plan.destination.num_pages(num_units))),
        **rest,
    )


class Runs(NamedTuple):
    """The byte runs of one piece: run n copies `run_bytes` bytes between the two offsets of index n."""

    source_offset_N: Offsets
    destination_offset_N: Offsets
    run_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.source_offset_N) * self.run_bytes


def runs_of(plan: TransferPlan, first: int, stop: int, source_pages: Pages, destination_pages: Pages) -> Runs:
    """Return the runs of units [first, stop) of a transfer between these pages."""
    return Runs(
        plan.source.offsets(first, stop, source_pages),
        plan.destination.offsets(first, stop, destination_pages),
        plan.run_bytes,
    )


def write(grant: PlannedTransfer, source: Tensor, destination: Tensor, first: int, stop: int) -> None:
    """Write what a transfer of units [first, stop) must write, run by run."""
    runs = runs_of(grant.plan, first, stop, grant.source_pages, grant.pages)
    flat, target = source.view(-1), destination.view(-1)
    for begin, end in zip(runs.source_offset_N.tolist(), runs.destination_offset_N.tolist(), strict=True):
        target[end : end + runs.run_bytes] = as_received(grant.plan, flat[begin : begin + runs.run_bytes])


def as_received(plan: TransferPlan, rows: Tensor) -> Tensor:
    """Return the bytes that arrive in the place of these bytes of whole rows."""
    if plan.sent_codes is None:
        return rows
    head_dim, dtype, codes = plan.sent_codes
    coded = encode_rows(rows.clone().view(dtype).view(-1, head_dim), codes).view(codes)
    return decode_rows(coded, dtype).view(-1).view(torch.uint8)


def digest(pages: Tensor) -> str:
    return hashlib.blake2b(pages.numpy().data, digest_size=16).hexdigest()


def open_files() -> list[str]:
    """Return the files behind this process's descriptors, except the descriptor that lists them."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue
    return sorted(name.split("[")[0] for name in found)
