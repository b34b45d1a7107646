"""Payloads through NIXL, NVIDIA's library for RDMA: the source writes into the destination's staging memory.

1. Each end of a pair has an agent with the backend UCX. UCX takes its networks from the environment: UCX_TLS,
   UCX_NET_DEVICES.
2. The source posts a write of each payload. NIXL reports the write as done when the payload is in the
   destination's memory, and only then does the source send the record. While a payload travels, the source
   packs the next one.
3. The destination is told of a payload by its record alone, and has nothing to wait for.

The source writes, and the destination does not read: where UCX emulates RDMA over TCP, a reader that dies can
end the process that it reads from.
"""

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, cast

from torch import Tensor

from baton.errors import BatonError, TransferFailed
from baton.kvtransfer.transports.one_sided import OneSidedChannel, OneSidedTransport, PeerMemory
from baton.kvtransfer.transports.rank_pair import NUM_SLOTS, SOURCE, PairGroup
from baton.kvtransfer.transports.torch_distributed import GroupSettings

_UCX: Final = "UCX"
WRITE_S: Final = GroupSettings().stall_s  # for one payload
Transfer: TypeAlias = object  # NIXL's handle of one write
Descriptors: TypeAlias = object
State: TypeAlias = Literal["DONE", "PROC", "ERR"]


class Agent(Protocol):
    """The methods of nixl_agent that are used here. NIXL's errors have no base class of their own."""

    def register_memory(self, reg_list: list[Tensor]) -> Descriptors: ...

    def deregister_memory(self, dereg_list: Descriptors) -> None: ...

    def get_agent_metadata(self) -> bytes: ...

    def add_remote_agent(self, metadata: bytes) -> bytes: ...

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Descriptors: ...

    def initialize_xfer(
        self, operation: str, local: Descriptors, remote: Descriptors, remote_agent: str
    ) -> Transfer: ...

    def transfer(self, handle: Transfer) -> State: ...

    def check_xfer_state(self, handle: Transfer) -> State: ...

    def release_xfer_handle(self, handle: Transfer) -> None: ...


class NixlTransport(OneSidedTransport):
    """Serves ranks on request, where the package nixl is installed."""

    name = "nixl"
    module = "nixl._api"
    extra = "nixl"

    def open_channel(
        self, group: PairGroup, peer: int, payloads: Sequence[Tensor], host: str
    ) -> "NixlChannel":
        api: Any = self.library()
        with _translated():
            config = api.nixl_agent_config(
                backends=[_UCX], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            agent = cast(Agent, api.nixl_agent(f"baton-{secrets.token_hex(16)}", config))
        return NixlChannel(group, peer, payloads, agent)


class _Posted(NamedTuple):
    """A payload that is being written, and the record that follows the payload."""

    slot: int
    record: bytes
    num_bytes: int


class NixlChannel(OneSidedChannel):
    """A pair whose payloads the source writes. Both threads of a source use the channel at once."""

    name = "nixl"

    def __init__(self, group: PairGroup, peer: int, payloads: Sequence[Tensor], agent: Agent) -> None:
        """agent: new; the channel owns it."""
        super().__init__(group, peer, payloads)
        self._memory_type = "VRAM" if payloads[0].is_cuda else "DRAM"
        self._agent: Agent | None = agent
        with _translated():
            self._registered = agent.register_memory(list(payloads))
        self._remote: PeerMemory
        self._remote_name = ""
        self._writes: list[Transfer | None] = [None] * NUM_SLOTS  # each keeps the agent alive
        self._posted: deque[_Posted] = deque()  # in the order of their records, which are not sent yet
        self._ordering = threading.Lock()

    def describe(self) -> bytes:
        with _translated():
            return self._open_agent().get_agent_metadata()

    def reach(self, peer: PeerMemory) -> None:
        self._remote = peer
        with _translated():
            self._remote_name = self._open_agent().add_remote_agent(peer.engine).decode()

    def move_first_byte(self, rank: int, timeout_s: float) -> None:
        if rank == SOURCE:
            self._post_write(0, 1)
            self.wait_until(lambda: self._has_ended(0), timeout_s)

    def send(self, slot: int, record: bytes, num_bytes: int) -> None:
        """Start to write the payload, and send the records of those before it."""
        self._post_write(slot, num_bytes)
        with self._ordering:
            self._posted.append(_Posted(slot, record, num_bytes))
            while len(self._posted) > 1:
                self._send_next_record(WRITE_S)

    def receive_answer(self, slot: int, timeout_s: float) -> bytes:
        with self._ordering:
            while any(posted.slot == slot for posted in self._posted):
                self._send_next_record(timeout_s)
        return super().receive_answer(slot, timeout_s)

    def fetch(self, slot: int, num_bytes: int, timeout_s: float) -> Tensor:
        return self.payload(slot, num_bytes)

    def close(self) -> None:
        super().close()
        agent, self._agent = self._agent, None
        if agent is None:
            return
        writes, self._writes = self._writes, []
        with contextlib.suppress(TransferFailed), _translated():
            for write in filter(None, writes):
                agent.release_xfer_handle(write)
            agent.deregister_memory(self._registered)

    def _post_write(self, slot: int, num_bytes: int) -> None:
        own, peer = self.payload(slot, num_bytes), self._remote
        with _translated():
            self._writes[slot] = self._open_agent().initialize_xfer(
                "WRITE",
                self._descriptors(own.data_ptr(), num_bytes, own.device.index or 0),
                self._descriptors(peer.addresses[slot], num_bytes, peer.device),
                self._remote_name,
            )
            self._open_agent().transfer(self._writes[slot])

    def _send_next_record(self, timeout_s: float) -> None:
        """Under the lock of the order."""
        slot, record, num_bytes = self._posted[0]
        self.wait_until(lambda: self._has_ended(slot), timeout_s)
        self._posted.popleft()
        super().send(slot, record, num_bytes)

    def _has_ended(self, slot: int) -> bool:
        """Return True when the write of a slot is done, once."""
        with _translated():
            state = self._open_agent().check_xfer_state(self._writes[slot])
            if state == "PROC":
                return False
            self._open_agent().release_xfer_handle(self._writes[slot])
            self._writes[slot] = None
        if state != "DONE":
            raise TransferFailed("nixl: a write failed")
        return True

    def _descriptors(self, address: int, num_bytes: int, device: int) -> Descriptors:
        return self._open_agent().get_xfer_descs([(address, num_bytes, device)], self._memory_type)

    def _open_agent(self) -> Agent:
        assert self._agent is not None
        return self._agent


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except BatonError:
        raise
    except Exception as error:
        raise TransferFailed(f"nixl: {type(error).__name__}: {error}") from error
