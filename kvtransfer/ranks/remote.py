"""The ranks of a replica that are other processes, as its rank 0 sees them.

1. Rank 0's worker makes a RankAgents, and its engine starts an agent (kvtransfer/ranks/agent.py) beside every
   follower: `load_engine(config, sidecar=agents.sidecar)`.
2. Each agent connects to a unix socket, and proves that it holds a secret made for this replica. It must be a
   process of the same user. When all have connected, `meet` sets them up and closes the socket.
3. Commands and events go over each agent's connection, in order.
4. The connection ends: the rank is lost. No transfer begins with it, and its open transfers fail. Its agent
   stops writing then, but only its death proves that: until then the pages of its parts stay reserved.
5. The rank's process has died, as a pidfd tells: everything that was asked of the rank counts as done.

A push names the step that writes its pages, and each rank waits until its own part of that step is written
(kvtransfer/ranks/executor.py): a digest would not show that a page was sent too early.
"""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import msgspec

from baton.config.engine import RankSidecar
from baton.errors import BatonError, WireError, WorkerLost
from baton.kvtransfer.protocol.messages import RankListenerAddresses
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
    ToRankZero,
    WriterStopped,
    decode_for_rank_zero,
    encode,
)
from baton.kvtransfer.settings import EndpointSettings
from baton.kvtransfer.transports.listener import Listener, ProcessWatch, listen_on_host, peer_process
from baton.kvtransfer.transports.message_stream import MessageStream, Post
from baton.rpc.connection import Connection, DroppedPeers, Role

logger = logging.getLogger(__name__)
AGENT: Final = "baton.kvtransfer.ranks.agent:RankAgent"
COME_S: Final = 60.0  # for all agents to connect; a loaded engine has started them all
SET_UP_S: Final = (
    60.0  # listeners of a GPU's pool take a while: staging memory, the first CUDA call of a thread
)
SECRET_BYTES: Final = 32

Emit: TypeAlias = Callable[[PartEvent], None]
OnLost: TypeAlias = Callable[["RemoteRank"], None]


class RemoteRank:
    """An `Executor` in another process. Rank 0's thread makes all calls but `stop`, `close` and `died`."""

    def __init__(self, settings: RankSettings, connection: Connection) -> None:
        """connection: to the agent of rank `settings.rank`, past its first message.

        WorkerLost when the rank does not listen for sources in time.
        """
        self.rank = settings.rank
        self.is_lost = False
        self._is_dead = False
        self._has_stopped = threading.Event()
        self._counts: dict[str, int] = {}
        self._is_asked = False  # for newer counts
        self._stream = MessageStream(connection, self._decode, f"kv-rank-{settings.rank}")
        self._post: Post
        self._emit: Emit
        self._on_lost: OnLost
        try:
            connection.send(encode(SetUp(settings=settings)))
            answer = decode_for_rank_zero(connection.recv(SET_UP_S))
        except (BatonError, TimeoutError) as error:
            connection.close()
            raise WorkerLost(f"rank {self.rank} does not listen for sources: {error}") from error
        if not isinstance(answer, Ready):
            connection.close()
            raise WorkerLost(f"rank {self.rank} said {type(answer).__name__} instead of Ready")
        self.listeners: RankListenerAddresses = answer.listeners

    def start(self, post: Post, emit: Emit, on_lost: OnLost) -> None:
        """on_lost: called with `is_lost` when the connection has ended, and with `is_dead` when the process
        has died.
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
        """The counts that came last; a later call will have newer ones."""
        if not self._is_asked and not self.is_lost:
            self._is_asked = True
            self._stream.send(encode(TellCounts()))
        return self._counts

    def stop(self) -> None:
        self._stream.send(encode(StopAll()))

    def wait_until_stopped(self, timeout_s: float) -> bool:
        return self._has_stopped.wait(max(0.0, timeout_s))

    def died(self) -> None:
        """The rank's process is certainly gone. From any thread."""
        self._has_stopped.set()
        self._post(self._on_death)

    def close(self) -> None:
        """The agent closes its listeners by itself, a moment later."""
        self._stream.close()

    def _decode(self, body: bytes) -> ToRankZero:
        """In the reading thread: rank 0's thread may be waiting in `wait_until_stopped`."""
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

    def _on_death(self) -> None:
        self._lose()
        self._is_dead = True
        self._on_lost(self)

    def _answer(self, event: PartEvent) -> None:
        self._post(partial(self._emit, event))


class AgentArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of an agent, as JSON."""

    address: str
    secret: bytes


class _Newcomer(NamedTuple):
    connection: Connection
    process: int  # descriptor


class RankAgents:
    """The agents of ranks 1 and up, if any. A `Ranks` that is given the object owns it."""

    def __init__(self, num_ranks: int, dropped: DroppedPeers | None = None) -> None:
        """num_ranks: of the replica, rank 0 included."""
        self.num_ranks = num_ranks
        self._dropped = dropped or DroppedPeers()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._came = threading.Condition()
        self._newcomers: dict[int, _Newcomer] = {}  # by rank, until `watch`
        self._watch = ProcessWatch()
        listener, self._address = listen_on_host("baton-ranks")
        self._acceptor = Listener(listener, self._greet, "kv-ranks", self._dropped)
        self._is_open = True

    @property
    def sidecar(self) -> RankSidecar:
        """The argument for `load_engine`."""
        arguments = AgentArguments(address=self._address, secret=self._secret)
        return RankSidecar(factory=AGENT, arguments=msgspec.json.encode(arguments).decode())

    def meet(self, settings: EndpointSettings, timeout_s: float = COME_S) -> list[RemoteRank]:
        """Every other rank, in order, set up. WorkerLost when the agent of one does not connect in time."""
        others = range(1, self.num_ranks)
        if not others:
            self.close()
        with self._came:
            if not self._came.wait_for(lambda: len(self._newcomers) == len(others), timeout_s):
                missing = [rank for rank in others if rank not in self._newcomers]
                raise WorkerLost(f"the agents of ranks {missing} did not connect within {timeout_s:g} s")
        self._close_listener()
        ranks: list[RemoteRank] = []
        try:
            for rank in others:
                ranks.append(RemoteRank(settings.for_rank(rank), self._newcomers[rank].connection))
        except WorkerLost:
            self.close()
            raise
        return ranks

    def watch(self, ranks: list[RemoteRank]) -> None:
        """Tell each rank when its process has died."""
        for rank in ranks:
            self._watch.add(self._newcomers.pop(rank.rank).process, rank.died)

    def close(self) -> None:
        self._close_listener()
        self._watch.close()
        with self._came:
            for newcomer in self._newcomers.values():
                newcomer.connection.close()
                os.close(newcomer.process)
            self._newcomers.clear()

    def _close_listener(self) -> None:
        if self._is_open:
            self._is_open = False
            self._acceptor.close()

    def _greet(self, sock: socket.socket) -> None:
        connection: Connection | None = None
        process = -1
        try:
            process = peer_process(sock, self._dropped)
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
                raise newcomer.connection.drop(
                    WireError(f"{came} is not a rank of this replica", reason="rank")
                )
            if came.rank in self._newcomers:
                raise newcomer.connection.drop(
                    WireError(f"rank {came.rank} has connected already", reason="rank")
                )
            self._acceptor.let_in(sock)
            self._newcomers[came.rank] = newcomer
            self._came.notify_all()
