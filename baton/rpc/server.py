"""Hosts a node on an event loop: listens, dials, and carries messages between the node and its peers.

The life of a connection, at either end:

1. A socket is accepted, or connected for `dial`. Both ends prove that they hold the cluster's key
   (baton/rpc/session.py), then say Hello; all within HANDSHAKE_TIMEOUT_S, or the socket is closed.
2. The node hears `joined`, then `received` for every message, in order.
3. A peer that breaks a rule, or leaves more than MAX_UNSENT_BYTES unread, is dropped and counted by reason.
   The node hears `left`, as it does for a peer that closes.
4. Both ends ping, and drop a peer that is silent for `link_timeout_s` (baton/rpc/liveness.py). The loop's
   thread does that, so a node with a thread of its own may be busy without losing its links.
5. `close` sends the unsent frames; a peer that takes none of them for CLOSE_TIMEOUT_S loses them.

At most MAX_STRANGERS sockets may be without a Hello; a further socket displaces the oldest of them. Frames
that are sent during one turn of the loop leave in one write. When the node has handled messages for TURN_S,
the next messages of all peers wait for the next turn, so an answer never waits for later messages.

`RpcServer` runs on its node's loop. `RpcThread` runs a server on a thread of its own, for a node that must
never wait for the network.
"""

import asyncio
import contextlib
import faulthandler
import logging
import math
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar, cast

import uvloop

from baton.clock import Clock, SystemClock
from baton.errors import WireError
from baton.messages.bounds import LINK_TIMEOUT_S, Kind, short_id
from baton.messages.codec import CONTROL_SCHEMA, AnyMessage, decode, encode
from baton.messages.control import Alive, Hello
from baton.messages.workers import Address, RunningStep
from baton.rpc.auth import ClusterKeys, KeyRing, LinkKeys, Role
from baton.rpc.connection import Call, DroppedPeers, Post, keep_alive
from baton.rpc.liveness import BEAT_S, LinkLife, StepWatchdog
from baton.rpc.peer_clock import ClockOffset
from baton.rpc.peers import TICK_S, Node, Peer
from baton.rpc.session import HANDSHAKE_TIMEOUT_S, Session

MAX_UNSENT_BYTES: Final = 16 << 20
MAX_STRANGERS: Final = 256
CLOSE_TIMEOUT_S: Final = 2.0
LEAST_BACKOFF_S, MOST_BACKOFF_S = 0.5, 30.0
TURN_S: Final = 0.012  # shorter turns split bursts of requests, and a worker's steps then batch fewer tokens
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _DialBackoff:
    """The growing pause between dials of an address with failing handshakes."""

    backoff_s: float = 0.0
    not_before_s: float = 0.0  # by the loop's clock


