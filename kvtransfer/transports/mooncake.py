"""Payloads through Mooncake's transfer engine: the destination reads the source's staging memory.

1. Each end of a pair has an engine. Engines find each other by address (P2PHANDSHAKE), without a server. An
   engine uses the RDMA cards of its host, or TCP where there is none or MC_FORCE_TCP is set.
2. A record says that a payload is in its slot at the source. The destination reads the payload, and answers
   when the payload is in the pages. The source's slot is free again with the answer.

The destination reads, and the source does not write: over TCP, Mooncake calls a write done when the bytes
have left, and a record could overtake them. A read is done when the bytes are here.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

from torch import Tensor

from baton.errors import TransferFailed
from baton.kvtransfer.transports.one_sided import OneSidedChannel, OneSidedTransport, PeerMemory
from baton.kvtransfer.transports.rank_pair import NUM_SLOTS, SOURCE, PairGroup

_NO_SERVER: Final = "P2PHANDSHAKE"
_ANY_NETWORK: Final = "rdma"  # Mooncake takes TCP where a host has no card
_UNDER_WAY: Final = 0
_DONE: Final = 1


class Engine(Protocol):
    """The methods of TransferEngine that are used here. Most return 0, or the code of an error."""

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
        engine = cast(Engine, api.TransferEngine())
        if engine.initialize(host, _NO_SERVER, _ANY_NETWORK, ""):
            raise TransferFailed(f"mooncake: no engine can listen at {host}")
        return MooncakeChannel(group, peer, payloads, engine, host)


class MooncakeChannel(OneSidedChannel):
    """A pair whose payloads the destination reads."""

    name = "mooncake"

    def __init__(
        self, group: PairGroup, peer: int, payloads: Sequence[Tensor], engine: Engine, host: str
    ) -> None:
        """engine: initialized at `host`; the channel owns it."""
        super().__init__(group, peer, payloads)
        self._engine: Engine | None = engine
        self._host = f"[{host}]" if ":" in host else host
        self._remote: PeerMemory
        self._remote_name = ""
        for payload in payloads:
            if engine.register_memory(payload.data_ptr(), len(payload)):
                raise TransferFailed("mooncake: staging memory cannot be registered")

    def describe(self) -> bytes:
        return f"{self._host}:{self._open_engine().get_rpc_port()}".encode()

    def reach(self, peer: PeerMemory) -> None:
        self._remote, self._remote_name = peer, peer.engine.decode(errors="replace")

    def move_first_byte(self, rank: int, timeout_s: float) -> None:
        if rank != SOURCE:
            self.fetch(0, 1, timeout_s)

    def fetch(self, slot: int, num_bytes: int, timeout_s: float) -> Tensor:
        payload = self.payload(slot, num_bytes)
        batch = self._open_engine().batch_transfer_async_read(
            self._remote_name, [payload.data_ptr()], [self._remote.addresses[slot]], [num_bytes]
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

    def _open_engine(self) -> Engine:
        assert self._engine is not None
        return self._engine
