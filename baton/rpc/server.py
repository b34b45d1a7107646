"""Hosts a node on an asyncio loop: listens, dials, and carries messages between it and its peers.

The life of a connection, at either end:

1. A socket is accepted, or one that `dial` asked for is connected. Both ends prove that they hold the
   cluster's key (baton/rpc/auth.py), then say Hello; all within HANDSHAKE_TIMEOUT_S, or the socket is closed.
2. The node hears `joined`, then `received` for every message, in order.
3. A peer that breaks a rule, or lets more than MAX_UNSENT_BYTES wait for it, is dropped, and counted by
   reason. The node hears `left`, as it does for a peer that went by itself.
4. Both ends ping, and drop a peer of which nothing comes for `link_timeout_s` (baton/rpc/liveness.py). All of
   that is done on the loop's thread: where the node has another, a busy node does not make its own links look
   dead.
5. `close` sends what is unsent; a peer that takes none of it for CLOSE_TIMEOUT_S loses it.

At most MAX_STRANGERS sockets may be without a Hello; a further one costs the oldest of them its place.

Frames that are sent during one turn of the loop leave in one write.
"""

import asyncio
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, cast

from baton.errors import WireError
from baton.messages.bounds import Kind
from baton.messages.codec import CONTROL_SCHEMA, AnyMessage, decode, encode
from baton.messages.control import Hello
from baton.messages.workers import Address
from baton.rpc.auth import MAX_CHALLENGE_BYTES, Challenge, ClusterKeys, ControlKeys, KeyRing, Role
from baton.rpc.connection import FRAME_TIMEOUT_S, HANDSHAKE_TIMEOUT_S, DroppedPeers, keep_alive
from baton.rpc.frames import FrameReader, Seals, encode_frame
from baton.rpc.heartbeat import SignsOfLife
from baton.rpc.liveness import LINK_TIMEOUT_S, LinkLife, StepWatchdog
from baton.rpc.peers import TICK_S, Node, Peer

MAX_UNSENT_BYTES: Final = 16 << 20
MAX_STRANGERS: Final = 256
CLOSE_TIMEOUT_S: Final = 2.0
LEAST_PAUSE_S, MOST_PAUSE_S = 0.5, 30.0  # of a DialPause
logger = logging.getLogger(__name__)