class RpcServer:
    """Serves one node. Made and used on its loop's thread."""

    def __init__(
        self,
        keys: ClusterKeys,
        *,
        dropped: DroppedPeers | None = None,
        link_timeout_s: float = LINK_TIMEOUT_S,
    ) -> None:
        """keys: of the node's process kind. dropped: counts the peers that the server drops."""
        self.dropped = dropped or DroppedPeers()
        self.link_timeout_s = link_timeout_s
        self.node: Node | None = None
        self.is_closed = False
        self.keys: LinkKeys | None = None  # as long as there is a node
        self._cluster_keys = keys
        self._backoffs: dict[Address, _DialBackoff] = {}
        self._complaints: dict[str, None] = {}  # that were logged
        self._server: asyncio.Server | None = None
        self._links: set[RpcLink] = set()
        self._strangers: dict[RpcLink, None] = {}  # accepted, without a Hello yet, oldest first
        self._turn_ends_s: float | None = None  # once this turn has handled a message
        self._dialing: dict[Address, asyncio.Task[None]] = {}  # until its connection has ended
        self._ticker: asyncio.Task[None] | None = None

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Listen, and return the address. Peers that connect before `serve` are dropped.

        Raises OSError when another process has the port.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: RpcLink(self, Role.ACCEPTING), host, port)
        bound = self._server.sockets[0].getsockname()
        return Address(bound[0], bound[1])

    def serve(self, node: Node) -> None:
        """Accept peers for this node. ConfigError: the keys belong to another kind of process."""
        self.node = node
        self.keys = LinkKeys(KeyRing.of(self._cluster_keys, node.hello.process))
        self._ticker = asyncio.get_running_loop().create_task(self._tick(node))

    def dial(self, address: Address) -> None:
        """See Dial in baton/rpc/peers.py."""
        if address in self._dialing or self.is_closed:
            return
        backoff = self._backoffs.get(address)
        if backoff is None or asyncio.get_running_loop().time() >= backoff.not_before_s:
            self._dialing[address] = asyncio.get_running_loop().create_task(self._connect(address))

    async def close(self) -> None:
        """End every connection; the node hears `left` for each."""
        self.is_closed = True
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

    # Called by links.

    def opened(self, link: "RpcLink") -> None:
        """Add a connected link."""
        self._links.add(link)
        if link.role is Role.ACCEPTING:
            self._strangers[link] = None
            if len(self._strangers) > MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]  # at once: further sockets may come before its end is reported
                oldest.drop(WireError(f"{MAX_STRANGERS} others have not said Hello yet", reason="limit"))

    def introduced(self, link: "RpcLink") -> None:
        """Note that the link's peer has said Hello."""
        self._strangers.pop(link, None)

    def closed(self, link: "RpcLink") -> None:
        """Forget a closed link."""
        self._links.discard(link)
        self._strangers.pop(link, None)

    def turn_ends_s(self, now_s: float) -> float:
        """Return the time at which links stop handling messages in this turn of the loop."""
        if self._turn_ends_s is None:
            self._turn_ends_s = now_s + TURN_S
            asyncio.get_running_loop().call_soon(self._end_turn)
        return self._turn_ends_s

    def _end_turn(self) -> None:
        self._turn_ends_s = None

    def complain(self, name: str, error: WireError) -> None:
        """Count a dropped peer and log the reason. Each message about another build or key is logged once."""
        self.dropped.add(error.reason)
        message = str(error)
        if error.reason not in ("version", "key"):
            logger.warning("%s was dropped: %s", name, message)
        elif message not in self._complaints:
            self._complaints[message] = None
            if len(self._complaints) > MAX_STRANGERS:
                del self._complaints[next(iter(self._complaints))]
            logger.error("a peer is refused: %s", message)

    async def _connect(self, address: Address) -> None:
        link = RpcLink(self, Role.CONNECTING)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await self._create_connection(link, address)
            await link.ended.wait()
            self._set_backoff(address, link)
        except (OSError, TimeoutError) as error:
            logger.debug("%s:%d cannot be reached: %s", address.host, address.port, error)
        finally:
            del self._dialing[address]

    async def _create_connection(self, link: "RpcLink", address: Address) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: link, address.host, address.port)
        except BaseException:
            # uvloop reports no lost connection if the call ends after `connection_made`; asyncio does, later.
            if link in self._links:
                link.connection_lost(None)
            raise

    def _set_backoff(self, address: Address, link: "RpcLink") -> None:
        """Lengthen the pause of an address after every failed handshake but the first.

        A handshake that succeeds ends the pause.
        """
        if link.is_introduced or self.keys is None:
            self._backoffs.pop(address, None)
            return
        backoff = self._backoffs.get(address)
        if backoff is None:
            self._backoffs[address] = _DialBackoff()
            return
        backoff.backoff_s = min(MOST_BACKOFF_S, max(LEAST_BACKOFF_S, 2 * backoff.backoff_s))
        backoff.not_before_s = asyncio.get_running_loop().time() + backoff.backoff_s

    async def _tick(self, node: Node) -> None:
        while True:
            for link in list(self._links):
                link.tick()
            try:
                node.tick()
            except Exception:  # a bug of ours: later ticks may succeed, and the node needs them
                logger.exception("a tick of %s failed", type(node).__name__)
            await asyncio.sleep(TICK_S)


