"""Whom a worker, or a gateway, is connected to, and what is ready to be said to them.

1. A worker keeps a connection to the router, and to the workers of `wanted` roles that the router lists.
2. Gateways and other workers connect to it; each is known by the id in its Hello. A newer connection of the
   same process takes the older one's place.
3. Tokens are kept by gateway until `flush`, once a step, makes one message of them for each.
"""

from collections.abc import Collection
from typing import Final

from baton.control import AnyMessage, Hello, Kind, Members, Reachable, Tokens
from baton.node import Dial, Peer
from baton.token_event import TokenEvent
from baton.worker import Address, Worker, WorkerRole

EVENTS_PER_MESSAGE: Final = 2048  # with twenty log probabilities each they fit a frame


class Colleagues:
    def __init__(
        self, hello: Hello, router: Address, dial: Dial, wanted: Collection[WorkerRole] = ()
    ) -> None:
        self.hello = hello
        self.members: dict[str, Worker] = {}  # those that the router takes for alive
        self._router = router
        self._dial = dial
        self._wanted = frozenset(wanted)
        self._peers: dict[str, Peer] = {}
        self._router_id = ""
        self._unsent: dict[str, list[TokenEvent]] = {}  # gateway's id -> events
        self._reported: frozenset[str] | None = None  # what the router was last told of

    @property
    def router(self) -> Peer | None:
        return self._peers.get(self._router_id)

    def peer(self, id_: str) -> Peer | None:
        return self._peers.get(id_)

    def is_router(self, peer: Peer) -> bool:
        return self._peers.get(self._router_id) is peer

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
        self._peers[peer.hello.id] = peer
        if peer.hello.process is Kind.ROUTER:
            self._router_id, self._reported = peer.hello.id, None

    def left(self, peer: Peer) -> bool:
        """Whether that was the connection in use: nothing reaches its process now."""
        if self._peers.get(peer.hello.id) is not peer:
            return False
        del self._peers[peer.hello.id]
        self._unsent.pop(peer.hello.id, None)
        return True

    def changed(self, message: Members) -> list[str]:
        """Take the router's word; returns the ids of workers that are gone."""
        before = self.members
        self.members = {worker.id: worker for worker in message.workers}
        if not message.is_complete:
            self.members = before | self.members
        return [id_ for id_ in before if id_ not in self.members]

    def keep_up(self) -> None:
        """Ask for the connections that are missing."""
        if self.router is None:
            self._dial(self._router)
        for worker in self.members.values():
            if worker.role in self._wanted and worker.id not in self._peers:
                self._dial(worker.address)

    def report(self, reachable: Collection[str]) -> None:
        """Tell the router whom this worker can send to, if it does not know that."""
        found = frozenset(reachable)
        if self.router is not None and found != self._reported:
            self.router.send(Reachable(workers=tuple(sorted(found))))
            self._reported = found

    def connected(self) -> list[str]:
        """Listed workers that there is a connection to, whoever made it."""
        return [id_ for id_ in self.members if id_ in self._peers]

    def tell(self, id_: str, message: AnyMessage) -> None:
        """To whoever has that id; nothing, if nobody is there."""
        peer = self._peers.get(id_)
        if peer is not None:
            peer.send(message)

    def emit(self, gateway: str, event: TokenEvent) -> None:
        self._unsent.setdefault(gateway, []).append(event)

    def flush(self) -> None:
        if not self._unsent:
            return
        unsent, self._unsent = self._unsent, {}
        for gateway, events in unsent.items():
            large = [event for event in events if event.prompt_logprobs is not None]
            for event in large:
                self.tell(gateway, Tokens(events=(event,)))
            small = [event for event in events if event.prompt_logprobs is None] if large else events
            for first in range(0, len(small), EVENTS_PER_MESSAGE):
                self.tell(gateway, Tokens(events=tuple(small[first : first + EVENTS_PER_MESSAGE])))
