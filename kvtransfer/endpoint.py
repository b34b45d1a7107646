"""The endpoint of one replica: it starts, feeds and ends the page transfers of the replica.

The life of a transfer, in the calls of the two workers:

1. Both workers know the transfer's id. The destination calls `grant`, which reserves pages and sends the
   source a Grant.
2. The source finds the grant in `take_granted`, and calls `offer` as pages are computed. A grant may arrive
   before its request: the source keeps the transfer until `abort` or the end of the transfer.
3. Both workers call `poll` in their loops. `poll` does all the work that touches the ledger and returns the
   transfers that ended.
4. `pull` is the alternative to `grant`: the destination requests pages that a peer already holds. The peer's
   `pin` finds the pages by their keys; a pull of pages that lie on disk waits until `fetch` has them.

`PageEndpoint` is independent of sockets and device memory; the simulator adds simulated links and ranks.
`KvEndpoint` adds sockets, rank executors and remote ranks. Its threads move bytes, read sockets and compute
digests. Each thread posts its results to an inbox as calls, and `poll` makes the calls. The ledger, the
hand-offs and the callbacks therefore belong to one thread, the thread that calls `poll`. Workers connect to
peers by `link`. Every peer holds the cluster key, and no transfer request contains a peer's address.

A replica of several ranks has its endpoint in rank 0. The ledger of rank 0 applies to all ranks: page p is
page p of each rank's pool. An agent in the process of each other rank moves that rank's pages:

    agents = RankAgents(config.num_ranks)
    shared = SharedPool()
    engine = load_engine(config, zeros_on_cpu=shared.zeros, sidecar=agents.sidecar)
    endpoint = KvEndpoint(
        settings, engine.runner.pool.device, ledger,
        shared=shared, agents=agents, steps=engine.runner.steps,
    )
    ...
    endpoint.close()
    engine.close()

The endpoint owns the agents and closes them. When a rank is lost, each transfer that has a shard at this rank
ends once, and no new transfer begins: the replica has to be loaded again.
"""

import contextlib
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from queue import Empty, Queue
from typing import Final, Protocol

import msgspec
from torch import Tensor

from baton.clock import Clock, SystemClock
from baton.errors import ProtocolError, WorkerLost
from baton.kvtransfer.links import KvLinks, Link, Peers
from baton.kvtransfer.protocol.destination import DestinationHandoff
from baton.kvtransfer.protocol.handoff import (
    Action,
    GrantedTransfer,
    HandoffContext,
    Owner,
    PageLedger,
    Timing,
    TransferEnded,
    answer_to_unknown,
)
from baton.kvtransfer.protocol.messages import (
    ID_BYTES,
    NO_DIGESTS,
    PROTOCOL,
    AnyMessage,
    EndpointClosed,
    EndpointHello,
    Grant,
    PullRequest,
    RankListenerAddresses,
    Released,
    TransferMessage,
    TransferRequest,
    check_request,
    size_complaint,
)
from baton.kvtransfer.protocol.source import Fetch, Pin, SourceHandoff, fetch_nothing, pin_nothing
from baton.kvtransfer.protocol.transfer_plan import default_layer_groups, plan_transfer
from baton.kvtransfer.ranks.executor import CompletedSteps, RankExecutor
from baton.kvtransfer.ranks.messages import (
    Command,
    ForgetShard,
    ShardEvent,
    ShardVerified,
)
from baton.kvtransfer.ranks.ranks import RankAgents, Ranks, routes
from baton.kvtransfer.transports.base import AUTO, RankSettings, TransportSet
from baton.kvtransfer.transports.pages import SharedPool
from baton.kvtransfer.transports.registry import transport_set
from baton.messages.bounds import DEFAULT_KV_STREAMS, LINK_TIMEOUT_S, KvStreams
from baton.messages.workers import MAX_PAIRS, PairTransport, Worker
from baton.pages import PageLayout
from baton.rpc.auth import PAGES, KeyRing, LinkKeys
from baton.rpc.connection import Call, DroppedPeers

TICK_S: Final = 0.25  # between two checks of leases and heartbeats
FETCH_POLL_S: Final = 0.002  # between two looks at pages that come from a disk


class EndpointSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one replica's endpoint: its keys, model, layout, address and limits."""

    keys: KeyRing
    fingerprint: str  # of the model
    layout: PageLayout
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    transport: str = AUTO
    has_digests: bool = True  # of pages; a transfer has none if both ends say so
    timing: Timing = Timing()
    num_streams: KvStreams = DEFAULT_KV_STREAMS  # of CUDA, for each pair of ranks
    stream_priority: int = 0  # of all these streams: -1 goes before 0
    link_timeout_s: float = LINK_TIMEOUT_S  # after which a silent link to another replica is dropped

    def hello(self, incarnation: bytes, listeners: tuple[RankListenerAddresses, ...] = ()) -> EndpointHello:
        """Return the first message over each link of the process with this incarnation.

        listeners: of each rank.
        """
        return EndpointHello(
            protocol=PROTOCOL,
            incarnation=incarnation,
            fingerprint=self.fingerprint,
            layout=self.layout,
            listeners=listeners,
            has_digests=self.has_digests,
        )

    def for_rank(self, rank: int) -> RankSettings:
        """Return the settings of one rank of the replica."""
        return RankSettings(
            keys=self.keys.generations,
            layout=self.layout,
            rank=rank,
            host=self.host,
            transport=self.transport,
            num_streams=self.num_streams,
            stream_priority=self.stream_priority,
        )


class ReplicaRanks(Protocol):
    """The ranks of one replica, to which hand-offs give commands; `Ranks` implements and documents it."""

    def complaint(self) -> str | None: ...
    def perform(self, rank: int, command: Command) -> None: ...
    def drop(self, link: Link) -> None: ...


@dataclass(slots=True, eq=False)
class OpenTransfer:
    """A transfer that arrives or leaves, and the link that carries its messages."""

    handoff: SourceHandoff | DestinationHandoff
    link: Link


