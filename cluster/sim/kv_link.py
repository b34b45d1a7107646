"""A link between two endpoints of the simulation: what they say about transfers, over a wire of its own."""

from collections.abc import Callable

from baton.cluster.sim.network import End
from baton.errors import WireError
from baton.kvtransfer.link import Link, OnMessage
from baton.kvtransfer.messages import AnyMessage, Hello, decode, encode


class SimLink(Link):
    """Has no socket and no thread; both ends of it know each other's Hello from the start."""

    def __init__(
        self,
        end: End,
        hello: Hello,
        on_message: OnMessage,
        on_end: Callable[["SimLink"], None],
        note: Callable[[WireError], None],
    ) -> None:
        self.hello = hello
        self.number = 0
        self.is_lost = False
        self._end = end
        self._on_message = on_message
        self._on_end = on_end
        self._note = note
        end.on_body = self._received
        end.on_end = self._lost

    def send(self, message: AnyMessage) -> None:
        self._end.send(encode(message))

    def digest_key(self, transfer: bytes) -> bytes:
        return transfer.ljust(32)  # nothing here asks for it: there are no forgers

    def drop(self, error: WireError) -> None:
        self._note(error)
        self._end.abort()

    def close(self) -> None:
        self._end.close()

    def _received(self, body: bytes) -> None:
        self._on_message(self, decode(body))

    def _lost(self) -> None:
        self.is_lost = True
        self._on_end(self)
