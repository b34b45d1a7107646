"""The two ends of a KV transfer: whole endpoints with real page pools, the destination in its own process.

Pages are scattered: the free lists are shuffled before anything moves.
"""

import random
import secrets
import sys
import threading
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Final

import msgspec
import torch
from torch import Tensor

from baton.bench.processes import Child
from baton.engine.cache.page_pool import PagePool
from baton.errors import ConfigError
from baton.kernels.huge_pages import huge_zeros
from baton.kernels.native import TORCH_DTYPES
from baton.kvtransfer.endpoint import KvEndpoint
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.handoff import HandoffOutcome, Timing, TransferEnded, TransferTimes
from baton.kvtransfer.protocol.messages import AnyMessage, Wrote
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.settings import EndpointSettings
from baton.kvtransfer.transports.pages import SharedPool
from baton.pages import PageLayout

KEY: Final = b"a key for this bench alone"
FINGERPRINT: Final = "bench"
DEADLINE_S: Final = 120.0
WAIT_S: Final = 0.05


def settings_of(layout: PageLayout, transport: str, timing: Timing | None = None) -> EndpointSettings:
    """Return the settings of an endpoint; both ends have the same key and fingerprint."""
    return EndpointSettings(
        key=KEY, fingerprint=FINGERPRINT, layout=layout, transport=transport, timing=timing or Timing()
    )


def pool_shape(layout: PageLayout, num_pages: int) -> tuple[int, ...]:
    """Return the shape of a rank's pool."""
    heads = layout.num_kv_heads // layout.tp_size
    return (num_pages, layout.num_layers, 2, heads, layout.page_size, layout.head_dim)


def scattered_ledger(layout: PageLayout, num_pages: int, seed: int) -> PagePool:
    """Return a pool with all pages free, in random order."""
    ledger = PagePool(num_pages, layout.page_size)
    pages = ledger.allocate(num_pages, "shuffle")
    random.Random(seed).shuffle(pages)
    ledger.release(pages, "shuffle")
    return ledger


class SourceEnd:
    """The end in the suite's own process."""

    def __init__(
        self, layout: PageLayout, num_pages: int, transport: str, pool: Tensor | None = None
    ) -> None:
        """pool: that of another end with the same layout, to save memory."""
        self.layout = layout
        if pool is None:
            pool = huge_zeros(pool_shape(layout, num_pages), TORCH_DTYPES[layout.dtype])
            pool.view(torch.int16).random_(0, 2**15)
        self.pool = pool
        self.ledger = scattered_ledger(layout, num_pages, seed=0)
        self.endpoint = KvEndpoint(settings_of(layout, transport), pool, self.ledger)

    def send(self, destination: "DestinationProcess", num_tokens: int) -> TransferTimes:
        """Hand over the pages of so many tokens at once; RuntimeError when that fails."""
        num_units = plan_transfer(self.layout, destination.layout, 0, 0).num_units(num_tokens)
        pages = self.ledger.allocate(self.layout.num_pages(num_tokens), "prompt")
        transfer = destination.grant(self.endpoint, num_units)
        self.endpoint.offer(transfer, pages, num_units)
        ended = self.wait_for(transfer)
        self.ledger.release(pages, "prompt")
        if ended.times is None or ended.outcome is not HandoffOutcome.HANDED_OVER:
            raise RuntimeError(f"{num_tokens} tokens were not handed over: {ended.outcome}: {ended.reason}")
        return ended.times

    def wait_for(self, transfer: bytes) -> TransferEnded:
        """Return the end of a transfer; TimeoutError after DEADLINE_S."""
        deadline_s = perf_counter() + DEADLINE_S
        while perf_counter() < deadline_s:
            for ended in self.endpoint.poll():
                if ended.transfer == transfer:
                    return ended
            self.endpoint.wait(WAIT_S)
        raise TimeoutError(f"a transfer has not ended within {DEADLINE_S:g} s")

    def close(self) -> None:
        """Close the endpoint."""
        self.endpoint.close()


class _Start(msgspec.Struct, frozen=True):
    """The destination's assignment."""

    layout: PageLayout
    num_pages: int
    is_shared: bool
    damaged_unit: int | None


class _GrantOrder(msgspec.Struct, frozen=True):
    """A transfer that the destination's process grants pages for, as its router would have it do."""

    source: tuple[str, int]
    transfer: str
    num_units: int
    num_layer_groups: int


