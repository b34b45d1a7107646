"""Messages between the ranks of a replica, over authenticated connections: commands and tensors.

1. Rank 0 listens on its node's address, and so does every other rank with a next stage. Each other rank
   connects to rank 0 and says where it listens, and which model its node has (RankHello).
2. When all ranks have come, with the same model, rank 0 tells each the address of its rank of the stage
   before (RankWelcome). The rank connects there; rank 0 has that link already.
3. A RankLink carries messages in both directions. Each direction keeps its order, and a receiver's tensors
   are filled in the order in which it began to receive them. A thread reads all that comes, so a sender never
   waits for the receiver's step. No more comes than the steps in flight need, at most MAX_WAITING_BYTES.
4. A link ends when its peer closes it or dies, or when the peer's machine is silent for `link_timeout_s`.

The ranks of a stage sum tensors elsewhere (engine/models/parallel.py). torch's gloo neither authenticates its
peers nor seals what they send, and small messages take it longer.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, Queue, SimpleQueue
from typing import Annotated, Final

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from baton.engine.models.parallel import JOIN_TIMEOUT, STEP_TIMEOUT
from baton.engine.runner.rank_process import START_TIMEOUT_S
from baton.errors import BatonError, ModelError, PeerGone, WireError, WorkerLost
from baton.messages.bounds import LINK_TIMEOUT_S, MAX_BODY_BYTES, Kind, schema_hash
from baton.messages.codec import decode_as
from baton.messages.workers import Address, ReplicaNonce
from baton.rpc.auth import RANKS, KeyRing, LinkKeys, Role
from baton.rpc.connection import Connection, DroppedPeers, Outbox, RankNetwork
from baton.rpc.listener import Listener, listen
from baton.rpc.session import HANDSHAKE_TIMEOUT_S

JOIN_S: Final = JOIN_TIMEOUT.total_seconds()
CHECK_S: Final = 0.1  # between looks whether a rank has ended that is to come
STEP_S: Final = STEP_TIMEOUT.total_seconds()
HEAD_BYTES: Final = 8  # before each message: its length
MAX_WAITING_BYTES: Final = 4 * 2**30  # at one end of a link, for the peer or for the steps of this rank


class RankHello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first message of a rank that has connected to another one."""

    replica: ReplicaNonce
    rank: Annotated[int, Meta(ge=1, le=2**16 - 1)]
    node: Annotated[str, Meta(max_length=255)]  # its address
    model: Annotated[str, Meta(max_length=64)]  # the fingerprint of the model's files on that node
    address: Address | None  # at which its rank of the next stage reaches it, if there is one


class RankWelcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rank 0's answer, when all ranks have come."""

    before: Address | None  # of the receiver's rank of the stage before; None: that is rank 0, or none


SCHEMA: Final = schema_hash(RankHello, RankWelcome)


