"""The ranks of a worker on nodes other than rank 0's.

1. On each other node a `RankHost` listens. Rank 0's process connects to each host (`HostedRanks`) and proves
   that it has workers' keys. The host has the worker's configuration and keys from the runtime; rank 0 sends
   neither.
2. StartRanks starts the ranks of the host's node as rank 0 starts those of its own. The host passes the
   answers of the ranks on.
3. A rank that ends ends the worker: rank 0's process hears of the end and notices it without a step
   (`HostedRanks.check`). A rank that ends without an error message also ends the host's `serve`, and the
   runtime ends all actors of the worker.
4. CloseRanks waits for the ranks, which have been told to stop, and kills those that stay. A link that ends
   without CloseRanks is lost: the host ends its ranks, too, and both ends of the link end the worker.
5. A rank ends with its host: the host keeps the rank's stdin open. New keys go to ranks the same way.
"""

import logging
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from baton.cluster.model_directory import resolve_model
from baton.config.cluster import WorkerConfig
from baton.config.engine import EngineConfig
from baton.config.environment import node_name
from baton.engine.runner.rank_process import (
    TpAssignment,
    TpWorkerFailure,
    TpWorkerProcess,
    ended,
    error_of,
)
from baton.errors import BatonError, ConfigError, PeerGone, WireError, WorkerLost, reason_of
from baton.kvtransfer.ranks.agent_arguments import AgentArguments
from baton.messages.bounds import LINK_TIMEOUT_S, Message, schema_hash
from baton.messages.codec import decode_as
from baton.messages.workers import HostPlace, RankZero
from baton.rpc.auth import RANKS, Generations, KeyRing, LinkKeys, Role
from baton.rpc.connection import Connection, DroppedPeers, RankNetwork
from baton.rpc.listener import Listener, listen
from baton.rpc.session import HANDSHAKE_TIMEOUT_S

ORPHANS_S: Final = 5.0  # for ranks to end by themselves after rank 0's process, before they are killed
CLOSE_S: Final = 5.0  # beyond the ranks' own time, for a host to answer
FAILURE_S: Final = 2.0  # for the error of a rank to come after the end of its connections
MAX_LINKS: Final = 2  # the link of a replica that has ended, and that of the next one
FIRST_ORDER_S: Final = 10.0  # for the first order of a link: rank 0's process sends it at once

logger = logging.getLogger(__name__)


class HostMessage(Message, frozen=True):
    """A message between rank 0's process and a host."""


class StartRanks(HostMessage, frozen=True):
    """Start the ranks of the host's node. The first order of a link, which has one such order."""

    num_threads: Annotated[int, Meta(ge=1, le=2**16)]
    ranks: RankZero
    agents: RankZero  # for the rank's agent


class CloseRanks(HostMessage, frozen=True):
    """Wait for all ranks, and kill them after the timeout; the answer is RanksClosed."""

    timeout_s: Annotated[float, Meta(ge=0, le=3600)]


class RankSaid(HostMessage, frozen=True):
    """An answer of a rank, see engine/runner/rank_process.py."""

    rank: int
    answer: bytes


class RankEnded(HostMessage, frozen=True):
    """The process of a rank has ended."""

    rank: int
    status: int


class RanksClosed(HostMessage, frozen=True):
    """All ranks have ended."""


ToHost: TypeAlias = StartRanks | CloseRanks
FromHost: TypeAlias = RankSaid | RankEnded | RanksClosed
SCHEMA: Final = schema_hash(ToHost, FromHost)
_decode_for_host: Final[Callable[[bytes], ToHost]] = partial(decode_as, msgspec.msgpack.Decoder(ToHost))
_decode_from_host: Final[Callable[[bytes], FromHost]] = partial(decode_as, msgspec.msgpack.Decoder(FromHost))


# On the other nodes.


def _first_order(connection: Connection) -> ToHost:
    try:
        return connection.recv_message(_decode_for_host, FIRST_ORDER_S)
    except TimeoutError:
        message = f"no order has come within {FIRST_ORDER_S:g} s"
        raise connection.drop(WireError(message, reason="order")) from None


