"""A replica's place in the traffic of pages: what leaves it, what arrives, and whom it talks to.

`PageEndpoint` tells what its owner asks for, and when.

Threads of the endpoint move bytes, read sockets and take digests. Whatever they learn is a call in the
inbox that `poll` makes, so the ledger, the hand-offs and the callbacks belong to one thread: the caller's.
Peers come from whoever calls `link`, and hold the cluster key; nothing in a request names one.

A replica of several ranks has its endpoint in rank 0, whose ledger is that of all ranks: page p is page p of
each rank's pool. The other ranks' pages are moved by an agent in each of their processes:

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

The endpoint takes the agents over, and closes them. A rank that is lost ends the transfers that it has a part
in, each once, and no other begins: the replica has to be loaded again.
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

TICK_S: Final = 0.25  # between two looks at leases and heartbeats


class KvEndpoint(PageEndpoint):
    """The pools of a replica, on any device. All but `close` is called by the thread that owns the ledger."""

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
        """pool: of rank 0. shared: what it was made by, if sources on this host may write into it directly.

        agents: of the other ranks. steps: of rank 0, which write its pool; None: only transfers do.
        WorkerLost when one of the ranks does not come. ConfigError for a transport that there is none of.
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
            self._hear,
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
                self._lost,
                clock=clock,
                dropped=dropped,
                link_timeout_s=settings.link_timeout_s,
            )
        except OSError:  # somebody else listens there
            ranks.close()
            raise
        ranks.start(inbox, self._hear, self._lost_rank)
        if isinstance(ring := settings.key, KeyRing):
            self._follow(ring)

    def _follow(self, ring: KeyRing) -> None:
        """Have the ranks use the keys of this ring, also those that came while the ranks were set up."""

        def use() -> None:
            self.post(lambda: self._replica.use(ring.generations))

        ring.follow(use)
        use()

    @property
    def address(self) -> tuple[str, int]:
        return self._peers.address

    @property
    def counters(self) -> TransportCounters:
        """Of rank 0's transports."""
        return self._here.counters

    def counts(self) -> dict[str, int]:
        """What went wrong or well since the start, by name, in all ranks: for metrics. What other ranks than
        rank 0 have counted is as they said it when this was last called.
        """
        return self._replica.counts()

    # What the owner asks for.

    def link(self, address: tuple[str, int]) -> Link:
        """Connect to another endpoint, from any thread; a link serves any number of transfers, both ways.

        TransferFailed, after seconds at worst: it can't be reached, has another key or serves another model.
        """
        return self._peers.dial(address)

    def poll(self) -> list[TransferEnded]:
        """Do what is due, without waiting; the transfers that have ended since the last call."""
        with contextlib.suppress(Empty):
            for _ in range(self._inbox.qsize()):  # no more than is there: peers may be faster than we are
                self._inbox.get_nowait()()
        if self._clock.now_s() >= self._next_tick_s:
            self._next_tick_s = self._clock.now_s() + TICK_S
            self._transfer_manager.tick(self._peers.link_to)
        return self._transfer_manager.take_ended()

    def post(self, call: Call) -> None:
        """From any thread: have the call made by the next `poll` or `wait`, in order with all others."""
        self._inbox.put(call)

    def wait(self, timeout_s: float) -> None:
        """Until there is something to `poll` for, or for so long."""
        with contextlib.suppress(Empty):
            self._inbox.get(timeout=timeout_s)()

    def close(self) -> None:
        """End every link and thread. Transfers that are open are lost; nothing is written here on return, and
        in other ranks a moment later.
        """
        self._peers.stop()
        if self._replica.stop():
            for outgoing in list(self._outgoing.values()):
                outgoing.let_go()
        self._peers.close()
        self._replica.close()

    def _lost_rank(self, rank: RemoteRank) -> None:
        """One of ours is lost, or dead by now."""
        self._lose(rank, f"rank {rank.rank} is lost", is_dead=rank.is_dead)