class RankLink:
    """One end of the connection between two ranks. One thread sends, and one receives."""

    def __init__(self, connection: Connection, peer: int) -> None:
        """connection: past its greeting. peer: the other rank."""
        self._connection = connection
        self._peer = peer
        self._outbox = Outbox(connection, max_unsent_bytes=MAX_WAITING_BYTES, timeout_s=STEP_S)
        self._begun: deque[PendingReceive] = deque()  # not filled in yet, oldest first
        # Parts of messages; the last item is an error.
        self._arrived: SimpleQueue[bytes | BatonError] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_waiting_bytes = 0  # in `_arrived`
        self._error: BatonError | None = None  # after which nothing is received
        self._thread = threading.Thread(target=self._read, name=f"rank-{peer}", daemon=True)
        self._thread.start()

    def send(self, message: bytes | memoryview) -> None:
        """Send a message without waiting for the peer. WorkerLost when the peer is gone."""
        first = MAX_BODY_BYTES - HEAD_BYTES
        with self._as_worker_lost():
            self._outbox.send(b"".join((len(message).to_bytes(HEAD_BYTES, "little"), message[:first])))
            for start in range(first, len(message), MAX_BODY_BYTES):
                self._outbox.send(bytes(message[start : start + MAX_BODY_BYTES]))

    def receive(self, tensor: Tensor) -> "PendingReceive":
        """Begin to receive the peer's next message, which must be as long as this contiguous tensor."""
        arrival = PendingReceive(self, tensor)
        self._begun.append(arrival)
        return arrival

    def receive_bytes(self, timeout_s: float | None) -> bytes:
        """The peer's next message, after the tensors that have begun to be received.

        WorkerLost when it has not come in time, or the peer is gone. The link is of no use then. None: wait
        as long as the peer lives.
        """
        if self._begun:
            self.fill(self._begun[-1], timeout_s)
        with self._as_worker_lost():
            return b"".join(self._next_message(timeout_s)[1])

    def fill(self, arrival: "PendingReceive", timeout_s: float | None) -> None:
        """Fill in the tensor of the arrival, after those of arrivals that began before.

        WorkerLost as in `receive_bytes`, and when a message is not as long as its tensor.
        """
        with self._as_worker_lost():
            while not arrival.is_here:
                self._fill_in(_bytes_of(self._begun[0].tensor), timeout_s)
                self._begun.popleft().is_here = True

    def flush(self) -> None:
        """Wait until the kernel has all that was sent, or the peer is gone."""
        self._outbox.close()

    def close(self) -> None:
        """End the link and its threads. Tensors that are still under way are lost."""
        self._connection.close()
        self._outbox.close()
        self._thread.join()

    def _fill_in(self, content: memoryview, timeout_s: float | None) -> None:
        num_bytes, parts = self._next_message(timeout_s)
        if num_bytes != len(content):
            raise self._ended(f"expected a tensor of {len(content)} bytes, got {num_bytes}", "length")
        start = 0
        for part in parts:
            content[start : start + len(part)] = part
            start += len(part)

    def _next_message(self, timeout_s: float | None) -> tuple[int, Iterator[memoryview]]:
        """The length of the next message, and its parts, which must all be taken."""
        part = memoryview(self._next_part(timeout_s))
        num_bytes = int.from_bytes(part[:HEAD_BYTES], "little")
        return num_bytes, self._parts(part[HEAD_BYTES:], num_bytes, timeout_s)

    def _parts(self, part: memoryview, num_missing: int, timeout_s: float | None) -> Iterator[memoryview]:
        while len(part) < num_missing:
            yield part
            num_missing -= len(part)
            part = memoryview(self._next_part(timeout_s))
        if len(part) > num_missing:
            raise self._ended("a message is longer than its head says", "length")
        yield part

    def _next_part(self, timeout_s: float | None) -> bytes:
        if self._error is not None:
            raise self._error
        try:
            part = self._arrived.get(timeout=timeout_s)
        except Empty:
            raise self._ended(f"it was silent for {timeout_s:g} s", "slow") from None
        if isinstance(part, BatonError):
            self._error = part
            raise part
        with self._lock:
            self._num_waiting_bytes -= len(part)
        return part

    def _ended(self, why: str, reason: str) -> BatonError:
        """End the link, and return the error."""
        self._error = self._connection.drop(WireError(why, reason=reason))
        return self._error

    def _read(self) -> None:
        try:
            while True:
                part = self._connection.recv()
                with self._lock:
                    self._num_waiting_bytes += len(part)
                    num_bytes = self._num_waiting_bytes
                if num_bytes > MAX_WAITING_BYTES:
                    message = f"{num_bytes} bytes wait for the steps of this rank, no more is kept"
                    raise self._connection.drop(WireError(message, reason="slow"))
                self._arrived.put(part)
        except (PeerGone, WireError) as error:
            self._arrived.put(error)

    @contextmanager
    def _as_worker_lost(self) -> Iterator[None]:
        try:
            yield
        except BatonError as error:
            raise WorkerLost(f"rank {self._peer}: {error}") from error