class DestinationProcess:
    """The process of a destination; `address` is that of its endpoint."""

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        *,
        is_shared: bool = True,
        damaged_unit: int | None = None,
    ) -> None:
        """damaged_unit: the unit that arrives with one bit flipped, in the first long transfer."""
        start = _Start(layout, num_pages, is_shared, damaged_unit)
        self.layout = layout
        self._child = Child("-m", "baton.bench.kv.ends")
        line = self._child.ask(msgspec.json.encode(start).decode())
        self.address = msgspec.json.decode(line, type=tuple[str, int])
        self.pid = self._child.pid

    def grant(self, source: KvEndpoint, num_units: int, num_layer_groups: int = 1) -> bytes:
        """Have the process grant pages once it has room; return the transfer that the source has heard of."""
        transfer = secrets.token_bytes(16)
        order = _GrantOrder(source.address, transfer.hex(), num_units, num_layer_groups)
        self._child.tell(msgspec.json.encode(order).decode())
        deadline_s = perf_counter() + DEADLINE_S
        while perf_counter() < deadline_s:
            source.poll()
            if any(granted.transfer == transfer for granted in source.take_granted()):
                return transfer
            source.wait(WAIT_S)
        raise TimeoutError(f"no pages were granted within {DEADLINE_S:g} s")

    def close(self) -> None:
        """End the process."""
        self._child.kill()


class _DamagingEndpoint(KvEndpoint):
    damaged_unit: int | None = None

    def _received(self, link: Link, message: AnyMessage) -> None:
        unit = self.damaged_unit
        if unit is not None and isinstance(message, Wrote) and message.first <= unit < message.stop:
            pages = self._incoming[message.transfer].handoff.pages
            memory = self._here.rank.memory
            assert memory is not None
            memory.view()[pages[unit] * memory.page_bytes] ^= 1
            self.damaged_unit = None
        super()._received(link, message)


def serve(start: _Start) -> None:
    """Grant pages as the lines of stdin say, and release what arrives, until killed."""
    layout, shared = start.layout, SharedPool() if start.is_shared else None
    zeros = huge_zeros if shared is None else shared.zeros
    pool = zeros(pool_shape(layout, start.num_pages), TORCH_DTYPES[layout.dtype])
    touch(pool)
    ledger = scattered_ledger(layout, start.num_pages, seed=1)
    endpoint = _DamagingEndpoint(settings_of(layout, "auto"), pool, ledger, shared=shared)
    endpoint.damaged_unit = start.damaged_unit
    sys.stdout.write(msgspec.json.encode(endpoint.address).decode() + "\n")
    sys.stdout.flush()
    orders: list[_GrantOrder] = []
    threading.Thread(target=_read_orders, args=(endpoint, orders), daemon=True).start()
    links: dict[tuple[str, int], Link] = {}
    while True:
        endpoint.wait(WAIT_S)
        release_adopted(endpoint.poll(), ledger)
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


def release_adopted(ended: Sequence[TransferEnded], ledger: PagePool) -> None:
    """Release the pages of transfers that the destination has adopted."""
    for each in ended:
        if each.outcome is HandoffOutcome.ADOPTED:
            ledger.release(each.pages, "sequence")


def touch(pool: Tensor) -> None:
    """Touch all memory, as a worker has after its first minutes."""
    pool.view(-1).view(torch.uint8)[::4096].fill_(1)


# The KV caches of models that people serve; name -> layers, KV heads, head dim, all in bf16
_SHAPES: Final = {
    "tiny": (4, 2, 64),  # the model that comes with Baton
    "qwen3-0.6b": (28, 8, 128),
    "llama-3.1-8b": (32, 8, 128),
}
SHAPE_NAMES: Final = tuple(_SHAPES)


def layout_of(shape: str, *, page_size: int, tp_size: int = 1) -> PageLayout:
    """Return the page layout of a model. ConfigError: the name is unknown."""
    if shape not in _SHAPES:
        raise ConfigError(f"shape: expected one of {', '.join(SHAPE_NAMES)}, got {shape!r}")
    num_layers, num_kv_heads, head_dim = _SHAPES[shape]
    return PageLayout(
        tp_size=tp_size,
        page_size=page_size,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype="bfloat16",
    )


if __name__ == "__main__":
    serve(msgspec.json.decode(sys.stdin.buffer.readline(), type=_Start))