class PageEndpoint(ABC):
    """The transfers of one replica; see the steps above.

    Owns the open transfers: each stays open until no writer or reader uses its pages. The caller owns the
    ledger and the ranks. The thread that owns the ledger makes all calls.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        incarnation: bytes,
        ledger: PageLedger,
        clock: Clock,
        ranks: ReplicaRanks,
    ) -> None:
        self.settings = settings
        self.incarnation = incarnation
        self.pin: Pin = pin_nothing  # a worker that lets peers pull its pages replaces both
        self.fetch: Fetch = fetch_nothing
        self._ledger = ledger
        self._clock = clock
        self._ranks = ranks
        self._transfers: dict[bytes, OpenTransfer] = {}
        self._fetching: list[SourceHandoff] = []  # pulls of peers that wait for a disk
        self._epochs = count(1)
        self._next_tick_s = 0.0
        self._ended: list[TransferEnded] = []
        self._granted: list[GrantedTransfer] = []
        # transfers_OUTCOME, verified_shards (of transfers that arrived), digest_mismatches (of these)
        self._counts: Counter[str] = Counter()

    def counts(self) -> dict[str, int]:
        """Return event counts since the start, by name, for metrics."""
        return dict(self._counts)

    def pairs(self, links: KvLinks, members: Mapping[str, Worker]) -> tuple[PairTransport, ...]:
        """Return the transports to the listed workers, fallbacks first, at most MAX_PAIRS.

        Of several pairs of ranks with a peer, the transports of rank 0 count, and of these a fallback.
        """
        return ()

    @abstractmethod
    def _make_posted_calls(self) -> None:
        """Make the calls that were posted to this thread, without blocking."""

    @abstractmethod
    def _link_to(self, incarnation: bytes) -> Link | None:
        """Return an open link to the process of this incarnation, or None."""

    @property
    def num_open(self) -> int:
        """Return the number of transfers that hold local pages, or will, as source or as destination."""
        return len(self._transfers)

    # Calls of the worker.

    def poll(self) -> list[TransferEnded]:
        """Process received events and due timers without blocking; return the newly ended transfers."""
        self._make_posted_calls()
        self._fetching = [handoff for handoff in self._fetching if handoff.is_fetching]
        for handoff in self._fetching:
            self._perform(self._transfers[handoff.transfer], handoff.fetched())
        if self._clock.now_s() >= self._next_tick_s:
            self._next_tick_s = self._clock.now_s() + TICK_S
            self._tick()
        ended, self._ended = self._ended, []
        return ended

    def take_granted(self) -> list[GrantedTransfer]:
        """Return the transfers that peers have granted pages for since the last call."""
        granted, self._granted = self._granted, []
        return granted

    def grant(
        self,
        link: Link,
        transfer: bytes,
        num_units: int,
        adopter: Owner,
        *,
        deadline_s: float,
        position: int = 0,
        num_layer_groups: int | None = None,
    ) -> None:
        """Reserve local pages and grant them to the peer. The caller has made room for the pages.

        transfer: the id, 16 bytes, which the peer's worker also knows; an id must not be used twice.
        position: the token of the sequence at which the units begin, a page boundary on both sides; the
        caller holds the tokens before it. adopter: the owner of the pages once they are verified.
        num_layer_groups: the source may offer pages separately for this many groups of layers, which
        `layer_groups` cuts; None: a number that suits the source's layout.
        Raises ValueError when a value is out of range or the id is in use.
        """
        if transfer in self._transfers:
            raise ValueError(f"transfer {transfer.hex()} was started before")
        if position % self._page_tokens(link):
            raise ValueError(f"a transfer from token {position} on, which starts no page")
        if num_layer_groups is None:
            num_layer_groups = default_layer_groups(link.hello.layout)
        context = self._context(link, transfer, num_layer_groups, is_source=False)
        grant = Grant(
            transfer=transfer,
            epoch=next(self._epochs),
            deadline_ms=max(1, round(deadline_s * 1000)),
            num_units=num_units,
            pages=(),
            generations=(),
            position=position,
            num_layer_groups=num_layer_groups,
        )
        self._begin_destination(link, grant, context, adopter)

    def offer(
        self, transfer: bytes, pages: Sequence[int], num_units: int, *, group: int | None = None
    ) -> None:
        """Append pages to the transfer and send all units that are computed.

        pages: the pages that follow the pages offered before. num_units: all units computed so far; on a GPU,
        by the stream that is current here and in `poll`. Other ranks send their shards once they have
        computed them. group: the group of layers that is computed; only the first group's offer contains the
        pages. Does nothing when the transfer is not open.
        """
        opened = self._transfers.get(transfer)
        if opened is not None and isinstance(opened.handoff, SourceHandoff):
            self._perform(opened, opened.handoff.offer(pages, num_units, group))

    def pull(
        self,
        link: Link,
        wanted: Sequence[bytes],
        num_units: int,
        adopter: Owner,
        *,
        deadline_s: float,
    ) -> bytes:
        """Request the peer's pages with these keys and return the transfer's id. The caller has made room.

        adopter: the owner of the local pages once they are verified. Raises ValueError when the request is
        too large for one transfer.
        """
        transfer = self._new_id()
        context = self._context(link, transfer, is_source=False)
        pull = PullRequest(
            transfer=transfer,
            epoch=next(self._epochs),
            deadline_ms=max(1, round(deadline_s * 1000)),
            num_units=num_units,
            wanted_keys=b"".join(wanted),
            pages=(),
            generations=(),
        )
        self._begin_destination(link, pull, context, adopter)
        return transfer

    def moving_s(self, transfer: bytes) -> float:
        """Return the seconds in which an open transfer from here has sent pages; 0 for any other transfer."""
        opened = self._transfers.get(transfer)
        handoff = None if opened is None else opened.handoff
        return handoff.timeline.moving_s if isinstance(handoff, SourceHandoff) else 0.0

    def abort(self, transfer: bytes, reason: str) -> None:
        """Cancel the transfer and tell the peer; `poll` reports its end. Does nothing when it is not open."""
        opened = self._transfers.get(transfer)
        if opened is not None:
            self._perform(opened, opened.handoff.abort(reason))

    # Events from peers, ranks and the clock.

    def _received(self, link: Link, message: AnyMessage) -> None:
        if link.is_lost:
            return
        if isinstance(message, Grant | PullRequest):
            self._requested(link, message)
            return
        if isinstance(message, EndpointClosed):
            self._peer_closed(link)
            return
        opened = self._transfers.get(getattr(message, "transfer", b""))
        # Messages come over any link of the process that the transfer began with.
        if opened is not None and opened.link.hello.incarnation == link.hello.incarnation:
            self._receive(opened, message)
        elif (answer := answer_to_unknown(message)) is not None:
            link.send(answer)

    def _receive(self, opened: OpenTransfer, message: AnyMessage) -> None:
        """Process a message of the peer. An illegal message drops the link and ends the transfer."""
        try:
            actions = opened.handoff.receive(message)
        except ProtocolError as error:
            opened.link.drop(error)
            actions = opened.handoff.peer_lost()
        self._perform(opened, actions)

    def _peer_closed(self, link: Link) -> None:
        """Release every transfer with the peer, whether it has read the request or not. No transfer begins
        over this link any more.
        """
        link.is_lost = True
        for opened in self._open_transfers():
            if opened.link.hello.incarnation == link.hello.incarnation:
                self._receive(opened, Released(transfer=opened.handoff.transfer))

    def _on_link_lost(self, link: Link) -> None:
        for opened in self._open_transfers():
            if opened.link is link:
                self._perform(opened, opened.handoff.peer_lost())
        self._ranks.drop(link)

    def _on_shard_event(self, event: ShardEvent) -> None:
        if isinstance(event, ShardVerified):
            self._counts["verified_shards"] += 1
            self._counts["digest_mismatches"] += bool(event.corrupt_units)
        opened = self._transfers.get(event.transfer)
        if opened is not None:
            self._perform(opened, opened.handoff.on_shard_event(event))

    def _on_rank_lost(self, rank: int, is_dead: bool) -> None:
        """End the transfers of a lost rank.

        is_dead: its process is gone, so its writers have stopped too.
        """
        for opened in self._open_transfers():
            handoff = opened.handoff
            shards = [shard for shard, route in enumerate(handoff.routes) if route.rank == rank]
            if shards:
                self._perform(opened, handoff.fail(f"rank {rank} is lost"))
            for shard in shards if is_dead else ():
                self._perform(opened, handoff.rank_died(shard))

    def _tick(self) -> None:
        """Check leases and deadlines, and send heartbeats."""
        for opened in self._open_transfers():
            if opened.link.is_lost:  # the remaining messages use another link to the same process
                opened.link = self._link_to(opened.link.hello.incarnation) or opened.link
            self._perform(opened, opened.handoff.tick())

    # Actions of the hand-offs.

    def _perform(self, opened: OpenTransfer, actions: Sequence[Action]) -> None:
        """Perform the actions; forget the transfer once it is closed.

        A command to rank 0 may report events; their actions are performed before those that follow here.
        """
        for action in actions:
            match action:
                case TransferMessage():
                    opened.link.send(action)
                case TransferEnded():
                    self._counts[f"transfers_{action.outcome}"] += 1
                    self._ended.append(action)
                case _:
                    self._ranks.perform(opened.handoff.routes[action.shard].rank, action)
        handoff = opened.handoff
        if handoff.is_closed and self._transfers.get(handoff.transfer) is opened:
            del self._transfers[handoff.transfer]
            for shard, route in enumerate(handoff.routes):
                self._ranks.perform(route.rank, ForgetShard(transfer=handoff.transfer, shard=shard))

    # New transfers.

    def _begin_destination(
        self, link: Link, request: TransferRequest, context: HandoffContext, adopter: Owner
    ) -> None:
        """Begin a transfer to here. request: without pages."""
        num_pages = context.plan.destination.num_pages(request.num_units)
        check_request(request, len(context.routes), num_pages)
        self._begin(link, DestinationHandoff(request, context, adopter))

    def _requested(self, link: Link, request: TransferRequest) -> None:
        try:
            context = self._checked_context(link, request)
        except ProtocolError as error:
            link.drop(error)
            return
        if isinstance(request, Grant):
            self._granted.append(
                GrantedTransfer(
                    request.transfer,
                    request.position,
                    request.num_units,
                    context.plan.unit_tokens,
                    request.num_layer_groups,
                )
            )
        handoff = SourceHandoff(request, context, self.pin, self.fetch)
        self._begin(link, handoff)
        if handoff.is_fetching:
            self._fetching.append(handoff)

    def _checked_context(self, link: Link, request: TransferRequest) -> HandoffContext:
        """Return the context of the transfer that the peer requests. Raises ProtocolError for an illegal
        request.
        """
        name, num_groups = f"transfer {request.transfer.hex()}", request.num_layer_groups
        if request.transfer in self._transfers:
            raise ProtocolError(f"{name} was requested twice")
        if num_groups > self.settings.layout.num_layers:
            layers = f"{self.settings.layout.num_layers} layers"
            raise ProtocolError(f"{name} has {num_groups} groups of layers, the model has {layers}")
        context = self._context(link, request.transfer, num_groups, is_source=True)
        if (complaint := size_complaint(request.num_units, len(context.routes))) is not None:
            raise ProtocolError(f"{name}: {complaint}")
        if isinstance(request, Grant) and request.position % self._page_tokens(link):
            raise ProtocolError(f"{name} begins at token {request.position}, which starts no page")
        num_pages = context.plan.destination.num_pages(request.num_units)
        if len(request.pages) != num_pages:
            raise ProtocolError(f"{name} is granted {len(request.pages)} pages, expected {num_pages}")
        num_wanted = context.plan.source.num_pages(request.num_units)
        if isinstance(request, PullRequest) and len(request.keys) != num_wanted:
            raise ProtocolError(f"{name} wants {len(request.keys)} pages, expected {num_wanted}")
        return context

    def _begin(self, link: Link, handoff: SourceHandoff | DestinationHandoff) -> None:
        """Open the transfer, and begin it when the link and all ranks are alive; otherwise end it."""
        opened = self._transfers[handoff.transfer] = OpenTransfer(handoff, link)
        complaint = self._ranks.complaint()
        if link.is_lost:
            self._perform(opened, handoff.peer_lost())
        elif complaint is not None:
            self._perform(opened, handoff.fail(complaint))
        else:
            self._perform(opened, handoff.begin())

    def _context(
        self, link: Link, transfer: bytes, num_layer_groups: int = 1, *, is_source: bool
    ) -> HandoffContext:
        """Return the context of a new hand-off over the link. is_source: this replica is the source."""
        ours, theirs = self.settings.layout, link.hello.layout
        source, destination = (ours, theirs) if is_source else (theirs, ours)
        has_digests = self.settings.has_digests or link.hello.has_digests
        return HandoffContext(
            ledger=self._ledger,
            clock=self._clock,
            timing=self.settings.timing,
            plan=plan_transfer(source, destination, 0, 0),
            routes=routes(ours, link, num_layer_groups, is_source=is_source),
            link=link.number,
            digest_key=link.digest_key(transfer) if has_digests else NO_DIGESTS,
        )

    def _page_tokens(self, link: Link) -> int:
        """Return the larger of the two sides' page sizes, in tokens.

        Page sizes are powers of two, so every multiple of the larger one is a page boundary on both sides.
        """
        return max(self.settings.layout.page_size, link.hello.layout.page_size)

    def _new_id(self) -> bytes:
        return secrets.token_bytes(ID_BYTES)

    def _open_transfers(self) -> list[OpenTransfer]:
        """Return a copy of all open transfers."""
        return list(self._transfers.values())


class KvEndpoint(PageEndpoint):
    """An endpoint over sockets, for page pools on any device.

    The thread that owns the ledger makes all calls; any thread may call `close`, `link` and `post`.
    """

    _ranks: Ranks

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
        self.dropped = DroppedPeers()
        clock = clock or SystemClock()
        # SimpleQueue is faster, but its `get` may wait for ever in Python 3.11: after a wakeup its remaining
        # timeout can become negative, which means none.
        self._inbox: Queue[Call] = Queue()
        transports = transport_set(settings.transport)
        self._here = here = RankExecutor(
            own,
            pool,
            shared,
            incarnation,
            transports,
            self._inbox.put,
            self._on_shard_event,
            clock=clock,
            dropped=self.dropped,
            steps=steps,
            node=settings.host if agents is not None and agents.node_place is not None else "",
        )
        ranks = Ranks(own, here, agents, clock)
        super().__init__(settings, incarnation, ledger, clock, ranks)
        try:
            self._peers = self._listen(transports, clock)
        except OSError:  # the address is in use
            ranks.close()
            raise
        ranks.start(self._inbox.put, self._on_shard_event, self._on_rank_lost)
        settings.keys.follow(self._use_keys)
        self._use_keys()  # keys may have been added while the ranks connected

    def _listen(self, transports: TransportSet, clock: Clock) -> Peers:
        """Listen for other endpoints. Raises OSError when the address is in use."""
        settings = self.settings
        return Peers(
            (settings.host, settings.port),
            LinkKeys(settings.keys, PAGES),
            settings.hello(self.incarnation, self._ranks.listeners),
            transports,
            self._inbox.put,
            self._received,
            self._on_link_lost,
            clock=clock,
            dropped=self.dropped,
            link_timeout_s=settings.link_timeout_s,
        )

    def _use_keys(self) -> None:
        """Give the ranks the keys of the ring. Any thread may call."""
        self.post(lambda: self._ranks.use(self.settings.keys.generations))

    @property
    def address(self) -> tuple[str, int]:
        """Return the host and the port that peers connect to."""
        return self._peers.address

    def counts(self) -> dict[str, int]:
        """Return event counts of all ranks since the start, by name, for metrics.

        The counts of remote ranks are as old as the previous call, which requested them.
        """
        return super().counts() | self._ranks.counts()

    def pairs(self, links: KvLinks, members: Mapping[str, Worker]) -> tuple[PairTransport, ...]:
        incarnations, workers = self._peers.incarnations(), links.ids()
        found: dict[str, PairTransport] = {}
        for link, transport, best in self._here.in_use():
            worker = members.get(workers.get(incarnations.get(link, b""), ""))
            if worker is not None and (worker.name not in found or transport != best):
                found[worker.name] = PairTransport(worker.name, transport, best)
        return tuple(sorted(found.values(), key=lambda pair: not pair.has_fallen_back)[:MAX_PAIRS])

    def link(self, address: tuple[str, int]) -> Link:
        """Connect to another endpoint; any thread may call. A link serves many transfers, in both directions.

        Raises TransferFailed, within seconds, when the endpoint cannot be reached, has another key or serves
        another model.
        """
        return self._peers.dial(address)

    def post(self, call: Call) -> None:
        """Queue a call for the next `poll` or `wait`; any thread may post. Calls run in the posted order."""
        self._inbox.put(call)

    def wait(self, timeout_s: float) -> None:
        """Block until the inbox has a call, and make the call; return after `timeout_s` at the latest, and
        soon while a pull waits for a disk.
        """
        timeout_s = min(timeout_s, FETCH_POLL_S) if self._fetching else timeout_s
        with contextlib.suppress(Empty):
            self._inbox.get(timeout=timeout_s)()

    def check(self) -> None:
        """Raise WorkerLost when a rank is lost: no transfer can begin any more."""
        if (complaint := self._ranks.complaint()) is not None:
            raise WorkerLost(complaint)

    def close(self) -> None:
        """Close every link and stop every thread; open transfers are lost.

        After the return, no transfer writes the pages of rank 0; writes at other ranks stop shortly after.
        """
        self.settings.keys.unfollow(self._use_keys)
        self._peers.stop()
        if self._ranks.stop():
            self._peers.tell_all(EndpointClosed())
        self._peers.close()
        self._ranks.close()

    def _make_posted_calls(self) -> None:
        with contextlib.suppress(Empty):
            for _ in range(self._inbox.qsize()):  # bounded: peers may post faster than this loop runs
                self._inbox.get_nowait()()

    def _link_to(self, incarnation: bytes) -> Link | None:
        return self._peers.link_to(incarnation)