class PendingReceive:
    """A tensor that has begun to be received."""

    def __init__(self, link: RankLink, tensor: Tensor) -> None:
        self.tensor = tensor
        self.is_here = False  # True once the tensor is filled in
        self._link = link

    def wait(self, timeout_s: float = STEP_S) -> None:
        """Wait until the tensor is filled in. WorkerLost as in `RankLink.fill`."""
        self._link.fill(self, timeout_s)


class RankLinks:
    """One rank's links to other ranks of its replica, by rank."""

    def __init__(self, links: Mapping[int, RankLink]) -> None:
        """links: by the other rank."""
        self._links = links

    def send(self, rank: int, tensor: Tensor) -> None:
        """Send a tensor, which may be changed once this returns. WorkerLost when the rank is gone."""
        self._links[rank].send(_bytes_of(tensor.contiguous()))

    def send_bytes(self, rank: int, message: bytes) -> None:
        """Send a message. WorkerLost when the rank is gone."""
        self._links[rank].send(message)

    def receive(self, rank: int, tensor: Tensor) -> PendingReceive:
        """Begin to receive a tensor: the rank's tensors fill these in the order of the calls."""
        return self._links[rank].receive(tensor)

    def receive_bytes(self, rank: int, timeout_s: float | None) -> bytes:
        """The rank's next message, as `RankLink.receive_bytes`."""
        return self._links[rank].receive_bytes(timeout_s)

    def flush(self) -> None:
        """Wait until the kernel has all that was sent: it sends that on after the end of the process."""
        for link in self._links.values():
            link.flush()

    def close(self) -> None:
        """End all links."""
        for link in self._links.values():
            link.close()


class RankListener:
    """Admits other ranks of the replica to this one."""

    def __init__(
        self,
        host: str,
        keys: KeyRing,
        replica: bytes,
        check: Callable[[], None] = lambda: None,
        link_timeout_s: float = LINK_TIMEOUT_S,
    ) -> None:
        """host: the address of this node. check: raises the error of a rank that will not come.

        Raises OSError.
        """
        self._check = check
        self._link_timeout_s = link_timeout_s
        self._keys = LinkKeys(keys, RANKS)
        self._replica = replica
        self._came: Queue[tuple[RankHello, Connection]] = Queue()
        self._dropped = DroppedPeers()
        self._lock = threading.Lock()  # of changes of `_came` until the listener closes
        listener = listen(host)
        self.address = Address(*listener.getsockname()[:2])
        self._listener = Listener(listener, self._greet, "ranks", self._dropped)

    def admit(self, ranks: Collection[int], timeout_s: float) -> dict[int, tuple[RankHello, Connection]]:
        """Wait for these ranks, and admit no more. WorkerLost when one has not come in time."""
        came: dict[int, tuple[RankHello, Connection]] = {}
        until_s = time.monotonic() + timeout_s
        try:
            while missing := [rank for rank in ranks if rank not in came]:
                self._check()
                if time.monotonic() >= until_s:
                    names = ", ".join(map(str, missing))
                    raise WorkerLost(f"rank {names} did not connect within {timeout_s:g} s")
                with suppress(Empty):
                    hello, connection = self._came.get(timeout=CHECK_S)
                    if hello.rank in missing:
                        came[hello.rank] = hello, connection
                    else:
                        connection.close()
        except BaseException:
            for _, connection in came.values():
                connection.close()
            raise
        finally:
            self.close()
        return came

    def close(self) -> None:
        """Admit no more ranks. May be called twice."""
        self._listener.close()
        with self._lock:
            while not self._came.empty():
                self._came.get()[1].close()

    def _greet(self, sock: socket.socket) -> None:
        connection = Connection(
            sock,
            self._keys,
            Role.ACCEPTING,
            dropped=self._dropped,
            link_timeout_s=self._link_timeout_s,
            schema=SCHEMA,
        )
        connection.handshake()
        hello = connection.recv_message(lambda body: decode_as(RankHello, body, "order"), HANDSHAKE_TIMEOUT_S)
        if hello.replica != self._replica:
            raise connection.drop(WireError("it is a rank of another replica", reason="rank"))
        with self._lock:
            if self._listener.is_closing:
                raise WorkerLost("no more ranks are admitted")
            self._listener.let_in(sock)
            self._came.put((hello, connection))


