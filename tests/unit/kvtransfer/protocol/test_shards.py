"""The shards of a transfer: every head of every layer moves in one shard, and both sides count them alike."""

from itertools import product

import pytest

from baton.kvtransfer.protocol.messages import MAX_SHARDS
from baton.kvtransfer.protocol.transfer_plan import ShardRanks, plan_transfer, shards_of
from baton.kvtransfer.ranks.messages import registration_id
from baton.pages import PageLayout

CUTS = list(product((1, 2, 4, 8), (1, 2, 4, 8)))


def layout(num_ranks: int) -> PageLayout:
    return PageLayout(
        tp_size=num_ranks, page_size=16, num_layers=3, num_kv_heads=8, head_dim=4, dtype="bfloat16"
    )


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize(("num_sources", "num_destinations"), CUTS)
def test_shards_together_move_every_byte_once(
    num_sources: int, num_destinations: int, num_groups: int
) -> None:
    source, destination = layout(num_sources), layout(num_destinations)
    shards = shards_of(source, destination, num_groups)
    plans = [
        plan_transfer(source, destination, shard.source, shard.destination, shard.layers) for shard in shards
    ]
    assert len(set(shards)) == len(shards) == max(num_sources, num_destinations) * num_groups <= MAX_SHARDS
    assert all(plan.unit_bytes for plan in plans)
    assert sum(plan.unit_bytes for plan in plans) == layout(1).page_bytes


def test_shards_are_counted_by_destination_then_source_then_layers() -> None:
    assert shards_of(layout(2), layout(1), 2) == (
        ShardRanks(0, 0, (0, 1)),
        ShardRanks(0, 0, (1, 3)),
        ShardRanks(1, 0, (0, 1)),
        ShardRanks(1, 0, (1, 3)),
    )
    assert shards_of(layout(1), layout(2)) == (ShardRanks(0, 0, (0, 3)), ShardRanks(0, 1, (0, 3)))


def test_each_shard_lands_under_a_name_of_its_own() -> None:
    names = [
        registration_id(bytes([transfer]) * 16, shard) for transfer in range(4) for shard in range(MAX_SHARDS)
    ]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {16}
    assert registration_id(b"t" * 16, 0) == b"t" * 16
