"""One response on its way out through uvicorn, and the Outlet that a stream writes its body to.

uvicorn writes a response's head by itself, which would cost every answer a system call and a packet of its
own. So the head is held until the first part of the body; a response that has none lets it go at its end.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class ResponseBody:
    """See outlet.Outlet: of a response with chunked encoding, which uvicorn has begun and will end."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self._cycle = cycle
        self._transport = _HeadFirst(cycle)
        cycle.transport = cast(Any, self._transport)

    @property
    def is_gone(self) -> bool:
        return self._cycle.disconnected

    @property
    def lags(self) -> bool:
        return self._cycle.flow.write_paused

    @property
    def has_begun(self) -> bool:
        return self._cycle.response_started

    @property
    def is_complete(self) -> bool:
        return self._cycle.response_complete

    def write(self, data: bytes) -> None:
        cycle = self._cycle
        if not cycle.disconnected and not cycle.response_complete:
            self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self) -> None:
        """The response is complete: nothing of it is written or told any more."""
        self._transport.flush()
        self._cycle.transport = self._transport.below
        # What refers to each other in a ring would wait for the collector.
        self.on_gone = self.on_writable = None
        extensions: Any = self._cycle.scope["extensions"]
        extensions.clear()

    def leave(self) -> None:
        """The client is gone, or is not listened to any more."""
        if not self._cycle.response_complete:
            self._cycle.disconnected = True
            self._cycle.message_event.set()
            if self.on_gone is not None:
                self.on_gone()

    def writable(self) -> None:
        if not self._cycle.response_complete and self.on_writable is not None:
            self.on_writable()


class _HeadFirst:
    """What a cycle has for its transport. The first write after the response has started is its head."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.below = cycle.transport
        self._head: bytes | None = None  # b"" once it has been written

    def write(self, data: bytes) -> None:
        if self._head is None and self._cycle.response_started:
            self._head = data
        elif self._head:
            self.below.write(self._head + data)
            self._head = b""
        else:
            self.below.write(data)

    def flush(self) -> None:
        if self._head:
            self.below.write(self._head)
            self._head = b""

    def close(self) -> None:
        self.flush()
        self.below.close()

    def is_closing(self) -> bool:
        return self.below.is_closing()


EXTENSION: Final = "baton.outlet"


class ResponseWriter(Protocol):
    """Where the bytes of a streamed response go, without a task: written from the callback that has them.

    A response is begun and ended as ASGI says. In between its server lends it an Outlet, in the scope.
    """

    on_gone: Callable[[], None] | None  # the client has left
    on_writable: Callable[[], None] | None  # it has read what it was behind with

    @property
    def is_gone(self) -> bool: ...

    @property
    def lags(self) -> bool:
        """Whether the client is behind: what is written now only waits in memory."""

    def write(self, data: bytes) -> None:
        """A part of the body; nothing when the client has gone."""
