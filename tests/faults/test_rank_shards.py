"""Hand-offs between replicas of several ranks each, whose other ranks are processes of their own."""

import itertools
import random
import time
from contextlib import closing
from functools import partial

import pytest

from tests.endpoint_host import EndpointHost
from tests.replicas import BACK_S, NUM_UNITS, Replicas, all_back_s, assert_handed_over, new_replica
from tests.transfer_ends import OPTIONAL
from tests.waiting import wait_for

EVERYDAY_CUTS = [(1, 2), (2, 1), (2, 4)]
OTHER_CUTS = [cut for cut in itertools.product((1, 2, 4), (1, 2, 4)) if cut not in EVERYDAY_CUTS]
CUTS = [*EVERYDAY_CUTS, *(pytest.param(*cut, marks=pytest.mark.slow) for cut in OTHER_CUTS)]
POINTS = ("start", "after Grant", "half", "all", "before Verified")


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("num_sources", "num_destinations"), CUTS)
def test_pages_arrive_exactly_whatever_the_number_of_ranks(
    replicas: Replicas, num_sources: int, num_destinations: int, transport: str
) -> None:
    source = replicas("source", num_sources, transport=transport)
    destination = replicas("destination", num_destinations)
    for _ in range(2):
        assert_handed_over(source, destination)
    num_shards = max(num_sources, num_destinations)
    used = {shard: source.endpoint.transport_of[shard] for shard in range(num_shards)}
    assert used == dict.fromkeys(range(num_shards), "shm" if transport == "auto" else "tcp")
    assert all_back_s(source, destination) < BACK_S


