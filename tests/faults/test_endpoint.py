"""Hand-offs between endpoints in two processes: the right bytes, and every page back, whatever happens."""

import random
from collections.abc import Callable, Iterator
from threading import Event, Timer

import pytest

from baton.errors import TransferFailed
from baton.kvtransfer.transports.base import AUTO
from tests.endpoint_host import NUM_PAGES, EndpointHost, HostProcess, ask
from tests.replicas import BACK_S, NUM_UNITS, all_back_s, assert_handed_over
from tests.transfer_ends import OPTIONAL
from tests.waiting import wait_for

SOURCE_POINTS = ("start", "before Grant", "after Grant", "half", "all", "before Verified", "later")
DESTINATION_POINTS = ("after grant", "before Wrote", "after Wrote", "before Commit", "after Commit")
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp", *OPTIONAL])


@pytest.fixture
def transport() -> str:
    return AUTO


@pytest.fixture
def destination(transport: str) -> Iterator[HostProcess]:
    """A destination that listens with the transport of the test's parameter, and with the automatic ones."""
    with HostProcess(transport=transport) as process:
        yield process


@TRANSPORTS
def test_pages_arrive_exactly_and_are_adopted(
    source: EndpointHost, destination: HostProcess, transport: str
) -> None:
    for _ in range(5):
        assert_handed_over(source, destination)
    assert source.transports()[transport] == 1
    assert all_back_s(source, destination) < BACK_S


@TRANSPORTS
@pytest.mark.parametrize("point", SOURCE_POINTS + DESTINATION_POINTS)
def test_an_abort_anywhere_gives_all_pages_back(
    source: EndpointHost, destination: HostProcess, point: str, num_aborts: int
) -> None:
    moments = random.Random(point)
    is_source = point in SOURCE_POINTS
    destination.abort_at("" if is_source else point)
    slowest_s = 0.0
    for _ in range(num_aborts):
        outcome = source.send(
            destination, NUM_UNITS, abort_at=point if is_source else "", delay_s=moments.uniform(0, 0.004)
        )
        assert outcome in ("cancelled", "failed", "handed_over")
        slowest_s = max(slowest_s, all_back_s(source, destination))
    assert slowest_s < BACK_S
    destination.abort_at("")
    assert_handed_over(source, destination)


@pytest.fixture(params=[3, pytest.param(500, marks=pytest.mark.slow)])
def num_aborts(request: pytest.FixtureRequest) -> int:
    """Aborts at each point over each transport."""
    return int(request.param)


@TRANSPORTS
def test_a_killed_destination_fails_its_transfers_alone(
    source: EndpointHost, destination: HostProcess, transport: str
) -> None:
    with HostProcess(transport=transport) as other:
        for each in (destination, other):
            assert_handed_over(source, each)
        transfer = source.begin(destination, NUM_UNITS, NUM_UNITS // 2)
        destination.kill()
        assert source.outcome(transfer) == "failed"
        assert_handed_over(source, other)
        assert all_back_s(source, other) < BACK_S


def send_until_killed(source: HostProcess, destination: HostProcess, after_s: float) -> None:
    """Send without a pause until the source is killed; no call may fail before."""
    is_killed = Event()

    def kill() -> None:
        is_killed.set()
        source.process.kill()

    killing = Timer(after_s, kill)
    killing.start()
    with pytest.raises(TransferFailed):
        while True:
            source.send_granted(ask(source, destination, NUM_UNITS), NUM_UNITS)
    assert is_killed.is_set()
    killing.join()


@TRANSPORTS
def test_a_killed_source_leaves_no_page_behind(destination: HostProcess, transport: str) -> None:
    """Killed at random moments of a stream of transfers."""
    moments = random.Random(7)
    for _ in range(3):
        with HostProcess(is_shared=False, transport=transport) as process:
            process.fill(1)
            assert process.send_granted(ask(process, destination, NUM_UNITS), NUM_UNITS) == "handed_over"
            send_until_killed(process, destination, moments.uniform(0.02, 0.1))
        assert all_back_s(destination) < BACK_S
    outcomes = {end[0] for end in destination.ended()}
    assert outcomes <= {"adopted", "recompute"}


@pytest.mark.parametrize("transport", ["tcp"])
def test_a_peer_of_another_model_or_key_is_refused_with_the_reason(
    source: EndpointHost, transport: str
) -> None:
    with (
        HostProcess(fingerprint="another") as other,
        pytest.raises(TransferFailed, match="the model another"),
    ):
        source.send(other, NUM_UNITS)
    with HostProcess(key="ab" * 20) as stranger, pytest.raises(TransferFailed, match="key"):
        source.send(stranger, NUM_UNITS)


@TRANSPORTS
def test_a_flipped_bit_is_written_again_and_a_second_one_means_recompute(
    source: EndpointHost, destination: HostProcess, transport: str
) -> None:
    destination.flip_bits(1)
    assert_handed_over(source, destination)
    destination.flip_bits(3)  # both pieces, and then what is written again
    assert source.send(destination, NUM_UNITS) == "failed"
    assert destination.ended()[-1] == ("recompute", "corrupt twice", "")
    assert all_back_s(source, destination) < BACK_S


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_prefix_is_pulled_from_its_holder(transport: str, make_host: Callable[..., EndpointHost]) -> None:
    puller = make_host(transport=transport)
    with HostProcess(transport=transport) as holder:
        holder.fill(3)
        for _ in range(3):
            wanted, digest = holder.known_pages(20)
            assert puller.pull(holder.address(), wanted, 20) == "adopted"
            assert puller.ended()[-1][2] == digest
        # Pages that the holder leases to a pull stay known: it hears of the end after the puller.
        wait_for(lambda: not holder.counts()["LEASED"])
        holder.forget_known()
        holder.known_pages(20)  # the pages have other contents now
        assert puller.pull(holder.address(), wanted, 20) == "refused"
        assert "not cached" in puller.ended()[-1][1]
        counts = holder.counts()
        assert counts["CACHED"] + counts["FREE"] == NUM_PAGES


@TRANSPORTS
@pytest.mark.parametrize("page_size", [4, 64])
def test_other_page_sizes_get_the_same_tokens(source: EndpointHost, transport: str, page_size: int) -> None:
    num_pages = NUM_PAGES * 16 // page_size
    with HostProcess(page_size=page_size, num_pages=num_pages, transport=transport) as destination:
        num_units = NUM_UNITS * 16 // min(16, page_size)
        assert_handed_over(source, destination, num_units)


def test_destination_without_a_gloo_listener_is_served_by_tcp(
    destination: HostProcess, make_host: Callable[..., EndpointHost]
) -> None:
    source = make_host(is_shared=False, transport="gloo")
    assert_handed_over(source, destination)
    assert source.transports() == {"tcp": 1}
