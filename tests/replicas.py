"""Replicas of several ranks, whose other ranks are processes of their own and have no engine."""

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import pytest

from tests.endpoint_host import NUM_PAGES, EndpointHost, HostProcess
from tests.waiting import wait_for

__all__ = [
    "BACK_S",
    "NUM_KV_HEADS",
    "NUM_UNITS",
    "Replicas",
    "all_back_s",
    "assert_handed_over",
    "new_replica",
    "replicas",
]

NUM_UNITS: Final = 24
NUM_KV_HEADS: Final = 4
BACK_S: Final = 1.0
Replicas: TypeAlias = Callable[..., EndpointHost]


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    """Yield a function that returns a replica of these settings, the same one for all tests of the module.

    A test leaves nothing behind in a replica.
    """
    made: dict[tuple[object, ...], EndpointHost] = {}

    def replica(side: str, num_ranks: int, page_size: int = 16, transport: str = "auto") -> EndpointHost:
        key = (side, num_ranks, page_size, transport)
        if key not in made:
            made[key] = new_replica(num_ranks, page_size, transport)
            made[key].fill(len(made))
        return made[key]

    yield replica
    for host in made.values():
        host.close()


def new_replica(num_ranks: int, page_size: int = 16, transport: str = "auto") -> EndpointHost:
    return EndpointHost(
        page_size,
        NUM_PAGES * 16 // page_size,
        transport=transport,
        num_ranks=num_ranks,
        num_kv_heads=NUM_KV_HEADS,
    )


def all_back_s(*hosts: EndpointHost | HostProcess) -> float:
    """Return the seconds until all pages of all hosts are free, and known to nobody."""

    def is_back(host: EndpointHost | HostProcess) -> bool:
        counts = host.counts()
        return not any(counts[state] for state in ("ACTIVE", "CACHED", "LEASED", "QUARANTINED", "open"))

    return wait_for(lambda: all(is_back(host) for host in hosts))


def assert_handed_over(
    source: EndpointHost, destination: EndpointHost | HostProcess, num_units: int = NUM_UNITS
) -> None:
    """Send pages, and compare what the destination adopts with them."""
    assert source.send(destination, num_units) == "handed_over"
    assert destination.ended()[-1] == ("adopted", "", source.sent)
