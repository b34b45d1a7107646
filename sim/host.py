"""What a hub is to a node (baton/rpc/server.py), without sockets: it listens, dials, and carries messages.

A dropped peer is noted, with the reason: among honest processes there are few that may occur.
"""

from functools import partial
from typing import Protocol

from baton.errors import WireError
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage, decode, encode
from baton.messages.control import Hello
from baton.messages.workers import Address
from baton.rpc.connection import HANDSHAKE_TIMEOUT_S
from baton.rpc.peers import TICK_S, Node
from baton.sim.network import End, Network
from baton.sim.process import Call, SimProcess


class Trace(Protocol):
    """Who watches: told of every message when it is heard, of every death and every drop."""

    def message(self, sender: str, receiver: str, message: AnyMessage) -> None: ...

    def died(self, name: str) -> None: ...

    def dropped(self, host: str, error: WireError) -> None: ...


class Host:
    """One process's connections; `serve` must follow before anything comes."""

    def __init__(self, process: SimProcess, network: Network, directory: "Directory", trace: Trace) -> None:
        self.process = process
        self.trace = trace
        self._network = network
        self._directory = directory
        self._node: Node | None = None
        self._dialing: set[Address] = set()  # until its connection has ended
        self._known: dict[HostPeer, None] = {}  # that have said Hello, and have not left

    @property
    def node(self) -> Node:
        assert self._node is not None, f"{self.process.name} serves nothing yet"
        return self._node

    def serve(self, node: Node, address: Address | None = None) -> None:
        self._node = node
        if address is not None:
            self._directory.listen(address, self)
        self.process.later(TICK_S, self._tick)

    def dial(self, address: Address) -> None:
        """See node.Dial."""
        if address in self._dialing:
            return
        self._dialing.add(address)
        self.process.later(self._network.delay_s(), lambda: self._connect(address))

    def _connect(self, address: Address) -> None:
        callee = self._directory.find(address)
        if callee is None or callee.process.is_dead or self._network.is_parted(self.process, callee.process):
            self._dialing.discard(address)
            return
        wait_s = self._network.connects_in_s(self.process, callee.process)
        if wait_s > 0:  # TCP goes on asking
            gives_up = wait_s > HANDSHAKE_TIMEOUT_S
            call = partial(self._dialing.discard if gives_up else self._connect, address)
            self.process.later(min(wait_s, HANDSHAKE_TIMEOUT_S), call)
            return
        ours, theirs = self._network.connect(self.process, callee.process)
        callee.process.post(lambda: callee.greet(HostPeer(callee, theirs)))
        self.greet(HostPeer(self, ours, on_gone=lambda: self._dialing.discard(address)))

    def greet(self, peer: "HostPeer") -> None:
        peer.send_now(self.node.hello)  # the hub's thread says it, whatever step runs
        self.process.later(HANDSHAKE_TIMEOUT_S, peer.end_unless_known)

    def tell_routers(self, message: AnyMessage) -> None:
        """As the hub's own thread does: a turn that lasts does not delay it."""
        for peer in self._known:
            if peer.hello.process is Kind.ROUTER:
                peer.send_now(message)

    def met(self, peer: "HostPeer") -> None:
        self._known[peer] = None

    def left(self, peer: "HostPeer") -> None:
        self._known.pop(peer, None)

    def drop(self, peer: "HostPeer", error: WireError) -> None:
        self.trace.dropped(self.process.name, error)
        peer.abort()

    def _tick(self) -> None:
        self.process.post(self._make_tick)

    def _make_tick(self) -> None:
        self.process.later(TICK_S, self._tick)
        self.node.tick()


class HostPeer:
    """See node.Peer. One to its node from the moment that its Hello has come."""

    def __init__(self, host: Host, end: End, on_gone: Call = lambda: None) -> None:
        self._host = host
        self._end = end
        self._on_gone = on_gone
        self._hello: Hello | None = None
        end.on_body = self._received
        end.on_end = self._left

    @property
    def hello(self) -> Hello:
        assert self._hello is not None, "nobody has been told of this peer yet"
        return self._hello

    @property
    def silence_s(self) -> float:
        return 0.0

    def send(self, message: AnyMessage) -> None:
        self._end.send(encode(message))

    def send_now(self, message: AnyMessage) -> None:
        """Send it though a turn of the process lasts."""
        self._end.carry(encode(message))

    def close(self) -> None:
        self._end.close()

    def abort(self) -> None:
        self._end.abort()

    def end_unless_known(self) -> None:
        """A process that stands still accepts connections, and says nothing."""
        if self._hello is None:
            self.abort()

    def _received(self, body: bytes) -> None:
        message, host = decode(body), self._host
        try:
            if self._hello is not None:
                host.trace.message(self._hello.id, host.process.name, message)
                host.node.received(self, message)
                return
            assert isinstance(message, Hello), message
            self._hello = message
            host.met(self)
            host.node.joined(self)
        except WireError as error:
            host.drop(self, error)

    def _left(self) -> None:
        self._on_gone()
        self._host.left(self)
        if self._hello is not None:
            self._host.node.left(self)


class Directory:
    """Who listens where."""

    def __init__(self) -> None:
        self._hosts: dict[Address, Host] = {}

    def listen(self, address: Address, host: Host) -> None:
        """A process that listens there takes the place of one that did before."""
        self._hosts[address] = host

    def find(self, address: Address) -> Host | None:
        return self._hosts.get(address)
