"""The two ends of transfers, whole and small: each can live in a test's process, or as a `Remote`."""

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from baton.errors import TransferFailed
from baton.kvtransfer.protocol.transfer_plan import TransferPlan, plan_transfer
from baton.kvtransfer.ranks.pages import PageMemory, SharedPool
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistration, ReceiveRegistrations
from baton.kvtransfer.transports.base import (
    OutgoingTransfer,
    Piece,
    TransferProgress,
    TransferStatus,
    Transport,
)
from baton.kvtransfer.transports.shm import ShmListener, ShmTransport
from baton.kvtransfer.transports.tcp import TcpSettings, TcpTransport
from baton.kvtransfer.transports.tcp_receiver import TcpReceiver
from baton.pages import PageLayout

KEY: Final = b"the key of the tests' cluster"
SETTINGS: Final = TcpSettings(connect_s=5.0, stall_s=2.0, part_s=20.0)
DEADLINE_S: Final = 20.0
WRITER: Final = b"source incarnati"


class Grant(msgspec.Struct, frozen=True, kw_only=True):
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
    direct: bool = False

    @property
    def plan(self) -> TransferPlan:
        return plan_transfer(self.source, self.destination, self.source_rank, self.rank)

    def outgoing(self) -> OutgoingTransfer:
        return OutgoingTransfer(
            id=bytes.fromhex(self.id),
            epoch=self.epoch,
            plan=self.plan,
            source_pages=self.source_pages,
            destination_pages=self.pages,
            destination_generations=(self.generation,) * len(self.pages),
        )


class Destination:
    def __init__(self, page_bytes: int, num_pages: int, key: str = KEY.hex()) -> None:
        self.pool = SharedPool()
        self.pages = self.pool.zeros((num_pages, page_bytes), torch.uint8)
        self.registrations = ReceiveRegistrations(num_pages)
        self.receiver = TcpReceiver(
            self.registrations, self.pool.memory, bytes.fromhex(key), settings=SETTINGS
        )
        self.orphans: list[str] = []
        self.safe: list[str] = []
        self._door = ShmListener(self.pool, self.registrations, bytes.fromhex(key), self._mourn)

    def renew(self, page_bytes: int, num_pages: int) -> None:
        """Another pool, and nothing of the one before."""
        self.close()
        self.__init__(page_bytes, num_pages)  # type: ignore[misc]

    def _mourn(self, transfers: list[bytes]) -> None:
        self.orphans += [transfer.hex() for transfer in transfers]

    def addresses(self) -> dict[str, Any]:
        return {"tcp": list(self.receiver.address), "shm": self._door.address}

    def grant(self, grant: dict[str, Any]) -> None:
        granted = msgspec.convert(grant, Grant)
        self.pool.generations.grant(granted.pages, [granted.generation] * len(granted.pages))
        self.registrations.add(
            ReceiveRegistration(
                id=bytes.fromhex(granted.id),
                epoch=granted.epoch,
                plan=granted.plan,
                num_units=granted.num_units,
                pages=granted.pages,
                writer=WRITER,
                may_write_directly=granted.direct,
            )
        )

    def end(self, grant: dict[str, Any]) -> None:
        """As after an abort: its pages are taken back, and listed in `safe` when nobody writes."""
        ended = msgspec.convert(grant, Grant)
        self.pool.generations.revoke(ended.pages)
        self.registrations.close(bytes.fromhex(ended.id), lambda: self.safe.append(ended.id))

    def release(self, transfer: str) -> None:
        self.registrations.release(bytes.fromhex(transfer))

    def is_safe(self, transfer: str) -> bool:
        return transfer in self.safe

    def digest(self) -> str:
        return digest(self.pages)

    def state(self) -> dict[str, Any]:
        counters = self.registrations.counters
        return {
            "stale": counters.num_stale,
            "broken": counters.num_broken,
            "open": self.registrations.num_open(),
            "streams": self.receiver.num_streams(),
            "dropped": dict(self.receiver.dropped.counts()),
            "orphans": self.orphans,
        }

    def close(self) -> None:
        self.receiver.close()
        self._door.close()
        self.pool.close()


