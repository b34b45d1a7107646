"""Pairs of ranks with payloads in registered memory, moved by a library for RDMA: NIXL or Mooncake.

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

import contextlib
import secrets
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol, TypeAlias, cast

import msgspec
from msgspec import Meta
from torch import Tensor

from baton.errors import BatonError, ConfigError, TransferFailed, how_to_install
from baton.kvtransfer.protocol.messages import RankListenerAddresses
from baton.kvtransfer.transports.base import LocalRank
from baton.kvtransfer.transports.pages import PagePacking, poll
from baton.kvtransfer.transports.rank_pair import (
    NUM_SLOTS,
    SOURCE,
    GlooChannel,
    PairGroup,
    PairStore,
    join_gloo,
    translated,
)
from baton.kvtransfer.transports.torch_distributed import GroupListener, GroupSettings, GroupTransport
from baton.messages.codec import decode_as


class PeerMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The slots of one end of a pair, as its engine describes the slots to the other end."""

    engine: Annotated[bytes, Meta(max_length=2**15)]  # how the library reaches the engine
    addresses: Annotated[tuple[int, ...], Meta(min_length=NUM_SLOTS, max_length=NUM_SLOTS)]
    device: Annotated[int, Meta(ge=0, le=2**16)]  # the GPU that holds the slots; 0 on a CPU


class OneSidedChannel(GlooChannel):
    """A pair with payloads that an engine moves. A subclass owns the engine, and frees it in `close`.

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
        self.reach(decode_as(PeerMemory, theirs, "memory"))
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
        """Wait for the condition. TransferFailed after the timeout, or when the pair ends first."""
        if not poll(lambda: self._is_over.is_set() or has_ended(), timeout_s):
            raise TransferFailed(f"{self.name}: a payload did not move within {timeout_s:g} s")
        if self._is_over.is_set():
            raise TransferFailed(f"{self.name}: the pair has ended")

    def send_payload(self, part: int, num_bytes: int, lane: int) -> None:
        """Send nothing over gloo: the engine moves payloads."""

    def post_payload(self, part: int) -> None:
        """Post nothing: a payload comes without a receive."""


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
                f"{how_to_install(self.extra)}"
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


# Payloads through NIXL, NVIDIA's library for RDMA: the source writes into the destination's staging memory.
#
# 1. Each end of a pair has an agent with the backend UCX, which takes its networks from the environment:
#    UCX_TLS, UCX_NET_DEVICES.
# 2. The source posts a write of each payload. NIXL reports the write as done when the payload is in the
#    destination's memory. The source sends the record of a batch when all its writes are done. While a batch
#    travels, the source packs the next one.
# 3. When a record comes, its payloads are at the destination already, which has nothing to wait for.
#
# The source writes, and the destination does not read: where UCX emulates RDMA over TCP, a reader that dies
# can end the process that it reads from.

_UCX: Final = "UCX"
NIXL_WRITE_S: Final = GroupSettings().stall_s  # for one payload
NixlTransfer: TypeAlias = object  # NIXL's handle of one write
NixlDescriptors: TypeAlias = object
NixlState: TypeAlias = Literal["DONE", "PROC", "ERR"]


class NixlAgent(Protocol):
    """The methods of nixl_agent that are used here. NIXL's errors have no base class of their own."""

    def register_memory(self, reg_list: list[Tensor]) -> NixlDescriptors: ...

    def deregister_memory(self, dereg_list: NixlDescriptors) -> None: ...

    def get_agent_metadata(self) -> bytes: ...

    def add_remote_agent(self, metadata: bytes) -> bytes: ...

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> NixlDescriptors: ...

    def initialize_xfer(
        self, operation: str, local: NixlDescriptors, remote: NixlDescriptors, remote_agent: str
    ) -> NixlTransfer: ...

    def transfer(self, handle: NixlTransfer) -> NixlState: ...

    def check_xfer_state(self, handle: NixlTransfer) -> NixlState: ...

    def release_xfer_handle(self, handle: NixlTransfer) -> None: ...


