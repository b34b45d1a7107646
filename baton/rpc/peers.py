"""Nodes, peers, and the registry of the peers of a worker or gateway.

A node is a process of the cluster apart from its sockets; the simulator runs the same nodes. A node owns no
thread and no connection. Its host (baton/rpc/server.py) calls it, always from one thread, and the node calls
the host's `Dial`.

The peer registry:

1. It keeps a connection to each router, and to the workers of the `wanted` roles that any router lists.
2. Gateways and other workers connect to this process; each is known by the id in its Hello. A newer
   connection of the same process takes the older one's place.
3. A worker is gone when no connected router lists it any more: one router alone may have lost the worker.
   Until a router has a complete list, no listed worker is gone.
4. Tokens are kept by gateway until `flush`, once a step, sends them in one message to each gateway; a failure
   leaves at once. Both wait for a gateway that is not connected yet, over two ticks in a row.
"""

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import Final, Protocol, TypeAlias

from baton.errors import WireError
from baton.messages.bounds import Kind, short_id
from baton.messages.codec import AnyMessage
from baton.messages.control import AttemptFailed, Hello, Members, Reachable, Tokens
from baton.messages.workers import Address, Worker, WorkerRole
from baton.request import TokenEvent
from baton.rpc.peer_clock import ClockOffset

TICK_S = 0.25  # between two calls of `tick`
ID_DIGITS: Final = 32
AGE_DIGITS: Final = 12  # of a router's id
EVENTS_PER_MESSAGE: Final = 2048  # with twenty log probabilities each they fit a frame
EMPTY_LIST: Final = Members(workers=(), is_complete=False)

# Connects to an address; returns at once. A failed try is forgotten: dial again, as in each `tick`. While a
# try or its connection lasts, dialling the same address does nothing.
Dial: TypeAlias = Callable[[Address], None]


class Peer(Protocol):
    """The other end of a connection, which has proved that it holds the cluster's key."""

    @property
    def hello(self) -> Hello: ...

    @property
    def silence_s(self) -> float:
        """Seconds since bytes, pings included, came from the peer or reached the peer, the longer of both."""

    @property
    def quiet_s(self) -> float:
        """Seconds since bytes, pings included, came from the peer."""

    @property
    def clock_offset(self) -> ClockOffset | None:
        """The peer's monotonic clock relative to ours; None until pings have gone both ways."""

    def send(self, message: AnyMessage) -> None:
        """Send without waiting. Messages to a peer that is gone are lost; the node hears `left`."""

    def close(self) -> None:
        """Close the connection; the node hears `left`."""


class Node(Protocol):
    """The handler of a process's connections."""

    @property
    def hello(self) -> Hello: ...

    def joined(self, peer: Peer) -> None:
        """Take a new connection, from either side. WireError: the peer is dropped, and `left` follows."""

    def received(self, peer: Peer, message: AnyMessage) -> None:
        """Take a message. WireError: the peer broke a rule and is dropped and counted."""

    def left(self, peer: Peer) -> None:
        """Take the end of a connection, once for each that joined; the peer's process may live on."""

    def tick(self) -> None:
        """Do periodic work, about every TICK_S."""


