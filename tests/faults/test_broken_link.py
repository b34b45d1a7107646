"""The link breaks while both processes live: neither may hold the other's pages for good."""

from collections.abc import Iterator

import pytest

from tests.endpoint_host import NUM_PAGES, EndpointHost, HostProcess
from tests.replicas import BACK_S, NUM_UNITS, all_back_s
from tests.waiting import wait_for

POINTS = ("start", "after Grant", "half", "all", "before Verified")


@pytest.fixture(scope="module")
def destination() -> Iterator[HostProcess]:
    with HostProcess() as process:
        yield process


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("point", POINTS)
def test_pages_come_back_over_the_next_link(
    source: EndpointHost,
    destination: HostProcess,
    point: str,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut(transfer: bytes, reason: str) -> None:
        source.endpoint.link_of(transfer)._stream._connection.close()

    assert source.send(destination, NUM_UNITS) == "handed_over"
    with monkeypatch.context() as patch:
        patch.setattr(source.endpoint, "abort", cut)  # what the host does at the point
        assert source.send(destination, NUM_UNITS, abort_at=point) in ("failed", "handed_over")
    # Handed over once the destination knows of the cut.
    wait_for(lambda: source.send(destination, NUM_UNITS) == "handed_over")
    assert all_back_s(source, destination) < BACK_S
    assert {end[0] for end in destination.ended()} <= {"adopted", "recompute"}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_pages_come_back_from_a_source_that_closes_and_whose_process_lives(
    destination: HostProcess, transport: str
) -> None:
    source = EndpointHost(is_shared=False, transport=transport)
    source.begin(destination, NUM_UNITS)
    assert destination.counts()["FREE"] < NUM_PAGES
    source.close()
    wait_for(lambda: destination.counts()["FREE"] == NUM_PAGES)
