"""The ways into one rank's pool, and the book of who may use them."""

from collections.abc import Callable
from typing import Final, Literal

import torch
from torch import Tensor

from baton.clock import Clock
from baton.kvtransfer.protocol.messages import RankListenerAddresses
from baton.kvtransfer.ranks.digests import HostDigests, StagedDigests, UnitDigests
from baton.kvtransfer.ranks.messages import RankSettings
from baton.kvtransfer.ranks.pages import PageGenerations, PageMemory, PagePacking, SharedPool, packing_of
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistrations
from baton.kvtransfer.transports.cuda_ipc import CudaIpcListener, SharedDevicePool
from baton.kvtransfer.transports.group_receiver import GroupListener, GroupReceiver
from baton.kvtransfer.transports.rank_pair import GroupName, GroupSettings
from baton.kvtransfer.transports.registry import this_host
from baton.kvtransfer.transports.shm import MappedPool, ShmListener
from baton.kvtransfer.transports.tcp_receiver import TcpReceiver
from baton.rpc.auth import LinkSecret
from baton.rpc.connection import DroppedPeers


class RankPages:
    """One rank's pool, and the ways to its pages within this process: in place on a CPU, staged on a GPU."""

    def __init__(self, pool: Tensor) -> None:
        """pool: contiguous [num_pages, ...], on a CPU or on a GPU; ValueError for any other."""
        self.pool = pool
        self.num_pages = len(pool)
        self.device: Literal["cpu", "cuda"] = "cuda" if pool.is_cuda else "cpu"
        self.memory = None if pool.is_cuda else PageMemory.of(pool)
        self.digests: UnitDigests = (
            HostDigests(self.memory) if self.memory is not None else StagedDigests(self.packing())
        )

    def packing(self) -> PagePacking:
        """For one user: on a GPU each has a stream of its own, and waits for nobody else's work."""
        return packing_of(self.pool)

    def for_sockets(self) -> PageMemory | PagePacking:
        return self.memory if self.memory is not None else self.packing()


GLOO: Final = "gloo"
NCCL: Final = "nccl"


class PoolListeners:
    """tcp always. On a CPU shared memory for pools that lie in it, and gloo where it is asked for by name;
    on a GPU cuda_ipc, and nccl where torch has it. tcp goes by way of pinned host memory there, which is
    slow and always possible; it is also how a GPU and a CPU reach each other.
    """

    def __init__(
        self,
        pool: Tensor,
        shared: SharedPool | None,
        settings: RankSettings,
        key: LinkSecret,
        incarnation: bytes,
        on_death: Callable[[list[bytes]], None],
        *,
        clock: Clock,
        dropped: DroppedPeers,
    ) -> None:
        """shared: what `pool` was made by. incarnation: of this process.

        on_death: called by a thread, see MappedPool.
        """
        self._incarnation = incarnation
        self.pages = RankPages(pool)
        self.registrations = ReceiveRegistrations(self.pages.num_pages)
        self.generations: PageGenerations | None = None
        host, registrations = settings.host, self.registrations
        tcp_pool = self.pages.for_sockets()
        self._receiver = TcpReceiver(registrations, tcp_pool, key, host=host, clock=clock, dropped=dropped)
        self._direct: MappedPool | None = None
        self._device_pool: SharedDevicePool | None = None
        if self.pages.device == "cuda":
            self._device_pool = SharedDevicePool(pool)
            self.generations = self._device_pool.generations
            self._direct = CudaIpcListener(
                self._device_pool, registrations, key, on_death, clock=clock, dropped=dropped
            )
        elif shared is not None:
            self.generations = shared.generations
            self._direct = ShmListener(shared, registrations, key, on_death, clock=clock, dropped=dropped)
        self._group: GroupReceiver | None = None
        self._group_door: GroupListener | None = None
        name = _group_name(self.pages.device, settings.transport)
        if name is not None:
            self._group = GroupReceiver(
                name, registrations, pool, settings=GroupSettings(host=host), dropped=dropped
            )
            self._group_door = GroupListener(
                self._group, settings.layout, settings.rank, key, clock=clock, dropped=dropped
            )

    @property
    def memory(self) -> PageMemory:
        """Of a pool on a CPU."""
        assert self.pages.memory is not None
        return self.pages.memory

    @property
    def names(self) -> tuple[str, ...]:
        return self.message().names

    def message(self) -> RankListenerAddresses:
        is_cuda = self.pages.device == "cuda"
        direct = self._direct.address if self._direct is not None else ""
        port = self._group_door.address[1] if self._group_door is not None else 0
        return RankListenerAddresses(
            incarnation=self._incarnation,
            host=this_host(),
            device=self.pages.device,
            tcp_port=self._receiver.address[1],
            shm_address="" if is_cuda else direct,
            gloo_port=0 if is_cuda else port,
            cuda_ipc_address=direct if is_cuda else "",
            nccl_port=port if is_cuda else 0,
        )

    def close(self) -> None:
        """No page is written any more on return, but by processes that have mapped it."""
        self._receiver.close()
        if self._direct is not None:
            self._direct.close()
        if self._device_pool is not None:
            self._device_pool.close()
        if self._group_door is not None:
            self._group_door.close()
        if self._group is not None:
            self._group.close()


def _group_name(device: str, transport: str) -> GroupName | None:
    """torch's own sockets, which know no key, are not opened where nobody needs them."""
    if device == "cuda":
        return NCCL if torch.distributed.is_nccl_available() else None
    return GLOO if transport == GLOO else None
