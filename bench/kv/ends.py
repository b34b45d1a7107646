"""The two ends of a KV transfer: whole endpoints with real page pools, the destination in its own process.

Pages are scattered: the free lists are shuffled before anything moves. Both ends take the digests of all
pages, so a page that arrives with other bytes fails the transfer. Both pools are in host memory or on a GPU.
"""

import random
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Final, Self, TypeVar

import msgspec
import torch
from torch import Tensor

from baton.bench.processes import Child
from baton.engine.cache.page_pool import PagePool
from baton.kernels.native import TORCH_DTYPES, huge_zeros
from baton.kvtransfer.endpoint import EndpointSettings, KvEndpoint
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.handoff import GrantedTransfer, HandoffOutcome, TransferEnded, TransferTimes
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.transports.base import AUTO
from baton.kvtransfer.transports.pages import SharedPool
from baton.messages.bounds import Kind
from baton.pages import PageLayout
from baton.rpc.auth import KeyRing

KEYS: Final = KeyRing.of(b"a key for this bench alone", Kind.WORKER)
FINGERPRINT: Final = "bench"
DEADLINE_S: Final = 120.0
WAIT_S: Final = 0.05
TRANSPORTS: Final = ("shm", "tcp")
FoundT = TypeVar("FoundT")


def settings_of(layout: PageLayout, transport: str, *, has_digests: bool = True) -> EndpointSettings:
    """Return the settings of an endpoint; both ends have the same key and fingerprint."""
    return EndpointSettings(
        keys=KEYS,
        fingerprint=FINGERPRINT,
        layout=layout,
        transport=transport,
        has_digests=has_digests,
    )


def _pool_shape(layout: PageLayout, num_pages: int) -> tuple[int, ...]:
    heads = layout.heads_per_rank
    return (num_pages, layout.num_layers, layout.num_planes, heads, layout.page_size, layout.row_elements)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return huge_zeros(shape, dtype) if device == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def _scattered_ledger(layout: PageLayout, num_pages: int, seed: int) -> PagePool:
    """Return a pool with all pages free, in random order."""
    ledger = PagePool(num_pages, layout.page_size)
    pages = ledger.allocate(num_pages, "shuffle")
    random.Random(seed).shuffle(pages)
    ledger.release(pages, "shuffle")
    return ledger


class SourceEnd:
    """The end in the suite's own process."""

    def __init__(self, settings: EndpointSettings, pool: Tensor, ledger: PagePool) -> None:
        """Open an endpoint for the pool. pool, ledger: of an engine, or made by `random`."""
        self.layout, self.pool, self.ledger = settings.layout, pool, ledger
        self.endpoint = KvEndpoint(settings, pool, ledger)

    @classmethod
    def random(
        cls, settings: EndpointSettings, num_pages: int, pool: Tensor | None = None, device: str = "cpu"
    ) -> Self:
        """Return an end with scattered pages of random bytes. pool: another end's, to save memory."""
        layout = settings.layout
        if pool is None:
            pool = _zeros(_pool_shape(layout, num_pages), TORCH_DTYPES[layout.element_type], device)
            pool.view(torch.int16).random_(0, 2**15)
        return cls(settings, pool, _scattered_ledger(layout, num_pages, seed=0))

    def send(self, destination: "DestinationProcess", num_tokens: int) -> TransferTimes:
        """Hand over the pages of so many tokens at once; RuntimeError when that fails."""
        num_units = plan_transfer(self.layout, destination.layout, 0, 0).num_units(num_tokens)
        pages = self.ledger.allocate(self.layout.num_pages(num_tokens), "prompt")
        transfer = destination.grant(self.endpoint, num_units).transfer
        self.endpoint.offer(transfer, pages, num_units)
        ended = wait_for(self.endpoint, transfer)
        self.ledger.release(pages, "prompt")
        return times_of(ended)

    def send_together(self, destination: "DestinationProcess", num_tokens: int, number: int) -> list[float]:
        """Hand over so many tokens' pages in each of several transfers; return the seconds of each."""
        num_units = plan_transfer(self.layout, destination.layout, 0, 0).num_units(num_tokens)
        granted = [destination.grant(self.endpoint, num_units).transfer for _ in range(number)]
        begin_s, taken_s = perf_counter(), list[float]()
        pages = {
            transfer: self.ledger.allocate(self.layout.num_pages(num_tokens), "prompt")
            for transfer in granted
        }
        for transfer, own in pages.items():
            self.endpoint.offer(transfer, own, num_units)
        while pages:
            for ended in self.endpoint.poll():
                times_of(ended)
                taken_s.append(perf_counter() - begin_s)
                self.ledger.release(pages.pop(ended.transfer), "prompt")
            if pages and perf_counter() > begin_s + DEADLINE_S:
                raise TimeoutError(f"{len(pages)} transfers have not ended within {DEADLINE_S:g} s")
            if pages:
                self.endpoint.wait(WAIT_S)
        return taken_s


