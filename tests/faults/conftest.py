import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.endpoint_host import Host
from tests.forked_ranks import ranks_are_forked
from tests.replicas import replicas

__all__ = ["ranks_are_forked", "replicas"]


@pytest.fixture
def free_ports() -> list[int]:
    """Three, that nobody listens on."""
    with ExitStack() as ends:
        held = [ends.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        return [each.getsockname()[1] for each in held]


@pytest.fixture
def source(transport: str) -> Iterator[Host]:
    """A source in this process, over the transport of the test's parameter."""
    host = Host(is_shared=False, transport=transport)
    host.fill(1)
    yield host
    host.close()