class Source:
    def __init__(self, page_bytes: int, num_pages: int, key: str = KEY.hex()) -> None:
        self.pages = source_pages(page_bytes, num_pages)
        self._key = bytes.fromhex(key)
        self.transport: Transport

    def open(self, name: str, addresses: dict[str, Any]) -> None:
        memory = PageMemory.of(self.pages)
        if name == "tcp":
            host, port = addresses["tcp"]
            self.transport = TcpTransport((host, port), self._key, memory, settings=SETTINGS)
        else:
            self.transport = ShmTransport(addresses["shm"], self._key, memory, WRITER)
        try:
            self.transport.open()
        except TransferFailed:
            self.transport.close()
            raise

    def push(self, grant: dict[str, Any], first: int, stop: int) -> int:
        return self.transport.push(Piece(msgspec.convert(grant, Grant).outgoing(), first, stop))

    def keep_pushing(self, grant: dict[str, Any], num_units: int) -> None:
        """Push the whole transfer again and again: whenever this process is stopped, it is writing."""
        outgoing = msgspec.convert(grant, Grant).outgoing()

        def push() -> None:
            status = TransferStatus.DONE
            while status == TransferStatus.DONE:
                handle = self.transport.push(Piece(outgoing, 0, num_units))
                while not (status := self.transport.poll(handle).status).is_final:
                    time.sleep(0.0001)
                self.transport.forget(handle)

        threading.Thread(target=push, daemon=True).start()

    def status(self, handle: int) -> int:
        return int(self.transport.poll(handle).status)

    def abort(self, transfer: str) -> None:
        self.transport.abort(bytes.fromhex(transfer))

    def close(self) -> None:
        self.transport.close()


def source_pages(page_bytes: int, num_pages: int) -> Tensor:
    """The same in every process."""
    generator = torch.Generator().manual_seed(num_pages)
    return torch.randint(0, 256, (num_pages, page_bytes), dtype=torch.uint8, generator=generator)


def grant_of(
    source: PageLayout, destination: PageLayout, num_units: int, pool_pages: int, seed: int = 0, **rest: Any
) -> Grant:
    """A transfer between scattered pages of two pools."""
    plan = plan_transfer(source, destination, rest.get("source_rank", 0), rest.get("rank", 0))
    choose = random.Random(seed)
    return Grant(
        id=choose.randbytes(16).hex(),
        source=source,
        destination=destination,
        num_units=num_units,
        source_pages=tuple(choose.sample(range(pool_pages), plan.source.num_pages(num_units))),
        pages=tuple(choose.sample(range(pool_pages), plan.destination.num_pages(num_units))),
        **rest,
    )


def write(grant: Grant, source: Tensor, destination: Tensor, first: int, stop: int) -> None:
    """What a transfer of units [first, stop) must do, run by run."""
    runs = grant.plan.runs(first, stop, grant.source_pages, grant.pages)
    flat, target = source.view(-1), destination.view(-1)
    for begin, end in zip(runs.source_offset_N.tolist(), runs.destination_offset_N.tolist(), strict=True):
        target[end : end + runs.run_bytes] = flat[begin : begin + runs.run_bytes]


def digest(pages: Tensor) -> str:
    return hashlib.blake2b(pages.numpy().data, digest_size=16).hexdigest()


def wait_for(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> float:
    """Seconds until the condition held."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > timeout_s:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.002)
    return time.monotonic() - started_s


def outcome(transport: Transport, handle: int) -> TransferProgress:
    wait_for(lambda: transport.poll(handle).status.is_final)
    return transport.poll(handle)


def open_files() -> list[str]:
    """What this process's descriptors are, but for the one that looks."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue
    return sorted(name.split("[")[0] for name in found)