def wait_for(endpoint: KvEndpoint, transfer: bytes) -> TransferEnded:
    """Return the end of a transfer; TimeoutError after DEADLINE_S."""
    return _first(endpoint, lambda: (each for each in endpoint.poll() if each.transfer == transfer))


def _first(endpoint: KvEndpoint, look: Callable[[], Iterator[FoundT]]) -> FoundT:
    """Look until something is found; return the first."""
    deadline_s = perf_counter() + DEADLINE_S
    while perf_counter() < deadline_s:
        for found in look():
            return found
        endpoint.wait(WAIT_S)
    raise TimeoutError(f"a transfer was not granted, or has not ended, within {DEADLINE_S:g} s")


def times_of(ended: TransferEnded) -> TransferTimes:
    """Return the times of a transfer that was handed over; RuntimeError names any other end."""
    if ended.times is None or ended.outcome is not HandoffOutcome.HANDED_OVER:
        raise RuntimeError(f"the pages were not handed over: {ended.outcome}: {ended.reason}")
    return ended.times


class _Start(msgspec.Struct, frozen=True):
    """The destination's assignment."""

    layout: PageLayout
    num_pages: int
    device: str
    transport: str
    has_digests: bool


class _GrantOrder(msgspec.Struct, frozen=True):
    """The order to grant pages for a transfer, in the place of a router's message."""

    source: tuple[str, int]
    transfer: str
    num_units: int
    num_layer_groups: int


class DestinationProcess(Child):
    """The process of a destination."""

    STOP_S = 0.0

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        *,
        device: str = "cpu",
        transport: str = AUTO,
        has_digests: bool = True,
    ) -> None:
        start = _Start(layout, num_pages, device, transport, has_digests)
        self.layout = layout
        super().__init__("-m", "baton.bench.kv.ends", msgspec.json.encode(start).decode())
        self.read()  # says that it is ready

    def grant(self, source: KvEndpoint, num_units: int, num_layer_groups: int = 1) -> GrantedTransfer:
        """Have the process grant pages once it has room; return the transfer as the source gets it.

        RuntimeError when the process has ended, TimeoutError after DEADLINE_S.
        """
        transfer = secrets.token_bytes(16)
        order = _GrantOrder(source.address, transfer.hex(), num_units, num_layer_groups)
        self.tell(msgspec.json.encode(order).decode())

        def granted() -> Iterator[GrantedTransfer]:
            source.poll()
            yield from (each for each in source.take_granted() if each.transfer == transfer)
            if self.poll() is not None:
                raise RuntimeError("the destination's process has ended")

        return _first(source, granted)