def test_times_and_bytes_count_all_shards(replicas: Replicas) -> None:
    source, destination = replicas("source", 2), replicas("destination", 4)
    transfer = source.begin(destination, NUM_UNITS, NUM_UNITS // 2)
    source.go_on(transfer)
    assert source.outcome(transfer) == "handed_over"
    times = source._ended[bytes.fromhex(transfer)].times
    assert times is not None
    assert 0.0 < times.moving_s < times.total_s
    page_bytes = 2 * source.endpoint.settings.layout.page_bytes  # of both ranks
    assert times.num_bytes == NUM_UNITS * page_bytes


@pytest.mark.parametrize(("num_sources", "num_destinations"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("transport", ["gloo", *OPTIONAL])
def test_every_shard_has_a_pair(num_sources: int, num_destinations: int, transport: str) -> None:
    with (
        closing(new_replica(num_sources, transport=transport)) as source,
        closing(new_replica(num_destinations, transport=transport)) as destination,
    ):
        source.fill(1)
        for _ in range(2):
            assert_handed_over(source, destination)
        assert source.endpoint.transport_of == {0: transport, 1: transport}


@pytest.mark.parametrize(("page_size", "other_page_size"), [(16, 64), (64, 16)])
@pytest.mark.parametrize(
    ("num_sources", "num_destinations"), [(1, 2), (2, 1), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_other_page_sizes_get_the_same_tokens(
    replicas: Replicas, num_sources: int, num_destinations: int, page_size: int, other_page_size: int
) -> None:
    source = replicas("source", num_sources, page_size)
    destination = replicas("destination", num_destinations, other_page_size)
    assert_handed_over(source, destination)


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("num_holders", "num_pullers"),
    [(1, 2), (2, 1), *(pytest.param(*cut, marks=pytest.mark.slow) for cut in ((2, 4), (4, 1)))],
)
def test_a_prefix_is_pulled_from_every_rank_that_holds_it(
    replicas: Replicas, num_holders: int, num_pullers: int, transport: str
) -> None:
    holder = replicas("source", num_holders, transport=transport)
    puller = replicas("destination", num_pullers)
    wanted, digest = holder.known_pages(20)
    assert puller.pull(holder.address(), wanted, 20) == "adopted"
    assert puller.ended()[-1][2] == digest
    holder.forget_known()
    assert puller.pull(holder.address(), wanted, 20) == "refused"
    assert all_back_s(holder, puller) < BACK_S


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", POINTS)
def test_an_abort_anywhere_gives_all_pages_back(replicas: Replicas, point: str, transport: str) -> None:
    source = replicas("source", 2, transport=transport)
    destination = replicas("destination", 4)
    for _ in range(3):
        outcome = source.send(destination, NUM_UNITS, abort_at=point)
        assert outcome in ("cancelled", "failed", "handed_over")
        assert all_back_s(source, destination) < BACK_S
    assert_handed_over(source, destination)


def test_a_flipped_bit_of_one_shard_is_written_again(replicas: Replicas) -> None:
    source, destination = replicas("source", 2), replicas("destination", 1)
    destination.flip_bits(1)
    assert_handed_over(source, destination)
    destination.flip_bits(3)  # both pieces of the shard, and then what is written again
    assert source.send(destination, NUM_UNITS) == "failed"
    assert destination.ended()[-1][:2] == ("recompute", "corrupt twice")
    assert all_back_s(source, destination) < BACK_S


@pytest.mark.parametrize(("transport", "num_ranks"), [("shm", 1), ("tcp", 2)])
@pytest.mark.parametrize(("ours", "theirs"), [(False, False), (True, False), (False, True)])
def test_pages_have_no_digests_only_if_both_ends_say_so(
    transport: str, ours: bool, theirs: bool, num_ranks: int
) -> None:
    with (
        closing(EndpointHost(transport=transport, num_ranks=num_ranks, has_digests=ours)) as source,
        closing(EndpointHost(transport=transport, num_ranks=num_ranks, has_digests=theirs)) as destination,
    ):
        source.fill(1)
        for num_flipped in (0, 1):
            destination.flip_bits(num_flipped)
            assert source.send(destination, NUM_UNITS) == "handed_over"
            outcome, _, digest = destination.ended()[-1]
            is_damaged = num_flipped and not ours and not theirs
            assert outcome == "adopted" and (digest != source.sent) == is_damaged
        assert all_back_s(source, destination) < BACK_S


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_transfers_both_ways_at_once_keep_apart(replicas: Replicas, transport: str) -> None:
    """Some are aborted; each of the others brings what it was begun with."""
    one, other = replicas("source", 2, transport=transport), replicas("destination", 4, transport=transport)
    moments = random.Random(transport)
    for _ in range(6):
        begun = []
        for source, destination in ((one, other), (other, one)) * 2:
            transfer = source.begin(destination, 12, 6)
            pages = source._prompts[bytes.fromhex(transfer)][0]
            sent = source._call(partial(source._digest, pages))
            begun.append((source, destination, transfer, sent))
        for source, _, transfer, _ in begun:
            source.go_on(transfer)
            if not moments.randrange(3):
                source._call(partial(source.endpoint.abort, bytes.fromhex(transfer), "the test aborts"))
        for source, destination, transfer, sent in begun:
            if source.outcome(transfer) == "handed_over":
                assert destination.outcome(transfer) == "adopted"
                assert destination._digests[bytes.fromhex(transfer)] == sent
    assert all_back_s(one, other) < BACK_S


def test_received_bytes_are_counted_in_every_rank(replicas: Replicas) -> None:
    source, destination = replicas("source", 1, transport="tcp"), replicas("destination", 2)
    endpoint = destination.endpoint

    def landed() -> int:
        return int(destination._call(endpoint.counts).get("landed_bytes", 0))

    def has_landed(num_bytes: int) -> bool:
        return landed() == num_bytes

    before, earlier = landed(), -1  # bytes of an earlier transfer may still land
    while before != earlier:
        time.sleep(0.05)
        before, earlier = landed(), before
    assert source.send(destination, NUM_UNITS) == "handed_over"
    page_bytes = endpoint.settings.layout.page_bytes  # of one rank
    wait_for(partial(has_landed, before + 2 * NUM_UNITS * page_bytes))
    assert destination._call(endpoint._here.counts)["landed_bytes"] < landed()
    assert all_back_s(source, destination) < BACK_S
