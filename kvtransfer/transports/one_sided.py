"""Pairs of ranks whose payloads a library for RDMA moves between registered memory: NIXL and Mooncake.

Such a library moves bytes without a thread of the other process. It does not know which transfers the
destination has granted, and its requests cannot all be recalled. Therefore no library touches a page:

1. Two ranks form a pair (kvtransfer/transports/torch_distributed.py). Records and answers go over gloo.
2. Each end has an engine of the library of its own, which knows the staging memory of the pair's slots and
   nothing else. The two exchange over the pair's connection how to reach each other, and move one byte.
3. The library moves each payload from a slot of the source into the same slot of the destination. The record
   comes over gloo, and the destination copies the payload into the pages that the registration names, or
   drops the payload where the registration admits no writer.
4. A pair that has ended is closed by the thread that used it: first the engine, then the memory. A request
   that the library still has then ends with its engine.

docs/decisions/0027-rdma-libraries-write-staging-memory.md has the reasons.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Annotated

import msgspec
from msgspec import Meta
from torch import Tensor

from baton.errors import ConfigError, TransferFailed
from baton.kvtransfer.protocol.messages import RankListenerAddresses
from baton.kvtransfer.transports.base import LocalRank
from baton.kvtransfer.transports.listener import decode_greeting
from baton.kvtransfer.transports.pages import PagePacking, poll
from baton.kvtransfer.transports.rank_pair import (
    NUM_SLOTS,
    GlooChannel,
    PairGroup,
    PairStore,
    join_gloo,
    translated,
)
from baton.kvtransfer.transports.torch_distributed import GroupListener, GroupTransport


class PeerMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The slots of one end of a pair, as its engine describes the slots to the other end."""

    engine: Annotated[bytes, Meta(max_length=2**15)]  # how the library reaches the engine
    addresses: Annotated[tuple[int, ...], Meta(min_length=NUM_SLOTS, max_length=NUM_SLOTS)]
    device: Annotated[int, Meta(ge=0, le=2**16)]  # the GPU that holds the slots; 0 on a CPU


class OneSidedChannel(GlooChannel):
    """A pair whose payloads an engine moves. A subclass owns the engine, and frees it in `close`.

    The engine must end before the memory of its slots is freed. A variable that holds the engine would
    outlive `close` in the traceback of an error, so methods reach the engine by `self`.
    """

    name = ""  # of the library, for messages

    def __init__(self, group: PairGroup, peer: int, payloads: Sequence[Tensor]) -> None:
        """payloads: the staging memory of each slot, on the device of the pool."""
        super().__init__(group, peer, list(payloads))
        self._is_over = threading.Event()

    @abstractmethod
    def describe(self) -> bytes:
        """Return how the library reaches this end's engine."""

    @abstractmethod
    def reach(self, peer: PeerMemory) -> None:
        """Let this end's engine reach the peer's slots. Called once, before any payload moves."""

    def connect(self, store: PairStore, rank: int, timeout_s: float) -> None:
        """Exchange descriptions and move a first byte: the library fails here, not during a transfer.

        rank: of this end, SOURCE or DESTINATION.
        """
        first = self.payload(0, 1)
        device = first.device.index or 0
        addresses = tuple(self.payload(slot, 1).data_ptr() for slot in range(NUM_SLOTS))
        own = PeerMemory(engine=self.describe(), addresses=addresses, device=device)
        with translated(self.name):
            store.set(f"memory {rank}", msgspec.msgpack.encode(own))
            theirs = store.get(f"memory {1 - rank}")
        self.reach(decode_greeting(theirs, PeerMemory, "memory"))
        self.move_first_byte(rank, timeout_s)
        with translated(self.name):
            store.set(f"moved {rank}", b"")
            store.get(f"moved {1 - rank}")

    @abstractmethod
    def move_first_byte(self, rank: int, timeout_s: float) -> None:
        """Move a byte between the first slots, at the end that moves payloads."""

    def abort(self) -> None:
        self._is_over.set()
        super().abort()

    def wait_until(self, has_ended: Callable[[], bool], timeout_s: float) -> None:
        """Raises TransferFailed after the timeout, or when the pair ends first."""
        if not poll(lambda: self._is_over.is_set() or has_ended(), timeout_s):
            raise TransferFailed(f"{self.name}: a payload did not move within {timeout_s:g} s")
        if self._is_over.is_set():
            raise TransferFailed(f"{self.name}: the pair has ended")

    def _send_payload(self, slot: int, num_bytes: int) -> None:
        """Nothing to send over gloo."""

    def _post_payload(self, slot: int) -> None:
        """Nothing to post: a payload comes without a receive."""


class OneSidedTransport(GroupTransport):
    """Serves ranks of one kind of device, on request: the libraries' sockets have no key."""

    is_automatic = False
    module = ""  # of the library
    extra = ""  # of Baton's package, which installs the library

    def can_serve(self, source: RankListenerAddresses, destination: RankListenerAddresses) -> bool:
        return source.device == destination.device

    def listen(self, rank: LocalRank) -> GroupListener:
        """As `Transport.listen`. Raises ConfigError where the library is missing."""
        self.library()
        return GroupListener(self, rank)

    def library(self) -> ModuleType:
        """Import the library, which takes a second. Raises ConfigError where that fails."""
        try:
            return import_module(self.module)
        except (ImportError, OSError) as error:  # OSError: a library that it needs
            raise ConfigError(
                f"transport: {self.name} needs {self.module}, which cannot be imported: {error}; "
                f"pip install 'baton-serve[{self.extra}]'"
            ) from error

    def join(
        self, store: PairStore, rank: int, host: str, packing: PagePacking, num_bytes: int, timeout_s: float
    ) -> OneSidedChannel:
        self.library()
        group = join_gloo(store, rank, host, timeout_s)
        payloads = [packing.staging(num_bytes) for _ in range(NUM_SLOTS)]
        channel = self.open_channel(group, 1 - rank, payloads, host)
        try:
            channel.connect(store, rank, timeout_s)
        except BaseException:
            channel.close()
            raise
        return channel

    @abstractmethod
    def open_channel(
        self, group: PairGroup, peer: int, payloads: Sequence[Tensor], host: str
    ) -> OneSidedChannel:
        """Return a channel with an engine that knows the payloads. host: the address to listen on."""
