"""What may be given up when room is short, oldest first, in groups that cannot push each other out.

The next to go is the oldest of the group that has most for its weight. So what a group keeps is at least its
share of the room, however fast others fill theirs; a group alone has all of it.
"""

from collections import OrderedDict
from typing import Generic, TypeAlias, TypeVar

Item = TypeVar("Item")
Group: TypeAlias = bytes  # the salt of what is kept: whose it is, and who may find it


class FairLru(Generic[Item]):
    def __init__(self) -> None:
        self.weights: dict[Group, float] = {}  # 1 of those that are not in it
        self._groups: dict[Group, OrderedDict[Item, None]] = {}  # oldest first, none empty

    def add(self, item: Item, group: Group) -> None:
        """As the newest of its group; it must be in none."""
        try:
            self._groups[group][item] = None
        except KeyError:
            self._groups[group] = OrderedDict(((item, None),))

    def remove(self, item: Item, group: Group) -> None:
        items = self._groups[group]
        del items[item]
        if not items:
            del self._groups[group]

    def clear(self) -> None:
        self._groups.clear()

    def has(self, item: Item, group: Group) -> bool:
        return item in self._groups.get(group, ())

    def num_of(self, group: Group) -> int:
        return len(self._groups.get(group, ()))

    def next_out(self) -> Item | None:
        """What to give up next; None when there is nothing."""
        groups = self._groups
        if len(groups) > 1:
            return next(iter(groups[max(groups, key=self._num_for_weight)]))
        for items in groups.values():
            return next(iter(items))
        return None

    def _num_for_weight(self, group: Group) -> float:
        return len(self._groups[group]) / self.weights.get(group, 1.0)
