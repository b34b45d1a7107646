"""The host of a simulated node: listens, dials, and carries messages, as baton/rpc/server.py does with
sockets."""

from functools import partial

from baton.errors import WireError
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage, decode, encode
from baton.messages.control import Hello
from baton.messages.workers import Address
from baton.rpc.peers import TICK_S, Node
from baton.rpc.session import HANDSHAKE_TIMEOUT_S
from baton.sim.network import End, Network
from baton.sim.process import Call, SimProcess
from baton.sim.trace import Recorder


class Host:
    """One process's connections; call `serve` before anything comes."""

    def __init__(
        self, process: SimProcess, network: Network, listeners: "dict[Address, Host]", recorder: Recorder
    ) -> None:
        """listeners: the hosts of one simulation by address. A later process displaces an earlier one."""
        self.process = process
        self.recorder = recorder
        self._network = network
        self._listeners = listeners
        self._node: Node | None = None
        self._dialing: set[Address] = set()  # until its connection has ended
        self._known: dict[HostPeer, None] = {}  # that have said Hello, and have not left

    @property
    def node(self) -> Node:
        """The node that the host serves."""
        assert self._node is not None, f"{self.process.name} serves nothing yet"
        return self._node

    def serve(self, node: Node, address: Address | None = None) -> None:
        """Let peers in. address: where the node listens, if it does."""
        self._node = node
        if address is not None:
            self._listeners[address] = self
        self.process.later(TICK_S, self._tick)

    def dial(self, address: Address) -> None:
        """See Dial in baton/rpc/peers.py."""
        if address not in self._dialing:
            self._dialing.add(address)
            self.process.later(self._network.delay_s(), lambda: self._connect(address))

    def tell_routers(self, message: AnyMessage) -> None:
        """Send now, as the thread of an RpcThread does: a turn that lasts does not delay the message."""
        for peer in self._known:
            if peer.hello.process is Kind.ROUTER:
                peer.send_now(message)

    def greet(self, peer: "HostPeer") -> None:
        """Say Hello to a new peer, at once."""
        peer.send_now(self.node.hello)
        self.process.later(HANDSHAKE_TIMEOUT_S, peer.end_unless_known)

    def heard(self, peer: "HostPeer", message: AnyMessage) -> None:
        """Take a message of a peer; its first is its Hello."""
        try:
            if peer in self._known:
                self.recorder.message(peer.hello.id, self.process.name, message)
                self.node.received(peer, message)
            else:
                assert isinstance(message, Hello), message
                peer.hello = message
                self._known[peer] = None
                self.node.joined(peer)
        except WireError as error:
            self.recorder.dropped(self.process.name, error)
            peer.abort()

    def left(self, peer: "HostPeer") -> None:
        """Take the end of a peer's connection."""
        if peer in self._known:
            del self._known[peer]
            self.node.left(peer)

    def knows(self, peer: "HostPeer") -> bool:
        """Return whether the peer has said Hello and has not left."""
        return peer in self._known

    def _connect(self, address: Address) -> None:
        callee = self._listeners.get(address)
        if callee is None or callee.process.is_dead or self._network.is_parted(self.process, callee.process):
            self._dialing.discard(address)
            return
        wait_s = self._network.connects_in_s(self.process, callee.process)
        if wait_s > 0:  # TCP sends its request again
            gives_up = wait_s > HANDSHAKE_TIMEOUT_S
            call = partial(self._dialing.discard if gives_up else self._connect, address)
            self.process.later(min(wait_s, HANDSHAKE_TIMEOUT_S), call)
            return
        ours, theirs = self._network.connect(self.process, callee.process)
        callee.process.post(lambda: callee.greet(HostPeer(callee, theirs)))
        self.greet(HostPeer(self, ours, on_gone=lambda: self._dialing.discard(address)))

    def _tick(self) -> None:
        self.process.post(self._make_tick)

    def _make_tick(self) -> None:
        self.process.later(TICK_S, self._tick)
        self.node.tick()


class HostPeer:
    """See Peer in baton/rpc/peers.py. The node knows a peer once the peer's Hello has come."""

    hello: Hello
    silence_s = 0.0

    def __init__(self, host: Host, end: End, on_gone: Call = lambda: None) -> None:
        self._host = host
        self._end = end
        self._on_gone = on_gone
        end.on_body = lambda body: host.heard(self, decode(body))
        end.on_end = self._ended

    def send(self, message: AnyMessage) -> None:
        """See Peer."""
        self._end.send(encode(message))

    def send_now(self, message: AnyMessage) -> None:
        """Send during a turn of the process."""
        self._end.carry(encode(message))

    def close(self) -> None:
        """See Peer."""
        self._end.close()

    def abort(self) -> None:
        """End the connection without sending the rest."""
        self._end.abort()

    def end_unless_known(self) -> None:
        """End the connection to a paused process, which accepts connections and says nothing."""
        if not self._host.knows(self):
            self.abort()

    def _ended(self) -> None:
        self._on_gone()
        self._host.left(self)
