"""Hand-offs between replicas of several ranks each, whose other ranks are processes of their own."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.endpoint_host import NUM_PAGES, Host

NUM_UNITS = 24
CUTS = list(itertools.product((1, 2, 4), (1, 2, 4)))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def replica(
    stack: ExitStack, num_ranks: int, page_size: int = 16, transport: str = "auto", seed: int = 1
) -> Host:
    num_pages = NUM_PAGES * 16 // page_size
    host = Host(page_size, num_pages, transport=transport, num_ranks=num_ranks, num_kv_heads=4)
    stack.callback(host.close)
    host.fill(seed)
    return host


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(("num_sources", "num_destinations"), CUTS)
def test_pages_arrive_exactly_whatever_the_number_of_ranks(
    stack: ExitStack, num_sources: int, num_destinations: int, transport: str
) -> None:
    source = replica(stack, num_sources, transport=transport)
    destination = replica(stack, num_destinations, seed=2)
    for _ in range(3):
        assert source.send(destination.address(), NUM_UNITS) == "handed_over"
        assert destination.ended()[-1] == ("adopted", "", source.sent)
