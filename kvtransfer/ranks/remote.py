"""A rank of ours that is another process, as rank 0 sees it: what is asked of it travels to its agent.

1. It comes (rank_agents.py), is set up and says where its doors are.
2. Commands and events go over its connection, in order.
3. The connection ends: it is lost, nothing more begins with it, and what was under way fails. Its agent stops
   writing then, but only its death is proof of that: until then its parts' pages stay where they are.
4. Its process has died, which a pidfd tells: whatever is asked of it has been done.
5. Pages are pushed that rank 0 has written. A push names the step that it needs, and the other rank waits
   until its own part of that step is written (kvtransfer/ranks/executor.py): a digest of the page would not
   tell.
"""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor

from baton.clock import SystemClock
from baton.config.engine import RankSidecar
from baton.errors import BatonError, WireError, WorkerLost
from baton.kvtransfer.protocol.messages import RankListenerAddresses
from baton.kvtransfer.protocol.pull import ID_BYTES
from baton.kvtransfer.ranks.executor import CompletedSteps, Emit, RankExecutor
from baton.kvtransfer.ranks.messages import (
    RANK_SCHEMA,
    AllStopped,
    Came,
    ClosePart,
    Command,
    Counted,
    PartEvent,
    PartStopped,
    RankSettings,
    Ready,
    SetUp,
    StopAll,
    StopPart,
    TellCounts,
    ToFollower,
    ToRankZero,
    WriterStopped,
    decode_for_follower,
    decode_for_rank_zero,
    encode,
)
from baton.kvtransfer.ranks.pages import SharedPool
from baton.kvtransfer.settings import EndpointSettings
from baton.kvtransfer.transports.listener import Listener, ProcessWatch, peer_process, peer_user
from baton.kvtransfer.transports.message_stream import Call, MessageStream, Post
from baton.rpc.connection import Connection, DroppedPeers, Role

OnLost: TypeAlias = Callable[["RemoteRank"], None]
SET_UP_S: Final = 60.0  # doors of a GPU's pool take a while: staging memory, the first CUDA call of a thread


class RemoteRank:
    """`doors` are known from the start. All but `stop`, `close` and `died` are calls of rank 0's thread."""

    def __init__(self, settings: RankSettings, connection: Connection) -> None:
        """connection: to the agent of rank `settings.rank`, past its first word. WorkerLost if it is none."""
        self.rank = settings.rank
        self.is_lost = False
        self._is_dead = False
        self._has_stopped = threading.Event()
        self._counts: dict[str, int] = {}
        self._is_asked = False  # for newer ones
        self._stream = MessageStream(connection, self._decode, f"kv-rank-{settings.rank}")
        self._post: Post
        self._emit: Emit
        self._on_lost: OnLost
        try:
            connection.send(encode(SetUp(settings=settings)))
            answer = decode_for_rank_zero(connection.recv(SET_UP_S))
        except (BatonError, TimeoutError) as error:
            connection.close()
            raise WorkerLost(f"rank {self.rank} did not open its doors: {error}") from error
        if not isinstance(answer, Ready):
            connection.close()
            raise WorkerLost(f"rank {self.rank} said {type(answer).__name__} instead of Ready")
        self.doors: RankListenerAddresses = answer.doors

    def start(self, post: Post, emit: Emit, on_lost: OnLost) -> None:
        """on_lost: called twice, when the connection has ended and when the process has; first `is_lost` is
        true, then `is_dead`.
        """
        self._post, self._emit, self._on_lost = post, emit, on_lost
        self._stream.start(post, self._hear, self._lose)

    @property
    def is_dead(self) -> bool:
        return self._is_dead

    def perform(self, command: Command) -> None:
        if not self._is_dead:
            self._stream.send(encode(command))
        elif isinstance(command, ClosePart):
            self._answer(WriterStopped(transfer=command.transfer, part=command.part))
        elif isinstance(command, StopPart):
            self._answer(PartStopped(transfer=command.transfer, part=command.part))

    def counts(self) -> dict[str, int]:
        """Asks for newer ones, which the next call will have."""
        if not self._is_asked and not self.is_lost:
            self._is_asked = True
            self._stream.send(encode(TellCounts()))
        return self._counts

    def stop(self) -> None:
        self._stream.send(encode(StopAll()))

    def wait_until_stopped(self, timeout_s: float) -> bool:
        return self._has_stopped.wait(max(0.0, timeout_s))

    def died(self) -> None:
        """Its process is gone for certain. From any thread."""
        self._has_stopped.set()
        self._post(self._on_peer_death)

    def close(self) -> None:
        """Its agent closes its doors by itself, a moment later."""
        self._stream.close()

    def _decode(self, body: bytes) -> ToRankZero:
        """In the reading thread: whoever waits for the last word polls no more."""
        message = decode_for_rank_zero(body)
        if isinstance(message, AllStopped):
            self._has_stopped.set()
        return message

    def _hear(self, message: ToRankZero) -> None:
        if isinstance(message, Counted):
            self._counts, self._is_asked = message.counts, False
        elif not isinstance(message, Came | Ready | AllStopped):
            self._emit(message)

    def _lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._on_lost(self)

    def _on_peer_death(self) -> None:
        self._lose()
        self._is_dead = True
        self._on_lost(self)

    def _answer(self, event: PartEvent) -> None:
        self._post(partial(self._emit, event))


