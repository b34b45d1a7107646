"""Ranks, and whole replicas, that die, hang or close in the middle of a hand-off."""

import signal
import time
from contextlib import closing

import pytest

from baton.kvtransfer.transports.tcp import TcpSender
from tests.endpoint_host import NUM_PAGES, HostProcess, ask
from tests.replicas import (
    BACK_S,
    NUM_KV_HEADS,
    NUM_UNITS,
    Replicas,
    all_back_s,
    assert_handed_over,
    new_replica,
)
from tests.waiting import wait_for


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_killed_rank_of_the_source_fails_its_transfers_and_no_page_stays(
    replicas: Replicas, transport: str
) -> None:
    destination = replicas("destination", 1)
    with closing(new_replica(2, transport=transport)) as source:
        source.fill(1)
        assert source.send(destination, NUM_UNITS) == "handed_over"
        transfer = source.begin(destination, NUM_UNITS)
        wait_for(lambda: destination.counts()["LEASED"] + destination.counts()["QUARANTINED"] > 0)
        source.others[0].kill()
        assert source.outcome(transfer) == "failed"
        # The destination watches the source's processes too, and may abort before the source's rank 0
        # notices.
        assert source.ended()[-1][1] in ("rank 1 is lost", "aborted: the source's process died")
        assert all_back_s(source, destination) < BACK_S
        assert destination.ended()[-1][0] in ("recompute", "refused")
        assert source.outcome(source.begin(destination, NUM_UNITS)) == "failed"


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_killed_rank_of_the_destination_fails_its_transfers_alone(
    replicas: Replicas, transport: str
) -> None:
    source, other = replicas("source", 2, transport=transport), replicas("destination", 1)
    with closing(new_replica(2)) as destination:
        assert source.send(destination, NUM_UNITS) == "handed_over"
        transfer = source.begin(destination, NUM_UNITS)
        wait_for(lambda: destination.counts()["FREE"] < NUM_PAGES)
        destination.others[0].kill()
        assert source.outcome(transfer) == "failed"
        assert destination.ended()[-1][:2] == ("recompute", "rank 1 is lost")
        assert all_back_s(source, destination) < BACK_S
        assert source.send(destination, NUM_UNITS) == "failed"
        assert "rank 1 is lost" in source.ended()[-1][1]
        assert source.send(other, NUM_UNITS) == "handed_over"


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_rank_of_the_source_killed_while_it_writes_leaves_no_page_behind(
    replicas: Replicas, transport: str
) -> None:
    destination = replicas("destination", 2)
    for delay_s in (0.0, 0.002, 0.01):
        with closing(new_replica(2, transport=transport)) as source:
            assert source.send(destination, NUM_UNITS) == "handed_over"
            transfer = source.begin(destination, NUM_UNITS, NUM_UNITS // 2)
            time.sleep(delay_s)
            source.others[0].kill()
            assert source.outcome(transfer) in ("failed", "handed_over")
            assert all_back_s(source, destination) < BACK_S


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_whole_replica_killed_leaves_no_page_behind(replicas: Replicas, transport: str) -> None:
    """Its rank 0 is killed; the other ends by itself, and only then is a page that it could write free."""
    destination = replicas("destination", 2)
    with HostProcess(num_ranks=2, num_kv_heads=NUM_KV_HEADS, transport=transport) as source:
        assert source.send_granted(ask(source, destination, NUM_UNITS), NUM_UNITS) == "handed_over"
        source.begin_granted(ask(source, destination, NUM_UNITS), NUM_UNITS)
        wait_for(lambda: destination.counts()["FREE"] < NUM_PAGES)
        source.kill()
        assert all_back_s(destination) < 10 * BACK_S
    assert destination.ended()[-1][0] == "recompute"


def test_a_destination_killed_whole_fails_the_transfer(replicas: Replicas) -> None:
    source = replicas("source", 2)
    with HostProcess(num_ranks=2, num_kv_heads=NUM_KV_HEADS) as destination:
        transfer = source.begin(destination, NUM_UNITS)
        wait_for(lambda: destination.counts()["FREE"] < NUM_PAGES)
        destination.kill()
        assert source.outcome(transfer) == "failed"
        assert all_back_s(source) < BACK_S


@pytest.mark.parametrize("is_for_good", [False, True])
def test_a_broken_way_between_two_ranks_fails_its_transfers_alone(
    replicas: Replicas, is_for_good: bool
) -> None:
    """From the source to rank 1 of the destination; its way to rank 0 and to others is whole."""
    source = replicas("source", 1, transport="tcp")
    destination, other = replicas("destination", 2), replicas("destination", 1)
    assert source.send(destination, NUM_UNITS) == "handed_over"
    link = source.endpoint._peers.link_to(destination.endpoint.incarnation)
    other_end = destination.endpoint._peers.link_to(source.endpoint.incarnation)
    assert link is not None and other_end is not None
    way = source.endpoint._here._transports._peers[link.number, 1]
    sender = way._sender
    assert isinstance(sender, TcpSender)
    transfer = source.begin(destination, NUM_UNITS, NUM_UNITS // 2)
    apart = source.begin(other, NUM_UNITS, NUM_UNITS // 2)
    if is_for_good:
        way.close()
    else:
        for stream in sender._streams:
            stream._socket.wake()  # type: ignore[union-attr]
    for each in (transfer, apart):
        source.go_on(each)
    assert source.outcome(apart) == "handed_over"
    expected = {"failed"} if is_for_good else {"failed", "handed_over"}
    assert source.outcome(transfer) in expected
    assert all_back_s(source, destination, other) < BACK_S
    if is_for_good:
        link.close()
        wait_for(lambda: link.is_lost and other_end.is_lost)
    else:  # a transfer fails over a sender that has not noticed the break
        wait_for(lambda: sender.is_broken)
    assert_handed_over(source, destination)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_rank_that_hangs_keeps_its_pages_until_it_goes_on(replicas: Replicas, side: str) -> None:
    """The lease ends the transfer; only the rank itself can say that it writes the pages no more."""
    source, destination = new_replica(2), new_replica(2)
    stopped = source if side == "source" else destination
    hanging = stopped.others[0]
    try:
        assert source.send(destination, NUM_UNITS) == "handed_over"
        transfer = source.begin(destination, NUM_UNITS, deadline_s=2.0)
        wait_for(lambda: source.is_streaming(transfer))
        hanging.signal(signal.SIGSTOP)
        source.go_on(transfer)
        assert source.outcome(transfer) == "failed"
        wait_for(lambda: destination.ended()[-1][0] in ("recompute", "refused"))
        time.sleep(0.2)
        assert destination.counts()["QUARANTINED"] > 0
        hanging.signal(signal.SIGCONT)
        assert all_back_s(source, destination) < 2 * BACK_S
        assert source.send(destination, NUM_UNITS) == "handed_over"
    finally:
        hanging.signal(signal.SIGCONT)
        source.close()
        destination.close()


def test_closing_source_releases_the_pages_of_its_other_ranks(replicas: Replicas) -> None:
    destination, source = replicas("destination", 2), new_replica(2)
    source.begin(destination, NUM_UNITS, NUM_UNITS // 2)
    source.begin(destination, NUM_UNITS)
    source.close()
    assert all_back_s(destination) < BACK_S
