"""The shards of a transfer: every head of every layer moves in one shard, and both sides count them alike."""

from itertools import product

import pytest

from baton.kvtransfer.protocol.messages import MAX_SHARDS
from baton.kvtransfer.protocol.transfer_plan import ShardRanks, plan_transfer, shards_of
from baton.kvtransfer.ranks.messages import registration_id
from baton.pages import PageLayout
from tests.layouts import a_layout


def layout(num_ranks: int, *stage_layers: int) -> PageLayout:
    """stage_layers: of each pipeline stage, each of which has so many ranks."""
    return a_layout(
        tp_size=num_ranks,
        num_layers=3,
        num_kv_heads=8,
        head_dim=4,
        dtype="bfloat16",
        stage_layers=stage_layers,
    )


def test_shards_are_counted_by_destination_then_source_then_layers() -> None:
    assert shards_of(layout(2), layout(1), 2) == (
        ShardRanks(0, 0, (0, 1), 0),
        ShardRanks(0, 0, (1, 3), 1),
        ShardRanks(1, 0, (0, 1), 0),
        ShardRanks(1, 0, (1, 3), 1),
    )
    assert shards_of(layout(1), layout(2)) == (ShardRanks(0, 0, (0, 3), 0), ShardRanks(0, 1, (0, 3), 0))


# (ranks of a stage, its layers); 16 ranks hold two copies of each head
Cut = tuple[int, tuple[int, ...]]
CUTS: list[Cut] = [*product((1, 2), ((), (1, 2), (2, 1), (1, 1, 1))), (4, ()), (8, ()), (16, ())]


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("sources", CUTS)
def test_stages_move_the_layers_that_they_share(sources: Cut, num_groups: int) -> None:
    for destinations in CUTS:
        source, destination = layout(sources[0], *sources[1]), layout(destinations[0], *destinations[1])
        shards = shards_of(source, destination, num_groups)
        assert len(set(shards)) == len(shards) <= MAX_SHARDS and shards[0][:2] == (0, 0)
        moved = [
            plan_transfer(source, destination, shard.source, shard.destination, shard.layers).unit_bytes
            for shard in shards
        ]
        assert all(moved) and sum(moved) == destination.num_copies * layout(1).page_bytes
        for shard in shards:
            first, stop = source.layer_groups(num_groups)[shard.group]
            assert first <= shard.layers[0] < shard.layers[1] <= stop


def test_equal_stages_move_whole_pages() -> None:
    cut = layout(2, 1, 2)
    (shard,) = (each for each in shards_of(cut, cut) if each.source == 3)
    assert shard == ShardRanks(3, 3, (1, 3), 0)
    plan = plan_transfer(cut, cut, 3, 3)
    assert plan.run_bytes == plan.unit_bytes == cut.of_stage(3).page_bytes == cut.page_bytes * 2 // 3


def test_each_shard_lands_under_a_name_of_its_own() -> None:
    names = [
        registration_id(bytes([transfer]) * 16, shard) for transfer in range(4) for shard in range(MAX_SHARDS)
    ]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {16}
    assert registration_id(b"t" * 16, 0) == b"t" * 16
