import socket
from contextlib import ExitStack

import pytest

from tests.replicas import replicas

__all__ = ["replicas"]


@pytest.fixture
def free_ports() -> list[int]:
    """Three, that nobody listens on."""
    with ExitStack() as ends:
        held = [ends.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        return [each.getsockname()[1] for each in held]
