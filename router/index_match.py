"""From the runs of a prompt's pages to how many of its first pages each worker holds."""

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.router.index_sets import MAX_SLOTS

Lengths: TypeAlias = NDArray[np.int32]

_FEW: Final = 8


class Match(NamedTuple):
    """How many of a prompt's first pages each worker holds, by its slot (see `PrefixIndex.slot`).

    `num_pages` counts the device's and then the host tier's, so it is never less. To be read only.
    """

    num_device_pages: Lengths
    num_pages: Lengths


def measure(runs: list[tuple[int, int]], present: int, num_slots: int) -> Lengths:
    """runs: where each begins, and the slots that hold its pages; the last is empty. Who holds all pages up
    to some run, and not that one, has as many as there are before it."""
    lengths = np.zeros(num_slots, np.int32)
    holding = present & runs[0][1]
    for start, slots in runs[1:]:
        lost = holding & ~slots
        if lost:
            lengths[_slots(lost)] = start
            holding ^= lost
        if not holding:
            break
    return lengths


def _slots(mask: int) -> list[int] | NDArray[np.int64]:
    if mask.bit_count() > _FEW:
        packed = np.frombuffer(mask.to_bytes(MAX_SLOTS // 8, "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    slots = []
    while mask:
        slots.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return slots
