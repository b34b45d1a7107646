"""The prefix index as plain dicts, slow and without bounds: an oracle."""

from dataclasses import dataclass, field

from baton.messages.control import KvEventBatch
from baton.messages.workers import Tier
from baton.pages import split_keys


@dataclass
class TwinWorker:
    held: dict[bytes, Tier] = field(default_factory=dict)
    expected: dict[bytes, tuple[int, float]] = field(default_factory=dict)  # by which expectation, until when
    next_number: int | None = None
    is_asked: bool = False


class Twin:
    def __init__(self) -> None:
        self.workers: dict[str, TwinWorker] = {}
        self.num_expectations = 0

    def apply(self, worker_id: str, events: KvEventBatch) -> bool:
        worker = self.workers[worker_id]
        changes = split_keys(events.keys)
        if events.is_snapshot:
            worker.held.clear()
            worker.expected.clear()
            is_in_order, num_stale = True, 0
        elif worker.next_number is None:
            is_in_order, num_stale = events.first == 0 and not worker.is_asked, 0
        else:
            is_in_order = events.first <= worker.next_number
            num_stale = min(len(changes), max(0, worker.next_number - events.first))
        for key in changes[num_stale:]:
            worker.expected.pop(key, None)
            worker.held.pop(key, None)
            if events.tier is not None:
                worker.held[key] = events.tier
        if not is_in_order:
            was_asked, worker.next_number, worker.is_asked = worker.is_asked, None, True
            return was_asked
        worker.is_asked = False
        end = events.first + len(changes)
        known = worker.next_number
        worker.next_number = end if known is None or events.is_snapshot else max(known, end)
        return True

    def expect(self, worker_id: str, keys: bytes, until_s: float) -> None:
        worker = self.workers[worker_id]
        self.num_expectations += 1
        for key in split_keys(keys):
            if key not in worker.held:
                worker.expected[key] = (self.num_expectations, until_s)

    def tick(self, now_s: float) -> None:
        for worker in self.workers.values():
            late = [key for key, (_, until_s) in worker.expected.items() if until_s <= now_s]
            for key in late:
                del worker.expected[key]

    def num_pages(self, worker_id: str, keys: bytes) -> int:
        """The number of first pages that a worker holds or is expected to hold."""
        worker = self.workers[worker_id]
        held = [key in worker.expected or key in worker.held for key in split_keys(keys)]
        return held.index(False) if False in held else len(held)

    def is_prefix_closed(self, keys: bytes) -> bool:
        """True when every worker holds a first part of these pages and none after it, as real workers do."""
        return all(
            self.num_pages(worker_id, keys)
            == sum(key in each.expected or key in each.held for key in split_keys(keys))
            for worker_id, each in self.workers.items()
        )

    def num_reported(self, worker_id: str, keys: bytes) -> int:
        """The number of first pages that a worker holds."""
        held = [key in self.workers[worker_id].held for key in split_keys(keys)]
        return held.index(False) if False in held else len(held)

    def outside(self, worker_id: str, keys: bytes) -> tuple[int, int]:
        """The numbers of pages in host memory and on disk."""
        tiers = [self.workers[worker_id].held.get(key) for key in split_keys(keys)]
        return tiers.count(Tier.HOST), tiers.count(Tier.DISK)