class RpcLink(asyncio.Protocol):
    """One connection; a Peer to the node once the other end has said Hello."""

    def __init__(self, rpc_server: RpcServer, role: Role) -> None:
        self.ended = asyncio.Event()
        self.role = role
        self._rpc_server = rpc_server
        self._session: Session | None = None  # from the connection on, if the server has a node
        self._has_said_hello = False
        self._hello: Hello | None = None
        self._life: LinkLife | None = None  # from the peer's Hello on
        self._unsent: list[bytes] = []
        self._bodies: Iterator[bytes] = iter(())  # received and not handled yet
        self._is_paused = False  # bodies wait for the next turn, and nothing is read meanwhile
        self._transport: asyncio.Transport | None = None
        self._handshake_timer: asyncio.TimerHandle | None = None
        self._received_s = 0.0  # when the latest bytes came

    @property
    def silence_s(self) -> float:
        return self._life.silence_s(time.monotonic()) if self._life is not None else 0.0

    @property
    def quiet_s(self) -> float:
        return self._life.quiet_s(time.monotonic()) if self._life is not None else 0.0

    @property
    def clock_offset(self) -> ClockOffset | None:
        return self._life.peer_clock.offset if self._life is not None else None

    @property
    def is_introduced(self) -> bool:
        """True when this end has accepted the peer's Hello."""
        return self._hello is not None

    @property
    def hello(self) -> Hello:
        assert self._hello is not None, "the peer has not said Hello yet"
        return self._hello

    def send(self, message: AnyMessage) -> None:
        """See Peer. Raises WireError for a message that fits no frame; nothing is sent then."""
        self._send_body(encode(message))

    def close(self) -> None:
        self._bodies = iter(())
        if self._transport is not None:
            self._flush()
            self._transport.close()
            asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def drop(self, error: WireError) -> None:
        """End the connection to a peer that broke a rule; the peer is counted."""
        self._rpc_server.complain(self._name, error)
        self._bodies = iter(())
        if self._transport is None:
            return
        if error.reason == "version" and not self._transport.is_closing():
            self.close()  # the unsent bytes are our own proof, from which the peer learns the reason
        else:
            self._transport.abort()

    def tick(self) -> None:
        """Ping the peer when a ping is due; drop a peer that is silent or does not finish its frame."""
        if self._life is None or self._session is None or not self._is_open:
            return
        now_s = time.monotonic()
        try:
            if self._is_paused:  # the peer may have sent more, which is not read yet
                self._life.heard(now_s)
            else:
                self._session.check_deadline(now_s)
            ping = self._life.tick(now_s)
        except WireError as error:
            self.drop(error)
            return
        if ping is not None:
            self._send_body(ping)
            self._flush()  # at once: the ping says when it was sent

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's transport has only the methods of one
        self._transport = transport
        if self._rpc_server.is_closed:  # the server closed while this socket was accepted
            transport.abort()
            return
        self._rpc_server.opened(self)
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock, self._rpc_server.link_timeout_s)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        late = WireError("the peer did not prove itself in time", reason="handshake")
        loop = asyncio.get_running_loop()
        self._handshake_timer = loop.call_later(HANDSHAKE_TIMEOUT_S, self.drop, late)
        if self._rpc_server.keys is None:
            self.drop(WireError("we are not ready yet", reason="early"))
            return
        self._session = Session(self._rpc_server.keys, self.role, transport.write, schema=CONTROL_SCHEMA)
        self._session.open()

    def data_received(self, data: bytes) -> None:
        self._received_s = now_s = time.monotonic()
        if self._life is not None:
            self._life.heard(now_s)
        if self._session is None:
            return
        self._bodies = chain(self._bodies, self._session.receive(data, now_s))
        if not self._is_paused:
            self._handle(self._rpc_server.turn_ends_s(now_s))

    def connection_lost(self, error: Exception | None) -> None:
        """End the link; the second report of the same end does nothing."""
        if self.ended.is_set():
            return
        self._stop_handshake_timer()
        try:
            if self._is_paused:
                self._is_paused = False
                self._handle(math.inf)
        finally:
            self._lost()

    def _lost(self) -> None:
        self._bodies = iter(())
        self._unsent.clear()
        self._rpc_server.closed(self)
        self.ended.set()
        if self._hello is not None and self._rpc_server.node is not None:
            self._rpc_server.node.left(self)

    def _resume(self) -> None:
        if not self._is_paused or self._transport is None:
            return
        self._is_paused = False
        try:
            self._handle(self._rpc_server.turn_ends_s(time.monotonic()))
        except Exception:  # a bug of ours: the connection ends, as when `data_received` fails
            self._transport.abort()
            raise
        if not self._is_paused and self._is_open:
            self._transport.resume_reading()

    def _handle(self, until_s: float) -> None:
        """Handle received bodies until `until_s`; the rest waits for the loop's next turn.

        Between two turns other tasks run, and the node's sent frames leave.
        """
        try:
            while (body := next(self._bodies, None)) is not None:
                self._say_hello()
                self._take(body)
                if time.monotonic() > until_s and self._is_open:
                    self._pause()
                    return
            self._say_hello()
        except WireError as error:
            self.drop(error)

    def _pause(self) -> None:
        assert self._transport is not None  # a link without one receives nothing
        self._is_paused = True
        self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._resume)

    @property
    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def _name(self) -> str:
        """The peer's name for logs."""
        if self._hello is None:
            return "a peer"
        worker = self._hello.worker
        return worker.name if worker is not None else f"the {self._hello.process} {short_id(self._hello.id)}"

    def _say_hello(self) -> None:
        """Say Hello once, as soon as the peer has proved itself."""
        if self._has_said_hello or self._session is None or not self._session.is_proven:
            return
        assert self._rpc_server.node is not None
        self._has_said_hello = True
        self.send(self._rpc_server.node.hello)
        self._flush()  # also to a peer that is dropped in this very turn: it learns which node it has reached

    def _take(self, body: bytes) -> None:
        node = self._rpc_server.node
        assert node is not None
        if self._life is not None and self._life.take_ping(body, self._received_s):
            return
        message = decode(body)
        if self._hello is None:
            self._greet(message)
            node.joined(self)
        else:
            node.received(self, message)

    def _greet(self, message: AnyMessage) -> None:
        if not isinstance(message, Hello):
            raise WireError(f"a {type(message).__name__} came before the Hello", reason="protocol")
        assert self._session is not None
        if message.process is not self._session.peer.kind:
            raise WireError(f"the peer is no {message.process.value} by its proof", reason="role")
        self._stop_handshake_timer()
        self._hello = message
        self._life = LinkLife(self._rpc_server.link_timeout_s, time.monotonic())
        self._rpc_server.introduced(self)

    def _send_body(self, body: bytes) -> None:
        if self._session is None or not self._is_open:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(self._session.frame(body))

    def _flush(self) -> None:
        transport, unsent = self._transport, self._unsent
        if transport is None or not unsent or transport.is_closing():
            return
        self._unsent = []
        transport.writelines(unsent)
        num_bytes = transport.get_write_buffer_size()
        if num_bytes > MAX_UNSENT_BYTES:
            self.drop(WireError(f"{num_bytes} bytes wait for the peer", reason="slow"))

    def _stop_handshake_timer(self) -> None:
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()