class RpcServer:
    """Of one node; made and used on its loop's thread."""

    def __init__(
        self,
        keys: ClusterKeys,
        *,
        dropped: DroppedPeers | None = None,
        link_timeout_s: float = LINK_TIMEOUT_S,
    ) -> None:
        """Raises ConfigError for a key that is too short."""
        KeyRing.of(keys, keys.kind if isinstance(keys, KeyRing) else Kind.OPERATOR)  # refuses them now
        self.dropped = dropped or DroppedPeers()
        self.link_timeout_s = link_timeout_s
        self._given_keys = keys
        self._keys: ControlKeys | None = None  # of the node's kind
        self._pauses: dict[Address, DialPause] = {}
        self._complaints: dict[str, None] = {}  # those that were logged
        self._node: Node | None = None
        self._server: asyncio.Server | None = None
        self._links: set[RpcLink] = set()
        self._strangers: dict[RpcLink, None] = {}  # accepted, without a Hello yet, oldest first
        self._is_closed = False
        self._dialing: dict[Address, asyncio.Task[None]] = {}  # until its connection has ended
        self._ticker: asyncio.Task[None] | None = None

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Where the node is reached from now on; `serve` must follow before anybody is answered.

        Raises OSError when the port is somebody else's.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: RpcLink(self, Role.ACCEPTING), host, port)
        bound = self._server.sockets[0].getsockname()
        return Address(bound[0], bound[1])

    def serve(self, node: Node) -> None:
        self._node = node
        self._keys = ControlKeys(KeyRing.of(self._given_keys, node.hello.process))
        self._ticker = asyncio.get_running_loop().create_task(self._tick(node))

    @property
    def node(self) -> Node | None:
        return self._node

    @property
    def keys(self) -> ControlKeys | None:
        """None until there is a node to serve."""
        return self._keys

    def dial(self, address: Address) -> None:
        """See node.Dial."""
        if address in self._dialing or self._is_closed:
            return
        pause = self._pauses.get(address)
        if pause is None or asyncio.get_running_loop().time() >= pause.not_before_s:
            self._dialing[address] = asyncio.get_running_loop().create_task(self._connect(address))

    async def close(self) -> None:
        """End every connection; the node hears `left` for each."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        tasks = [*self._dialing.values(), *([self._ticker] if self._ticker else [])]
        for task in tasks:
            task.cancel()
        for link in list(self._links):
            link.close()
        await asyncio.gather(
            *tasks, *(link.ended.wait() for link in list(self._links)), return_exceptions=True
        )
        if self._server is not None:
            await self._server.wait_closed()

    def opened(self, link: "RpcLink") -> None:
        self._links.add(link)
        if link.role is Role.ACCEPTING:
            self._strangers[link] = None
            if len(self._strangers) > MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]  # its end is told later than that of others who come now
                oldest.drop(WireError(f"{MAX_STRANGERS} others have not said Hello yet", reason="crowd"))

    def introduced(self, link: "RpcLink") -> None:
        self._strangers.pop(link, None)

    def closed(self, link: "RpcLink") -> None:
        self._links.discard(link)
        self._strangers.pop(link, None)

    async def _connect(self, address: Address) -> None:
        loop = asyncio.get_running_loop()
        link = RpcLink(self, Role.CONNECTING)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await loop.create_connection(lambda: link, address.host, address.port)
            await link.ended.wait()
            self._remember(address, link)
        except (OSError, TimeoutError) as error:
            logger.debug("%s:%d cannot be reached: %s", address.host, address.port, error)
        finally:
            del self._dialing[address]

    def complain(self, name: str, error: WireError) -> None:
        """Log why a peer is dropped; of mixed builds and keys once, however often they meet."""
        message = str(error)
        if error.reason not in ("version", "key"):
            logger.warning("%s was dropped: %s", name, message)
        elif message not in self._complaints:
            self._complaints[message] = None
            if len(self._complaints) > MAX_STRANGERS:
                del self._complaints[next(iter(self._complaints))]
            logger.error("a peer is refused: %s", message)

    def _remember(self, address: Address, link: "RpcLink") -> None:
        """Lengthen an address's pause after each failed handshake but the first; a good one ends it."""
        if link.is_introduced or self._keys is None:
            self._pauses.pop(address, None)
            return
        pause = self._pauses.get(address)
        if pause is None:
            self._pauses[address] = DialPause()
            return
        pause.pause_s = min(MOST_PAUSE_S, max(LEAST_PAUSE_S, 2 * pause.pause_s))
        pause.not_before_s = asyncio.get_running_loop().time() + pause.pause_s

    async def _tick(self, node: Node) -> None:
        while True:
            for link in list(self._links):
                link.tick()
            try:
                node.tick()
            except Exception:  # a bug of ours: the next tick may do better, none at all surely would not
                logger.exception("a tick of %s failed", type(node).__name__)
            await asyncio.sleep(TICK_S)


