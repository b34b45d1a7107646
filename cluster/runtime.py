"""The seam between what the cluster runs and where: a runtime starts processes, watches and ends them."""

from typing import Protocol

from baton.cluster.cluster_key import Keys
from baton.cluster.process_spec import Loading, ProcessSpec
from baton.worker import Address


class Process(Protocol):
    """One life of a process. Its calls may be repeated, and come from one asyncio loop."""

    async def ready(self) -> Address:
        """Where it serves. ConfigError or WorkerLost: it ended before it did; the message says why."""

    async def loading(self) -> Loading | None:
        """How far it has come before it serves; None where it has not said."""

    async def watch(self) -> str:
        """Waits until it is gone, and says how it ended; "" when it was drained, or told to by `stop`."""

    def stop(self) -> None:
        """Ask it to drain and end."""

    def kill(self) -> None:
        """End it now, with all that it has started."""

    def give_up(self) -> None:
        """End it though it may not answer, as on a machine that stands still; waits for nothing.

        Its successor, the next spawn of its name, is placed elsewhere where there is room.
        """

    async def silent_s(self) -> float:
        """Seconds since its event loop last ran, of a router or a gateway that serves; 0 where unknown."""


class Runtime(Protocol):
    @property
    def num_gpus(self) -> int:
        """That workers could have, once it is open."""

    @property
    def host(self) -> str:
        """The address of this machine that the cluster's processes connect to."""

    @property
    def worker_host(self) -> str:
        """What workers listen on; "": the address of the machine that each is started on."""

    @property
    def head_away_s(self) -> float:
        """Seconds since Ray's head last answered; 0 while it does, and where there is no Ray.

        Meanwhile what runs goes on, and nothing can be started.
        """

    async def open(self) -> None:
        """ConfigError when there is nothing to run processes on."""

    async def place(self, specs: list[ProcessSpec]) -> None:
        """Have room for all of these, before any is started. ConfigError: there is none, and why."""

    async def spawn(self, spec: ProcessSpec) -> Process:
        """Start it, and return at once."""

    def use_keys(self, keys: Keys) -> None:
        """Hand these cluster keys to every process from now on, also to those that run; returns at once."""

    async def close(self) -> None:
        """End everything that was started and is still there."""