class Ends:
    """A pool here, a pool in another process, and an endpoint here for each transport."""

    def __init__(
        self,
        layout: PageLayout,
        num_tokens: int,
        transports: Sequence[str] = TRANSPORTS,
        device: str = "cpu",
        has_digests: bool = True,
    ) -> None:
        """num_tokens: room of either pool; there are 64 pages at least."""
        num_pages = max(64, layout.num_pages(num_tokens))
        asked = transports[0] if len(transports) == 1 else AUTO
        self._destination = DestinationProcess(
            layout, num_pages, device=device, transport=asked, has_digests=has_digests
        )
        self._sources: dict[str, SourceEnd] = {}
        pool: Tensor | None = None
        for transport in transports:
            settings = settings_of(layout, transport, has_digests=has_digests)
            end = SourceEnd.random(settings, num_pages, pool, device)
            self._sources[transport], pool = end, end.pool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._sources.values():
            source.endpoint.close()
        self._destination.close()

    def pool(self, transport: str) -> Tensor:
        """Return the pool that this transport sends from."""
        return self._sources[transport].pool

    def send(self, transport: str, num_tokens: int) -> TransferTimes:
        """Hand over the pages of so many tokens. RuntimeError: another transport moved them, or none."""
        source = self._sources[transport]
        times = source.send(self._destination, num_tokens)
        counts = source.endpoint.counts()
        if {name for name in counts if name.startswith("opened_")} != {f"opened_{transport}"}:
            raise RuntimeError(f"{transport} did not move the pages: {counts}")
        return times


def serve(start: _Start) -> None:
    """Grant pages as the lines of stdin say, and release what arrives, until killed."""
    layout, shared = start.layout, SharedPool() if start.device == "cpu" else None
    shape, dtype = _pool_shape(layout, start.num_pages), TORCH_DTYPES[layout.element_type]
    pool = _zeros(shape, dtype, start.device) if shared is None else shared.zeros(shape, dtype)
    # Touches all memory, as a worker has after its first minutes.
    pool.view(-1).view(torch.uint8)[::4096].fill_(1)
    ledger = _scattered_ledger(layout, start.num_pages, seed=1)
    settings = settings_of(layout, start.transport, has_digests=start.has_digests)
    endpoint = KvEndpoint(settings, pool, ledger, shared=shared)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    orders: list[_GrantOrder] = []
    threading.Thread(target=_read_orders, args=(endpoint, orders), daemon=True).start()
    links: dict[tuple[str, int], Link] = {}
    while True:
        endpoint.wait(WAIT_S)
        for ended in endpoint.poll():
            if ended.outcome is HandoffOutcome.ADOPTED:
                ledger.release(ended.pages, "sequence")
        while orders and ledger.num_free >= orders[0].num_units:  # a unit is a page, or a part of one
            order = orders.pop(0)
            link = links.get(order.source)
            if link is None or link.is_lost:
                link = links[order.source] = endpoint.link(order.source)
            endpoint.grant(
                link,
                bytes.fromhex(order.transfer),
                order.num_units,
                "sequence",
                deadline_s=DEADLINE_S,
                num_layer_groups=order.num_layer_groups,
            )


def _read_orders(endpoint: KvEndpoint, orders: list[_GrantOrder]) -> None:
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=_GrantOrder)
        endpoint.post(partial(orders.append, order))


# The KV caches of models that people serve; name -> layers, KV heads, head dim, all in bf16
SHAPES: Final = {
    "tiny": (4, 2, 64),  # the model that comes with Baton
    "qwen3-0.6b": (28, 8, 128),
    "llama-3.1-8b": (32, 8, 128),
}


def layout_of(shape: str, *, page_size: int) -> PageLayout:
    """Return the page layout of one of SHAPES."""
    return bf16_layout(*SHAPES[shape], page_size=page_size)


def bf16_layout(
    num_layers: int, num_kv_heads: int, head_dim: int, *, page_size: int, tp_size: int = 1
) -> PageLayout:
    """Return the layout of pages of bf16."""
    return PageLayout(
        tp_size=tp_size,
        page_size=page_size,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype="bfloat16",
    )


if __name__ == "__main__":
    serve(msgspec.json.decode(sys.argv[1], type=_Start))
