"""A process of the simulation: a real ledger, memory whose contents are numbers, and its hand-offs.

What its steps write comes to the memory late, in the order of the steps: see Device.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from baton.clock import ManualClock
from baton.engine.cache.page_pool import PagePool
from baton.kvtransfer.protocol.destination import DestinationHandoff
from baton.kvtransfer.protocol.handoff import HandoffContext
from baton.kvtransfer.protocol.source import SourceHandoff
from baton.kvtransfer.ranks.messages import ShardCommand
from tests.numbered_pages import handoff_context

Pick: TypeAlias = Callable[[int], int]  # n -> a number in [0, n), by chance
Ranks: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[int, int]  # page, slot in it
Slot: TypeAlias = tuple[int, int, int]  # page, slot in it, shard
NUM_PAGES = 10


@dataclass(eq=False)
class Sequence:
    """Somebody who owns pages, wrote them or adopted them, and reads them until it lets go."""

    name: str
    pages: list[int]
    contents: dict[tuple[int, int], int]  # (unit, shard) -> what it must find
    num_computed: int = 0  # units that may be offered
    num_offered: int = 0


@dataclass(eq=False)
class Registration:
    """The receive registration of one shard: whether it is open, and the number of its active writers."""

    epoch: int
    is_open: bool = True
    num_inside: int = 0


class Device:
    """Writes what steps were launched to write, in their order and late. A StepMarks."""

    def __init__(self) -> None:
        self.memory: dict[Slot, int] = {}
        self.launched = 0
        self.unwritten: deque[tuple[Slot, int]] = deque()

    def launch(self, slot: Slot, contents: int) -> None:
        self.launched += 1
        self.unwritten.append((slot, contents))

    def write(self, num: int) -> None:
        """Write the next `num` of what was launched."""
        for _ in range(num):
            slot, contents = self.unwritten.popleft()
            self.memory[slot] = contents

    def has_passed(self, mark: int) -> bool:
        return self.launched - len(self.unwritten) >= mark

    def read_by_step(self, slot: Slot) -> int:
        """What a step reads that is launched now: it comes after all that was launched before."""
        late = (contents for other, contents in reversed(self.unwritten) if other == slot)
        return next(late, self.memory.get(slot, 0))


class Host:
    """Dies as a whole: a new Host takes its place, with nothing of the old one. Or one of its ranks dies."""

    def __init__(self, name: str, incarnation: int, units_per_page: int, ranks: Ranks) -> None:
        """ranks: of ours that moves each shard. Rank 0 is where the host's calls are made."""
        self.name = name
        self.incarnation = incarnation.to_bytes(16, "big")
        self.device = Device()
        self.pool = PagePool(NUM_PAGES, units_per_page, self.device)
        self.units_per_page = units_per_page
        self.ranks = ranks
        self.lost_rank: int | None = None  # it is heard no more
        self.is_rank_dead = False  # and known to be dead
        self.sequences: dict[str, Sequence] = {}
        self.sources: dict[bytes, SourceHandoff] = {}
        self.destinations: dict[bytes, DestinationHandoff] = {}
        self.unopened: set[bytes] = set()  # sources whose transports are being opened
        self.registrations: dict[tuple[bytes, int], Registration] = {}
        self.inbox: list[bytes] = []
        self.has_lost_peer = False  # and has not been told yet
        self.waiting: dict[bytes, list[ShardCommand]] = {}  # they wait for the device
        self.verifications: list[tuple[bytes, int, bytes]] = []
        self.finished: dict[bytes, str] = {}
        self.num_epochs = 0
        self.is_dead = False

    def next_epoch(self) -> int:
        self.num_epochs += 1
        return self.num_epochs

    def handoffs(self) -> list[SourceHandoff | DestinationHandoff]:
        return [*self.sources.values(), *self.destinations.values()]

    def place(self, pages: list[int] | tuple[int, ...], unit: int) -> Place:
        return pages[unit // self.units_per_page], unit % self.units_per_page

    def read(self, pages: list[int] | tuple[int, ...], unit: int, shard: int) -> int:
        return self.device.memory.get((*self.place(pages, unit), shard), 0)

    def write(self, pages: list[int] | tuple[int, ...], unit: int, shard: int, contents: int) -> None:
        self.device.memory[(*self.place(pages, unit), shard)] = contents

    def launch(self, pages: list[int], unit: int, shard: int, contents: int) -> None:
        """Have a step write it."""
        self.device.launch((*self.place(pages, unit), shard), contents)

    def is_lost(self, shard: int) -> bool:
        return self.ranks[shard] == self.lost_rank

    def is_gone(self, shard: int) -> bool:
        """Return True when no process has the shard's memory any more."""
        return self.is_dead or (self.is_lost(shard) and self.is_rank_dead)

    def check_reads(self, sequence: Sequence) -> None:
        for (unit, shard), expected in sequence.contents.items():
            if self.is_lost(shard):
                continue
            found = self.device.read_by_step((*self.place(sequence.pages, unit), shard))
            page, _ = self.place(sequence.pages, unit)
            assert sequence.name in self.pool.owners(page), f"{sequence.name} does not own page {page}"
            assert found == expected, f"{sequence.name} reads {found} in page {page}, {expected} was written"

    def num_pages_for(self, num_units: int) -> int:
        return -(-num_units // self.units_per_page)

    def make_room(self, num_pages: int) -> bool:
        while self.pool.num_free < num_pages:
            page = self.pool.cached.next_out()
            if page is None:
                return False
            self.pool.forget(page)
        return True

    def context(self, clock: ManualClock, units_per_page: tuple[int, int]) -> HandoffContext:
        return handoff_context(self.pool, clock, self.ranks, units_per_page)


@dataclass(frozen=True)
class Hint:
    """What a prefix index remembers of pages that were known once."""

    incarnation: bytes
    pages: tuple[tuple[int, int], ...]  # (page, generation)
    contents: dict[tuple[int, int], int] = field(hash=False)
    num_units: int
