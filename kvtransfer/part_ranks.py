"""The parts of a transfer: each pair of a source rank and a destination rank that share heads.

Both replicas number them from 0 in the same order, destination rank by destination rank. Part 0 is the pair
of the two ranks 0. To the landings of a rank, and so on the wire of bytes, a part is a transfer of its own.
"""

import hashlib
from functools import lru_cache
from typing import Final, NamedTuple

from baton.kvtransfer.transfer_plan import peers_of
from baton.layout import PageLayout

_PERSON: Final = b"baton kv part"


class PartRanks(NamedTuple):
    source: int
    destination: int


@lru_cache(maxsize=64)
def parts_of(source: PageLayout, destination: PageLayout) -> tuple[PartRanks, ...]:
    """Every part of a transfer from one replica to another. ConfigError when they serve two models."""
    return tuple(
        PartRanks(source_rank, rank)
        for rank in range(destination.tp_size)
        for source_rank in peers_of(destination, source, rank)
    )


def landing_id(transfer: bytes, part: int) -> bytes:
    """16 bytes by which the part's bytes are let in: of part 0 the transfer's own id."""
    if part == 0:
        return transfer
    return hashlib.blake2b(part.to_bytes(2, "big"), key=transfer, digest_size=16, person=_PERSON).digest()
