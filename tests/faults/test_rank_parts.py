"""Hand-offs between replicas of several ranks each, whose other ranks are processes of their own."""

import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from baton.errors import TransferFailed
from tests.endpoint_host import NUM_PAGES, Host, HostProcess
from tests.transfer_ends import wait_for

NUM_UNITS = 24
NUM_KV_HEADS = 4
BACK_S = 1.0
EVERYDAY_CUTS = [(1, 2), (2, 1), (2, 4)]
OTHER_CUTS = [cut for cut in itertools.product((1, 2, 4), (1, 2, 4)) if cut not in EVERYDAY_CUTS]
CUTS = [*EVERYDAY_CUTS, *(pytest.param(*cut, marks=pytest.mark.slow) for cut in OTHER_CUTS)]
POINTS = ("start", "after Grant", "half", "all", "before Verified")
Replicas = Callable[..., Host]


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    """Made once for all tests, each with what it is asked for: nothing may be left of a test in them."""
    made: dict[tuple[object, ...], Host] = {}

    def replica(side: str, num_ranks: int, page_size: int = 16, transport: str = "auto") -> Host:
        key = (side, num_ranks, page_size, transport)
        if key not in made:
            made[key] = new_replica(num_ranks, page_size, transport)
            made[key].fill(len(made))
        return made[key]

    yield replica
    for host in made.values():
        host.close()


def new_replica(num_ranks: int, page_size: int = 16, transport: str = "auto") -> Host:
    return Host(
        page_size,
        NUM_PAGES * 16 // page_size,
        transport=transport,
        num_ranks=num_ranks,
        num_kv_heads=NUM_KV_HEADS,
    )


def all_back_s(*hosts: Host) -> float:
    """Seconds until all pages of all hosts are free, and known to nobody."""

    def is_back(host: Host) -> bool:
        counts = host.counts()
        return counts["FREE"] == host.ledger.num_pages and not counts["open"]

    return wait_for(lambda: all(is_back(host) for host in hosts))


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(("num_sources", "num_destinations"), CUTS)
def test_pages_arrive_exactly_whatever_the_number_of_ranks(
    replicas: Replicas, num_sources: int, num_destinations: int, transport: str
) -> None:
    source = replicas("source", num_sources, transport=transport)
    destination = replicas("destination", num_destinations)
    for _ in range(2):
        assert source.send(destination.address(), NUM_UNITS) == "handed_over"
        assert destination.ended()[-1] == ("adopted", "", source.sent)
    num_parts = max(num_sources, num_destinations)
    used = {part: source.endpoint.transport_of[part] for part in range(num_parts)}
    assert used == dict.fromkeys(range(num_parts), "shm" if transport == "auto" else "tcp")
    assert all_back_s(source, destination) < BACK_S


