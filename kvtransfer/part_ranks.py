"""The parts of a transfer: each pair of a source rank and a destination rank that share heads, and each group
of layers that leaves by itself.

Both replicas number them from 0 in the same order, destination rank by destination rank, and within a pair of
ranks group by group. Part 0 is of the two ranks 0, and of the first layers. To the landings of a rank, and so
on the wire of bytes, a part is a transfer of its own.
"""

import hashlib
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from baton.kvtransfer.transfer_plan import peers_of
from baton.layout import PageLayout

_PERSON: Final = b"baton kv part"


class PartRanks(NamedTuple):
    source: int
    destination: int
    layers: tuple[int, int]  # [first, stop)


@lru_cache(maxsize=64)
def parts_of(source: PageLayout, destination: PageLayout, num_layer_groups: int = 1) -> tuple[PartRanks, ...]:
    """Every part of a transfer from one replica to another. ConfigError when they serve two models,
    ValueError when these have fewer layers than groups.
    """
    groups = layer_groups(source.num_layers, num_layer_groups)
    return tuple(
        PartRanks(source_rank, rank, layers)
        for rank in range(destination.tp_size)
        for source_rank in peers_of(destination, source, rank)
        for layers in groups
    )


def layer_groups(num_layers: int, num_groups: int) -> list[tuple[int, int]]:
    """[first, stop) of each group, as equal as can be: those in which an engine tells of a step's layers."""
    if not 1 <= num_groups <= num_layers:
        raise ValueError(f"{num_layers} layers make no {num_groups} groups")
    bounds = [group * num_layers // num_groups for group in range(num_groups + 1)]
    return list(pairwise(bounds))


def landing_id(transfer: bytes, part: int) -> bytes:
    """16 bytes by which the part's bytes are let in: of part 0 the transfer's own id."""
    if part == 0:
        return transfer
    return hashlib.blake2b(part.to_bytes(2, "big"), key=transfer, digest_size=16, person=_PERSON).digest()
