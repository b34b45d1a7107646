"""The ways into one rank's pool, and the book of who may use them."""

from collections.abc import Callable

from torch import Tensor

from baton.clock import Clock
from baton.kvtransfer.choose import this_host
from baton.kvtransfer.landing import Landings
from baton.kvtransfer.messages import Doors
from baton.kvtransfer.page_memory import PageGenerations, PageMemory, SharedPool
from baton.kvtransfer.shm_door import ShmDoor
from baton.kvtransfer.tcp_receiver import TcpReceiver
from baton.wire import DroppedPeers


class PoolDoors:
    """tcp always, and shared memory for pools that lie in it."""

    def __init__(
        self,
        pool: Tensor,
        shared: SharedPool | None,
        key: bytes,
        host: str,
        on_death: Callable[[list[bytes]], None],
        *,
        clock: Clock,
        dropped: DroppedPeers,
    ) -> None:
        """shared: what `pool` was made by. on_death: called by a thread, see ShmDoor."""
        self.memory = PageMemory.of(pool)
        self.landings = Landings(self.memory.num_pages)
        self.generations: PageGenerations | None = shared.generations if shared is not None else None
        self._receiver = TcpReceiver(self.landings, self.memory, key, host=host, clock=clock, dropped=dropped)
        self._shm: ShmDoor | None = None
        if shared is not None:
            self._shm = ShmDoor(shared, self.landings, key, on_death, clock=clock, dropped=dropped)

    @property
    def names(self) -> tuple[str, ...]:
        return ("tcp",) if self._shm is None else ("shm", "tcp")

    def message(self) -> Doors:
        return Doors(
            host=this_host(),
            device="cpu",
            tcp_port=self._receiver.address[1],
            shm_address=self._shm.address if self._shm is not None else "",
        )

    def close(self) -> None:
        """No page is written any more on return, but by processes that have mapped it."""
        self._receiver.close()
        if self._shm is not None:
            self._shm.close()
