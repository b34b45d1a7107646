from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import xxhash

from baton.kernels.pages import copy_runs_reference
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks import digests
from baton.kvtransfer.ranks.digests import (
    ShardDigests,
    UnitDigests,
    differing_units,
    digest_units,
)
from baton.pages import PageLayout
from tests.layouts import a_layout
from tests.transfer_ends import as_received, local_rank, runs_of

NUM_PAGES = 8


def layout(tp_size: int, page_size: int) -> PageLayout:
    return a_layout(tp_size=tp_size, page_size=page_size, num_kv_heads=4, head_dim=2)


def pool_of(layout: PageLayout) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    rng = np.random.default_rng(layout.page_size)
    return rng.integers(0, 256, NUM_PAGES * layout.page_bytes, dtype=np.uint8)


@pytest.mark.parametrize("transfer_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("cuts", [((1, 4), (1, 4)), ((2, 8), (4, 4)), ((4, 2), (2, 8))])
def test_digests_of_codes_are_those_of_the_rows_that_they_stand_for(
    transfer_dtype: str, cuts: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    layouts = [msgspec.structs.replace(layout(*cut), transfer_dtype=transfer_dtype) for cut in cuts]
    plan = plan_transfer(layouts[0], layouts[1], 0, 0)
    sent = torch.randn(NUM_PAGES, layouts[0].page_bytes // 4).view(torch.uint8)
    received = torch.zeros(NUM_PAGES, layouts[1].page_bytes, dtype=torch.uint8)
    num_units, pages = 4, ([3, 1, 4, 0], [2, 0, 5, 6])
    runs = runs_of(plan, 0, num_units, *pages)
    copied = (runs.source_offset_N, runs.destination_offset_N, runs.run_bytes)
    copy_runs_reference(as_received(plan, sent.view(-1)), received.view(-1), *copied)

    ends = [ShardDigests(UnitDigests(local_rank(pool)), b"k" * 32, 1) for pool in (sent, received)]
    expected = ends[0].take(plan, runs.source_offset_N, 0, num_units)
    stored = plan.as_stored()
    assert ends[1].take(stored, runs.destination_offset_N, 0, num_units) == expected
    assert ends[0].take(stored, runs.source_offset_N, 0, num_units) != expected
    parts = [plan.source.offsets(first, first + 2, pages[0]) for first in (0, 2)]
    taken = (ends[0].take(plan, parts[at // 2], at, at + 2) for at in (0, 2))
    assert expected == b"".join(taken)
    received.view(-1)[int(runs.destination_offset_N[-1])] ^= 1
    found = ends[1].take(stored, runs.destination_offset_N, 0, num_units)
    assert differing_units(expected, found) == (num_units - 1,)


@pytest.mark.parametrize("offsets", [[10, 15, 60, 65], [10, 15, 60, 70], [15, 10, 60, 65], [10, 15, 10, 15]])
def test_units_that_are_one_stretch_of_bytes_have_the_digests_of_their_runs(offsets: list[int]) -> None:
    content = bytes(range(100))
    units = [b"".join(content[start : start + 5] for start in offsets[unit : unit + 2]) for unit in (0, 2)]
    found = digest_units(memoryview(content), np.array(offsets, dtype=np.int64), 5, 2)
    assert found == b"".join(xxhash.xxh3_64_digest(unit) for unit in units)


class Found(NamedTuple):
    """A pool of bytes in four units of 16, and its digests under a key."""

    pool: np.ndarray[tuple[int], np.dtype[np.uint8]]

    def digests(self, key: bytes, shard: int = 0, first: int = 0, stop: int = 4) -> bytes:
        rank = local_rank(torch.from_numpy(self.pool).view(4, 16))
        plan = plan_transfer(
            a_layout(page_size=1, num_layers=1, num_kv_heads=1, head_dim=2),
            a_layout(page_size=1, num_layers=1, num_kv_heads=1, head_dim=2),
            0,
            0,
        )
        offsets = plan.source.offsets(first, stop, range(4))
        return ShardDigests(UnitDigests(rank), key, shard).take(plan, offsets, first, stop)


def test_digest_of_bytes_is_unknown_without_the_key() -> None:
    known = Found(np.zeros(64, dtype=np.uint8))
    secret = known.digests(b"k" * 32)
    assert secret not in (known.digests(b"x" * 32), known.digests(b"k" * 32, shard=1))
    plain = digest_units(known.pool.data, np.arange(0, 64, 16), 16, 4)
    assert plain != secret
    # Units that are alike do not have digests that are: what is sent says nothing of the hash under the seed.
    assert len({secret[unit * 8 : unit * 8 + 8] for unit in range(4)}) == 4


def test_hash_under_the_mask_is_seeded_by_the_key() -> None:
    pools = [Found(np.full(64, content, dtype=np.uint8)) for content in (0, 1)]
    masked = [int.from_bytes(pool.digests(b"k" * 32)[:8], "big") for pool in pools]
    plain = [xxhash.xxh3_64_intdigest(pool.pool[:16].tobytes()) for pool in pools]
    assert masked[0] ^ masked[1] != plain[0] ^ plain[1]  # the mask of both is the same


def test_ranks_that_share_nothing_have_digests_of_nothing() -> None:
    nothing = np.array([], dtype=np.int64)
    assert len(digest_units(memoryview(b""), nothing, 0, 3)) == 24
    assert digest_units(memoryview(b""), nothing, 0, 0) == b""


@pytest.mark.parametrize(
    ("offsets", "num_units"), [([0, 5, 10], 2), ([0], 0), ([96], 1), ([-1], 1), ([0], -1)]
)
def test_runs_that_do_not_fit_are_refused(offsets: list[int], num_units: int) -> None:
    with pytest.raises(ValueError, match="runs"):
        digest_units(memoryview(bytes(100)), np.array(offsets, dtype=np.int64), 5, num_units)


def test_digests_of_other_lengths_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="digests of 8 and 16 bytes"):
        differing_units(bytes(8), bytes(16))


@pytest.mark.parametrize("destination_tp", [1, 2])
@pytest.mark.parametrize("destination_page", [4, 2, 8])
@pytest.mark.parametrize("chunk_bytes", [1, 300, digests.CHUNK_BYTES])
def test_pages_that_are_staged_have_the_digests_of_pages_in_place(
    destination_tp: int, destination_page: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU's pages would have, with a CPU's packing in its place."""
    monkeypatch.setattr(digests, "CHUNK_BYTES", chunk_bytes)
    source = layout(1, 4)
    plan = plan_transfer(source, layout(destination_tp, destination_page), 0, 0)
    pool = torch.from_numpy(pool_of(source)).view(NUM_PAGES, -1)
    offsets = plan.source.offsets(0, 5, [3, 1, 4, 0, 6])
    rank = local_rank(pool)
    expected = UnitDigests(rank).take(plan, offsets, 5)
    rank.memory = None
    staged = UnitDigests(rank)
    assert staged.take(plan, offsets, 5) == expected
    pool.view(-1)[int(offsets[-1])] ^= 1
    assert differing_units(expected, staged.take(plan, offsets, 5)) == (4,)
    assert staged.take(plan, offsets[:0], 0) == b""
