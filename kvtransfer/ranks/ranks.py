"""The ranks of one replica. Rank 0 gives the commands; in the process of every other rank an agent
(kvtransfer/ranks/agent.py) carries them out.

The life of a remote rank:

1. Rank 0's process makes a `RankAgents` and loads the engine with its sidecar, which makes a `RankAgent`
   beside every TP worker: `load_engine(config, sidecar=agents.sidecar)`. The agent is made before the rank's
   pool: `zeros_on_cpu` puts the pool of a CPU into shared memory.
2. Each agent connects to a unix socket, and proves that it holds a secret made for this replica. It must be a
   process of the same user. An agent on another node connects by TCP, and proves that it has workers' keys;
   it gets these keys, and those that replace them, from the process that started it. When all have connected,
   `set_up` sets them up, which makes them listen for sources, and closes the sockets.
3. Commands and events go over each agent's connection, in order. The agent performs the commands of rank 0,
   and nothing else.
4. When the connection ends, the rank is lost: its open transfers fail and no transfer begins. The agent stops
   its pushes and closes its listeners, but only the death of its process proves that it writes no more. Until
   then the pages of its shards stay reserved.
5. When a pidfd reports that death, the rank reads and writes no more. A process on another node has no
   pidfd. Its pages stay reserved until rank 0's process ends, which the lost rank causes.

A push names the step that writes its pages, and each rank waits until that step has written its own pages
(kvtransfer/ranks/executor.py): a digest would not show that a page was sent too early.
"""

import os
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, NamedTuple, TypeAlias

import msgspec

from baton.clock import Clock
from baton.config.engine import RankSidecar
from baton.errors import BatonError, ConfigError, WireError, WorkerLost
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import shards_of
from baton.kvtransfer.ranks.agent_arguments import AgentArguments
from baton.kvtransfer.ranks.executor import Emit, RankExecutor
from baton.kvtransfer.ranks.messages import (
    RANK_SCHEMA,
    AgentHello,
    AllStopped,
    Command,
    Counted,
    DropLink,
    Ready,
    Route,
    SetUp,
    StopAll,
    TellCounts,
    ToRankZero,
    UseKeys,
    decode_for_rank_zero,
    encode,
)
from baton.kvtransfer.transports.base import RankSettings
from baton.kvtransfer.transports.process_watch import ProcessWatch, peer_process
from baton.messages.bounds import LINK_TIMEOUT_S
from baton.messages.workers import Address, RankZero
from baton.pages import PageLayout
from baton.rpc.auth import RANKS, KeyRing, LinkKeys, LinkSecret, Role
from baton.rpc.auth import Generations as KeyGenerations
from baton.rpc.connection import Connection, DroppedPeers, MessageStream, Post
from baton.rpc.listener import Listener, listen, listen_on_host

CONNECT_S: Final = 30.0  # for an agent; rank 0 may be busy with its own part of a large model
AGENTS_TIMEOUT_S: Final = 60.0  # for all agents to connect; a loaded engine has started them all
# Listeners of a GPU's pool take a while: staging memory, the first CUDA call of a thread.
SET_UP_TIMEOUT_S: Final = 60.0
STOP_S: Final = 5.0  # for agents to confirm that no page leaves them
SECRET_BYTES: Final = 32
REPLICA_BYTES: Final = 16

OnLost: TypeAlias = Callable[[int, bool], None]  # (rank, its process is dead)