ResultT = TypeVar("ResultT")


class RpcThread:
    """Runs an `RpcServer` on a thread of its own. The node's thread makes it and calls it.

    1. Events of the loop become calls that are posted to the node's thread: `joined`, `received`, `left` and
       `tick`, in order.
    2. Calls of the node are queued, and the loop is woken once for all that are queued meanwhile.
    3. The loop's thread sends a worker's signs of life, also while the node's thread is busy.
    4. A peer that the node refuses (WireError) is dropped as if the server had refused it.
    """

    def __init__(
        self,
        keys: ClusterKeys,
        post: Post,
        *,
        dropped: DroppedPeers | None = None,
        link_timeout_s: float = LINK_TIMEOUT_S,
    ) -> None:
        """post: hands calls to the node's thread. dropped: counts the peers that the server drops."""
        self.post = post
        # asyncio's loop leaks a socket accepted while its server closes.
        self._loop = uvloop.new_event_loop()
        self._must_stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="rpc", daemon=True)
        self._thread.start()
        self._rpc_server = RpcServer(keys, dropped=dropped, link_timeout_s=link_timeout_s)
        self._calls: deque[Call] = deque()  # for the loop; it is woken when this was empty
        self._is_closed = False

    def listen(self, host: str, port: int = 0) -> Address:
        return self._wait(self._rpc_server.listen(host, port))

    def serve(self, node: Node, steps: StepWatchdog | None = None) -> None:
        """Accept peers for this node. steps: of a worker; the loop's thread reports the step's age."""
        life = None if steps is None else SignsOfLife(steps)
        self._loop.call_soon_threadsafe(self._rpc_server.serve, _NodeProxy(node, self, life))

    def dial(self, address: Address) -> None:
        """See Dial in baton/rpc/peers.py."""
        self.call(partial(self._rpc_server.dial, address))

    def close(self) -> None:
        """Send the unsent frames, end every connection and the thread. Further calls do nothing."""
        if self._is_closed:
            return
        try:
            self._wait(self._rpc_server.close())
        finally:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._must_stop.set)
            self._thread.join()

    def _run(self) -> None:
        """Run the loop until `close`. The runner ends the tasks that are left, and closes the loop."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._must_stop.wait())

    def call(self, call: Call) -> None:
        """Have the loop's thread make the call. After `close` the call is dropped."""
        if self._is_closed:
            return
        self._calls.append(call)
        if len(self._calls) == 1:
            self._loop.call_soon_threadsafe(self._make_calls)

    def _make_calls(self) -> None:
        while self._calls:
            try:
                self._calls[0]()  # stays in the queue meanwhile: later calls need not wake the loop
            except WireError as error:
                logger.warning("a message was not sent: %s", error)
            except Exception:  # a bug of ours: later calls must not wait for ever
                logger.exception("a call of the node failed")
            finally:
                self._calls.popleft()

    def _wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class SignsOfLife:
    """Sends routers a sign of life with the age of the current step, from a thread that no step delays."""

    def __init__(self, steps: StepWatchdog, clock: Clock | None = None) -> None:
        self._steps = steps
        self._clock = clock or SystemClock()
        self._next_s = self._clock.now_s()
        self._was_overdue = False

    def give(self, routers: Sequence[Peer]) -> None:
        """Send a sign of life every BEAT_S, and when the step becomes overdue; call it in every tick."""
        now_s, step = self._clock.now_s(), self._steps.present
        has_become_overdue = step.is_overdue and not self._was_overdue
        self._was_overdue = step.is_overdue
        if has_become_overdue:
            _show_threads(step)
        if now_s < self._next_s and not has_become_overdue:
            return
        self._next_s = now_s + BEAT_S
        for router in routers:
            router.send(Alive(step=step))


