"""Attempts on their way through the router.

1. A gateway submits one. It is refused when its name is none, or is under way here already.
2. It is asked for at the reception (router/queue/admission.py). Too many are under way, a quota or an
   objective stands against it, or nobody can take it now: the gateway is told so (Rejected).
3. `let_out`: its turn has come and a worker has room. `_send_out`: it goes to a pair of workers and into the
   books, and other routers are told.
4. Its gateway says that its first token is there, and that it has ended; or is told that its decode worker
   was lost before that. Whatever makes room lets others out.
"""

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from baton.errors import ProtocolError
from baton.messages.bounds import Attempt, Id
from baton.messages.codec import fits_beside
from baton.messages.control import (
    MAX_AGE_S,
    AttemptFailed,
    Dispatch,
    Failure,
    Prefill,
    Queued,
    Rejected,
    Routed,
    Submit,
)
from baton.messages.operations import GatewayStatus
from baton.messages.status import OverloadLevel
from baton.request import Request
from baton.router.cluster_state import ClusterState
from baton.router.in_flight import InFlightAttempt, Key, num_kv_tokens, scheduling_class_of
from baton.router.membership import Member
from baton.router.policies.base import Pair, TenantClaim
from baton.router.policies.cost_model import CostModel
from baton.router.policies.pairing import NoSlot, Pairing, Unpaired
from baton.router.queue.admission import AdmissionQueue
from baton.router.queue.overload import PRESSED_LOCAL_TOKENS
from baton.router.queue.quotas import QuotaRefusal
from baton.router.queue.tenant_queues import QueuedAttempt
from baton.rpc.peers import Peer
from baton.tenants import Refusal, has_slots

# What the choice of a pair makes of an attempt: an entry in the books, and a word to either side.

_KEY: Final = tuple[Id, Attempt]


def key_of(request: Request) -> Key:
    """The attempt's name. ProtocolError when it is none that messages can carry."""
    key = (request.request_id, request.attempt)
    try:
        return msgspec.convert(key, _KEY)
    except msgspec.ValidationError as error:
        message = f"attempt {key[1]} of {key[0][:64]!r} is no attempt's name: {error}"
        raise ProtocolError(message) from error


def prefill_of(pair: Pair) -> str:
    """Its id, or ""."""
    return pair.prefill.id if pair.prefill is not None else ""


def entry_of(
    gateway_id: str, request: Request, pair: Pair, model: CostModel, charged: float
) -> InFlightAttempt:
    """charged: work, to its tenant."""
    num_prompt_tokens = request.num_tokens
    if pair.choice is not None and pair.choice.candidate is not None:
        num_prompt_tokens -= pair.choice.candidate.num_held_tokens
        compute_s = pair.choice.candidate.terms.compute_s
    else:
        computer = model.of(prefill_of(pair) or pair.decode.id)
        compute_s = computer.compute_s(num_prompt_tokens, num_prompt_tokens)
    num_tokens = num_kv_tokens(request)
    return InFlightAttempt(
        gateway=gateway_id,
        decode=pair.decode.id,
        prefill=prefill_of(pair),
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=num_tokens,
        compute_s=compute_s,
        scheduling_class=scheduling_class_of(request),
        num_output_tokens=num_tokens - request.num_tokens,
        charged=charged,
    )


def orders_of(gateway_id: str, request: Request, pair: Pair, age_s: float) -> tuple[Dispatch, Prefill | None]:
    """Return the messages that begin an attempt: to the decode worker, and to the prefill worker if any."""
    source, age_s = pair.choice.source if pair.choice is not None else None, min(MAX_AGE_S, age_s)
    if source is not None and not fits_beside(request, source):
        source = None  # the prompt is computed whole: the request matters more than the hint
    if pair.prefill is None:
        return Dispatch(request=request, gateway=gateway_id, age_s=age_s, source=source), None
    transfer = secrets.token_bytes(TRANSFER_BYTES)
    dispatch = Dispatch(
        request=request, gateway=gateway_id, prefill=pair.prefill.id, transfer=transfer, age_s=age_s
    )
    prefill = Prefill(
        request=request,
        gateway=gateway_id,
        decode=pair.decode.id,
        transfer=transfer,
        age_s=age_s,
        source=source,
    )
    return dispatch, prefill


def routed_of(request: Request, pair: Pair) -> Routed:
    return Routed(
        request_id=request.request_id,
        attempt=request.attempt,
        decode=pair.decode.id,
        prefill=prefill_of(pair),
        reason=pair.reason,
    )


TRANSFER_BYTES: Final = 16
RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 86_400.0