class NixlTransport(OneSidedTransport):
    """Serves ranks on request, where the package nixl is installed."""

    name = "nixl"
    module = "nixl._api"
    extra = "nixl"

    def open_channel(
        self, group: PairGroup, peer: int, payloads: Sequence[Tensor], host: str
    ) -> "NixlChannel":
        api: Any = self.library()
        with _nixl_errors():
            config = api.nixl_agent_config(
                backends=[_UCX], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            agent = cast(NixlAgent, api.nixl_agent(f"baton-{secrets.token_hex(16)}", config))
        return NixlChannel(group, peer, payloads, agent)


class _HeldRecord(NamedTuple):
    """A record that follows the payloads that it announces."""

    batch: int
    record: bytes
    parts: Sequence[int]


class NixlChannel(OneSidedChannel):
    """A pair with payloads that the source writes. Both threads of a source use the channel at once."""

    name = "nixl"

    def __init__(self, group: PairGroup, peer: int, payloads: Sequence[Tensor], agent: NixlAgent) -> None:
        """agent: new; the channel owns it."""
        super().__init__(group, peer, payloads)
        self._memory_type = "VRAM" if payloads[0].is_cuda else "DRAM"
        self._agent: NixlAgent | None = agent
        with _nixl_errors():
            self._registered = agent.register_memory(list(payloads))
        self._remote: PeerMemory
        self._remote_name = ""
        self._writes: list[NixlTransfer | None] = [None] * NUM_SLOTS  # each keeps the agent alive
        self._held: deque[_HeldRecord] = deque()  # in the order of their batches
        self._ordering = threading.Lock()

    def describe(self) -> bytes:
        with _nixl_errors():
            return self._open_agent().get_agent_metadata()

    def reach(self, peer: PeerMemory) -> None:
        self._remote = peer
        with _nixl_errors():
            self._remote_name = self._open_agent().add_remote_agent(peer.engine).decode()

    def move_first_byte(self, rank: int, timeout_s: float) -> None:
        if rank == SOURCE:
            self.send_payload(0, 1, 0)
            self.wait_until(lambda: self._has_ended(0), timeout_s)

    def send_record(self, batch: int, record: bytes, parts: Sequence[int]) -> None:
        """Hold the record until its payloads are written."""
        with self._ordering:
            self._held.append(_HeldRecord(batch, record, parts))

    def end_batch(self) -> None:
        with self._ordering:
            while len(self._held) > 1:
                self._send_next_record(NIXL_WRITE_S)

    def receive_answer(self, batch: int, parts: Sequence[int], timeout_s: float) -> bytes:
        with self._ordering:
            while any(held.batch == batch for held in self._held):
                self._send_next_record(timeout_s)
        return super().receive_answer(batch, parts, timeout_s)

    def fetch_payload(self, part: int, num_bytes: int, lane: int, timeout_s: float) -> Tensor:
        return self.payload(part, num_bytes)

    def close(self) -> None:
        super().close()
        agent, self._agent = self._agent, None
        if agent is None:
            return
        writes, self._writes = self._writes, []
        with contextlib.suppress(TransferFailed), _nixl_errors():
            for write in filter(None, writes):
                agent.release_xfer_handle(write)
            agent.deregister_memory(self._registered)

    def send_payload(self, part: int, num_bytes: int, lane: int) -> None:
        """Start to write the payload."""
        own, peer, slot = self.payload(part, num_bytes), self._remote, part % NUM_SLOTS
        with _nixl_errors():
            self._writes[slot] = self._open_agent().initialize_xfer(
                "WRITE",
                self._descriptors(own.data_ptr(), num_bytes, own.device.index or 0),
                self._descriptors(peer.addresses[slot], num_bytes, peer.device),
                self._remote_name,
            )
            self._open_agent().transfer(self._writes[slot])

    def _send_next_record(self, timeout_s: float) -> None:
        """Send the oldest held record once its payloads are written. The caller holds the lock."""
        held = self._held[0]
        for part in held.parts:
            self.wait_until(partial(self._has_ended, part % NUM_SLOTS), timeout_s)
        self._held.popleft()
        super().send_record(*held)

    def _has_ended(self, slot: int) -> bool:
        """Return True when the last write from a slot is done."""
        if self._writes[slot] is None:
            return True
        with _nixl_errors():
            state = self._open_agent().check_xfer_state(self._writes[slot])
            if state == "PROC":
                return False
            self._open_agent().release_xfer_handle(self._writes[slot])
            self._writes[slot] = None
        if state != "DONE":
            raise TransferFailed("nixl: a write failed")
        return True

    def _descriptors(self, address: int, num_bytes: int, device: int) -> NixlDescriptors:
        return self._open_agent().get_xfer_descs([(address, num_bytes, device)], self._memory_type)

    def _open_agent(self) -> NixlAgent:
        assert self._agent is not None
        return self._agent


@contextlib.contextmanager
def _nixl_errors() -> Iterator[None]:
    try:
        yield
    except BatonError:
        raise
    except Exception as error:
        raise TransferFailed(f"nixl: {type(error).__name__}: {error}") from error


# Payloads through Mooncake's transfer engine: the destination reads the source's staging memory.
#
# 1. Each end of a pair has an engine. Engines find each other by address (P2PHANDSHAKE), without a server. An
#    engine uses the RDMA cards of its host, or TCP where there is none or MC_FORCE_TCP is set.
# 2. The source sends the record of a batch when all its payloads are in their slots. The destination reads
#    them, and answers when they are in the pages. The source's slots are free again with the answer.
#
# The destination reads, and the source does not write: over TCP, Mooncake calls a write done when the bytes
# have left, and a record could overtake them. A read is done when the bytes are here.

_NO_SERVER: Final = "P2PHANDSHAKE"
_ANY_NETWORK: Final = "rdma"  # Mooncake takes TCP where a host has no card
_UNDER_WAY: Final = 0
_DONE: Final = 1


class MooncakeEngine(Protocol):
    """The methods of Mooncake's TransferEngine that are used here. Most return 0, or the code of an error."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int: ...

    def get_rpc_port(self) -> int: ...

    def register_memory(self, address: int, num_bytes: int, /) -> int: ...

    def unregister_memory(self, address: int, /) -> int: ...

    def batch_transfer_async_read(
        self, peer: str, own: list[int], theirs: list[int], lengths: list[int], /
    ) -> int:
        """Return the number of a batch, or 0."""

    def transfer_check_status(self, batch: int, /) -> int:
        """Return 0 while the batch is under way, then 1 or a negative number, once."""


class MooncakeTransport(OneSidedTransport):
    """Serves ranks on request, where a package of Mooncake's transfer engine is installed."""

    name = "mooncake"
    module = "mooncake.engine"
    extra = "mooncake"

    def open_channel(
        self, group: PairGroup, peer: int, payloads: Sequence[Tensor], host: str
    ) -> "MooncakeChannel":
        api: Any = self.library()
        engine = cast(MooncakeEngine, api.TransferEngine())
        if engine.initialize(host, _NO_SERVER, _ANY_NETWORK, ""):
            raise TransferFailed(f"mooncake: no engine can listen at {host}")
        return MooncakeChannel(group, peer, payloads, engine, host)


class MooncakeChannel(OneSidedChannel):
    """A pair with payloads that the destination reads."""

    name = "mooncake"

    def __init__(
        self, group: PairGroup, peer: int, payloads: Sequence[Tensor], engine: MooncakeEngine, host: str
    ) -> None:
        """engine: initialized at `host`; the channel owns it."""
        super().__init__(group, peer, payloads)
        self._engine: MooncakeEngine | None = engine
        self._host = f"[{host}]" if ":" in host else host
        self._remote: PeerMemory
        self._remote_name = ""
        self._held: _HeldRecord | None = None
        for payload in payloads:
            if engine.register_memory(payload.data_ptr(), len(payload)):
                raise TransferFailed("mooncake: staging memory cannot be registered")

    def describe(self) -> bytes:
        return f"{self._host}:{self._open_engine().get_rpc_port()}".encode()

    def reach(self, peer: PeerMemory) -> None:
        self._remote, self._remote_name = peer, peer.engine.decode(errors="replace")

    def move_first_byte(self, rank: int, timeout_s: float) -> None:
        if rank != SOURCE:
            self.fetch_payload(0, 1, 0, timeout_s)

    def send_record(self, batch: int, record: bytes, parts: Sequence[int]) -> None:
        """Hold the record until its payloads are in their slots: the destination reads them at once."""
        self._held = _HeldRecord(batch, record, parts)

    def end_batch(self) -> None:
        assert self._held is not None
        super().send_record(*self._held)

    def fetch_payload(self, part: int, num_bytes: int, lane: int, timeout_s: float) -> Tensor:
        payload, address = self.payload(part, num_bytes), self._remote.addresses[part % NUM_SLOTS]
        batch = self._open_engine().batch_transfer_async_read(
            self._remote_name, [payload.data_ptr()], [address], [num_bytes]
        )
        if not batch:
            raise TransferFailed(f"mooncake: {self._remote_name} cannot be reached")
        status = _UNDER_WAY

        def has_ended() -> bool:
            nonlocal status
            status = self._open_engine().transfer_check_status(batch)
            return status != _UNDER_WAY

        self.wait_until(has_ended, timeout_s)
        if status != _DONE:
            raise TransferFailed(f"mooncake: a read from {self._remote_name} failed")
        return payload

    def close(self) -> None:
        super().close()
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for slot in range(NUM_SLOTS):
            engine.unregister_memory(self.payload(slot, 1).data_ptr())

    def _open_engine(self) -> MooncakeEngine:
        assert self._engine is not None
        return self._engine
