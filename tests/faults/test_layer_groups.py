"""Hand-offs whose last pages leave by groups of layers: the same bytes, and every page back."""

import random
from collections.abc import Iterator

import pytest

from tests.endpoint_host import NUM_PAGES, Host
from tests.replicas import BACK_S, NUM_UNITS, all_back_s

POINTS = ("after Grant", "half", "all", "before Verified")


@pytest.fixture(scope="module", params=["auto", "tcp", "gloo", "two-ranks"])
def source(request: pytest.FixtureRequest) -> Iterator[Host]:
    is_split = request.param == "two-ranks"
    transport = "auto" if is_split else request.param
    host = Host(transport=transport, num_ranks=1 + is_split, num_layer_groups=2)
    host.fill(1)
    yield host
    host.close()


@pytest.fixture(scope="module", params=[(16, 1), (64, 1), (16, 2)], ids=["equal", "page-64", "two-ranks"])
def destination(request: pytest.FixtureRequest) -> Iterator[Host]:
    page_size, num_ranks = request.param
    host = Host(page_size, NUM_PAGES * 16 // page_size, num_ranks=num_ranks)
    yield host
    host.close()


def test_pages_arrive_exactly(source: Host, destination: Host) -> None:
    for _ in range(3):
        assert source.send(destination.address(), NUM_UNITS) == "handed_over"
        assert destination.ended()[-1] == ("adopted", "", source.sent)
    assert all_back_s(source, destination) < BACK_S


@pytest.mark.parametrize("point", POINTS)
def test_an_abort_anywhere_gives_all_pages_back(source: Host, destination: Host, point: str) -> None:
    moments = random.Random(point)
    for _ in range(2):
        outcome = source.send(
            destination.address(), NUM_UNITS, abort_at=point, delay_s=moments.uniform(0, 0.004)
        )
        assert outcome in ("cancelled", "failed", "handed_over")
        assert all_back_s(source, destination) < BACK_S
    assert source.send(destination.address(), NUM_UNITS) == "handed_over"
    assert destination.ended()[-1] == ("adopted", "", source.sent)


def test_a_flipped_bit_of_one_group_is_written_again(source: Host, destination: Host) -> None:
    destination.flip_bits(1)
    assert source.send(destination.address(), NUM_UNITS) == "handed_over"
    assert destination.ended()[-1] == ("adopted", "", source.sent)
    assert all_back_s(source, destination) < BACK_S


@pytest.mark.parametrize("num_groups", [0, 3])
def test_more_groups_than_layers_are_no_transfer(source: Host, destination: Host, num_groups: int) -> None:
    assert all_back_s(source, destination) < BACK_S  # of the transfer before
    with pytest.raises(ValueError, match=f"2 layers cannot form {num_groups} groups"):
        destination.grant(source.address(), "ab" * 16, NUM_UNITS, num_layer_groups=num_groups)
    assert destination.counts()["open"] == 0
