"""Where the bytes of a streamed response go, without a task: written from the callback that has them.

A response is begun and ended as ASGI says. In between its server lends it an Outlet, in the scope.
"""

from collections.abc import Callable
from typing import Final, Protocol

EXTENSION: Final = "baton.outlet"


class Outlet(Protocol):
    on_gone: Callable[[], None] | None  # the client has left
    on_writable: Callable[[], None] | None  # it has read what it was behind with

    @property
    def is_gone(self) -> bool: ...

    @property
    def lags(self) -> bool:
        """Whether the client is behind: what is written now only waits in memory."""

    def write(self, data: bytes) -> None:
        """A part of the body; nothing when the client has gone."""
