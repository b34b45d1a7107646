"""The ways into one rank's pool, and the book of who may use them."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from baton.challenge import LinkSecret
from baton.clock import Clock
from baton.kvtransfer.choose import this_host
from baton.kvtransfer.cuda_ipc import CudaIpcDoor, SharedDevicePool
from baton.kvtransfer.group_door import GroupDoor
from baton.kvtransfer.group_receiver import GroupReceiver
from baton.kvtransfer.landing import Landings
from baton.kvtransfer.messages import RankDoors
from baton.kvtransfer.page_memory import PageGenerations, PageMemory, SharedPool
from baton.kvtransfer.pair import GroupName, GroupSettings
from baton.kvtransfer.rank_messages import RankSettings
from baton.kvtransfer.rank_pages import RankPages
from baton.kvtransfer.shm_door import PoolDoor, ShmDoor
from baton.kvtransfer.tcp_receiver import TcpReceiver
from baton.wire import DroppedPeers

GLOO: Final = "gloo"
NCCL: Final = "nccl"


class PoolDoors:
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

        on_death: called by a thread, see PoolDoor.
        """
        self._incarnation = incarnation
        self.pages = RankPages(pool)
        self.landings = Landings(self.pages.num_pages)
        self.generations: PageGenerations | None = None
        host, landings = settings.host, self.landings
        tcp_pool = self.pages.for_sockets()
        self._receiver = TcpReceiver(landings, tcp_pool, key, host=host, clock=clock, dropped=dropped)
        self._direct: PoolDoor | None = None
        self._device_pool: SharedDevicePool | None = None
        if self.pages.device == "cuda":
            self._device_pool = SharedDevicePool(pool)
            self.generations = self._device_pool.generations
            self._direct = CudaIpcDoor(
                self._device_pool, landings, key, on_death, clock=clock, dropped=dropped
            )
        elif shared is not None:
            self.generations = shared.generations
            self._direct = ShmDoor(shared, landings, key, on_death, clock=clock, dropped=dropped)
        self._group: GroupReceiver | None = None
        self._group_door: GroupDoor | None = None
        name = _group_name(self.pages.device, settings.transport)
        if name is not None:
            self._group = GroupReceiver(
                name, landings, pool, settings=GroupSettings(host=host), dropped=dropped
            )
            self._group_door = GroupDoor(
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

    def message(self) -> RankDoors:
        is_cuda = self.pages.device == "cuda"
        direct = self._direct.address if self._direct is not None else ""
        port = self._group_door.address[1] if self._group_door is not None else 0
        return RankDoors(
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
