"""The ways into one rank's pool, and the book of who may use them."""

from collections.abc import Callable
from typing import Final

from torch import Tensor

from baton.clock import Clock
from baton.kvtransfer.choose import this_host
from baton.kvtransfer.endpoint_settings import EndpointSettings
from baton.kvtransfer.group_door import GroupDoor
from baton.kvtransfer.group_receiver import GroupReceiver
from baton.kvtransfer.landing import Landings
from baton.kvtransfer.messages import Doors
from baton.kvtransfer.page_memory import PageGenerations, PageMemory, SharedPool
from baton.kvtransfer.pair import GroupSettings
from baton.kvtransfer.shm_door import ShmDoor
from baton.kvtransfer.tcp_receiver import TcpReceiver
from baton.wire import DroppedPeers

GLOO: Final = "gloo"


class PoolDoors:
    """tcp always, shared memory for pools that lie in it, gloo where it is asked for by name."""

    def __init__(
        self,
        pool: Tensor,
        shared: SharedPool | None,
        settings: EndpointSettings,
        on_death: Callable[[list[bytes]], None],
        *,
        clock: Clock,
        dropped: DroppedPeers,
    ) -> None:
        """shared: what `pool` was made by. on_death: called by a thread, see ShmDoor."""
        self.memory = PageMemory.of(pool)
        self.landings = Landings(self.memory.num_pages)
        self.generations: PageGenerations | None = shared.generations if shared is not None else None
        key, host, landings, memory = settings.key, settings.host, self.landings, self.memory
        self._receiver = TcpReceiver(landings, memory, key, host=host, clock=clock, dropped=dropped)
        self._shm: ShmDoor | None = None
        if shared is not None:
            self._shm = ShmDoor(shared, landings, key, on_death, clock=clock, dropped=dropped)
        self._gloo: GroupReceiver | None = None
        self._gloo_door: GroupDoor | None = None
        if settings.transport == GLOO:  # torch's own sockets, which know no key, open for nobody else
            self._gloo = GroupReceiver(
                GLOO, landings, memory, settings=GroupSettings(host=host), dropped=dropped
            )
            self._gloo_door = GroupDoor(
                self._gloo, settings.layout, settings.rank, key, clock=clock, dropped=dropped
            )

    @property
    def names(self) -> tuple[str, ...]:
        doors = {"shm": self._shm, GLOO: self._gloo, "tcp": self._receiver}
        return tuple(name for name, door in doors.items() if door is not None)

    def message(self) -> Doors:
        return Doors(
            host=this_host(),
            device="cpu",
            tcp_port=self._receiver.address[1],
            shm_address=self._shm.address if self._shm is not None else "",
            gloo_port=self._gloo_door.address[1] if self._gloo_door is not None else 0,
        )

    def close(self) -> None:
        """No page is written any more on return, but by processes that have mapped it."""
        self._receiver.close()
        if self._shm is not None:
            self._shm.close()
        if self._gloo_door is not None:
            self._gloo_door.close()
        if self._gloo is not None:
            self._gloo.close()