class DialPause:
    """The growing pause before an address is dialled again whose handshakes fail."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        self.not_before_s = 0.0  # by the loop's clock


class RpcLink(asyncio.Protocol):
    """One connection; a Peer to the node once the other end has said Hello."""

    def __init__(self, rpc_server: RpcServer, role: Role) -> None:
        self.ended = asyncio.Event()
        self.role = role
        self._rpc_server = rpc_server
        self._challenge: Challenge | None = None  # from the connection on, if the node is there
        self._reader = FrameReader(MAX_CHALLENGE_BYTES + 1)
        self._seals: Seals | None = None
        self._hello: Hello | None = None
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._life: LinkLife | None = None  # from the peer's Hello on

    @property
    def silence_s(self) -> float:
        """See Peer."""
        return self._life.silence_s(time.monotonic()) if self._life is not None else 0.0

    @property
    def is_introduced(self) -> bool:
        """True once the peer's Hello was accepted."""
        return self._hello is not None

    @property
    def hello(self) -> Hello:
        assert self._hello is not None, "nobody has been told of this peer yet"
        return self._hello

    def send(self, message: AnyMessage) -> None:
        """See Peer. WireError, and nothing is sent, for a message that fits no frame."""
        self._send_body(encode(message))

    def tick(self) -> None:
        """Ping the peer when that is due; drop one that is silent."""
        if self._life is None or self._transport is None or self._transport.is_closing():
            return
        try:
            ping = self._life.tick(time.monotonic())
        except WireError as error:
            self.drop(error)
            return
        if ping is not None:
            self._send_body(ping)

    def _send_body(self, body: bytes) -> None:
        if self._seals is None or self._transport is None or self._transport.is_closing():
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(encode_frame(self._seals.seal(body)))

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()
            asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class, but by its methods
        self._transport = transport
        self._rpc_server.opened(self)
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock, self._rpc_server.link_timeout_s)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._must_end_within(HANDSHAKE_TIMEOUT_S, "the peer did not prove itself in time", "handshake")
        if self._rpc_server.keys is None:
            self.drop(WireError("we are not ready yet", reason="early"))
            return
        self._challenge = Challenge(self._rpc_server.keys, self.role, schema=CONTROL_SCHEMA)
        if self.role is Role.CONNECTING:
            transport.write(encode_frame(self._challenge.first()))

    def data_received(self, data: bytes) -> None:
        if self._life is not None:
            self._life.heard(time.monotonic())
        try:
            self._feed(data)
        except WireError as error:
            self.drop(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._forget_deadline()
        self._unsent.clear()
        self._rpc_server.closed(self)
        self.ended.set()
        if self._hello is not None and self._rpc_server.node is not None:
            self._rpc_server.node.left(self)

    # Bytes to messages.

    def _feed(self, data: bytes) -> None:
        view = memoryview(data)
        bodies: list[bytes] = []
        while view:
            # The challenge's reader is exchanged for a larger one in the middle of what has come.
            reader = self._reader
            taken = min(len(view), reader.num_wanted) if self._seals is None else len(view)
            bodies = reader.feed(view[:taken])
            for body in bodies:
                self._take(body)
                if self._transport is None or self._transport.is_closing():
                    return
            view = view[taken:]
        if self._hello is not None:
            self._watch_frame(has_ended_one=bool(bodies))

    def _take(self, body: bytes) -> None:
        if self._seals is None:
            self._prove(body)
            return
        opened = self._seals.open(body)
        if self._life is not None and self._life.take_ping(opened):
            return
        message = decode(opened)
        if self._hello is None:
            self._greet(message)
        elif self._rpc_server.node is not None:
            self._rpc_server.node.received(self, message)

    def _prove(self, body: bytes) -> None:
        assert self._transport is not None and self._challenge is not None
        answer = self._challenge.receive(body)
        if answer is not None:
            self._transport.write(encode_frame(answer))
        session_key = self._challenge.session_key
        if session_key is None:
            return
        assert self._rpc_server.node is not None
        self._challenge.check_version()
        self._reader = FrameReader()
        self._seals = Seals(session_key, self.role)
        self.send(self._rpc_server.node.hello)
        self._flush()  # also to a peer that is dropped in this very turn: it shall learn whom it has reached

    def _greet(self, message: AnyMessage) -> None:
        if not isinstance(message, Hello):
            raise WireError(f"a {type(message).__name__} came before the Hello", reason="protocol")
        assert self._challenge is not None and self._challenge.peer is not None
        if message.process is not self._challenge.peer.kind:
            raise WireError(f"the peer is no {message.process.value} by its proof", reason="role")
        self._forget_deadline()
        self._hello = message
        self._life = LinkLife(self._rpc_server.link_timeout_s, time.monotonic())
        self._rpc_server.introduced(self)
        assert self._rpc_server.node is not None
        self._rpc_server.node.joined(self)

    def _flush(self) -> None:
        transport, unsent = self._transport, self._unsent
        if transport is None or not unsent or transport.is_closing():
            return
        self._unsent = []
        transport.writelines(unsent)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.drop(
                WireError(f"{transport.get_write_buffer_size()} bytes wait for the peer", reason="slow")
            )

    @property
    def _name(self) -> str:
        """The peer's name for logs."""
        if self._hello is None:
            return "a peer"
        worker = self._hello.worker
        return worker.name if worker is not None else f"the {self._hello.process} {self._hello.id[:8]}"

    # Ends.

    def drop(self, error: WireError) -> None:
        self._rpc_server.complain(self._name, error)
        self._rpc_server.dropped.add(error.reason)
        if self._transport is None:
            return
        if error.reason == "version" and not self._transport.is_closing():
            self.close()  # what is unsent is our own proof, with which the peer can say the same
        else:
            self._transport.abort()

    def _watch_frame(self, has_ended_one: bool) -> None:
        """A frame that has begun must end in time, however many ended before it."""
        if has_ended_one or not self._reader.has_begun:
            self._forget_deadline()
        if self._reader.has_begun and self._deadline is None:
            self._must_end_within(FRAME_TIMEOUT_S, "a frame took too long to arrive", "slow")

    def _must_end_within(self, seconds: float, complaint: str, reason: str) -> None:
        late: Callable[[], None] = lambda: self.drop(WireError(complaint, reason=reason))  # noqa: E731
        self._deadline = asyncio.get_running_loop().call_later(seconds, late)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


# Hosts a node whose own thread must never wait for the network: its hub runs on a thread beside it.
#
# 1. What the hub's loop learns becomes a call that is posted to the node's thread: `joined`, `received`,
#    `left` and `tick`, in order.
# 2. What the node says is queued, and the loop is woken once for all that is queued meanwhile.
# 3. The loop's thread sends a worker's signs of life, also while the node's thread is busy.
# 4. A peer that the node refuses (WireError) is dropped as if the hub had refused it.

Call: TypeAlias = Callable[[], None]
Post: TypeAlias = Callable[[Call], None]  # have it made on the node's thread, soon
ResultT = TypeVar("ResultT")


class RpcThread:
    """Made, and called, on the node's thread or before it runs."""

    def __init__(self, keys: ClusterKeys, post: Post, *, link_timeout_s: float = LINK_TIMEOUT_S) -> None:
        self._post = post
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hub", daemon=True)
        self._thread.start()
        self._rpc_server = self._wait(_make_hub(keys, link_timeout_s))
        self._calls: deque[Call] = deque()  # for the loop; it is woken when this was empty
        self._is_closed = False

    @property
    def dropped(self) -> dict[str, int]:
        """How many peers were dropped, by reason."""
        return dict(self._rpc_server.dropped.counts())

    def listen(self, host: str, port: int = 0) -> Address:
        """OSError when the port is somebody else's."""
        return self._wait(self._rpc_server.listen(host, port))

    def serve(self, node: Node, steps: StepWatchdog | None = None) -> None:
        """steps: of a worker's engine; routers are told from the loop's thread how its present one does."""
        life = None if steps is None else SignsOfLife(steps)
        self._loop.call_soon_threadsafe(self._rpc_server.serve, _Announcer(node, self, life))

    def dial(self, address: Address) -> None:
        """See node.Dial."""
        self.call(partial(self._rpc_server.dial, address))

    def close(self) -> None:
        """Send what is unsent, end every connection and the thread."""
        try:
            self._wait(self._rpc_server.close())
        finally:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def call(self, call: Call) -> None:
        """Have the loop make the call; after `close` nobody hears it."""
        if self._is_closed:
            return
        self._calls.append(call)
        if len(self._calls) == 1:
            self._loop.call_soon_threadsafe(self._make_calls)

    def post(self, call: Call) -> None:
        """Have the node's thread make the call."""
        self._post(call)

    def _make_calls(self) -> None:
        while self._calls:
            try:
                self._calls[0]()  # stays in the queue meanwhile: who adds to it need not wake us
            except WireError as error:
                logger.warning("a message was not sent: %s", error)
            except Exception:  # a bug of ours: what else the node says must not wait for ever
                logger.exception("a call of the node failed")
            finally:
                self._calls.popleft()

    def _wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class DistantPeer:
    """A peer whose socket is another thread's."""

    def __init__(self, link: Peer, thread: RpcThread) -> None:
        self._link = link
        self._thread = thread

    @property
    def hello(self) -> Hello:
        return self._link.hello

    @property
    def silence_s(self) -> float:
        return self._link.silence_s

    def send(self, message: AnyMessage) -> None:
        self._thread.call(partial(self._link.send, message))

    def close(self) -> None:
        self._thread.call(self._link.close)

    def drop(self, error: WireError) -> None:
        link = self._link
        assert isinstance(link, RpcLink)
        self._thread.call(partial(link.drop, error))


class _Announcer:
    """The node, to the hub: on the loop's thread."""

    def __init__(self, node: Node, thread: RpcThread, life: SignsOfLife | None = None) -> None:
        self._node = node
        self._life = life
        self._thread = thread
        self._peers: dict[Peer, DistantPeer] = {}

    @property
    def hello(self) -> Hello:
        return self._node.hello

    def joined(self, link: Peer) -> None:
        peer = self._peers[link] = DistantPeer(link, self._thread)
        self._thread.post(partial(self._guarded, peer, partial(self._node.joined, peer)))

    def received(self, link: Peer, message: AnyMessage) -> None:
        peer = self._peers[link]
        self._thread.post(partial(self._guarded, peer, partial(self._node.received, peer, message)))

    def left(self, link: Peer) -> None:
        self._thread.post(partial(self._node.left, self._peers.pop(link)))

    def tick(self) -> None:
        if self._life is not None:
            self._life.give([link for link in self._peers if link.hello.process is Kind.ROUTER])
        self._thread.post(self._node.tick)

    def _guarded(self, peer: DistantPeer, call: Call) -> None:
        """On the node's thread."""
        try:
            call()
        except WireError as error:
            peer.drop(error)


async def _make_hub(keys: ClusterKeys, link_timeout_s: float) -> RpcServer:
    return RpcServer(keys, link_timeout_s=link_timeout_s)
