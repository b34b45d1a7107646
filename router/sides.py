"""The workers of one role that could serve an attempt, and who of them holds most of a prompt."""

from collections.abc import Mapping, Sequence

import msgspec

from baton.router.costs import Kin
from baton.router.index_match import Holdings
from baton.router.membership import Member
from baton.router.prefix_index import PrefixIndex
from baton.router.prompt_keys import Family, family_of
from baton.worker import WorkerRole


class Station(msgspec.Struct, frozen=True, gc=False):
    """What every decision asks of a worker, and no decision changes."""

    id: str
    family: Family  # of equal ones the same object, and so is kin: what one reads is warm for the next
    kin: Kin
    page_size: int
    num_slots: int  # of KV, at least 1
    max_num_seqs: int  # at least 1
    max_num_batched_tokens: int  # that a step computes; 0: unknown
    is_prefill: bool
    slot: int  # in the index; 0 where it does not know it
    slot_bit: int  # 0: the index does not know it


class _Kindred:
    """Those of a side that name pages alike."""

    __slots__ = ("by_slot", "slots")

    def __init__(self) -> None:
        self.by_slot: dict[int, Station] = {}
        self.slots = 0  # a bit for each


class Side:
    """Made once for a membership: of a thousand workers nobody is asked one by one what it holds."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.families: Sequence[Family] = list({family_of(member.worker): None for member in members})
        self.by_id: dict[str, Station] = {}  # as `stations` has made them
        self._stations: list[Station] = []
        self._kindred: dict[Family, _Kindred] = {}
        self._version = -1

    def __len__(self) -> int:
        return len(self.members)

    def stations(self, index: PrefixIndex) -> Sequence[Station]:
        """In the members' order."""
        if self._version != index.version:
            self._version = index.version
            shared = {family: (family, family[:2]) for family in self.families}
            self._stations = [_station(member, shared, index) for member in self.members]
            self.by_id = {station.id: station for station in self._stations}
            self._kindred = {family: _Kindred() for family in self.families}
            for station in self._stations:
                if station.slot_bit:
                    kindred = self._kindred[station.family]
                    kindred.by_slot[station.slot] = station
                    kindred.slots |= station.slot_bit
        return self._stations

    def holders(self, family: Family, holdings: Holdings, limit: int, first: Station) -> list[Station]:
        """Of this family: at most so many, who hold some of a prompt, and none that is left out holds more.

        holdings: of the family's keys, from the index that `stations` was asked with. first: where the search
        among equals begins.
        """
        kindred = self._kindred[family]
        slots = holdings.most(kindred.slots, limit, first.slot)
        return [kindred.by_slot[slot] for slot in slots]


def _station(member: Member, shared: Mapping[Family, tuple[Family, Kin]], index: PrefixIndex) -> Station:
    worker, slot = member.worker, index.slot(member.id)
    family, kin = shared[family_of(worker)]
    return Station(
        id=member.id,
        family=family,
        kin=kin,
        page_size=worker.page_size,
        num_slots=max(1, worker.num_pages * worker.page_size),
        max_num_seqs=max(1, worker.max_num_seqs),
        max_num_batched_tokens=worker.max_num_batched_tokens,
        is_prefill=worker.role is WorkerRole.PREFILL,
        slot=slot or 0,
        slot_bit=0 if slot is None else 1 << slot,
    )
