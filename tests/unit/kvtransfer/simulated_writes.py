"""How bytes travel in the simulation: by a receiver at the destination, or by the source's own hand.

A push moves one unit a step. Through a receiver, a unit is read, travels alone and in any order, is let into
its registration or drained there, and is written in a step of its own. A direct writer looks at the page's
generation in one step and writes in the next, so it may look, sleep and write late: only the ledger can
keep its page from being reused in between.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.unit.kvtransfer.simulated_host import Host, Registration

FLIPPED = 1 << 62


@dataclass(eq=False)
class PushJob:
    source: Host
    destination: Host  # the one whose memory is mapped or connected, even when it is dead
    transfer: bytes
    epoch: int
    shard: int
    first: int
    stop: int
    source_pages: list[int]
    pages: tuple[int, ...]
    generations: tuple[int, ...]
    is_direct: bool
    after: int  # the mark that the source's steps must have passed before anything is read
    next_unit: int = 0
    carried: int | None = None  # read and checked, not written yet
    digests: bytearray = field(default_factory=bytearray)
    num_written: int = 0
    must_stop: bool = False
    has_failed: bool = False

    def __post_init__(self) -> None:
        self.next_unit = self.first

    @property
    def units(self) -> dict[str, Any]:
        """The fields of an event about the job."""
        return {"transfer": self.transfer, "shard": self.shard, "first": self.first, "stop": self.stop}

    @property
    def is_written(self) -> bool:
        return self.num_written == self.stop - self.first

    def read_next(self) -> int:
        page, _ = self.source.place(self.source_pages, self.next_unit)
        assert ("reader", self.transfer) in self.source.pool.owners(page), f"page {page} is read unheld"
        contents = self.source.read(self.source_pages, self.next_unit, self.shard)
        self.digests += contents.to_bytes(8, "big")
        return contents

    def step_directly(self) -> None:
        """Look, or write what was looked at."""
        page, _ = self.destination.place(self.pages, self.next_unit)
        if self.carried is None:
            index = self.next_unit // self.destination.units_per_page
            if self.destination.pool.generation(page) != self.generations[index]:
                self.has_failed = True
                return
            self.carried = self.read_next()
            return
        write(self.destination, self.transfer, self.shard, self.pages, self.next_unit, self.carried)
        self.carried = None
        self.next_unit += 1
        self.num_written += 1


@dataclass(eq=False)
class Flight:
    """One unit on its way to a receiver, or inside it."""

    job: PushJob
    unit: int
    contents: int
    registration: Registration | None = None  # once it is being written

    def arrive(self) -> bool:
        """True when the write is over: written now, or drained."""
        job, host = self.job, self.job.destination
        if self.registration is None:
            registration = host.registrations.get((job.transfer, job.shard))
            if registration is None or not registration.is_open or registration.epoch != job.epoch:
                job.has_failed = True
                return True
            registration.num_inside += 1
            self.registration = registration
            return False
        write(host, job.transfer, job.shard, job.pages, self.unit, self.contents)
        self.registration.num_inside -= 1
        job.num_written += 1
        return True


def write(host: Host, transfer: bytes, shard: int, pages: tuple[int, ...], unit: int, contents: int) -> None:
    page, _ = host.place(pages, unit)
    if not host.is_gone(shard):
        owners = host.pool.owners(page)
        assert ("writer", transfer, shard) in owners, f"page {page} is {owners}'s while a writer is in it"
    host.write(pages, unit, shard, contents)
