"""The dispatcher: takes submitted attempts from the admission queue to workers, until each attempt ends.

1. `submit`: a gateway submits an attempt. The page keys of a long prompt are computed first, in slices. The
   admission queue (router/queue/admission.py) takes the attempt, or the gateway gets `Rejected`: too many
   attempts are open, or a quota or an objective forbids this one.
2. `dispatch_queued`: each attempt is dispatched in its turn to a pair of workers with room. The
   attempt is entered as in-flight load, both workers get their messages, and other routers are told.
   Migrations and health checks bypass the queue.
3. `started`, `ended`: the gateway reports the first token and the end. When the decode worker leaves before
   the first token, the gateway gets `AttemptFailed`. Freed room goes to queued attempts at once.

A router has one `Dispatcher` a model, so a model without room delays no request for another model.
`Dispatchers` has all of them (docs/decisions/0041).
"""

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple

import msgspec

from baton.clock import Clock
from baton.config.router import RouterConfig
from baton.errors import ProtocolError
from baton.messages.bounds import MAX_REASON_CHARS, MAX_SECONDS
from baton.messages.control import (
    AttemptFailed,
    Dispatch,
    Failure,
    Heartbeat,
    Prefill,
    Pressure,
    Queued,
    Rejected,
    Routed,
    Submit,
)
from baton.messages.operations import GatewayStatus, Migrate
from baton.messages.status import OverloadLevel, QueueStatus, joined
from baton.messages.workers import PrefillTimes
from baton.request import AttemptKey, Request
from baton.router.cluster_state import ClusterState
from baton.router.in_flight import InFlightAttempt, num_kv_tokens, num_output_tokens, scheduling_class_of
from baton.router.membership import Member, Membership, MemberView, ModelMembers
from baton.router.pairing import NoSlot, Pairing, PairQuestion, Unpaired
from baton.router.policies.base import NO_CLAIM, Pair, TenantClaim
from baton.router.policies.cost_model import CostModel
from baton.router.queue.admission import AdmissionQueue, Capacity, SharedAdmission
from baton.router.queue.quotas import AttemptRefusal, no_room
from baton.router.queue.tenant_queues import QueuedAttempt
from baton.router.sliced_work import SlicedWork
from baton.rpc.peers import Peer
from baton.tenants import has_slots

TRANSFER_BYTES: Final = 16
MAX_DISPATCHED: Final = 2  # attempts in one call of `dispatch_queued`; later turns of the loop go on


def make_entry(
    gateway_id: str, request: Request, pair: Pair, model: CostModel, charged: float
) -> InFlightAttempt:
    """Return the in-flight load of an attempt on its pair of workers.

    charged: the work that the tenant was charged. Without a prediction of the policy, no prefix of the prompt
    is expected in a cache.
    """
    num_prompt_tokens = request.num_tokens
    if pair.choice is not None and pair.choice.candidate is not None:
        num_prompt_tokens -= pair.choice.candidate.num_held_tokens
        compute_s = pair.choice.candidate.prompt_cost.compute_s
    else:
        compute_s = model.of(pair.computed_by.id).compute_s(num_prompt_tokens, num_prompt_tokens)
    return InFlightAttempt(
        gateway=gateway_id,
        decode=pair.decode.id,
        prefill=pair.prefill_id,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=num_kv_tokens(request),
        compute_s=compute_s,
        scheduling_class=scheduling_class_of(request),
        num_output_tokens=num_output_tokens(request),
        charged=charged,
    )


def pair_with_room(pairing: Pairing, capacity: Capacity, question: PairQuestion) -> Pair | Unpaired | NoSlot:
    """Choose a pair with room on the decode worker. A worker that holds the prompt already needs no room.

    question: its `full` workers are left out too. The others without room are computed lazily: only after a
    decode worker was found to be full.
    """
    full: frozenset[str] = frozenset()
    num_tokens = num_kv_tokens(question.submit.request)
    if capacity.is_any_full:
        full = capacity.full(num_tokens)
        capacity.is_any_full = bool(full)
        question = question._replace(full=question.full | full)
    pair = pairing.pair(question)
    if full or not isinstance(pair, Pair) or pair.decode.id == question.submit.sticky_worker:
        return pair
    if capacity.can_decode(pair.decode, num_tokens):
        return pair
    capacity.is_any_full = True
    return pairing.pair(question._replace(full=question.full | capacity.full(num_tokens)))


