from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from tests.endpoint_host import EndpointHost
from tests.forked_ranks import ranks_are_forked
from tests.replicas import replicas

__all__ = ["ranks_are_forked", "replicas"]


@pytest.fixture
def make_host() -> Iterator[Callable[..., EndpointHost]]:
    """Make hosts in this process, with random contents of a seed, and close them after the test."""
    with ExitStack() as stack:

        def make(seed: int = 1, **settings: object) -> EndpointHost:
            host = stack.enter_context(closing(EndpointHost(**settings)))  # type: ignore[arg-type]
            host.fill(seed)
            return host

        yield make


@pytest.fixture
def source(transport: str, make_host: Callable[..., EndpointHost]) -> EndpointHost:
    """A source in this process, over the transport of the test's parameter."""
    return make_host(is_shared=False, transport=transport)
