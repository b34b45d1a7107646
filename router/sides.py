"""The workers of one role that could serve an attempt, and who of them holds most of a prompt."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.router.index_match import Lengths
from baton.router.membership import Member
from baton.router.prefix_index import PrefixIndex
from baton.router.prompt_keys import Family, family_of

_ANYWHERE: Final = np.iinfo(np.int32).max  # of a slot: beyond all lengths


class Kin(NamedTuple):
    """Those of a side that name pages alike."""

    members: Sequence[Member]
    slots: NDArray[np.int64]  # in a Match; _ANYWHERE: the index does not know it


class Side:
    """Made once for a membership: of a thousand workers nobody is asked one by one what it holds."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self._families: dict[Family, list[Member]] = {}
        for member in members:
            self._families.setdefault(family_of(member.worker), []).append(member)
        self._kin: dict[Family, Kin] = {}
        self._version = -1

    def __len__(self) -> int:
        return len(self.members)

    @property
    def families(self) -> Sequence[Family]:
        return list(self._families)

    def holders(self, index: PrefixIndex, family: Family, lengths: Lengths, most: int) -> list[Member]:
        """Of this family: at most so many, who hold some of a prompt, and none that is left out holds more.

        lengths: as in a Match of the family's keys.
        """
        kin = self._kin_of(index, family)
        held = np.append(lengths, 0).take(np.minimum(kin.slots, lengths.size))
        rows = np.argpartition(held, -most)[-most:] if held.size > most else np.arange(held.size)
        return [kin.members[row] for row in rows.tolist() if held[row]]

    def _kin_of(self, index: PrefixIndex, family: Family) -> Kin:
        if self._version != index.version:
            self._version = index.version
            self._kin.clear()
        if family not in self._kin:
            members = self._families[family]
            slots = [index.slot(member.id) for member in members]
            numbers = [_ANYWHERE if slot is None else slot for slot in slots]
            self._kin[family] = Kin(members, np.array(numbers, np.int64))
        return self._kin[family]
