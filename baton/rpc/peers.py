"""Whom a worker, or a gateway, is connected to, and what is ready to be said to them.

1. It keeps a connection to each router, and to the workers of `wanted` roles that any of them lists.
2. Gateways and other workers connect to it; each is known by the id in its Hello. A newer connection of the
   same process takes the older one's place.
3. A worker is gone when no router that is connected lists it any more: one of them may have lost it alone.
   Until one of them has a complete list, nobody is gone who was listed before.
4. Tokens are kept by gateway until `flush`, once a step, makes one message of them for each; a failure leaves
   at once. Both wait for a gateway that is not here yet, over two ticks in a row.
"""

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import Final, Protocol, TypeAlias

from baton.errors import WireError
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import AttemptFailed, Hello, Members, Reachable, Tokens
from baton.messages.workers import Address, Worker, WorkerRole
from baton.request import TokenEvent

# What a process of the cluster is, apart from its sockets: the same code runs in the simulator.
#
# A node owns no thread and no connection. Its host (see baton/rpc/server.py) calls it, always from one
# thread, and it calls its host's `Dial`. Peers are known by the id in their Hello; who reconnects comes as a
# new Peer.

TICK_S = 0.25  # between two calls of `tick`


class Peer(Protocol):
    """The other end of a connection, which has proved that it holds the cluster's key."""

    @property
    def hello(self) -> Hello: ...

    @property
    def silence_s(self) -> float:
        """For how long nothing has come from the peer, or nothing has arrived there; pings count."""

    def send(self, message: AnyMessage) -> None:
        """Never waits, and never fails: to a peer that is gone nothing is sent, and `left` says so."""

    def close(self) -> None:
        """`left` follows."""


class Node(Protocol):
    @property
    def hello(self) -> Hello: ...

    def joined(self, peer: Peer) -> None:
        """A connection is there, whoever asked for it. WireError: the peer is dropped, and `left` follows."""

    def received(self, peer: Peer, message: AnyMessage) -> None:
        """WireError: the peer broke a rule and is dropped, and counted."""

    def left(self, peer: Peer) -> None:
        """Once for each that joined; its process may live on."""

    def tick(self) -> None:
        """About every TICK_S."""


# Be connected to this address: returns at once. A try that fails is forgotten: ask again, as in each `tick`.
# Asked again while a try or its connection lasts, it does nothing.
Dial: TypeAlias = Callable[[Address], None]

ID_DIGITS: Final = 32
AGE_DIGITS: Final = 12  # of a router's id
EVENTS_PER_MESSAGE: Final = 2048  # with twenty log probabilities each they fit a frame
NOTHING_YET: Final = Members(workers=(), is_complete=False)