def _show_threads(step: RunningStep) -> None:
    """Log the stacks of all threads, so that the cause can be found after the process was killed."""
    logger.error("%s; its threads are in:", step.complaint)
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # there may be no stderr
        faulthandler.dump_traceback(sys.__stderr__)  # type: ignore[arg-type]


class _PeerProxy:
    """A Peer on the node's thread, with a socket of the loop's thread."""

    def __init__(self, link: Peer, thread: RpcThread) -> None:
        self._link = link
        self._thread = thread

    @property
    def hello(self) -> Hello:
        return self._link.hello

    @property
    def silence_s(self) -> float:
        return self._link.silence_s

    @property
    def quiet_s(self) -> float:
        return self._link.quiet_s

    @property
    def clock_offset(self) -> ClockOffset | None:
        return self._link.clock_offset

    def send(self, message: AnyMessage) -> None:
        self._thread.call(partial(self._link.send, message))

    def close(self) -> None:
        self._thread.call(self._link.close)

    def drop(self, error: WireError) -> None:
        link = self._link
        assert isinstance(link, RpcLink)
        self._thread.call(partial(link.drop, error))


class _NodeProxy:
    """The node as the server sees it, on the loop's thread."""

    def __init__(self, node: Node, thread: RpcThread, life: SignsOfLife | None = None) -> None:
        self._node = node
        self._life = life
        self._thread = thread
        self._peers: dict[Peer, _PeerProxy] = {}

    @property
    def hello(self) -> Hello:
        return self._node.hello

    def joined(self, link: Peer) -> None:
        peer = self._peers[link] = _PeerProxy(link, self._thread)
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

    def _guarded(self, peer: _PeerProxy, call: Call) -> None:
        """Make the call on the node's thread; a WireError drops the peer."""
        try:
            call()
        except WireError as error:
            peer.drop(error)
