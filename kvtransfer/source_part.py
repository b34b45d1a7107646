"""One part of a leaving transfer: what is still to be written, and what is being written."""

from collections.abc import Sequence
from itertools import pairwise

from baton.kvtransfer.messages import DIGEST_BYTES


class SourcePart:
    def __init__(self, num_units: int) -> None:
        self.in_flight: set[tuple[int, int]] = set()  # pushes: (first, stop)
        self.is_committed = False
        self.was_corrupt = False
        self._num_units = num_units
        self._num_missing = num_units
        self._digests = bytearray()  # none until the first push: a peer's mere question takes no memory

    @property
    def is_written(self) -> bool:
        return not self._num_missing and not self.in_flight

    @property
    def digests(self) -> bytes:
        return bytes(self._digests)

    def wrote(self, first: int, stop: int, digests: bytes) -> None:
        if len(digests) != (stop - first) * DIGEST_BYTES:
            raise ValueError(f"{len(digests)} bytes of digests for units [{first}, {stop})")
        self._digests = self._digests or bytearray(self._num_units * DIGEST_BYTES)
        self._digests[first * DIGEST_BYTES : stop * DIGEST_BYTES] = digests
        self._num_missing -= stop - first

    def can_be_corrupt(self, units: Sequence[int]) -> bool:
        """Only what was committed can be damaged, and only once."""
        return self.is_committed and not self.was_corrupt and units[-1] < self._num_units

    def open_again(self, units: Sequence[int]) -> list[tuple[int, int]]:
        """The damaged units are missing again; returns them as ranges [first, stop)."""
        self.is_committed, self.was_corrupt, self._num_missing = False, True, len(units)
        gaps = [index for index, (a, b) in enumerate(pairwise(units), 1) if b != a + 1]
        bounds = pairwise([0, *gaps, len(units)])
        return [(units[start], units[stop - 1] + 1) for start, stop in bounds]