# Where the agents of a replica's other ranks meet its rank 0.
#
# 1. Rank 0's worker makes a RankAgents, and has its engine start an agent beside every follower:
# `load_engine(config, companion=agents.companion)`.
# 2. Each agent connects to a unix socket that has an address but no file, and proves that it holds a secret
# that was made for this meeting. It must be a process of the same user.
# 3. The endpoint takes them all over (`meet`), and the socket is closed: nobody comes later.

logger = logging.getLogger(__name__)
AGENT: Final = "baton.kvtransfer.ranks.remote:RankAgent"
COME_S: Final = 60.0  # an engine that is loaded has started them all: they are on their way
SECRET_BYTES: Final = 32


class AgentArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent is started with, as JSON."""

    address: str
    secret: bytes


class _Newcomer(NamedTuple):
    connection: Connection
    process: int  # descriptor


class RankAgents:
    """Of ranks 1 and up, of which there may be none. Whoever makes it closes it, unless `meet` has."""

    def __init__(self, num_ranks: int, dropped: DroppedPeers | None = None) -> None:
        """num_ranks: of the replica, rank 0 included."""
        self.num_ranks = num_ranks
        self._dropped = dropped or DroppedPeers()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._address = f"\0baton-ranks-{secrets.token_hex(16)}"
        self._came = threading.Condition()
        self._newcomers: dict[int, _Newcomer] = {}  # rank -> whom nobody has taken over
        self._watch = ProcessWatch()
        self._acceptor = Listener(self._listen(), self._greet, "kv-ranks", self._dropped)
        self._is_open = True

    @property
    def sidecar(self) -> RankSidecar:
        """For `load_engine`."""
        arguments = AgentArguments(address=self._address, secret=self._secret)
        return RankSidecar(factory=AGENT, arguments=msgspec.json.encode(arguments).decode())

    def meet(self, settings: EndpointSettings, timeout_s: float = COME_S) -> list[RemoteRank]:
        """Every other rank, in order, its doors open; WorkerLost when one does not come."""
        others = range(1, self.num_ranks)
        if not others:
            self.close()
        with self._came:
            if not self._came.wait_for(lambda: len(self._newcomers) == len(others), timeout_s):
                missing = [rank for rank in others if rank not in self._newcomers]
                raise WorkerLost(f"no agent of rank {missing} came within {timeout_s:g} s")
        self._close_door()
        ranks: list[RemoteRank] = []
        try:
            for rank in others:
                ranks.append(RemoteRank(settings.for_rank(rank), self._newcomers[rank].connection))
        except WorkerLost:
            self.close()
            raise
        return ranks

    def watch(self, ranks: list[RemoteRank]) -> None:
        """From now on each is told when its process has died."""
        for rank in ranks:
            self._watch.add(self._newcomers.pop(rank.rank).process, rank.died)

    def close(self) -> None:
        self._close_door()
        self._watch.close()
        with self._came:  # perhaps one is being let in
            for newcomer in self._newcomers.values():
                newcomer.connection.close()
                os.close(newcomer.process)
            self._newcomers.clear()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._address)
        listener.listen(128)
        return listener

    def _close_door(self) -> None:
        if self._is_open:
            self._is_open = False
            self._acceptor.close()

    def _greet(self, sock: socket.socket) -> None:
        connection: Connection | None = None
        process = -1
        try:
            if peer_user(sock) != os.getuid():
                self._dropped.add("user")
                raise WireError(f"user {peer_user(sock)} has no rank here", reason="user")
            process = peer_process(sock)
            connection = Connection(
                sock, self._secret, Role.ACCEPTING, dropped=self._dropped, schema=RANK_SCHEMA
            )
            self._let_in(sock, _Newcomer(connection.handshake(COME_S), process))
        except (BatonError, TimeoutError, OSError) as error:
            logger.warning("an agent was not let in: %s", error)
            if connection is not None:
                connection.close()
            sock.close()
            if process >= 0:
                os.close(process)

    def _let_in(self, sock: socket.socket, newcomer: _Newcomer) -> None:
        came = decode_for_rank_zero(newcomer.connection.recv(COME_S))
        with self._came:
            if not isinstance(came, Came) or not 1 <= came.rank < self.num_ranks:
                raise newcomer.connection.drop(WireError(f"{came} is no rank of ours", reason="rank"))
            if came.rank in self._newcomers:
                raise newcomer.connection.drop(WireError(f"rank {came.rank} is here already", reason="rank"))
            self._acceptor.let_in(sock)
            self._newcomers[came.rank] = newcomer
            self._came.notify_all()


# The agent of a rank that is not rank 0: a thread beside the rank's steps that moves its pages when told to.
#
# 1. The rank's process makes it before its pool: `zeros_on_cpu` puts the pool of a CPU into shared memory.
# 2. `start` connects to rank 0, whose meeting place came with the arguments (rank_agents.py).
# 3. It opens the doors of its pool when it is set up, and does what rank 0 says, and nothing else.
# 4. When rank 0's connection ends, for whatever reason, every push is stopped and every door closed.

CONNECT_S: Final = 30.0  # rank 0 may be busy with its own part of a large model


class RankAgent:
    """A companion of an engine's follower."""

    def __init__(self, arguments: str) -> None:
        self._arguments = msgspec.json.decode(arguments, type=AgentArguments)
        self._shared: SharedPool | None = None
        self._inbox: SimpleQueue[Call] = SimpleQueue()
        self._dropped = DroppedPeers()
        self._pool: Tensor
        self._steps: CompletedSteps | None = None
        self._stream: MessageStream[ToFollower] | None = None
        self._thread: threading.Thread | None = None
        self._executor: RankExecutor | None = None
        self._is_over = False

    def zeros_on_cpu(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the pool that sources on this host can map."""
        self._shared = SharedPool()
        return self._shared.zeros(shape, dtype)

    def start(self, rank: int, pool: Tensor, steps: CompletedSteps | None = None) -> None:
        """steps: of the rank, which write the pool. WorkerLost and the like when rank 0 can't be reached."""
        self._pool = pool
        self._steps = steps
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(self._arguments.address)
        except OSError as error:
            sock.close()
            raise WorkerLost(f"rank 0 is not there to be met: {error}") from error
        connection = Connection(
            sock, self._arguments.secret, Role.CONNECTING, dropped=self._dropped, schema=RANK_SCHEMA
        )
        connection.handshake(CONNECT_S)
        connection.send(encode(Came(rank=rank)))
        self._stream = MessageStream(connection, decode_for_follower, "kv-rank-0")
        self._stream.start(self._inbox.put, self._obey, self._end)
        self._thread = threading.Thread(target=self._run, name="kv-agent", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """On return no page of this rank moves any more."""
        if self._stream is not None and self._thread is not None:
            self._stream.close()  # which is the end that the thread waits for
            self._thread.join()
        if self._shared is not None:
            self._shared.close()

    def _run(self) -> None:
        try:
            if self._pool.is_cuda:
                torch.cuda.set_device(self._pool.device)
            while not self._is_over:
                self._inbox.get()()
        except Exception:
            logger.exception("the agent of a rank has failed")
        finally:
            if self._stream is not None:
                self._stream.close()
            if self._executor is not None:
                self._executor.close()

    def _obey(self, message: ToFollower) -> None:
        if isinstance(message, SetUp):
            self._set_up(message.settings)
            return
        if self._executor is None or self._stream is None:
            raise WireError(f"{type(message).__name__} came before SetUp", reason="order")
        if isinstance(message, StopAll):
            self._executor.stop()
            self._stream.send(encode(AllStopped()))
        elif isinstance(message, TellCounts):
            self._stream.send(encode(Counted(counts=self._executor.counts())))
        else:
            self._executor.perform(message)

    def _set_up(self, settings: RankSettings) -> None:
        if self._executor is not None:
            raise WireError("SetUp came twice", reason="order")
        self._executor = RankExecutor(
            settings,
            self._pool,
            self._shared,
            secrets.token_bytes(ID_BYTES),
            self._inbox.put,
            self._tell,
            clock=SystemClock(),
            dropped=self._dropped,
            steps=self._steps,
        )
        assert self._stream is not None
        self._stream.send(encode(Ready(doors=self._executor.doors)))

    def _tell(self, event: PartEvent) -> None:
        assert self._stream is not None
        self._stream.send(encode(event))

    def _end(self) -> None:
        self._is_over = True
