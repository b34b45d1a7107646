"""Hand-offs by groups of layers, and hand-offs of staged memory: the right bytes, and every page back.

Sockets and digests reach the memory of a GPU by way of staging memory. Here a CPU's packing stands in for the
GPU's; pools in place and staged ones hand over to each other.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import product
from typing import Any, Final, NamedTuple

import pytest

from baton.kvtransfer.ranks import executor
from baton.kvtransfer.transports.base import LocalRank
from tests.endpoint_host import NUM_PAGES, EndpointHost
from tests.replicas import BACK_S, NUM_UNITS, Replicas, all_back_s, assert_handed_over

POINTS: Final = ("after Grant", "half", "all", "before Verified")
SOURCES: Final[dict[str, dict[str, Any]]] = {
    "groups": {},
    "groups over tcp": {"transport": "tcp"},
    "groups over gloo": {"transport": "gloo"},
    "groups of two ranks": {"num_ranks": 2},
}
DESTINATIONS: Final[dict[str, dict[str, Any]]] = {
    "equal": {},
    "page 64": {"page_size": 64, "num_pages": NUM_PAGES // 4},
    "two ranks": {"num_ranks": 2},
}


class StagedRank(LocalRank):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.memory = None


class Kind(NamedTuple):
    """The settings of both hosts, and whether the memory of each is staged."""

    source: dict[str, Any]
    destination: dict[str, Any]
    is_staged: tuple[bool, bool] = (False, False)


KINDS: Final = {
    f"{name} to {other}": Kind({**source, "num_layer_groups": 2}, destination)
    for (name, source), (other, destination) in product(SOURCES.items(), DESTINATIONS.items())
} | {
    f"{name}, page {size}": Kind({"is_shared": False}, {"is_shared": False, "page_size": size}, is_staged)
    for (name, is_staged), size in product(
        {
            "staged to staged": (True, True),
            "staged to in place": (True, False),
            "in place to staged": (False, True),
        }.items(),
        (16, 32),
    )
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def ends(kind: Kind) -> Iterator[tuple[EndpointHost, EndpointHost]]:
    """A source and a destination."""
    with ExitStack() as stack:

        def host(settings: dict[str, Any], is_staged: bool) -> EndpointHost:
            with pytest.MonkeyPatch.context() as monkeypatch:
                if is_staged:
                    monkeypatch.setattr(executor, "LocalRank", StagedRank)
                return stack.enter_context(closing(EndpointHost(**settings)))

        source, destination = host(kind.source, kind.is_staged[0]), host(kind.destination, kind.is_staged[1])
        source.fill(1)
        yield source, destination


def test_pages_arrive_exactly(ends: tuple[EndpointHost, EndpointHost], kind: Kind) -> None:
    source, destination = ends
    for _ in range(3):
        assert_handed_over(source, destination)
    assert all_back_s(source, destination) < BACK_S
    if any(kind.is_staged):
        assert source.transports() == {"tcp": 1}


@pytest.mark.parametrize("point", POINTS)
def test_an_abort_anywhere_gives_all_pages_back(ends: tuple[EndpointHost, EndpointHost], point: str) -> None:
    source, destination = ends
    moments = random.Random(point)
    for _ in range(2):
        outcome = source.send(destination, NUM_UNITS, abort_at=point, delay_s=moments.uniform(0, 0.004))
        assert outcome in ("cancelled", "failed", "handed_over")
        assert all_back_s(source, destination) < BACK_S
    assert_handed_over(source, destination)


def test_a_flipped_bit_is_written_again(ends: tuple[EndpointHost, EndpointHost]) -> None:
    source, destination = ends
    destination.flip_bits(1)
    assert_handed_over(source, destination)
    assert all_back_s(source, destination) < BACK_S


@pytest.mark.parametrize("num_groups", [0, 3])
def test_more_groups_than_layers_are_no_transfer(replicas: Replicas, num_groups: int) -> None:
    source, destination = replicas("source", 1), replicas("destination", 1)
    with pytest.raises(ValueError, match=f"2 layers cannot form {num_groups} groups"):
        destination.grant(source.address(), "ab" * 16, NUM_UNITS, num_layer_groups=num_groups)
    assert destination.counts()["open"] == 0