class PeerRegistry:
    def __init__(
        self, hello: Hello, routers: Sequence[Address], dial: Dial, wanted: Collection[WorkerRole] = ()
    ) -> None:
        self.hello = hello
        self.members: dict[str, Worker] = {}  # those that a router takes for alive
        self._addresses = routers
        self._dial = dial
        self._wanted = frozenset(wanted)
        self._peers: dict[str, Peer] = {}
        self._lists: dict[str, Members] = {}  # router's id -> what it said last; those that are connected
        self._chosen = ""  # router
        self._unsent: dict[str, list[TokenEvent | AttemptFailed]] = {}  # by gateway's id
        self._absent: set[str] = set()  # of these gateways, at the last tick
        self._reported: dict[str, frozenset[str]] = {}  # router's id -> what it was last told of

    @property
    def router(self) -> Peer | None:
        """The one to ask for something. It stays the same while the same routers are there and know all."""
        return self._peers.get(self._chosen)

    @property
    def common_router(self) -> Peer | None:
        """The one that everybody asks, as long as all see the same routers: one alone sees all of a thing.

        The oldest, so that one which comes, or comes again, takes over nothing.
        """
        knowing = [id_ for id_, members in self._lists.items() if members.is_complete]
        return self._peers.get(min(knowing or self._lists, key=_age_rank, default=""))

    @property
    def routers(self) -> list[Peer]:
        return [self._peers[id_] for id_ in self._lists]

    def peer(self, id_: str) -> Peer | None:
        return self._peers.get(id_)

    def is_router(self, peer: Peer) -> bool:
        return peer.hello.id in self._lists and self._peers[peer.hello.id] is peer

    def of_role(self, role: WorkerRole) -> dict[str, Worker]:
        return {id_: worker for id_, worker in self.members.items() if worker.role is role}

    def with_pages(self) -> list[Worker]:
        """Listed workers that pages go to or may be fetched from: they have the same weights."""
        own = self.hello.worker
        if own is None:
            return []
        others = [each for each in self.members.values() if each.id != own.id]
        return [each for each in others if each.fingerprint == own.fingerprint]

    def joined(self, peer: Peer) -> None:
        """WireError: a process of another kind has the id: a gateway may not take a router's place."""
        known = self._peers.get(peer.hello.id)
        if known is not None and known.hello.process is not peer.hello.process:
            raise WireError(f"a {peer.hello.process} has the id of a {known.hello.process}", reason="role")
        self._peers[peer.hello.id] = peer
        if peer.hello.process is Kind.ROUTER:
            self._lists[peer.hello.id] = NOTHING_YET
            self._reported.pop(peer.hello.id, None)
            self._choose()
        elif peer.hello.id in self._unsent:
            self.flush()

    def left(self, peer: Peer) -> bool:
        """Whether that was the connection in use: nothing reaches its process now.

        After a router's, `recount` tells of the workers that it alone listed.
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
        """Take a router's word; returns the ids of workers that are gone."""
        self._lists[router.hello.id] = message
        self._choose()
        return self.recount()

    def recount(self) -> list[str]:
        """The ids of workers that no router lists which is connected: they are gone."""
        before = self.members
        self.members = {worker.id: worker for each in self._lists.values() for worker in each.workers}
        if not any(each.is_complete for each in self._lists.values()):
            self.members = before | self.members
        return [id_ for id_ in before if id_ not in self.members]

    def keep_up(self) -> None:
        """Ask for the connections that are missing."""
        if len(self._lists) < len(self._addresses):
            for address in self._addresses:
                self._dial(address)
        for worker in self.members.values():
            if worker.role in self._wanted and worker.id not in self._peers:
                self._dial(worker.address)

    def tick(self) -> None:
        """What was to be sent to a gateway that is not here at two ticks in a row is let go of."""
        self.keep_up()
        absent = {gateway for gateway in self._unsent if gateway not in self._peers}
        for gateway in absent & self._absent:
            del self._unsent[gateway]
        self._absent = absent

    def report(self, reachable: Collection[str]) -> None:
        """Tell each router whom this worker can send to, if it does not know that."""
        found = frozenset(reachable)
        for router in self.routers:
            if found != self._reported.get(router.hello.id):
                router.send(Reachable(workers=tuple(sorted(found))))
                self._reported[router.hello.id] = found

    def connected(self) -> list[str]:
        """Listed workers that there is a connection to, whoever made it."""
        return [id_ for id_ in self.members if id_ in self._peers]

    def tell(self, id_: str, message: AnyMessage) -> None:
        """To whoever has that id; nothing, if nobody is there."""
        peer = self._peers.get(id_)
        if peer is not None:
            peer.send(message)

    def emit(self, gateway: str, event: TokenEvent) -> None:
        """For the next `flush` that finds the gateway here: what it asks for may come a moment before it."""
        self._unsent.setdefault(gateway, []).append(event)

    def fail(self, gateway: str, failed: AttemptFailed) -> None:
        """Now, or as soon as the gateway is here."""
        if gateway in self._peers:
            self.tell(gateway, failed)
        else:
            self._unsent.setdefault(gateway, []).append(failed)

    def flush(self) -> None:
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
        """One that knows all workers, if there is one; which of them is each process's own chance."""
        knowing = [id_ for id_, members in self._lists.items() if members.is_complete]
        own = self.hello.id
        self._chosen = max(knowing or self._lists, key=lambda id_: _rank(own, id_), default="")


def new_router_id(incarnation: int, began_s: float, chance: bytes) -> str:
    """Return the id of a router that starts now; of two routers the older one has the lower last digits.

    incarnation: see worker.Worker. 0: it was started by hand, at `began_s`, seconds since 1970.
    chance: ID_DIGITS bytes or more.
    """
    age = incarnation or round(began_s * 1000)
    return f"{chance.hex()[: ID_DIGITS - AGE_DIGITS]}{age % 16**AGE_DIGITS:0{AGE_DIGITS}x}"


def _age_rank(router_id: str) -> tuple[str, str]:
    """The least is that of the oldest."""
    return router_id[-AGE_DIGITS:], router_id


def _rank(whose: str, router_id: str) -> bytes:
    """Of a router among others: the highest is chosen."""
    return blake2b(f"{whose} {router_id}".encode(), digest_size=8).digest()
