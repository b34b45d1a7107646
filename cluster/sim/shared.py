"""What Redis is to several routers, in the simulation: it carries what they tell each other, or not all.

What it carries comes in order, as a stream's entries do.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final, TypeAlias

from baton.cluster.sim.network import End, Network
from baton.cluster.sim.process import Process
from baton.control import PageEvents
from baton.router.redis_messages import AnyShared, Codec
from baton.worker import Worker

CODEC: Final = Codec(bytes(32))
LOSS_CHANCES: Final = (0.0, 0.05, 1.0)  # in one simulation it is one of these

Hear: TypeAlias = Callable[[AnyShared], None]


class SharedStream:
    def __init__(self, network: Network, random: Random) -> None:
        self._network = network
        self._random = random
        self._loss_chance = random.choice(LOSS_CHANCES)
        self._readers: dict[Process, tuple[End, Hear]] = {}

    @property
    def may_lose(self) -> bool:
        return self._loss_chance > 0

    def join(self, process: Process, hear: Hear) -> "SharedLink":
        self._readers[process] = End(process, self._network), hear

        def leave() -> None:
            del self._readers[process]

        process.on_death.append(leave)
        return SharedLink(self, process)

    def carry(self, sender: Process, body: bytes) -> None:
        for reader, (end, hear) in list(self._readers.items()):
            if reader is not sender and self._random.random() >= self._loss_chance:
                self._network.deliver(end, partial(_say, hear, body), 0.0)


class SharedLink:
    """See router/sharing.py. Each router is told of pages by the workers themselves."""

    def __init__(self, stream: SharedStream, process: Process) -> None:
        self._stream = stream
        self._process = process

    def joined(self, worker: Worker) -> None: ...

    def left(self, worker_id: str) -> None: ...

    def pages(self, worker_id: str, events: PageEvents) -> None: ...

    def share(self, message: AnyShared) -> None:
        body = CODEC.encode_shared(message)
        self._process.send(lambda: self._stream.carry(self._process, body))


def _say(hear: Hear, body: bytes) -> None:
    hear(CODEC.decode_shared(body))