def connect_ranks(
    rank: int, network: RankNetwork, listener: RankListener | None, *, model: str, tp_size: int, pp_size: int
) -> RankLinks:
    """Connect this rank to rank 0 and to its ranks of the stages before and after; rank 0 to all others.

    listener: of rank 0; other ranks make their own. model: its fingerprint on this node. WorkerLost when the
    ranks do not all come in time; ModelError, on rank 0, when another node has another model.
    """
    try:
        if rank == 0:
            assert listener is not None
            return RankLinks(_welcome(listener, model, tp_size, pp_size))
        return RankLinks(_join(rank, network, model, tp_size, pp_size))
    except (WireError, TimeoutError, OSError) as error:
        raise WorkerLost(f"rank {rank} of {tp_size * pp_size} did not meet the others: {error}") from error


def _welcome(listener: RankListener, model: str, tp_size: int, pp_size: int) -> dict[int, RankLink]:
    """On rank 0: wait for all other ranks, and tell each where its rank of the stage before is."""
    came = listener.admit(range(1, tp_size * pp_size), START_TIMEOUT_S)
    try:
        for rank, (hello, _) in came.items():
            if hello.model != model:
                where = f"rank {rank}: the model's files on node {hello.node}"
                raise ModelError(f"{where} differ from those on the node of rank 0")
        for rank, (_, connection) in came.items():
            before = came.get(rank - tp_size)
            connection.send(msgspec.msgpack.encode(RankWelcome(before=before and before[0].address)))
    except BaseException:
        for _, connection in came.values():
            connection.close()
        raise
    return {rank: RankLink(connection, rank) for rank, (_, connection) in came.items()}


def _join(rank: int, network: RankNetwork, model: str, tp_size: int, pp_size: int) -> dict[int, RankLink]:
    after, before = rank + tp_size, rank - tp_size
    listener = None
    if after < tp_size * pp_size:
        ring, replica = KeyRing(Kind.WORKER, network.keys), network.rank_zero.replica
        listener = RankListener(network.own_host, ring, replica, link_timeout_s=network.link_timeout_s)
    hello = RankHello(
        replica=network.rank_zero.replica,
        rank=rank,
        node=network.own_host,
        model=model,
        address=None if listener is None else listener.address,
    )
    opened: dict[int, Connection] = {}
    try:
        opened[0] = _dial(network.rank_zero.address, hello, network)
        welcome = opened[0].recv_message(
            lambda body: decode_as(RankWelcome, body, "order"),
            START_TIMEOUT_S + JOIN_S,  # the last rank may be late
        )
        if welcome.before is not None:
            opened[before] = _dial(welcome.before, hello, network)
        if listener is not None:
            opened[after] = listener.admit((after,), JOIN_S)[after][1]
    except BaseException:
        for connection in opened.values():
            connection.close()
        raise
    finally:
        if listener is not None:
            listener.close()
    return {peer: RankLink(connection, peer) for peer, connection in opened.items()}


def _dial(address: Address, hello: RankHello, network: RankNetwork) -> Connection:
    sock = socket.create_connection((address.host, address.port), HANDSHAKE_TIMEOUT_S)
    keys, timeout_s = LinkKeys(KeyRing(Kind.WORKER, network.keys), RANKS), network.link_timeout_s
    connection = Connection(sock, keys, Role.CONNECTING, link_timeout_s=timeout_s, schema=SCHEMA).handshake()
    connection.send(msgspec.msgpack.encode(hello))
    return connection


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