class GatewayPeer:
    """A connected gateway, its latest reports, and its open orders."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.id = peer.hello.id
        self.reached: frozenset[str] = frozenset()  # ids of workers that the gateway can reach
        self.status: GatewayStatus | None = None
        self.orders: dict[tuple[str, int], Migrate] = {}  # without an answer, by asker and number


class _Reservation(NamedTuple):
    """A decode worker that gets no other attempts until it has room for this one."""

    key: AttemptKey
    worker: str  # "": the gateway reaches no decode worker that takes work


class _Arrival(NamedTuple):
    """An attempt on its way to the queue."""

    gateway: GatewayPeer
    submit: Submit


class Dispatcher:
    """Owns each attempt of one model, of this router's gateways, from its submission to its end."""

    def __init__(
        self,
        pairing: Pairing,
        cluster_state: ClusterState,
        admission_queue: AdmissionQueue,
        gateways: Mapping[str, GatewayPeer],
        max_attempts: int,
        sliced_work: SlicedWork,
    ) -> None:
        """gateways: the connected gateways by id; the router updates the mapping.

        max_attempts: queued attempts of the model and all in-flight attempts; more are rejected. sliced_work:
        dispatches the rest of a long queue in later turns, if it defers work.
        """
        self._in_flight = admission_queue.in_flight
        self._pairing = pairing
        self._cluster_state = cluster_state
        self.admission_queue = admission_queue
        self._gateways = gateways
        self._max_attempts = max_attempts
        self._counters: Counter[str] = cluster_state.counters
        self._reservation: _Reservation | None = None
        # Attempts that waited for a slot at their best worker in the last `dispatch_queued`; at most two.
        self._waiting_for_slot: dict[AttemptKey, NoSlot] = {}
        self._sliced_work = sliced_work
        self._is_dispatch_scheduled = False  # a later turn dispatches more of the queue
        # attempt -> gateway: queued while a dispatch is scheduled; `max_queued` is checked when it ends
        self._unchecked: dict[AttemptKey, str] = {}
        self._arriving: dict[AttemptKey, _Arrival] = {}  # the page keys of these prompts are being computed

    def submit(self, gateway: GatewayPeer, submit: Submit) -> bool:
        """Dispatch, queue or reject an attempt, and tell the gateway.

        Returns True when the attempt was dispatched or queued in this call; a long prompt is queued later.

        Raises ProtocolError for an attempt that is already open here.
        """
        key = submit.request.key
        if self._in_flight.is_anothers(key):
            self._in_flight.ended(key)  # the gateway has left the other router, or that router is gone
        if key in self._in_flight or key in self.admission_queue or key in self._arriving:
            raise ProtocolError(f"attempt {key[1]} of {key[0]} was submitted twice")
        num_open = len(self._in_flight) + len(self.admission_queue) + len(self._arriving)
        num_free = self._max_attempts - num_open
        num_own = 0 if submit.is_begun else self.admission_queue.quotas.num_requests(submit.request.tenant)
        has_slot = has_slots(submit.request.tenant, 1, num_own, num_free)
        if not has_slot and not submit.request.is_health_check:
            reason = f"of {self._max_attempts} attempts {num_free} are free, {num_own} are the tenant's"
            self._reject(gateway.id, key, no_room(reason))
            return False
        if self._cluster_state.has_keys(submit):
            return self._enqueue(gateway, submit)
        arrival = self._arriving[key] = _Arrival(gateway, submit)
        self._sliced_work.add(self._prepare(key, arrival))
        return False

    def started(self, key: AttemptKey) -> None:
        """The attempt has its first token. An attempt of another model is ignored."""
        self.admission_queue.started(key)

    def ended(self, key: AttemptKey, num_tokens: int | None) -> None:
        """The attempt has ended. An attempt of another model is ignored."""
        self._arriving.pop(key, None)
        self.admission_queue.ended(key, num_tokens)

    def attempts_of(self, gateway_id: str) -> list[AttemptKey]:
        """The open attempts of a gateway, also while page keys of their prompts are being computed."""
        arriving = (key for key, each in self._arriving.items() if each.gateway.id == gateway_id)
        return [*arriving, *self.admission_queue.attempts_of(gateway_id)]

    def tick(self) -> None:
        """Update the overload level, and reject attempts that have waited too long or are shed."""
        for queued, refused in self.admission_queue.tick():
            self._reject(queued.gateway, queued.key, refused)
        self.dispatch_queued()

    def dispatch_queued(self, *, slots_freed: bool = True) -> None:
        """Dispatch queued attempts in order, as long as workers have room.

        When the first attempt cannot be dispatched, later attempts of other tenants may bypass it: when no
        decode worker has room, on all decode workers except one reserved worker; when its best worker has no
        slot for the prompt, on all other workers. A second attempt that cannot be dispatched ends the call.

        slots_freed: False when no worker can have freed a slot since the last call, so an attempt that waited
        for a slot still waits.
        """
        self._drop_stale_reservation()
        waited_for_slot = {} if slots_freed else self._waiting_for_slot
        self._waiting_for_slot = {}
        bypassed: QueuedAttempt | None = None
        num_left = MAX_DISPATCHED if self._sliced_work.is_deferred else inf
        try:
            while (queued := self.admission_queue.first()) is not None:
                if not num_left:
                    self._schedule_dispatch()
                    break
                obstacle = waited_for_slot.get(queued.key) or self._try_dispatch(queued)
                if obstacle is None:
                    num_left -= 1
                    continue
                if isinstance(obstacle, NoSlot):
                    self._waiting_for_slot[queued.key] = obstacle
                elif bypassed is None and not self._reserve_worker(queued):
                    continue  # the dropped reservation may make room for this attempt
                if bypassed is not None:
                    break
                bypassed = queued
                self.admission_queue.skip(queued.tenant)
        finally:
            if bypassed is not None:
                self.admission_queue.resume(bypassed.tenant)
        if not self._is_dispatch_scheduled:  # else the queue may hold attempts that workers have room for
            self.admission_queue.settle()

    def _prepare(self, key: AttemptKey, arrival: _Arrival) -> Iterator[None]:
        """Compute the page keys of a long prompt, a slice at each step; then queue the attempt.

        The gateway gets an answer in any case: it sends no further long prompt of the tenant before.
        """
        gateway, submit = arrival
        try:
            yield from self._cluster_state.prepare_keys(submit.request)
        except Exception:  # a bug of ours
            gateway.peer.close()
            raise
        if self._arriving.get(key) is arrival:
            del self._arriving[key]
            self._enqueue(gateway, submit)
            return
        self._cluster_state.keys.forget(key)
        if self._gateways.get(gateway.id) is gateway:  # the attempt has ended
            gateway.peer.send(Queued(request_id=key[0], attempt=key[1]))

    def _migrate(self, gateway: GatewayPeer, submit: Submit) -> bool:
        """Dispatch a migration, or reject it: the request runs on where it is."""
        capacity, num_tokens = self.admission_queue.capacity, num_kv_tokens(submit.request)
        pair = self._pairing.migration(
            submit, gateway.reached, lambda member: capacity.can_decode(member, num_tokens)
        )
        return self._dispatch_at_once(gateway, submit, pair)

    def _check_health(self, gateway: GatewayPeer, submit: Submit) -> bool:
        """Dispatch a health check, also to full workers: a busy cluster is healthy."""
        local_tokens = self.admission_queue.overload.local_prefill_tokens
        pair = self._pairing.pair(PairQuestion(submit, gateway.reached, frozenset(), NO_CLAIM, local_tokens))
        return self._dispatch_at_once(gateway, submit, pair)

    def _dispatch_at_once(self, gateway: GatewayPeer, submit: Submit, pair: Pair | Unpaired | NoSlot) -> bool:
        """Dispatch an attempt past the queue if it has a pair, or reject it."""
        assert not isinstance(pair, NoSlot), "without a claim no slot is needed"
        if isinstance(pair, Unpaired):
            self._reject(gateway.id, submit.request.key, no_room(pair.value))
            return False
        queued = self.admission_queue.bypass(gateway.id, submit)
        entry = make_entry(gateway.id, submit.request, pair, self._cluster_state.model, 0.0)
        if submit.migrates_from:  # its prompt is not computed again
            entry = entry._replace(num_prompt_tokens=0, compute_s=0.0)
        self._enter(gateway, submit, pair, queued, entry)
        return True

    def _enqueue(self, gateway: GatewayPeer, submit: Submit) -> bool:
        if submit.migrates_from:
            return self._migrate(gateway, submit)
        if submit.request.is_health_check:
            return self._check_health(gateway, submit)
        key = submit.request.key
        refused = self.admission_queue.submit(gateway.id, submit)
        if refused is not None:
            self._reject(gateway.id, key, refused)
            return False
        self.dispatch_queued(slots_freed=False)
        if self._is_dispatch_scheduled:
            self._unchecked[key] = gateway.id
        elif not self._check_overflow(gateway.id, key):
            return False
        if key in self.admission_queue:
            gateway.peer.send(Queued(request_id=key[0], attempt=key[1]))
        return True

    def _check_overflow(self, gateway_id: str, key: AttemptKey) -> bool:
        """Reject an attempt that waits although too many of its tenant do. Returns False when it was."""
        refused = self.admission_queue.overflow(key)
        if refused is not None:
            self._reject(gateway_id, key, refused)
        return refused is None

    def _schedule_dispatch(self) -> None:
        """Dispatch the rest of the queue in later turns of the host's loop."""
        if not self._is_dispatch_scheduled:
            self._is_dispatch_scheduled = True
            self._sliced_work.add(self._dispatch_rest())

    def _dispatch_rest(self) -> Iterator[None]:
        yield
        self._is_dispatch_scheduled = False
        self.dispatch_queued(slots_freed=False)  # attempts that wait for a slot were tried in the last call
        if not self._is_dispatch_scheduled:
            unchecked, self._unchecked = self._unchecked, {}
            for key, gateway_id in reversed(unchecked.items()):  # the latest are refused
                self._check_overflow(gateway_id, key)

    def _try_dispatch(self, queued: QueuedAttempt) -> Unpaired | NoSlot | None:
        """Return the reason why the attempt must wait; None when it was dispatched or rejected."""
        refused = self.admission_queue.refuse_hopeless(queued)
        if refused is not None:
            self._reject(queued.gateway, queued.key, refused)
            return None
        gateway = self._gateways[queued.gateway]
        wanted = [no_slot.worker for no_slot in self._waiting_for_slot.values()]
        pair = self._pair(gateway, queued, self.admission_queue.claim(queued, wanted))
        if isinstance(pair, Pair):
            self._dispatch(gateway, queued, pair)
            return None
        if pair is Unpaired.UNREACHED or pair is Unpaired.NO_PREFILL:
            refused = no_room(pair.value)
            self.admission_queue.refuse(queued.key, refused)
            self._reject(queued.gateway, queued.key, refused)
            return None
        return pair

    def _drop_stale_reservation(self) -> None:
        """Drop the reservation when its attempt has left the queue, or its worker takes no more work."""
        reservation, admission_queue = self._reservation, self.admission_queue
        if reservation is not None and not (
            reservation.key in admission_queue and admission_queue.capacity.takes(reservation.worker)
        ):
            self._reservation = None

    def _reserve_worker(self, queued: QueuedAttempt) -> bool:
        """Reserve the decode worker with the most room for the attempt, unless the attempt has a reservation.

        Returns False, and drops the reservation, when a worker is reserved for an attempt later in the queue:
        with two reservations, each attempt could wait for the worker of the other.
        """
        if self._reservation is None:
            reached, avoid = self._gateways[queued.gateway].reached, queued.submit.avoid
            worker = self.admission_queue.capacity.roomiest(reached, avoid)
            self._reservation = _Reservation(queued.key, worker)
        elif self._reservation.key != queued.key:
            self._reservation = None
            return False
        return True

    def _pair(
        self, gateway: GatewayPeer, queued: QueuedAttempt, claim: TenantClaim
    ) -> Pair | Unpaired | NoSlot:
        """Choose a pair with room on the decode worker, which is not reserved for another attempt."""
        admission_queue, reservation = self.admission_queue, self._reservation
        reserved = frozenset[str]()
        if reservation is not None:
            admission_queue.capacity.is_any_full = True
            if reservation.key != queued.key:
                reserved = frozenset((reservation.worker,))
        local_tokens = admission_queue.overload.local_prefill_tokens
        question = PairQuestion(queued.submit, gateway.reached, reserved, claim, local_tokens)
        return pair_with_room(self._pairing, admission_queue.capacity, question)

    def _dispatch(self, gateway: GatewayPeer, queued: QueuedAttempt, pair: Pair) -> None:
        """Take the attempt out of the queue, and dispatch it."""
        request, submit = self.admission_queue.dispatch(queued), queued.submit
        if request is not submit.request:
            submit = msgspec.structs.replace(submit, request=request)
        entry = make_entry(gateway.id, request, pair, self._cluster_state.model, queued.work)
        self._enter(gateway, submit, pair, queued, entry)

    def _enter(
        self, gateway: GatewayPeer, submit: Submit, pair: Pair, queued: QueuedAttempt, entry: InFlightAttempt
    ) -> None:
        """Enter the load of an attempt, and tell workers, gateway and other routers."""
        self._in_flight.enter(queued.key, entry)
        kind = "dispatched" if pair.prefill is not None else "dispatched_local"
        self._counters["migrations" if submit.migrates_from else kind] += 1
        _send(gateway, submit.request, pair, queued, self.admission_queue.waited_s(queued))
        # The workers have their messages: the rest adds nothing to the latency of the request.
        self._cluster_state.dispatched(submit, pair, entry)

    def _reject(self, gateway_id: str, key: AttemptKey, refused: AttemptRefusal) -> None:
        self._counters["rejected"] += 1
        rejected = Rejected(
            request_id=key[0],
            attempt=key[1],
            reason=refused.reason[:MAX_REASON_CHARS],
            retry_after_s=min(refused.retry_after_s, MAX_SECONDS),
            should_retry=refused.should_retry,
            refusal=refused.refusal,
        )
        self._cluster_state.rejected(rejected)
        self._gateways[gateway_id].peer.send(rejected)