class RankHost:
    """Starts and ends the ranks of one worker on this node, as rank 0's process says."""

    def __init__(self, config: WorkerConfig, node: int, ring: KeyRing) -> None:
        """config: of the worker, with this node's address as `host`. node: counted from 1, of the worker's.

        ring: the keys in it may be replaced later.
        """
        self._config = config
        self._node = node
        self._ring = ring
        self._dropped = DroppedPeers()
        self._has_failed = threading.Event()
        self._failure = ""
        listener = listen(config.host)
        host, port = listener.getsockname()[:2]
        self.place = HostPlace(host, port, node_name())
        self._listener = Listener(listener, self._greet, "rank-host", self._dropped)

    def serve(self) -> None:
        """Serve until a rank dies or the link of rank 0's process is lost; raises WorkerLost then."""
        self._has_failed.wait()
        raise WorkerLost(self._failure)

    def close(self) -> None:
        """End all ranks."""
        self._listener.close()

    def _greet(self, sock: socket.socket) -> None:
        keys = LinkKeys(self._ring, RANKS)
        connection = Connection(
            sock,
            keys,
            Role.ACCEPTING,
            dropped=self._dropped,
            schema=SCHEMA,
            link_timeout_s=self._config.link_timeout_s,
        )
        try:
            connection.handshake()
            order = _first_order(connection)
            replica = _HostedReplica(self._config, self._node, self._ring, connection, self._failed)
            if self._listener.keep(sock, connection.close, MAX_LINKS):
                replica.serve(order)
            else:
                replica.refuse(WorkerLost("the host has too many links"))
        except PeerGone:
            logger.info("rank 0 is gone")
        except (BatonError, OSError) as error:
            logger.warning("a link of rank 0's process ends, and its ranks with it: %s", error)
        finally:
            connection.close()

    def _failed(self, why: str) -> None:
        self._failure = self._failure or why
        self._has_failed.set()


