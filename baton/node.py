"""What a process of the cluster is, apart from its sockets: the same code runs in the simulator.

A node owns no thread and no connection. Its host (see hub.py) calls it, always from one thread, and it calls
its host's `Dial`. Peers are known by the id in their Hello; who reconnects comes as a new Peer.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from baton.control import Hello
from baton.control_wire import AnyMessage
from baton.worker import Address

TICK_S = 0.25  # between two calls of `tick`


class Peer(Protocol):
    """The other end of a connection, which has proved that it holds the cluster's key."""

    @property
    def hello(self) -> Hello: ...

    @property
    def silence_s(self) -> float:
        """For how long nothing has come from the peer, or nothing has arrived there; pings count."""

    def send(self, message: AnyMessage) -> None:
        """Never waits, and never fails: to a peer that is gone nothing is sent, and `left` says so."""

    def close(self) -> None:
        """`left` follows."""


class Node(Protocol):
    @property
    def hello(self) -> Hello: ...

    def joined(self, peer: Peer) -> None:
        """A connection is there, whoever asked for it. WireError: the peer is dropped, and `left` follows."""

    def received(self, peer: Peer, message: AnyMessage) -> None:
        """WireError: the peer broke a rule and is dropped, and counted."""

    def left(self, peer: Peer) -> None:
        """Once for each that joined; its process may live on."""

    def tick(self) -> None:
        """About every TICK_S."""


# Be connected to this address: returns at once. A try that fails is forgotten: ask again, as in each `tick`.
# Asked again while a try or its connection lasts, it does nothing.
Dial: TypeAlias = Callable[[Address], None]
