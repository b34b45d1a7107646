"""The endpoint of one replica, with its sockets, rank executors and remote ranks.

`PageEndpoint` documents the calls that a worker makes.

The endpoint's threads move bytes, read sockets and compute digests. Each thread posts its results to an inbox
as calls, and `poll` makes the calls. The ledger, the hand-offs and the callbacks therefore belong to one
thread, the thread that calls `poll`. Workers connect to peers by `link`. Every peer holds the cluster key,
and no transfer request contains a peer's address.

A replica of several ranks has its endpoint in rank 0. The ledger of rank 0 applies to all ranks: page p is
page p of each rank's pool. An agent in the process of each other rank moves that rank's pages:

    agents = RankAgents(config.tensor_parallel_size)
    shared = SharedPool()
    engine = load_engine(config, zeros_on_cpu=shared.zeros, companion=agents.companion)
    endpoint = KvEndpoint(
        settings, engine.runner.pool.device, ledger,
        shared=shared, agents=agents, steps=engine.runner.steps,
    )
    ...
    endpoint.close()
    engine.close()

The endpoint owns the agents and closes them. When a rank is lost, each transfer that has a part at this rank
ends once, and no new transfer begins: the replica has to be loaded again.
"""

import contextlib
import secrets
from queue import Empty, SimpleQueue
from typing import Final

from torch import Tensor

from baton.clock import Clock, SystemClock
from baton.kvtransfer.links import Link, Peers
from baton.kvtransfer.page_endpoint import PageEndpoint
from baton.kvtransfer.protocol.handoff import PageLedger, TransferEnded
from baton.kvtransfer.protocol.pull import ID_BYTES
from baton.kvtransfer.ranks.executor import RankExecutor
from baton.kvtransfer.ranks.peer_transports import TransportCounters
from baton.kvtransfer.ranks.ranks import Ranks
from baton.kvtransfer.ranks.remote import RankAgents, RemoteRank
from baton.kvtransfer.ranks.step_gate import CompletedSteps
from baton.kvtransfer.settings import EndpointSettings
from baton.kvtransfer.transports.message_stream import Call
from baton.kvtransfer.transports.pages import SharedPool
from baton.kvtransfer.transports.registry import transport_set
from baton.rpc.auth import KeyRing
from baton.rpc.connection import DroppedPeers

TICK_S: Final = 0.25  # between two checks of leases and heartbeats


class KvEndpoint(PageEndpoint):
    """An endpoint over sockets, for page pools on any device.

    The thread that owns the ledger makes all calls; any thread may call `close`, `link` and `post`.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        pool: Tensor,
        ledger: PageLedger,
        *,
        shared: SharedPool | None = None,
        agents: RankAgents | None = None,
        clock: Clock | None = None,
        steps: CompletedSteps | None = None,
    ) -> None:
        """Open the listeners and connect to the other ranks.

        pool: the page pool of rank 0. shared: the allocator of the pool, when sources on this host may write
        into the pool directly. agents: the agents of the other ranks. steps: the completed steps of rank 0,
        which write its pool; None: only transfers write it.
        Raises WorkerLost when a rank does not connect, ConfigError when the transport does not exist, and
        OSError when the address is in use.
        """
        own, incarnation = settings.for_rank(0), secrets.token_bytes(ID_BYTES)
        self.dropped = dropped = DroppedPeers()
        self._clock = clock = clock or SystemClock()
        self._inbox: SimpleQueue[Call] = SimpleQueue()
        self._next_tick_s = 0.0
        inbox = self._inbox.put
        transports = transport_set(settings.transport)
        self._here = here = RankExecutor(
            own,
            pool,
            shared,
            incarnation,
            transports,
            inbox,
            self._on_part_event,
            clock=clock,
            dropped=dropped,
            steps=steps,
        )
        self._replica = ranks = Ranks(settings, here, agents, clock)
        super().__init__(settings, incarnation, ledger, clock, ranks)
        try:
            self._peers = Peers(
                (settings.host, settings.port),
                settings.secret,
                settings.hello(incarnation),
                ranks.listeners,
                transports,
                inbox,
                self._received,
                self._on_link_lost,
                clock=clock,
                dropped=dropped,
                link_timeout_s=settings.link_timeout_s,
            )
        except OSError:  # the address is in use
            ranks.close()
            raise
        ranks.start(inbox, self._on_part_event, self._on_remote_rank_lost)
        if isinstance(ring := settings.key, KeyRing):
            self._follow_keys(ring)

    def _follow_keys(self, ring: KeyRing) -> None:
        """Give the ranks every new key of the ring, including keys added while the ranks connected."""

        def use() -> None:
            self.post(lambda: self._replica.use(ring.generations))

        ring.follow(use)
        use()

    @property
    def address(self) -> tuple[str, int]:
        """Return the host and the port that peers connect to."""
        return self._peers.address

    @property
    def counters(self) -> TransportCounters:
        """Return the counters of rank 0's transports."""
        return self._here.counters

    def counts(self) -> dict[str, int]:
        """Return event counts of all ranks since the start, by name, for metrics.

        The counts of remote ranks are as old as the previous call, which requested them.
        """
        return self._replica.counts()

    # Calls of the worker.

    def link(self, address: tuple[str, int]) -> Link:
        """Connect to another endpoint; any thread may call. A link serves many transfers, in both directions.

        Raises TransferFailed, within seconds, when the endpoint cannot be reached, has another key or serves
        another model.
        """
        return self._peers.dial(address)

    def poll(self) -> list[TransferEnded]:
        """Process the inbox and the due timers without blocking; return the newly ended transfers."""
        with contextlib.suppress(Empty):
            for _ in range(self._inbox.qsize()):  # bounded: peers may post faster than this loop runs
                self._inbox.get_nowait()()
        if self._clock.now_s() >= self._next_tick_s:
            self._next_tick_s = self._clock.now_s() + TICK_S
            self._transfer_manager.tick(self._peers.link_to)
        return self._transfer_manager.take_ended()

    def post(self, call: Call) -> None:
        """Queue a call for the next `poll` or `wait`; any thread may post. Calls run in the posted order."""
        self._inbox.put(call)

    def wait(self, timeout_s: float) -> None:
        """Block until the inbox has a call, and make the call; return after `timeout_s` at the latest."""
        with contextlib.suppress(Empty):
            self._inbox.get(timeout=timeout_s)()

    def close(self) -> None:
        """Close every link and stop every thread; open transfers are lost.

        After the return, no transfer writes the pages of rank 0; writes at other ranks stop shortly after.
        """
        self._peers.stop()
        if self._replica.stop():
            for outgoing in list(self._outgoing.values()):
                outgoing.send_released()
        self._peers.close()
        self._replica.close()

    def _on_remote_rank_lost(self, rank: RemoteRank) -> None:
        """End the transfers of a rank that is lost; called again once the rank is known to be dead."""
        self._on_rank_lost(rank, f"rank {rank.rank} is lost", is_dead=rank.is_dead)
