"""The body of one response through uvicorn, which a stream writes to directly.

uvicorn writes the head of a response apart, which would cost every answer a system call and a packet. So the
head is held until the first part of the body, or until the end of a response without a body.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class ResponseBody:
    """A ResponseWriter for a response with chunked encoding, which uvicorn begins and ends."""

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
        """Release the response when it is complete."""
        self._transport.flush()
        self._cycle.transport = self._transport.below
        # A ring of references would wait for the collector.
        self.on_gone = self.on_writable = None
        extensions: Any = self._cycle.scope["extensions"]
        extensions.clear()

    def leave(self) -> None:
        """Take note that the client has left, or is no longer listened to."""
        if not self._cycle.response_complete:
            self._cycle.disconnected = True
            self._cycle.message_event.set()
            if self.on_gone is not None:
                self.on_gone()

    def writable(self) -> None:
        if not self._cycle.response_complete and self.on_writable is not None:
            self.on_writable()


class _HeadFirst:
    """The transport of a cycle. The first write after the response has started is the head."""

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
    """The body of a streamed response, written from callbacks, without a task.

    A response begins and ends as ASGI says; in between it writes to the ResponseWriter in its scope.
    """

    on_gone: Callable[[], None] | None  # called when the client has left
    on_writable: Callable[[], None] | None  # called when the client no longer lags

    @property
    def is_gone(self) -> bool:
        """The client has left."""

    @property
    def lags(self) -> bool:
        """The client does not keep up: more bytes would wait in memory."""

    def write(self, data: bytes) -> None:
        """Write a part of the body; without effect when the client has left."""