class RemoteRank:
    """A rank in another process, with the methods of its `RankExecutor`.

    Rank 0's thread makes all calls but `stop`, `close` and `died`.
    """

    def __init__(
        self, settings: RankSettings, connection: Connection, *, is_on_other_node: bool = False
    ) -> None:
        """connection: to the agent of rank `settings.rank`, past its first message.

        is_on_other_node: the agent has keys of its own and listens on its node's address.
        WorkerLost when the rank does not listen for sources in time.
        """
        if is_on_other_node:
            settings = msgspec.structs.replace(settings, keys=())
        self.rank = settings.rank
        self._is_on_other_node = is_on_other_node
        self.is_lost = False
        self._has_stopped = threading.Event()
        self._counts: dict[str, int] = {}
        self._is_asked = False  # for newer counts
        self._stream = MessageStream(connection, self._decode, f"kv-rank-{settings.rank}")
        self._post: Post
        self._emit: Emit
        self._on_lost: OnLost
        try:
            connection.send(encode(SetUp(settings=settings)))
            answer = connection.recv_message(decode_for_rank_zero, SET_UP_TIMEOUT_S)
        except (BatonError, TimeoutError) as error:
            connection.close()
            raise WorkerLost(f"rank {self.rank} does not listen for sources: {error}") from error
        if not isinstance(answer, Ready):
            connection.close()
            raise WorkerLost(f"rank {self.rank} said {type(answer).__name__} instead of Ready")
        self.listeners: RankListenerAddresses = answer.listeners

    def start(self, post: Post, emit: Emit, on_lost: OnLost) -> None:
        """Start reading. on_lost: called when the connection has ended (`is_lost`), and again when the
        process has died.
        """
        self._post, self._emit, self._on_lost = post, emit, on_lost
        self._stream.start(post, self._received, self._on_end)

    def perform(self, command: Command) -> None:
        if not (self._is_on_other_node and isinstance(command, UseKeys)):
            self._stream.send(encode(command))

    def counts(self) -> dict[str, int]:
        """Return the latest received counts, and request newer ones for a later call."""
        if not self._is_asked and not self.is_lost:
            self._is_asked = True
            self._stream.send(encode(TellCounts()))
        return self._counts

    def stop(self) -> None:
        """Begin to stop sending pages; `wait_until_stopped` waits for the end."""
        self._stream.send(encode(StopAll()))

    def wait_until_stopped(self, timeout_s: float) -> bool:
        """Return True once no page can leave the rank; False after the timeout."""
        return self._has_stopped.wait(max(0.0, timeout_s))

    def died(self) -> None:
        """Record the certain death of the rank's process. Any thread may call."""
        self._has_stopped.set()
        self._post(self._on_death)

    def close(self) -> None:
        """Close the connection. The agent closes its listeners by itself, a moment later."""
        self._stream.close()

    def _decode(self, body: bytes) -> ToRankZero:
        """Decode in the reading thread: rank 0's thread may be waiting in `wait_until_stopped`."""
        message = decode_for_rank_zero(body)
        if isinstance(message, AllStopped):
            self._has_stopped.set()
        return message

    def _received(self, message: ToRankZero) -> None:
        if isinstance(message, Counted):
            self._counts, self._is_asked = message.counts, False
        elif not isinstance(message, AgentHello | Ready | AllStopped):
            self._emit(message)

    def _on_end(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._on_lost(self.rank, False)

    def _on_death(self) -> None:
        self._on_end()
        self._on_lost(self.rank, True)


class _Newcomer(NamedTuple):
    connection: Connection
    process: int | None  # descriptor; None: it is on another node


class RankAgents:
    """The agents of ranks 1 and up, if any. A `Ranks` that is given the object owns it."""

    def __init__(
        self,
        num_ranks: int,
        *,
        ranks_here: int | None = None,
        host: str = "",
        keys: KeyRing | None = None,
        link_timeout_s: float = LINK_TIMEOUT_S,
    ) -> None:
        """num_ranks: of the replica, rank 0 included. ranks_here: the first ones, on this node; None: all.

        host: the address of this node, if ranks are on other nodes: `node_place` is for their agents. keys:
        prove them. link_timeout_s: of the connections to them.
        """
        self.num_ranks = num_ranks
        self._link_timeout_s = link_timeout_s
        self._here = range(1, num_ranks if ranks_here is None else ranks_here)
        self._elsewhere = range(self._here.stop, num_ranks)
        self._keys = keys
        self._dropped = DroppedPeers()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._has_connected = threading.Condition()
        self._newcomers: dict[int, _Newcomer] = {}  # by rank, until `watch`
        self._watch = ProcessWatch()
        listener, self._address = listen_on_host("baton-ranks")
        self._acceptors = [Listener(listener, self._greet_here, "kv-ranks", self._dropped)]
        self.node_place: RankZero | None = None  # None: no rank is on another node
        if keys is not None:
            listener = listen(host)
            address = Address(*listener.getsockname()[:2])
            self.node_place = RankZero(address=address, replica=secrets.token_bytes(REPLICA_BYTES))
            self._acceptors.append(Listener(listener, self._greet_elsewhere, "kv-ranks", self._dropped))

    @property
    def sidecar(self) -> RankSidecar:
        """Return the argument for `load_engine`."""
        return AgentArguments(address=self._address, secret=self._secret).sidecar()

    def set_up(self, settings: RankSettings, timeout_s: float = AGENTS_TIMEOUT_S) -> list[RemoteRank]:
        """Return every other rank, in order, ready for commands. settings: those of rank 0.

        Raises WorkerLost when an agent does not connect in time.
        """
        others = range(1, self.num_ranks)
        if not others:
            self.close()
        with self._has_connected:
            if not self._has_connected.wait_for(lambda: len(self._newcomers) == len(others), timeout_s):
                missing = [rank for rank in others if rank not in self._newcomers]
                raise WorkerLost(f"the agents of ranks {missing} did not connect within {timeout_s:g} s")
        self._stop_listening()
        ranks: list[RemoteRank] = []
        try:
            for rank in others:
                connection, process = self._newcomers[rank]
                own = msgspec.structs.replace(settings, rank=rank)
                ranks.append(RemoteRank(own, connection, is_on_other_node=process is None))
        except WorkerLost:
            self.close()
            raise
        return ranks

    def watch(self, ranks: list[RemoteRank]) -> None:
        """Report the death of a rank's process to the rank, from now on."""
        for rank in ranks:
            process = self._newcomers.pop(rank.rank).process
            if process is not None:
                self._watch.add(process, rank.died)

    def close(self) -> None:
        """Stop listening and watching, and drop the agents that have connected and are not set up."""
        self._stop_listening()
        self._watch.close()
        with self._has_connected:
            for newcomer in self._newcomers.values():
                newcomer.connection.close()
                if newcomer.process is not None:
                    os.close(newcomer.process)
            self._newcomers.clear()

    def _stop_listening(self) -> None:
        for acceptor in self._acceptors:
            acceptor.close()

    def _greet_here(self, sock: socket.socket) -> None:
        self._greet(sock, self._secret, peer_process(sock, self._dropped))

    def _greet_elsewhere(self, sock: socket.socket) -> None:
        assert self._keys is not None
        self._greet(sock, LinkKeys(self._keys, RANKS), None)

    def _greet(self, sock: socket.socket, secret: LinkSecret, process: int | None) -> None:
        """Let an agent of this replica in. process: of the agent; the newcomer owns it once it is let in."""
        with ExitStack() as unless_let_in:
            if process is not None:
                unless_let_in.callback(os.close, process)
            connection = Connection(
                sock,
                secret,
                Role.ACCEPTING,
                dropped=self._dropped,
                schema=RANK_SCHEMA,
                link_timeout_s=self._link_timeout_s,
            )
            unless_let_in.callback(connection.close)
            self._let_in(sock, _Newcomer(connection.handshake(AGENTS_TIMEOUT_S), process))
            unless_let_in.pop_all()

    def _let_in(self, sock: socket.socket, newcomer: _Newcomer) -> None:
        hello = newcomer.connection.recv_message(decode_for_rank_zero, AGENTS_TIMEOUT_S)
        with self._has_connected:
            if not isinstance(hello, AgentHello) or not self._expects(hello, newcomer):
                raise newcomer.connection.drop(
                    WireError(f"{hello} is not a rank of this replica", reason="rank")
                )
            if hello.rank in self._newcomers:
                raise newcomer.connection.drop(
                    WireError(f"rank {hello.rank} has connected already", reason="rank")
                )
            self._acceptors[newcomer.process is None].let_in(sock)
            self._newcomers[hello.rank] = newcomer
            self._has_connected.notify_all()

    def _expects(self, hello: AgentHello, newcomer: _Newcomer) -> bool:
        """Return whether the rank belongs to this replica and runs on the newcomer's node."""
        if newcomer.process is not None or self.node_place is None:
            return hello.rank in self._here
        return hello.rank in self._elsewhere and hello.replica == self.node_place.replica


def routes(own: PageLayout, link: Link, num_layer_groups: int, *, is_source: bool) -> list[Route]:
    """Return one route for each shard of a transfer over the link, in the order of the shards.

    own: the layout of this replica. is_source: this replica is the source. Raises ValueError when there are
    more groups than layers.
    """
    peer = link.hello.layout
    source, destination = (own, peer) if is_source else (peer, own)
    found = []
    for source_rank, rank, layers, group in shards_of(source, destination, num_layer_groups):
        ours, theirs = (source_rank, rank) if is_source else (rank, source_rank)
        listeners = link.hello.listeners[theirs]
        host = listeners.node or link.hello.listeners[0].node or link.host
        peer_rank = PeerRank(host=host, layout=peer, rank=theirs, listeners=listeners)
        found.append(Route(ours, peer_rank, layers, group))
    return found


class Ranks:
    """The ranks of a replica; commands go to one of them or to all. `close` closes all ranks."""

    def __init__(
        self, settings: RankSettings, here: RankExecutor, agents: RankAgents | None, clock: Clock
    ) -> None:
        """settings, here: of rank 0.

        `here` is closed when another rank does not connect (WorkerLost), or when the number of ranks is not
        the layout's (ConfigError).
        """
        self._clock = clock
        self._agents = agents
        self._others: list[RemoteRank] = []
        num_ranks = 1 if agents is None else agents.num_ranks
        try:
            if num_ranks != settings.layout.num_ranks:
                raise ConfigError(
                    f"{num_ranks} ranks have agents, the layout has {settings.layout.num_ranks}"
                )
            if agents is not None:
                self._others = agents.set_up(settings)
        except BaseException:
            here.close()
            if agents is not None:
                agents.close()
            raise
        self._here = here
        self._executors: list[RankExecutor | RemoteRank] = [here, *self._others]

    def start(self, post: Post, emit: Emit, on_lost: OnLost) -> None:
        """Start reading from the other ranks, and watch their processes. on_lost: as in RemoteRank.start."""
        for rank in self._others:
            rank.start(post, emit, on_lost)
        if self._agents is not None:
            self._agents.watch(self._others)

    @property
    def listeners(self) -> tuple[RankListenerAddresses, ...]:
        """Return the listeners of each rank."""
        return tuple(executor.listeners for executor in self._executors)

    def counts(self) -> dict[str, int]:
        """Return the counters since the start, by name, summed over all ranks."""
        total: Counter[str] = Counter()
        for executor in self._executors:
            total.update(executor.counts())
        return dict(total)

    def complaint(self) -> str | None:
        """Return the reason why no transfer can begin; None when no rank is lost."""
        lost = [str(other.rank) for other in self._others if other.is_lost]
        return f"rank {', '.join(lost)} is lost" if lost else None

    def perform(self, rank: int, command: Command) -> None:
        """Have one rank perform the command. Returns at once; the events that follow are reported later."""
        self._executors[rank].perform(command)

    def drop(self, link: Link) -> None:
        """Close the transports of a link after the end of its transfers."""
        self._perform_all(DropLink(link=link.number))

    def use(self, generations: KeyGenerations) -> None:
        """Give every rank these keys for new connections."""
        self._perform_all(UseKeys(generations=generations))

    def stop(self) -> bool:
        """Stop all sending of pages. Returns False when a rank does not confirm the stop in time."""
        for other in self._others:
            other.stop()
        self._here.stop()
        deadline_s = self._clock.now_s() + STOP_S
        return all([other.wait_until_stopped(deadline_s - self._clock.now_s()) for other in self._others])

    def close(self) -> None:
        """Close every rank, and the agents' listeners."""
        if self._agents is not None:
            self._agents.close()
        for executor in self._executors:
            executor.close()

    def _perform_all(self, command: Command) -> None:
        for executor in self._executors:
            executor.perform(command)
