"""Attempts on their way through the router.

1. A gateway submits one. It is refused when its name is none, or is under way here already.
2. `_admit`: too many are under way, or nobody can take it now: the gateway is told so (Rejected).
3. `_send_out`: it goes to a pair of workers and into the books, and other routers are told.
4. Its gateway says that its first token is there, and that it has ended; or is told that its decode worker
   was lost before that.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from baton.control import AttemptFailed, Failure, Rejected, Submit
from baton.errors import ProtocolError
from baton.node import Peer
from baton.router.books import Books, Key
from baton.router.knowledge import Knowledge
from baton.router.membership import Member
from baton.router.orders import dispatch_of, entry_of, key_of, routed_of
from baton.router.pairing import Pair, Pairing, Unpaired

RETRY_AFTER_S = 1.0


class Gateway:
    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.id = peer.hello.id
        self.reached: frozenset[str] = frozenset()  # workers


class Dispatcher:
    def __init__(
        self,
        books: Books,
        pairing: Pairing,
        knowledge: Knowledge,
        gateways: Mapping[str, Gateway],
        max_attempts: int,
    ) -> None:
        """gateways: those that are here, by id, whenever it is looked at."""
        self._books = books
        self._pairing = pairing
        self._knowledge = knowledge
        self._gateways = gateways
        self._max_attempts = max_attempts
        self._counters: Counter[str] = knowledge.counters

    def submit(self, gateway: Gateway, submit: Submit) -> None:
        """ProtocolError when no gateway that is well would say it."""
        key = key_of(submit.request)
        if self._books.is_anothers(key):
            self._books.ended(key)  # its router is gone, or its gateway has left that one
        if key in self._books:
            raise ProtocolError(f"attempt {key[1]} of {key[0]} was submitted twice")
        self._admit(gateway, submit)

    def started(self, attempts: Sequence[Key]) -> None:
        for key in attempts:
            self._books.started(key)
        self._knowledge.started(attempts)

    def ended(self, attempts: Sequence[Key]) -> None:
        for key in attempts:
            self._books.ended(key)
        self._knowledge.ended(attempts)

    def lost(self, member: Member, reason: str) -> None:
        """What it may never have heard of is given back; of the rest its gateways know more than it does."""
        for (request_id, attempt), entry in self._books.waiting_at(member.id):
            gateway = self._gateways.get(entry.gateway)
            if gateway is None:
                continue  # another router's: that one gives it back
            failed = AttemptFailed(
                request_id=request_id,
                attempt=attempt,
                failure=Failure.LOST,
                reason=f"{member.worker.name} is gone: {reason}",
                worker=member.id,
            )
            gateway.peer.send(failed)

    def _admit(self, gateway: Gateway, submit: Submit) -> None:
        if len(self._books) >= self._max_attempts:
            self._reject(gateway, submit, f"{self._max_attempts} attempts are under way")
            return
        pair = self._pairing.pair(submit, gateway.reached)
        if isinstance(pair, Unpaired):
            self._reject(gateway, submit, pair.value)
            return
        self._send_out(gateway, submit, pair)

    def _send_out(self, gateway: Gateway, submit: Submit, pair: Pair) -> None:
        request = submit.request
        entry = entry_of(gateway.id, request, pair)
        self._books.enter(key_of(request), entry)
        self._counters["dispatched" if pair.prefill is not None else "dispatched_local"] += 1
        pair.decode.peer.send(dispatch_of(gateway.id, request, pair))
        gateway.peer.send(routed_of(request, pair))
        # Nobody waits for what follows.
        self._knowledge.decided(submit, pair)
        self._knowledge.dispatched(submit, pair, entry)

    def _reject(self, gateway: Gateway, submit: Submit, reason: str) -> None:
        self._counters["rejected"] += 1
        request = submit.request
        gateway.peer.send(
            Rejected(
                request_id=request.request_id,
                attempt=request.attempt,
                reason=reason,
                retry_after_s=RETRY_AFTER_S,
            )
        )