def test_the_spans_of_a_transfer_of_many_parts_add_up(replicas: Replicas) -> None:
    source, destination = replicas("source", 2), replicas("destination", 4)
    transfer = source.begin(destination.address(), NUM_UNITS, NUM_UNITS // 2)
    source.go_on(transfer)
    assert source.outcome(transfer) == "handed_over"
    times = source._ended[bytes.fromhex(transfer)].times
    assert times is not None
    spans = (
        times.handshake_s,
        times.reserve_s,
        times.gather_s,
        times.wire_s,
        times.waiting_s,
        times.verify_s,
    )
    assert sum(spans) == pytest.approx(times.total_s)
    assert min(spans) >= 0.0 and times.wire_s > 0.0
    page_bytes = 2 * source.endpoint.settings.layout.page_bytes  # of both ranks
    assert times.num_bytes == NUM_UNITS * page_bytes


@pytest.mark.parametrize(("num_sources", "num_destinations"), [(1, 2), (2, 1)])
def test_gloo_has_a_pair_for_every_part(num_sources: int, num_destinations: int) -> None:
    source, destination = (new_replica(number, 16, "gloo") for number in (num_sources, num_destinations))
    try:
        source.fill(1)
        for _ in range(2):
            assert source.send(destination.address(), NUM_UNITS) == "handed_over"
            assert destination.ended()[-1] == ("adopted", "", source.sent)
        assert source.endpoint.transport_of == {0: "gloo", 1: "gloo"}
    finally:
        source.close()
        destination.close()


@pytest.mark.parametrize(("page_size", "other_page_size"), [(16, 64), (64, 16)])
@pytest.mark.parametrize(("num_sources", "num_destinations"), [(1, 2), (2, 1), (4, 2)])
def test_other_page_sizes_get_the_same_tokens(
    replicas: Replicas, num_sources: int, num_destinations: int, page_size: int, other_page_size: int
) -> None:
    source = replicas("source", num_sources, page_size)
    destination = replicas("destination", num_destinations, other_page_size)
    assert source.send(destination.address(), NUM_UNITS) == "handed_over"
    assert destination.ended()[-1] == ("adopted", "", source.sent)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(("num_holders", "num_pullers"), [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_a_prefix_is_pulled_from_every_rank_that_holds_it(
    replicas: Replicas, num_holders: int, num_pullers: int, transport: str
) -> None:
    holder = replicas("source", num_holders, transport=transport)
    puller = replicas("destination", num_pullers)
    wanted, digest = holder.known_pages(20)
    assert puller.pull(holder.address(), wanted, 20) == "adopted"
    assert puller.ended()[-1][2] == digest
    stale = [(page, generation - 1) for page, generation in wanted]
    assert puller.pull(holder.address(), stale, 20) == "recompute"
    holder.forget_known()
    assert all_back_s(holder, puller) < BACK_S


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("point", POINTS)
def test_an_abort_anywhere_gives_all_pages_back(replicas: Replicas, point: str, transport: str) -> None:
    source = replicas("source", 2, transport=transport)
    destination = replicas("destination", 4)
    for _ in range(3):
        outcome = source.send(destination.address(), NUM_UNITS, abort_at=point)
        assert outcome in ("cancelled", "failed", "handed_over")
        assert all_back_s(source, destination) < BACK_S
    assert source.send(destination.address(), NUM_UNITS) == "handed_over"
    assert destination.ended()[-1][2] == source.sent


def test_a_flipped_bit_of_one_part_is_written_again(replicas: Replicas) -> None:
    source, destination = replicas("source", 2), replicas("destination", 1)
    destination.flip_bits(1)
    assert source.send(destination.address(), NUM_UNITS) == "handed_over"
    assert destination.ended()[-1] == ("adopted", "", source.sent)
    destination.flip_bits(3)  # both pieces of the part, and then what is written again
    assert source.send(destination.address(), NUM_UNITS) == "failed"
    assert destination.ended()[-1][:2] == ("recompute", "corrupt twice")
    assert all_back_s(source, destination) < BACK_S


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_transfers_both_ways_at_once_keep_apart(replicas: Replicas, transport: str) -> None:
    """Some are aborted; each of the others brings what it was begun with."""
    one, other = replicas("source", 2, transport=transport), replicas("destination", 4, transport=transport)
    moments = random.Random(transport)
    for _ in range(6):
        begun = []
        for source, destination in ((one, other), (other, one)) * 2:
            transfer = source.begin(destination.address(), 12, 6)
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


# Ranks that die.


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_killed_rank_of_the_source_fails_its_transfers_and_no_page_stays(
    replicas: Replicas, transport: str
) -> None:
    destination, source = replicas("destination", 1), new_replica(2, transport=transport)
    try:
        source.fill(1)
        assert source.send(destination.address(), NUM_UNITS) == "handed_over"
        transfer = source.begin(destination.address(), NUM_UNITS)
        wait_for(lambda: destination.counts()["LEASED"] + destination.counts()["QUARANTINED"] > 0)
        source.others[0].kill()
        assert source.outcome(transfer) == "failed"
        assert source.ended()[-1][1] == "rank 1 is lost"
        assert all_back_s(source, destination) < BACK_S
        assert destination.ended()[-1][0] == "recompute"
        assert source.outcome(source.begin(destination.address(), NUM_UNITS)) == "failed"
    finally:
        source.close()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_killed_rank_of_the_destination_fails_its_transfers_alone(
    replicas: Replicas, transport: str
) -> None:
    source, other = replicas("source", 2, transport=transport), replicas("destination", 1)
    destination = new_replica(2)
    try:
        assert source.send(destination.address(), NUM_UNITS) == "handed_over"
        transfer = source.begin(destination.address(), NUM_UNITS)
        wait_for(lambda: destination.counts()["FREE"] < NUM_PAGES)
        destination.others[0].kill()
        assert source.outcome(transfer) == "failed"
        assert destination.ended()[-1][:2] == ("recompute", "rank 1 is lost")
        assert all_back_s(source, destination) < BACK_S
        assert source.send(destination.address(), NUM_UNITS) == "failed"
        assert "rank 1 is lost" in source.ended()[-1][1]
        assert source.send(other.address(), NUM_UNITS) == "handed_over"
    finally:
        destination.close()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_rank_of_the_source_killed_while_it_writes_leaves_no_page_behind(
    replicas: Replicas, transport: str
) -> None:
    destination = replicas("destination", 2)
    for delay_s in (0.0, 0.002, 0.01):
        source = new_replica(2, transport=transport)
        try:
            assert source.send(destination.address(), NUM_UNITS) == "handed_over"
            transfer = source.begin(destination.address(), NUM_UNITS, NUM_UNITS // 2)
            time.sleep(delay_s)
            source.others[0].kill()
            assert source.outcome(transfer) in ("failed", "handed_over")
            assert all_back_s(source, destination) < BACK_S
        finally:
            source.close()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_whole_replica_killed_leaves_no_page_behind(replicas: Replicas, transport: str) -> None:
    """Its rank 0 is killed; the other ends by itself, and only then is a page that it could write free."""
    destination = replicas("destination", 2)
    with HostProcess(num_ranks=2, num_kv_heads=NUM_KV_HEADS, transport=transport) as source:
        assert source.call("send", destination.address(), NUM_UNITS) == "handed_over"
        source.call("begin", destination.address(), NUM_UNITS)
        wait_for(lambda: destination.counts()["FREE"] < NUM_PAGES)
        source.process.kill()
        source.process.wait()
        assert all_back_s(destination) < 10 * BACK_S
    assert destination.ended()[-1][0] == "recompute"


def test_a_destination_killed_whole_fails_the_transfer(replicas: Replicas) -> None:
    source = replicas("source", 2)
    with HostProcess(num_ranks=2, num_kv_heads=NUM_KV_HEADS) as destination:
        address = destination.call("address")
        transfer = source.begin(address, NUM_UNITS)
        wait_for(lambda: destination.call("counts")["FREE"] < NUM_PAGES)
        destination.process.kill()
        destination.process.wait()
        assert source.outcome(transfer) == "failed"
        assert all_back_s(source) < BACK_S
        with pytest.raises(TransferFailed):
            source.send(address, NUM_UNITS)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_rank_that_hangs_keeps_its_pages_until_it_goes_on(replicas: Replicas, side: str) -> None:
    """The lease ends the transfer; that nobody is in the pages only the rank itself can say."""
    source, destination = new_replica(2), new_replica(2)
    stopped = source if side == "source" else destination
    process = stopped.others[0].process
    try:
        assert source.send(destination.address(), NUM_UNITS) == "handed_over"
        transfer = source.begin(destination.address(), NUM_UNITS, deadline_s=2.0)
        wait_for(lambda: destination.counts()["FREE"] < NUM_PAGES)
        process.send_signal(signal.SIGSTOP)
        source.go_on(transfer)
        assert source.outcome(transfer) == "failed"
        wait_for(lambda: destination.ended()[-1][0] == "recompute")
        time.sleep(0.2)
        assert destination.counts()["QUARANTINED"] > 0
        process.send_signal(signal.SIGCONT)
        assert all_back_s(source, destination) < 2 * BACK_S
        assert source.send(destination.address(), NUM_UNITS) == "handed_over"
    finally:
        process.send_signal(signal.SIGCONT)
        source.close()
        destination.close()


def test_a_source_that_closes_gives_back_what_its_other_ranks_could_write(replicas: Replicas) -> None:
    destination, source = replicas("destination", 2), new_replica(2)
    source.begin(destination.address(), NUM_UNITS, NUM_UNITS // 2)
    source.begin(destination.address(), NUM_UNITS)
    source.close()
    assert all_back_s(destination) < BACK_S
