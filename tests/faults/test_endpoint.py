"""Hand-offs between endpoints in two processes: the right bytes, and every page back, whatever happens."""

import random
import time
from collections.abc import Iterator

import pytest

from baton.errors import TransferFailed
from baton.kvtransfer.transports.base import AUTO
from tests.endpoint_host import NUM_PAGES, Host, HostProcess
from tests.transfer_ends import OPTIONAL

NUM_UNITS = 24
BACK_S = 1.0
SOURCE_POINTS = ("start", "before Grant", "after Grant", "half", "all", "before Verified", "later")
DESTINATION_POINTS = ("after grant", "before Wrote", "after Wrote", "before Commit", "after Commit")
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp", *OPTIONAL])
ALL_FREE = {"FREE": NUM_PAGES, "ACTIVE": 0, "CACHED": 0, "LEASED": 0, "QUARANTINED": 0}


@pytest.fixture
def transport() -> str:
    return AUTO


@pytest.fixture
def destination(transport: str) -> Iterator[HostProcess]:
    """A destination that listens with the transport of the test's parameter, and with the automatic ones."""
    with HostProcess(transport=transport) as process:
        yield process


def all_back_s(source: Host, destination: HostProcess) -> float:
    """Seconds until every page of both sides is free."""
    started_s = time.monotonic()
    while True:
        counts = source.counts(), destination.call("counts")
        if all({state: each[state] for state in ALL_FREE} == ALL_FREE for each in counts):
            return time.monotonic() - started_s
        if time.monotonic() - started_s > 10 * BACK_S:
            pytest.fail(f"pages are missing: source {counts[0]}, destination {counts[1]}")


@TRANSPORTS
def test_pages_arrive_exactly_and_are_adopted(source: Host, destination: HostProcess, transport: str) -> None:
    address = destination.call("address")
    for _ in range(5):
        assert source.send(address, NUM_UNITS) == "handed_over"
        outcome, _, digest = destination.call("ended")[-1]
        assert (outcome, digest) == ("adopted", source.sent)
    assert source.transports()[transport] == 1
    assert all_back_s(source, destination) < BACK_S


@TRANSPORTS
@pytest.mark.parametrize("point", SOURCE_POINTS + DESTINATION_POINTS)
def test_an_abort_anywhere_gives_all_pages_back(
    source: Host, destination: HostProcess, point: str, num_aborts: int
) -> None:
    address, moments = destination.call("address"), random.Random(point)
    is_source = point in SOURCE_POINTS
    destination.call("abort_at", "" if is_source else point)
    slowest_s = 0.0
    for _ in range(num_aborts):
        outcome = source.send(
            address, NUM_UNITS, abort_at=point if is_source else "", delay_s=moments.uniform(0, 0.004)
        )
        assert outcome in ("cancelled", "failed", "handed_over")
        slowest_s = max(slowest_s, all_back_s(source, destination))
    assert slowest_s < BACK_S
    destination.call("abort_at", "")
    assert source.send(address, NUM_UNITS) == "handed_over"
    assert destination.call("ended")[-1][2] == source.sent


@pytest.fixture(params=[3, pytest.param(500, marks=pytest.mark.slow)])
def num_aborts(request: pytest.FixtureRequest) -> int:
    """Aborts at each point over each transport."""
    return int(request.param)


@TRANSPORTS
def test_a_killed_destination_fails_its_transfers_alone(
    source: Host, destination: HostProcess, transport: str
) -> None:
    with HostProcess(transport=transport) as other:
        address, other_address = destination.call("address"), other.call("address")
        assert source.send(address, NUM_UNITS) == source.send(other_address, NUM_UNITS) == "handed_over"
        destination.call("abort_at", "nothing")
        destination.kill()
        with pytest.raises(TransferFailed):
            while True:  # the link is lost a moment after the process; then it can't be reached
                assert source.send(address, NUM_UNITS) == "failed"
        assert source.send(other_address, NUM_UNITS) == "handed_over"
        assert all_back_s(source, other) < BACK_S


@TRANSPORTS
def test_a_killed_source_leaves_no_page_behind(destination: HostProcess, transport: str) -> None:
    """Killed at random moments of a stream of transfers."""
    address, moments = destination.call("address"), random.Random(7)
    for _ in range(3):
        with HostProcess(is_shared=False, transport=transport) as process:
            process.call("fill", 1)
            assert process.call("send", address, NUM_UNITS) == "handed_over"
            process.begin("send_forever", address, NUM_UNITS)
            time.sleep(moments.uniform(0.02, 0.1))
            process.kill()
        started_s = time.monotonic()
        while destination.call("counts")["FREE"] != NUM_PAGES:
            assert time.monotonic() - started_s < BACK_S
    outcomes = {end[0] for end in destination.call("ended")}
    assert outcomes <= {"adopted", "recompute"}


@pytest.mark.parametrize("transport", ["tcp"])
def test_a_peer_of_another_model_or_key_is_refused_with_the_reason(source: Host, transport: str) -> None:
    with (
        HostProcess(fingerprint="another") as other,
        pytest.raises(TransferFailed, match="the model another"),
    ):
        source.send(other.call("address"), NUM_UNITS)
    with HostProcess(key="ab" * 20) as stranger, pytest.raises(TransferFailed, match="key"):
        source.send(stranger.call("address"), NUM_UNITS)


@TRANSPORTS
def test_a_flipped_bit_is_written_again_and_a_second_one_means_recompute(
    source: Host, destination: HostProcess, transport: str
) -> None:
    address = destination.call("address")
    destination.call("flip_bits", 1)
    assert source.send(address, NUM_UNITS) == "handed_over"
    assert destination.call("ended")[-1][::2] == ("adopted", source.sent)
    destination.call("flip_bits", 3)  # both pieces, and then what is written again
    assert source.send(address, NUM_UNITS) == "failed"
    assert destination.call("ended")[-1] == ("recompute", "corrupt twice", "")
    assert all_back_s(source, destination) < BACK_S


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_prefix_is_pulled_from_its_holder(transport: str) -> None:
    puller = Host(transport=transport)
    with HostProcess(transport=transport) as holder:
        holder.call("fill", 3)
        for _ in range(3):
            wanted, digest = holder.call("known_pages", 20)
            assert puller.pull(holder.call("address"), wanted, 20) == "adopted"
            assert puller.ended()[-1][2] == digest
        stale = [(page, generation + 1) for page, generation in wanted]
        assert puller.pull(holder.call("address"), stale, 20) == "refused"
        assert "generation" in puller.ended()[-1][1]
        counts = holder.call("counts")
        assert counts["CACHED"] + counts["FREE"] == NUM_PAGES
    puller.close()


@TRANSPORTS
@pytest.mark.parametrize("page_size", [4, 64])
def test_other_page_sizes_get_the_same_tokens(source: Host, transport: str, page_size: int) -> None:
    num_pages = NUM_PAGES * 16 // page_size
    with HostProcess(page_size=page_size, num_pages=num_pages, transport=transport) as destination:
        num_units = NUM_UNITS * 16 // min(16, page_size)
        assert source.send(destination.call("address"), num_units) == "handed_over"
        assert destination.call("ended")[-1][2] == source.sent


def test_destination_without_a_gloo_listener_is_served_by_tcp(destination: HostProcess) -> None:
    source = Host(is_shared=False, transport="gloo")
    source.fill(1)
    assert source.send(destination.call("address"), NUM_UNITS) == "handed_over"
    assert destination.call("ended")[-1][2] == source.sent
    assert source.transports() == {"tcp": 1}
    source.close()
