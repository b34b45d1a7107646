"""Things in order, each with its work, and how much work comes before any place among them.

They are kept in blocks, each in order, of some `block_size`: to put a thing at its place or take it away
touches one block, and the work before a place is that of the blocks before it and of a part of one. So each
takes a few microseconds, of ten things as of a million, and nothing is ever put off for a later one to pay.
What is compared lies side by side in memory: among a million things, to follow a reference costs more.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final, Generic, TypeAlias, TypeVar

Item = TypeVar("Item")
Order: TypeAlias = tuple[int, float, int]  # the least is first; the last number is of one thing alone

BLOCK_SIZE: Final = 128


class _Block(Generic[Item]):
    """Entry i of each is of the same thing."""

    __slots__ = ("dues", "items", "numbers", "priorities", "works")

    def __init__(self) -> None:
        self.priorities = array("q")
        self.dues = array("d")
        self.numbers = array("q")
        self.works = array("d")
        self.items: list[Item] = []

    def __len__(self) -> int:
        return len(self.items)

    @property
    def last(self) -> Order:
        return self.priorities[-1], self.dues[-1], self.numbers[-1]

    def place(self, order: Order) -> int:
        """How many come before it."""
        priority, due, number = order
        priorities, dues = self.priorities, self.dues
        first, stop = 0, len(dues)
        if not priorities[0] == priority == priorities[-1]:
            first, stop = bisect_left(priorities, priority), bisect_right(priorities, priority)
        first, stop = bisect_left(dues, due, first, stop), bisect_right(dues, due, first, stop)
        return bisect_left(self.numbers, number, first, stop)

    def insert(self, place: int, order: Order, item: Item, work: float) -> None:
        self.priorities.insert(place, order[0])
        self.dues.insert(place, order[1])
        self.numbers.insert(place, order[2])
        self.works.insert(place, work)
        self.items.insert(place, item)

    def delete(self, place: int) -> float:
        """Its work."""
        del self.priorities[place], self.dues[place], self.numbers[place], self.items[place]
        return self.works.pop(place)

    def split(self) -> "_Block[Item]":
        """The second half, which is not in this one any more."""
        half, other = len(self) // 2, _Block[Item]()
        for name in ("priorities", "dues", "numbers", "works", "items"):
            values = getattr(self, name)
            setattr(other, name, values[half:])
            del values[half:]
        return other

    def extend(self, other: "_Block[Item]") -> None:
        """By what comes after all that is in it."""
        for name in ("priorities", "dues", "numbers", "works", "items"):
            getattr(self, name).extend(getattr(other, name))


class WorkLine(Generic[Item]):
    __slots__ = ("_block_size", "_blocks", "_lasts", "_works", "num", "work")

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        """A block has a quarter of `block_size` to twice as many; the first may have fewer."""
        self.num = 0
        self.work = 0.0  # of all, together
        self._block_size = block_size
        self._blocks: list[_Block[Item]] = []  # none is empty
        self._lasts: list[Order] = []  # of each block
        self._works: list[float] = []  # of all that is in each block

    def __iter__(self) -> Iterator[Item]:
        """In order."""
        return (item for block in self._blocks for item in block.items)

    def first(self) -> Item:
        """There must be one."""
        return self._blocks[0].items[0]

    def add(self, order: Order, item: Item, work: float) -> None:
        """Its order must be its own."""
        self.num += 1
        self.work += work
        if not self._blocks:
            block = _Block[Item]()
            block.insert(0, order, item, work)
            self._blocks.append(block)
            self._lasts.append(order)
            self._works.append(work)
            return
        number = min(bisect_left(self._lasts, order), len(self._lasts) - 1)
        block = self._blocks[number]
        block.insert(block.place(order), order, item, work)
        self._lasts[number] = block.last
        self._works[number] += work
        if len(block) > 2 * self._block_size:
            self._split(number)

    def remove(self, order: Order) -> None:
        """What was added with that order; it must be here."""
        self.num -= 1
        number = bisect_left(self._lasts, order)
        block = self._blocks[number]
        place = 0 if block.numbers[0] == order[2] else block.place(order)
        assert block.numbers[place] == order[2], order
        work = block.delete(place)
        self._works[number] -= work
        self.work = self.work - work if self.num else 0.0
        if not block:
            del self._blocks[number], self._lasts[number], self._works[number]
            return
        self._lasts[number] = block.last
        if 4 * len(block) < self._block_size and number:
            self._merge(number - 1)

    def work_before(self, order: Order) -> float:
        """Of all with a lesser order."""
        number = bisect_left(self._lasts, order)
        if number == len(self._blocks):
            return self.work
        block = self._blocks[number]
        return sum(self._works[:number]) + sum(block.works[: block.place(order)])

    def check_integrity(self) -> None:
        """AssertionError when the parts do not agree."""
        orders = list[Order]()
        for block, work in zip(self._blocks, self._works, strict=True):
            orders += zip(block.priorities, block.dues, block.numbers, strict=True)
            assert 0 < len(block) == len(block.works) == len(block.numbers)
            assert abs(sum(block.works) - work) <= 1e-6 * (1 + work)
        assert orders == sorted(orders) and len(orders) == self.num
        assert self._lasts == [block.last for block in self._blocks]
        assert abs(sum(self._works) - self.work) <= 1e-6 * (1 + self.work)

    def _split(self, number: int) -> None:
        block = self._blocks[number]
        other = block.split()
        self._blocks.insert(number + 1, other)
        self._lasts[number : number + 1] = [block.last, other.last]
        self._works[number : number + 1] = [sum(block.works), sum(other.works)]

    def _merge(self, number: int) -> None:
        """With the next one."""
        block = self._blocks[number]
        block.extend(self._blocks.pop(number + 1))
        self._works[number] += self._works.pop(number + 1)
        del self._lasts[number]
        if len(block) > 2 * self._block_size:
            self._split(number)