class GatewayPeer:
    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.id = peer.hello.id
        self.reached: frozenset[str] = frozenset()  # workers
        self.status: GatewayStatus | None = None  # as last reported


class _Kept(NamedTuple):
    """A decode worker that is given nothing but what it has yet to make room for."""

    key: Key
    worker: str


class Dispatcher:
    def __init__(
        self,
        pairing: Pairing,
        cluster_state: ClusterState,
        admission_queue: AdmissionQueue,
        gateways: Mapping[str, GatewayPeer],
        max_attempts: int,
    ) -> None:
        """gateways: those that are here, by id, whenever it is looked at."""
        self._in_flight = admission_queue.in_flight
        self._pairing = pairing
        self._cluster_state = cluster_state
        self._admission_queue = admission_queue
        self._gateways = gateways
        self._max_attempts = max_attempts
        self._counters: Counter[str] = cluster_state.counters
        self._kept: _Kept | None = None
        self._stuck: dict[Key, NoSlot] = {}  # who waited for a place, when last looked at: two at most
        self._is_crowded = False  # a decode worker without room was met: they are looked at before the choice

    def submit(self, gateway: GatewayPeer, submit: Submit) -> bool:
        """Take an attempt on, or reject it; return whether it was taken on.

        Raises ProtocolError when no gateway that is well would send it.
        """
        key = key_of(submit.request)
        if self._in_flight.is_anothers(key):
            self._in_flight.ended(key)  # its router is gone, or its gateway has left that one
        if key in self._in_flight or key in self._admission_queue:
            raise ProtocolError(f"attempt {key[1]} of {key[0]} was submitted twice")
        num_free = self._max_attempts - len(self._in_flight) - len(self._admission_queue)
        num_own = 0 if submit.is_begun else self._admission_queue.quotas.num_requests(submit.request.tenant)
        if not has_slots(submit.request.tenant, 1, num_own, num_free):
            reason = f"of {self._max_attempts} attempts {num_free} are free, {num_own} are the tenant's"
            self._reject(gateway.id, key, _no_room(reason))
            return False
        refused = self._admission_queue.submit(gateway.id, submit)
        if refused is None:
            self.find_room()
            refused = self._admission_queue.overflow(key)
        if refused is not None:
            self._reject(gateway.id, key, refused)
        elif key in self._admission_queue:
            gateway.peer.send(Queued(request_id=key[0], attempt=key[1]))
        return refused is None

    def started(self, attempts: Sequence[Key]) -> None:
        for key in attempts:
            self._in_flight.started(key)
            self._admission_queue.started(key)
        self._cluster_state.started(attempts)
        self.let_out()

    def ended(self, attempts: Sequence[Key], num_tokens: Sequence[int] = ()) -> None:
        """num_tokens: that each has answered, where that is known."""
        for number, key in enumerate(attempts):
            self._in_flight.ended(key)
            self._admission_queue.ended(key, num_tokens[number] if number < len(num_tokens) else None)
        self._cluster_state.ended(attempts)
        if attempts:
            self.let_out()
        else:  # a worker has said that it is well
            self.find_room()

    def gateway_left(self, gateway_id: str) -> None:
        self._in_flight.gateway_left(gateway_id)
        self._admission_queue.gateway_left(gateway_id)
        self.let_out()

    def find_room(self) -> None:
        """Workers may have room that they had not, or somebody has come; no place has come free by that."""
        self.let_out(has_places=False)

    def tick(self) -> None:
        for record, refused in self._admission_queue.tick():
            self._reject(record.gateway, (record.request.request_id, record.request.attempt), refused)
        is_pressed = self._admission_queue.overload.level >= OverloadLevel.LOCAL_PREFILL
        self._pairing.press(PRESSED_LOCAL_TOKENS if is_pressed else 0)
        self.let_out()

    def let_out(self, *, has_places: bool = True) -> None:
        """All that workers have room for now, one after the other.

        Where the first has none, others go past it, but to one worker: that is kept until it has room for it.
        They go past it too where it is best for it to wait for a place: to places that it does not want.
        has_places: some may be free that were not at the last look; else who waited for one still does.
        """
        kept, admission_queue = self._kept, self._admission_queue
        if kept is not None and not (
            kept.key in admission_queue and admission_queue.capacity.takes(kept.worker)
        ):
            self._kept = None
        stuck, self._stuck = {} if has_places else self._stuck, {}
        passed: QueuedAttempt | None = None
        try:
            while (waiting := self._admission_queue.first()) is not None:
                obstacle = stuck.get(waiting.key) or self._let_out(waiting)
                if obstacle is None:
                    continue
                if isinstance(obstacle, NoSlot):
                    self._stuck[waiting.key] = obstacle
                elif passed is None and not self._keep_a_worker(waiting):
                    continue
                if passed is not None:
                    break
                passed = waiting
                self._admission_queue.skip(waiting.tenant)
        finally:
            if passed is not None:
                self._admission_queue.resume(passed.tenant)
        self._admission_queue.settle()

    def lost(self, member: Member, reason: str) -> None:
        """What it may never have heard of is given back; of the rest its gateways know more than it does."""
        for (request_id, attempt), entry in self._in_flight.waiting_at(member.id):
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

    def _let_out(self, waiting: QueuedAttempt) -> Unpaired | NoSlot | None:
        """Why it has to wait; None: it has left the queue, wherever to."""
        refused = self._admission_queue.refuse_hopeless(waiting)
        if refused is not None:
            self._reject(waiting.gateway, waiting.key, refused)
            return None
        gateway = self._gateways[waiting.gateway]
        wanted = [each.worker for each in self._stuck.values()]
        pair = self._pair(gateway, waiting, self._admission_queue.claim(waiting, wanted))
        if pair is Unpaired.UNREACHED or pair is Unpaired.NO_PREFILL:
            refused = _no_room(pair.value)
            self._admission_queue.refuse(waiting.key, refused)
            self._reject(waiting.gateway, waiting.key, refused)
            return None
        if not isinstance(pair, Pair):
            return pair
        request = self._admission_queue.dispatch(waiting)
        submit = waiting.submit
        if request is not submit.request:
            submit = msgspec.structs.replace(submit, request=request)
        entry = entry_of(gateway.id, request, pair, self._cluster_state.model, waiting.work)
        self._send_out(gateway, submit, pair, waiting.key, entry, self._admission_queue.waited_s(waiting))
        return None

    def _keep_a_worker(self, waiting: QueuedAttempt) -> bool:
        """False: one was kept for somebody whose turn comes later, and is not any more. Two would wait for
        each other.
        """
        if self._kept is None:
            reached, avoid = self._gateways[waiting.gateway].reached, waiting.submit.avoid
            self._kept = _Kept(waiting.key, self._admission_queue.capacity.roomiest(reached, avoid))
        elif self._kept.key != waiting.key:
            self._kept = None
            return False
        return True

    def _pair(
        self, gateway: GatewayPeer, waiting: QueuedAttempt, turn: TenantClaim
    ) -> Pair | Unpaired | NoSlot:
        """With room, but for one that holds the prompt already. Who is full is found out once one was met."""
        submit = waiting.submit
        capacity, num_tokens = self._admission_queue.capacity, num_kv_tokens(submit.request)
        kept = self._kept
        full: frozenset[str] = frozenset()
        if self._is_crowded or kept is not None:
            full = capacity.full(num_tokens)
            self._is_crowded = bool(full)
            if kept is not None and kept.key != waiting.key:
                full |= {kept.worker}
        pair = self._pairing.pair(submit, gateway.reached, full, turn)
        if full or not isinstance(pair, Pair) or pair.decode.id == submit.sticky_worker:
            return pair
        if capacity.can_decode(pair.decode, num_tokens):
            return pair
        self._is_crowded = True
        return self._pairing.pair(submit, gateway.reached, capacity.full(num_tokens), turn)

    def _send_out(
        self, gateway: GatewayPeer, submit: Submit, pair: Pair, key: Key, entry: InFlightAttempt, age_s: float
    ) -> None:
        request = submit.request
        self._in_flight.enter(key, entry)
        self._counters["dispatched" if pair.prefill is not None else "dispatched_local"] += 1
        dispatch, prefill = orders_of(gateway.id, request, pair, age_s)
        if pair.prefill is not None and prefill is not None:
            pair.prefill.peer.send(prefill)
        pair.decode.peer.send(dispatch)
        gateway.peer.send(routed_of(request, pair))
        # Nobody waits for what follows.
        self._cluster_state.decided(submit, pair)
        self._cluster_state.dispatched(submit, pair, entry)

    def _reject(self, gateway_id: str, key: Key, refused: QuotaRefusal) -> None:
        self._counters["rejected"] += 1
        rejected = Rejected(
            request_id=key[0],
            attempt=key[1],
            reason=refused.reason[:512],
            retry_after_s=min(refused.retry_after_s, MAX_RETRY_AFTER_S),
            may_return=refused.may_return,
            refusal=refused.refusal,
        )
        self._gateways[gateway_id].peer.send(rejected)


def _no_room(reason: str) -> QuotaRefusal:
    return QuotaRefusal(Refusal.NO_ROOM, reason, RETRY_AFTER_S)
