"""Where the agents of a replica's other ranks meet its rank 0.

1. Rank 0's worker makes a RankAgents, and has its engine start an agent beside every follower:
   `load_engine(config, companion=agents.companion)`.
2. Each agent connects to a unix socket that has an address but no file, and proves that it holds a secret
   that was made for this meeting. It must be a process of the same user.
3. The endpoint takes them all over (`meet`), and the socket is closed: nobody comes later.
"""

import logging
import os
import secrets
import socket
import threading
from typing import Final, NamedTuple

import msgspec

from baton.companion import Companion
from baton.errors import BatonError, WireError, WorkerLost
from baton.kvtransfer.acceptor import Acceptor
from baton.kvtransfer.endpoint_settings import EndpointSettings
from baton.kvtransfer.process_watch import ProcessWatch, peer_process, peer_user
from baton.kvtransfer.rank_messages import RANK_SCHEMA, Came, decode_for_rank_zero
from baton.kvtransfer.remote_rank import RemoteRank
from baton.wire import Connection, DroppedPeers, Role

logger = logging.getLogger(__name__)

AGENT: Final = "baton.kvtransfer.rank_agent:RankAgent"
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
        self._acceptor = Acceptor(self._listen(), self._greet, "kv-ranks", self._dropped)
        self._is_open = True

    @property
    def companion(self) -> Companion:
        """For `load_engine`."""
        arguments = AgentArguments(address=self._address, secret=self._secret)
        return Companion(factory=AGENT, arguments=msgspec.json.encode(arguments).decode())

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