class Dispatchers:
    """The dispatchers of all models, over one in-flight load, one cluster state and one set of quotas.

    The dispatcher of the model "" serves a cluster of one model, and has all workers. A named model gets a
    dispatcher with the first request that comes when the model has a worker. Until then the dispatcher of ""
    takes the model's requests, and refuses them for lack of a worker.
    """

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        members: Membership,
        pairing: Pairing,
        cluster_state: ClusterState,
        gateways: Mapping[str, GatewayPeer],
        *,
        sliced_work: SlicedWork,
        decoders_compute: bool,
    ) -> None:
        """gateways, sliced_work: see Dispatcher. decoders_compute: see Capacity."""
        self.shared = SharedAdmission(clock)
        self._max_attempts = config.max_attempts
        self._clock = clock
        self._members = members
        self._pairing = pairing
        self._cluster_state = cluster_state
        self._in_flight = cluster_state.in_flight
        self._gateways = gateways
        self._sliced_work = sliced_work
        self._decoders_compute = decoders_compute
        self._dispatchers: dict[str, Dispatcher] = {}
        self.of_one_model = self._add("", members)

    def __iter__(self) -> Iterator[Dispatcher]:
        return iter(self._dispatchers.values())

    @property
    def num_queued(self) -> int:
        """The number of waiting attempts."""
        return sum(len(each.admission_queue) for each in self)

    def submit(self, gateway: GatewayPeer, submit: Submit) -> bool:
        """See Dispatcher."""
        return self._of(submit.request.model).submit(gateway, submit)

    def started(self, attempts: Sequence[AttemptKey]) -> None:
        """These attempts have their first token, so their prompts are computed."""
        for key in filter(self._in_flight.started, attempts):
            for each in self:
                each.started(key)
        self._cluster_state.started(attempts)
        self.dispatch_queued()

    def ended(self, attempts: Sequence[AttemptKey], num_tokens: Sequence[int] = ()) -> None:
        """These attempts have ended.

        num_tokens: tokens of each attempt's answer; unknown for attempts beyond its length.
        """
        for number, key in enumerate(attempts):
            self._in_flight.ended(key)
            for each in self:
                each.ended(key, num_tokens[number] if number < len(num_tokens) else None)
        self._cluster_state.ended(attempts, num_tokens)
        self.dispatch_queued()

    def computed(self, prompts: Sequence[PrefillTimes]) -> None:
        """These prompts were computed: their tenants are charged the computed tokens.

        An attempt of another router has its first token then, although its Started message may be lost.
        """
        for each in self:
            each.admission_queue.computed(prompts)
        keys = [(each.request_id, each.attempt) for each in prompts]
        if any([self._in_flight.started(key) for key in keys if self._in_flight.is_anothers(key)]):
            self.dispatch_queued()

    def gateway_left(self, gateway_id: str) -> None:
        """End all attempts of a gateway. Workers that still compute them report them as unknown load."""
        self.ended([key for each in self for key in each.attempts_of(gateway_id)])

    def worker_left(self, member: Member, reason: str) -> None:
        """Fail the attempts on a decode worker that has left.

        The decode worker may never have received them; a first token from the prefill worker proves nothing.
        A gateway ignores the failure of an attempt whose decode worker has sent a token: the gateway is
        connected to that worker, and detects its loss itself.
        """
        for key, entry in self._in_flight.decoded_at(member.id):
            self._fail(key, entry, member, f"{member.worker.name} is gone: {reason}")

    def worker_beat(self, member: Member, beat: Heartbeat) -> None:
        """Fail the attempts that a decode worker should report and does not: their Dispatch may be lost."""
        dropped = self._in_flight.beat(member.worker, beat)
        for key, entry in dropped:
            self._fail(key, entry, member, f"{member.worker.name} does not report it")
        if dropped:
            self.ended([key for key, _ in dropped])
        else:  # the worker may have taken room or given it back by itself
            self.dispatch_queued(slots_freed=False)

    def dispatch_queued(self, *, slots_freed: bool = True) -> None:
        """See Dispatcher."""
        for each in self:
            each.dispatch_queued(slots_freed=slots_freed)

    def tick(self) -> None:
        """See Dispatcher."""
        for each in self:
            each.tick()

    def send_overload_levels(self) -> None:
        """Send each worker a changed level of its model; levels below SMALL_CHUNKS change nothing there."""
        for member in self._members.all():
            level = self._level(member)
            if level < OverloadLevel.SMALL_CHUNKS:
                level = OverloadLevel.CALM
            if level != member.sent_level:
                member.sent_level = level
                member.peer.send(Pressure(level=level))

    def status(self) -> QueueStatus:
        """The state of all queues, for operators."""
        return joined(each.admission_queue.status() for each in self)

    def check_integrity(self) -> None:
        """Raise AssertionError when the parts of a queue do not agree, or the queues and the quotas."""
        for each in self:
            each.admission_queue.check_integrity()

    def _level(self, member: Member) -> OverloadLevel:
        level = self.of_one_model.admission_queue.overload.level
        own = self._dispatchers.get(member.worker.model)
        return level if own is None else max(level, own.admission_queue.overload.level)

    def _of(self, model: str) -> Dispatcher:
        found = self._dispatchers.get(model)
        if found is None and any(member.worker.serves(model) for member in self._members.all()):
            found = self._add(model, ModelMembers(self._members, model))
        return self.of_one_model if found is None else found

    def _add(self, model: str, members: MemberView) -> Dispatcher:
        capacity = Capacity(members, self._in_flight, decoders_compute=self._decoders_compute)
        costs = self._cluster_state.model
        admission_queue = AdmissionQueue(self._clock, members, capacity, costs, self.shared)
        added = self._dispatchers[model] = Dispatcher(
            self._pairing,
            self._cluster_state,
            admission_queue,
            self._gateways,
            self._max_attempts,
            self._sliced_work,
        )
        return added

    def _fail(self, key: AttemptKey, entry: InFlightAttempt, member: Member, reason: str) -> None:
        gateway = self._gateways.get(entry.gateway)
        if gateway is None:
            return  # another router dispatched this attempt, and fails it
        failed = AttemptFailed(
            request_id=key[0], attempt=key[1], failure=Failure.LOST, reason=reason, worker=member.id
        )
        gateway.peer.send(failed)


