"""Hosts a node whose own thread must never wait for the network: its hub runs on a thread beside it.

1. What the hub's loop learns becomes a call that is posted to the node's thread: `joined`, `received`, `left`
   and `tick`, in order.
2. What the node says is queued, and the loop is woken once for all that is queued meanwhile.
3. The loop's thread sends a worker's signs of life, also while the node's thread is busy.
4. A peer that the node refuses (WireError) is dropped as if the hub had refused it.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias, TypeVar

from baton.beats import SignsOfLife
from baton.control import Hello
from baton.control_wire import AnyMessage
from baton.errors import WireError
from baton.hub import Hub, HubLink
from baton.keys import ClusterKeys
from baton.link_life import LINK_TIMEOUT_S
from baton.node import Node, Peer
from baton.steps import StepWatchdog
from baton.wire_types import Kind
from baton.worker import Address

Call: TypeAlias = Callable[[], None]
Post: TypeAlias = Callable[[Call], None]  # have it made on the node's thread, soon
ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


class NodeThread:
    """Made, and called, on the node's thread or before it runs."""

    def __init__(self, keys: ClusterKeys, post: Post, *, link_timeout_s: float = LINK_TIMEOUT_S) -> None:
        self._post = post
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hub", daemon=True)
        self._thread.start()
        self._hub = self._wait(_make_hub(keys, link_timeout_s))
        self._calls: deque[Call] = deque()  # for the loop; it is woken when this was empty
        self._is_closed = False

    @property
    def dropped(self) -> dict[str, int]:
        """How many peers were dropped, by reason."""
        return dict(self._hub.dropped.counts())

    def listen(self, host: str, port: int = 0) -> Address:
        """OSError when the port is somebody else's."""
        return self._wait(self._hub.listen(host, port))

    def serve(self, node: Node, steps: StepWatchdog | None = None) -> None:
        """steps: of a worker's engine; routers are told from the loop's thread how its present one does."""
        life = None if steps is None else SignsOfLife(steps)
        self._loop.call_soon_threadsafe(self._hub.serve, _Announcer(node, self, life))

    def dial(self, address: Address) -> None:
        """See node.Dial."""
        self.call(partial(self._hub.dial, address))

    def close(self) -> None:
        """Send what is unsent, end every connection and the thread."""
        try:
            self._wait(self._hub.close())
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

    def __init__(self, link: Peer, thread: NodeThread) -> None:
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
        assert isinstance(link, HubLink)
        self._thread.call(partial(link.drop, error))


class _Announcer:
    """The node, to the hub: on the loop's thread."""

    def __init__(self, node: Node, thread: NodeThread, life: SignsOfLife | None = None) -> None:
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


async def _make_hub(keys: ClusterKeys, link_timeout_s: float) -> Hub:
    return Hub(keys, link_timeout_s=link_timeout_s)
