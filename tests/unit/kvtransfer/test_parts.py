"""Both ends' view of one pair of ranks: source.py and destination.py of kvtransfer/protocol."""

import pytest

from baton.kvtransfer.protocol.destination import ReceivePart
from baton.kvtransfer.protocol.messages import Commit, Wrote
from baton.kvtransfer.protocol.source import SourcePart

ID = b"t" * 16


def test_part_is_written_when_nothing_is_missing_or_under_way() -> None:
    part = SourcePart(2)
    part.in_flight = {(0, 1), (1, 2)}
    part.wrote(0, 1, b"digest 0")
    part.wrote(1, 2, b"digest 1")
    assert (part.is_written, part.digests) == (False, b"digest 0digest 1")
    part.in_flight.clear()
    assert (part.is_written, part.digests) == (True, b"digest 0digest 1")


@pytest.mark.parametrize(
    ("units", "ranges"),
    [
        ((0,), [(0, 1)]),
        ((0, 1, 2), [(0, 3)]),
        ((1, 3), [(1, 2), (3, 4)]),
        ((0, 1, 3, 5, 6), [(0, 2), (3, 4), (5, 7)]),
    ],
)
def test_damaged_units_are_written_again_as_ranges(
    units: tuple[int, ...], ranges: list[tuple[int, int]]
) -> None:
    part = SourcePart(8)
    part.is_committed = True
    assert part.can_be_corrupt(units)
    assert part.open_again(units) == ranges
    assert not part.is_written
    part.is_committed = True
    assert not part.can_be_corrupt(units)  # a second time


def test_wrong_number_of_digests_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="7 bytes of digests"):
        SourcePart(1).wrote(0, 1, b"digests")


def test_part_that_committed_is_silent_until_it_is_opened_again() -> None:
    part = ReceivePart(0, ID)
    wrote = Wrote(transfer=ID, epoch=1, first=0, stop=2)
    commit = Commit(transfer=ID, epoch=1, digests=bytes(16))
    assert part.accepts(wrote, 2) and part.accepts(commit, 2)
    assert not part.accepts(wrote, 1) and not part.accepts(commit, 3)
    part.commit(commit.digests)
    assert not part.accepts(wrote, 2) and not part.accepts(commit, 2)
    part.corrupt = (1,)
    assert part.open_again() == (1,)
    assert part.accepts(commit, 2) and not part.is_stopped and part.corrupt is None