class _HostedReplica:
    """The ranks of one link, which end with it."""

    def __init__(
        self,
        config: WorkerConfig,
        node: int,
        ring: KeyRing,
        connection: Connection,
        failed: Callable[[str], None],
    ) -> None:
        """failed: called when a rank ends that has not said why, or when the link is lost."""
        self._config = config
        self._ring = ring
        self._connection = connection
        self._failed = failed
        num_here = config.engine.ranks_per_node
        self._ranks = range(node * num_here, (node + 1) * num_here)
        self._processes: list[TpWorkerProcess] = []
        self._keys_lock = threading.Lock()  # held while keys are passed on, so that the newest come last
        self._threads: list[threading.Thread] = []
        self._is_closing = False

    def serve(self, order: ToHost) -> None:
        """Serve until the link ends; all ranks have ended on return. order: the first."""
        timeout_s = ORPHANS_S
        self._ring.follow(self._use_keys)
        with tempfile.TemporaryDirectory(prefix="baton-ranks-") as folder:
            try:
                if isinstance(order, StartRanks):
                    self._start(order, str(Path(folder) / "store"))
                    order = self._connection.recv_message(_decode_for_host)
                if isinstance(order, StartRanks):
                    raise self._connection.drop(WireError("the ranks have been started", reason="order"))
                timeout_s = order.timeout_s
            except (PeerGone, WireError) as error:
                if self._processes:
                    self._failed(f"the link of rank 0's process is lost: {error}")
                raise
            finally:
                self._is_closing = True
                self._ring.unfollow(self._use_keys)
                self._end(timeout_s)
        self._send(RanksClosed())

    def refuse(self, error: BatonError | OSError) -> None:
        """Say why the next rank is not started, and none after it."""
        failure = TpWorkerFailure(type(error).__name__, str(error))
        self._send(RankSaid(rank=self._ranks[len(self._processes)], answer=msgspec.json.encode(failure)))

    def _start(self, order: StartRanks, rendezvous: str) -> None:
        try:
            for rank in self._ranks:
                self._start_rank(order, rank, rendezvous)
        except (BatonError, OSError) as error:
            self.refuse(error)

    def _start_rank(self, order: StartRanks, rank: int, rendezvous: str) -> None:
        keys = self._ring.generations
        process = TpWorkerProcess(self._assignment(order, rank, rendezvous, keys))
        with self._keys_lock:
            self._processes.append(process)
        if self._ring.generations != keys:  # they were replaced while the process started
            self._use_keys()
        thread = threading.Thread(target=self._watch, args=(process,), name="rank-watch", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _assignment(self, order: StartRanks, rank: int, rendezvous: str, keys: Generations) -> TpAssignment:
        config = self._config
        network = RankNetwork(
            rank_zero=order.ranks, own_host=config.host, link_timeout_s=config.link_timeout_s, keys=keys
        )
        agent = AgentArguments(network=msgspec.structs.replace(network, rank_zero=order.agents))
        model = str(resolve_model(config.engine.model).resolve())
        return TpAssignment(
            config=msgspec.structs.replace(config.engine, model=model),
            rank=rank,
            rendezvous=rendezvous,
            num_threads=order.num_threads,
            sidecar=agent.sidecar(),
            network=network,
            has_guardian=True,
        )

    def _watch(self, process: TpWorkerProcess) -> None:
        """Pass the answers and the end of a rank on."""
        answers = []

        def pass_on(answer: bytes) -> None:
            answers.append(answer)
            self._send(RankSaid(rank=process.rank, answer=answer))

        with suppress(PeerGone, WireError):
            status = process.watch(pass_on)
            self._send(RankEnded(rank=process.rank, status=status))
            if status and not answers and not self._is_closing:
                self._failed(f"rank {process.rank} ended with status {status}")

    def _end(self, timeout_s: float) -> None:
        """timeout_s: of all ranks together."""
        until_s = time.monotonic() + timeout_s
        for process in self._processes:
            process.end(max(0.0, until_s - time.monotonic()))
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.close(0.0)

    def _use_keys(self) -> None:
        with self._keys_lock:
            for process in self._processes:
                process.tell(msgspec.json.encode(self._ring.generations))

    def _send(self, message: FromHost) -> None:
        self._connection.send(msgspec.msgpack.encode(message))


# In rank 0's process.


class HostedRanks:
    """The ranks of one replica on other nodes: the RankNodes of the engine."""

    def __init__(
        self,
        hosts: Sequence[HostPlace],
        host: str,
        ring: KeyRing,
        agents: RankZero | None,
        link_timeout_s: float = LINK_TIMEOUT_S,
    ) -> None:
        """hosts: of the other nodes, in their order. host: the address of this node.

        agents: for the agents of the other nodes' ranks. link_timeout_s: of all connections to other nodes.
        """
        self.host = host
        self.link_timeout_s = link_timeout_s
        self._hosts = hosts
        self._ring = ring
        self._agents = agents
        self._links: dict[int, _HostLink] = {}  # by node
        self._ranks: list[HostedRank] = []
        self._has_changed = threading.Condition()  # the error of a rank is known

    @property
    def keys(self) -> Generations:
        return self._ring.generations

    def start(self, config: EngineConfig, num_threads: int, network: RankNetwork) -> "Sequence[HostedRank]":
        num_hosts, num_wanted = len(self._hosts), config.nnodes - 1
        if num_hosts != num_wanted:
            raise ConfigError(f"nnodes: there are hosts on {num_hosts} other nodes, not on {num_wanted}")
        assert self._agents is not None, "agents of other nodes have an address"
        order = StartRanks(num_threads=num_threads, ranks=network.rank_zero, agents=self._agents)
        self._ranks = [
            HostedRank(rank, self._has_changed) for rank in range(config.ranks_per_node, config.num_ranks)
        ]
        for node, place in enumerate(self._hosts, start=1):
            here = [rank for rank in self._ranks if rank.rank // config.ranks_per_node == node]
            self._links[node] = _HostLink(place, self._ring, self.link_timeout_s, here)
            self._links[node].start(order)
        return self._ranks

    def check(self) -> None:
        """Raise WorkerLost when a rank has ended or a host is gone. Not after `close`."""
        error = next(filter(None, (rank.error for rank in self._ranks)), None)
        if error is not None:
            raise WorkerLost(str(error)) from error

    def failure(self) -> BatonError | None:
        """As `RankNodes`. The error may come a moment after the end of the rank's other connections."""

        def is_known() -> bool:
            return any(rank.failure() for rank in self._ranks) or all(rank.error for rank in self._ranks)

        with self._has_changed:
            self._has_changed.wait_for(is_known, FAILURE_S)
        return next(filter(None, (rank.failure() for rank in self._ranks)), None)

    def close(self, timeout_s: float = 0.0) -> None:
        for link in self._links.values():
            link.begin_close(timeout_s)
        for link in self._links.values():
            link.close()


class _HostLink:
    """The connection to the host of one node."""

    def __init__(
        self, place: HostPlace, ring: KeyRing, link_timeout_s: float, ranks: "Sequence[HostedRank]"
    ) -> None:
        """ranks: of the node."""
        where = f"{place.host}:{place.port}"
        try:
            sock = socket.create_connection((place.host, place.port), HANDSHAKE_TIMEOUT_S)
            keys = LinkKeys(ring, RANKS)
            self._connection = Connection(
                sock, keys, Role.CONNECTING, schema=SCHEMA, link_timeout_s=link_timeout_s
            ).handshake()
        except (BatonError, OSError) as error:
            raise WorkerLost(f"the host of ranks at {where} cannot be reached: {reason_of(error)}") from error
        self._where = where
        self._ranks = {rank.rank: rank for rank in ranks}
        self._have_ended = threading.Event()
        self._close_by_s: float | None = None  # from `begin_close` on
        self._thread = threading.Thread(target=self._read, name="rank-host", daemon=True)
        self._thread.start()

    def start(self, order: StartRanks) -> None:
        self._send(order)

    def begin_close(self, timeout_s: float) -> None:
        """Have the host wait for its ranks, and kill them after the timeout. May be called again."""
        if self._close_by_s is None:
            self._close_by_s = time.monotonic() + timeout_s + CLOSE_S
            with suppress(WorkerLost):
                self._send(CloseRanks(timeout_s=timeout_s))

    def close(self) -> None:
        """Wait for the end of the ranks after `begin_close`, and end the link. May be called again."""
        assert self._close_by_s is not None
        self._have_ended.wait(max(0.0, self._close_by_s - time.monotonic()))
        self._connection.close()
        self._thread.join()

    def _send(self, message: ToHost) -> None:
        try:
            self._connection.send(msgspec.msgpack.encode(message))
        except (PeerGone, WireError) as error:
            raise WorkerLost(f"the host of ranks at {self._where} is gone: {error}") from error

    def _read(self) -> None:
        why = "has ended its ranks"
        try:
            while not isinstance(message := self._connection.recv_message(_decode_from_host), RanksClosed):
                rank = self._ranks.get(message.rank)
                if rank is not None:
                    rank.told(message)
        except (PeerGone, WireError) as error:
            why = f"is gone: {error}"
        self._have_ended.set()
        for rank in self._ranks.values():
            rank.lost(f"the host of ranks at {self._where} {why}")


class HostedRank:
    """Rank 0's end of a rank on another node: a TpWorker."""

    def __init__(self, rank: int, has_changed: threading.Condition) -> None:
        """has_changed: shared by all ranks on other nodes."""
        self.rank = rank
        self._has_changed = has_changed
        self.error: BatonError | None = None  # what the rank said, or why it is gone
        self._has_said_why = False

    def failure(self) -> BatonError | None:
        return self.error if self._has_said_why else None

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def told(self, message: RankSaid | RankEnded) -> None:
        """Note a message of the host. The link's thread calls."""
        match message:
            case RankSaid(answer=answer):
                self._fail(error_of(self.rank, answer), has_said_why=True)
            case RankEnded(status=status):
                self._fail(ended(self.rank, status))

    def lost(self, why: str) -> None:
        """Note that the host says no more. The link's thread calls."""
        self._fail(WorkerLost(f"rank {self.rank}: {why}"))

    def _fail(self, error: BatonError, *, has_said_why: bool = False) -> None:
        with self._has_changed:
            if self.error is None:
                self.error, self._has_said_why = error, has_said_why
            self._has_changed.notify_all()