class PeerRegistry:
    """The peers of a worker or a gateway. See the life above."""

    def __init__(
        self, hello: Hello, routers: Sequence[Address], dial: Dial, wanted: Collection[WorkerRole] = ()
    ) -> None:
        """wanted: roles of the workers to connect to."""
        self.hello = hello
        self.members: dict[str, Worker] = {}  # the workers that a router lists, by id
        self.workers: Sequence[Worker] = ()  # values of members; a new object after each change
        self._addresses = routers
        self._dial = dial
        self._wanted = frozenset(wanted)
        self._peers: dict[str, Peer] = {}
        self._lists: dict[str, Members] = {}  # id of a connected router -> its last list
        self._chosen = ""  # id of `router`
        self._common = ""  # id of `common_router`
        self._unsent: dict[str, list[TokenEvent | AttemptFailed]] = {}  # by gateway's id
        self._absent: set[str] = set()  # gateways of `_unsent` that were absent at the last tick
        self._reported: dict[str, frozenset[str]] = {}  # router's id -> workers that it was last told of

    @property
    def router(self) -> Peer | None:
        """The router to submit requests to.

        It changes only when routers come, go, or complete their lists.
        """
        return self._peers.get(self._chosen)

    @property
    def common_router(self) -> Peer | None:
        """The oldest router that lists a decode worker: the same for all processes that see the same routers.

        A router that starts takes over nothing. Lists need not be complete: while a cluster starts, they
        become complete one after the other, and the choice would follow them.
        """
        return self._peers.get(self._common)

    @property
    def routers(self) -> list[Peer]:
        """The connected routers."""
        return [self._peers[id_] for id_ in self._lists]

    def peer(self, id_: str) -> Peer | None:
        """Return the connected process of this id."""
        return self._peers.get(id_)

    def router_for(self, tenant: str) -> Peer | None:
        """Return the router for a request: the common one where there are tenants, which wait in one queue.

        Of two routers each would share out the same capacity.
        """
        return self.common_router if tenant else self.router

    def name(self, worker: str) -> str:
        """Return the name of a worker, or the short form of its id if no router lists it."""
        member = self.members.get(worker)
        return short_id(worker) if member is None else member.name

    def is_router(self, peer: Peer) -> bool:
        """Return whether this is the connection in use of a router."""
        return peer.hello.id in self._lists and self._peers[peer.hello.id] is peer

    def of_role(self, role: WorkerRole) -> dict[str, Worker]:
        """Return the listed workers of a role, by id."""
        return {id_: worker for id_, worker in self.members.items() if worker.role is role}

    def with_pages(self) -> list[Worker]:
        """Return the other listed workers with the same weights, with which this worker exchanges pages."""
        own = self.hello.worker
        if own is None:
            return []
        others = [each for each in self.members.values() if each.id != own.id and not each.is_asleep]
        return [each for each in others if each.fingerprint == own.fingerprint]

    def joined(self, peer: Peer) -> None:
        """Take a new connection. WireError: a process of another kind has the id."""
        known = self._peers.get(peer.hello.id)
        if known is not None and known.hello.process is not peer.hello.process:
            raise WireError(f"a {peer.hello.process} has the id of a {known.hello.process}", reason="role")
        self._peers[peer.hello.id] = peer
        if peer.hello.process is Kind.ROUTER:
            self._lists[peer.hello.id] = EMPTY_LIST
            self._reported.pop(peer.hello.id, None)
            self._choose()
        elif peer.hello.id in self._unsent:
            self.flush()

    def left(self, peer: Peer) -> bool:
        """Return whether this was the connection in use, so that no message reaches its process now.

        After a router has left, `recount` returns the workers that it alone listed.
        """
        if self._peers.get(peer.hello.id) is not peer:
            return False
        del self._peers[peer.hello.id]
        self._unsent.pop(peer.hello.id, None)
        self._reported.pop(peer.hello.id, None)
        if self._lists.pop(peer.hello.id, None) is not None:
            self._choose()
        return True

    def changed(self, router: Peer, message: Members) -> list[str]:
        """Take a router's new list; returns the ids of workers that are gone."""
        self._lists[router.hello.id] = message
        self._choose()
        return self.recount()

    def recount(self) -> list[str]:
        """Update `members`; returns the ids of workers that no connected router lists any more."""
        before = self.members
        self.members = {worker.id: worker for each in self._lists.values() for worker in each.workers}
        if not any(each.is_complete for each in self._lists.values()):
            self.members = before | self.members
        self.workers = tuple(self.members.values())
        return [id_ for id_ in before if id_ not in self.members]

    def keep_up(self) -> None:
        """Dial the routers and wanted workers without a connection."""
        if len(self._lists) < len(self._addresses):
            for address in self._addresses:
                self._dial(address)
        for worker in self.members.values():
            if worker.role in self._wanted and worker.id not in self._peers and not worker.is_asleep:
                self._dial(worker.address)

    def tick(self) -> None:
        """Keep up, and forget the messages to gateways that are absent at two ticks in a row."""
        self.keep_up()
        absent = {gateway for gateway in self._unsent if gateway not in self._peers}
        for gateway in absent & self._absent:
            del self._unsent[gateway]
        self._absent = absent

    def report(self, reachable: Collection[str]) -> None:
        """Tell each router the workers that this process reaches, unless the router knows them."""
        found = frozenset(reachable)
        for router in self.routers:
            if found != self._reported.get(router.hello.id):
                router.send(Reachable(workers=tuple(sorted(found))))
                self._reported[router.hello.id] = found

    def connected(self) -> list[str]:
        """Return the ids of listed workers with a connection, made by either side."""
        return [id_ for id_ in self.members if id_ in self._peers]

    def tell(self, id_: str, message: AnyMessage) -> None:
        """Send to the process of this id, if it is connected."""
        peer = self._peers.get(id_)
        if peer is not None:
            peer.send(message)

    def emit(self, gateway: str, event: TokenEvent) -> None:
        """Keep an event for the next `flush` that finds the gateway connected.

        A worker may get a gateway's request a moment before the gateway's connection.
        """
        self._unsent.setdefault(gateway, []).append(event)

    def fail(self, gateway: str, failed: AttemptFailed) -> None:
        """Send a failure now, or as soon as the gateway is connected."""
        if gateway in self._peers:
            self.tell(gateway, failed)
        else:
            self._unsent.setdefault(gateway, []).append(failed)

    def flush(self) -> None:
        """Send the kept events to each connected gateway: prompts with log probabilities in messages of their
        own.
        """
        if not self._unsent:
            return
        here = [gateway for gateway in self._unsent if gateway in self._peers]
        for gateway, unsent in [(gateway, self._unsent.pop(gateway)) for gateway in here]:
            events = [each for each in unsent if isinstance(each, TokenEvent)]
            large = [event for event in events if event.prompt_logprobs is not None]
            for event in large:
                self.tell(gateway, Tokens(events=(event,)))
            small = [event for event in events if event.prompt_logprobs is None] if large else events
            for first in range(0, len(small), EVENTS_PER_MESSAGE):
                self.tell(gateway, Tokens(events=tuple(small[first : first + EVENTS_PER_MESSAGE])))
            for failed in [each for each in unsent if isinstance(each, AttemptFailed)]:
                self.tell(gateway, failed)

    def _choose(self) -> None:
        """Choose `router`, of those with complete lists if there are any, and `common_router`.

        Processes choose different ones as `router`.
        """
        own = self.hello.id
        knowing = [id_ for id_, members in self._lists.items() if members.is_complete]
        self._chosen = max(knowing or self._lists, key=lambda id_: _rank(own, id_), default="")
        serving = [id_ for id_, members in self._lists.items() if any(map(_decodes, members.workers))]
        self._common = min(serving or self._lists, key=_age_rank, default="")


def _decodes(worker: Worker) -> bool:
    return worker.role is WorkerRole.DECODE


def new_router_id(incarnation: int, began_s: float, chance: bytes) -> str:
    """Return the id of a router that starts now; of two routers the older one has the lower last digits.

    incarnation: see Worker. 0: the router was started by hand, at `began_s`, seconds since 1970.
    chance: ID_DIGITS bytes or more.
    """
    age = incarnation or round(began_s * 1000)
    return f"{chance.hex()[: ID_DIGITS - AGE_DIGITS]}{age % 16**AGE_DIGITS:0{AGE_DIGITS}x}"


def _age_rank(router_id: str) -> tuple[str, str]:
    """Return a sort key; the oldest router has the least."""
    return router_id[-AGE_DIGITS:], router_id


def _rank(own_id: str, router_id: str) -> bytes:
    """Return a router's rank for one process; the router of the highest rank is chosen."""
    return blake2b(f"{own_id} {router_id}".encode(), digest_size=8).digest()