def _send(gateway: GatewayPeer, request: Request, pair: Pair, queued: QueuedAttempt, waited_s: float) -> None:
    """Send the messages that begin an attempt to its workers, and `Routed` to its gateway."""
    age_s = min(MAX_SECONDS, waited_s)
    source = pair.choice.source if pair.choice is not None else None
    if pair.prefill is None:
        dispatch = Dispatch(
            request=request,
            gateway=gateway.id,
            age_s=age_s,
            source=source,
            migrates_from=queued.submit.migrates_from,
        )
    else:
        transfer = secrets.token_bytes(TRANSFER_BYTES)
        prefill = Prefill(
            request=request,
            gateway=gateway.id,
            decode=pair.decode.id,
            transfer=transfer,
            age_s=age_s,
            source=source,
        )
        pair.prefill.peer.send(prefill)
        dispatch = Dispatch(
            request=request, gateway=gateway.id, prefill=pair.prefill.id, transfer=transfer, age_s=age_s
        )
    pair.decode.peer.send(dispatch)
    routed = Routed(
        request_id=request.request_id,
        attempt=request.attempt,
        decode=pair.decode.id,
        prefill=pair.prefill_id,
        reason=pair.reason,
        received_s=max(0.0, queued.received_s),
        dispatched_s=max(0.0, queued.since_s + waited_s),
        num_ahead=queued.num_ahead,
        ahead_tenant=queued.ahead_tenant,
    )
    gateway.peer.send(routed)
