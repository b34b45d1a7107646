"""The page tables of running sequences as rows of one array, so that a step copies only what changed."""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baton.engine.sequence import Sequence

FIRST_WIDTH: Final = 16


@dataclass(slots=True)
class _Row:
    index: int
    version: int  # of the sequence's page table
    num_pages: int  # filled in so far


class PageTableRows:
    """Row `index` is [0, num_pages) valid, zeros or leftovers beyond."""

    def __init__(self, max_num_seqs: int, max_pages: int) -> None:
        self._table = np.zeros((max_num_seqs, min(FIRST_WIDTH, max_pages)), np.int32)
        self._max_pages = max_pages
        self._rows: dict[Sequence, _Row] = {}  # by identity: a key may be used again
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def gather(self, sequences: Ordered[Sequence]) -> NDArray[np.int32]:
        """[num_sequences, pages of the longest one]: the tables as they are now, a copy."""
        if len(self._free) + len(self._rows) < len(sequences):
            raise ValueError(f"{len(sequences)} sequences in a step planned for {len(self._table)}")
        width = max((len(sequence.page_table) for sequence in sequences), default=0)
        self._widen(width)
        rows = [self._update(sequence, sequences) for sequence in sequences]
        return self._table[rows, :width]

    def _update(self, sequence: Sequence, batch: Ordered[Sequence]) -> int:
        row, num_pages = self._rows.get(sequence), len(sequence.page_table)
        if row is None:
            row = self._rows[sequence] = _Row(self._take_row(batch), sequence.table_version, 0)
        elif row.version != sequence.table_version or row.num_pages > num_pages:
            row.version, row.num_pages = sequence.table_version, 0
        if row.num_pages < num_pages:
            self._table[row.index, row.num_pages : num_pages] = sequence.page_table[row.num_pages :]
            row.num_pages = num_pages
        return row.index

    def _take_row(self, batch: Ordered[Sequence]) -> int:
        if not self._free:
            leavers = self._rows.keys() - set(batch)
            self._free += [self._rows.pop(sequence).index for sequence in leavers]
        return self._free.pop()

    def _widen(self, width: int) -> None:
        old = self._table
        if width <= old.shape[1]:
            return
        wider = min(self._max_pages, max(width, 2 * old.shape[1]))
        self._table = np.zeros((len(old), wider), np.int32)
        self._table[:, : old.shape[1]] = old
