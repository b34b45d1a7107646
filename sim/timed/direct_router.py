"""The routing of a fast rehearsal: production's rules, policy and cost model, without messages and queues.

The production router learns what workers hold, and when prompts start and end, from messages; encoding and
applying them takes most of the time of a rehearsal. This router is told both by the simulation. Requests wait
in their order until a decode worker has room and a worker has a slot for the prompt
(router/queue/admission.py); then the policy chooses a pair. There are no tenants' shares and no refusals.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from baton.clock import Clock
from baton.config.router import RouterConfig
from baton.messages.control import KvEventBatch, Measured, Submit
from baton.request import AttemptKey, Request
from baton.router.cluster_state import ClusterState
from baton.router.dispatcher import make_entry, pair_with_room
from baton.router.in_flight import InFlight, NewPrompt, scheduling_class_of
from baton.router.index.prefix_index import PrefixIndex
from baton.router.membership import Membership
from baton.router.pairing import NoSlot, Pairing, PairQuestion, Unpaired
from baton.router.policies.base import Pair, PolicyContext, TenantClaim
from baton.router.policies.cost_model import CostModel
from baton.router.policies.registry import load_policy, policy_class
from baton.router.queue.admission import Capacity
from baton.router.sliced_work import Family, PromptKeys
from baton.sim.timed.fleet import GATEWAY

if TYPE_CHECKING:
    from baton.sim.timed.fast_worker import FastWorker


class _SharedKeys(PromptKeys):
    """The keys of the pages that several prompts have. Others are in no cache, and the index needs none."""

    def __init__(self, keys_of: Callable[[Request], Sequence[bytes]]) -> None:
        super().__init__()
        self._keys_of = keys_of

    def keys(self, family: Family, request: Request) -> bytes:
        return b"".join(self._keys_of(request))


class DirectRouter:
    """Chooses the workers of each request."""

    def __init__(
        self, config: RouterConfig, clock: Clock, keys_of: Callable[[Request], Sequence[bytes]]
    ) -> None:
        """keys_of: returns the keys of the leading pages that a prompt shares with others."""
        self._in_flight = InFlight(clock)
        self._members = Membership(clock)
        index, model = PrefixIndex(clock, seed=config.seed), CostModel()
        keys, random = _SharedKeys(keys_of), Random(config.seed)
        context = PolicyContext(clock, self._in_flight, index, model, keys, random)
        self._policy = policy_class(config.policy)(context)
        self._state = ClusterState(context, self._policy, Counter())
        self._pairing = Pairing(config, self._members, self._policy, load_policy(self._policy, context))
        decoders_compute = self._policy.weighs_local_prefill
        self._capacity = Capacity(self._members, self._in_flight, decoders_compute=decoders_compute)
        self._workers: dict[str, FastWorker] = {}  # by id
        self._reached = frozenset[str]()  # every worker
        self._queue: deque[Request] = deque()
        self._pairs: dict[str, Pair] = {}  # request id -> its workers, until the prompt's times are known

    def join(self, workers: Iterable["FastWorker"]) -> None:
        """Add all workers, which reach each other."""
        for each in workers:
            self._members.join(each.worker, each)
            self._state.joined(each.worker, each)
            self._workers[each.worker.id] = each
        self._reached = frozenset(self._workers)
        for member in self._members.all():
            member.reached = self._reached

    def submit(self, request: Request) -> None:
        """Dispatch a request, or queue it."""
        self._queue.append(request)
        self._dispatch()

    def received(self, worker: "FastWorker", message: KvEventBatch | Measured) -> None:
        """Learn what a worker holds, or what it has measured."""
        if isinstance(message, KvEventBatch):
            self._state.pages(worker, message)
            return
        model, worker_id = self._state.model, worker.worker.id
        model.learn(worker_id, message)
        for times in message.prefills:
            pair = self._pairs.pop(times.request_id)
            source = pair.choice.source if pair.choice is not None else None
            decode = pair.decode.id if pair.prefill is not None else ""
            model.learn_transfers(worker_id, times, source.worker if source is not None else "", decode)

    def started(self, key: AttemptKey) -> None:
        """Take the first token of a request."""
        self._in_flight.started(key)
        self._dispatch()

    def ended(self, key: AttemptKey) -> None:
        """Take the end of a request."""
        self._in_flight.ended(key)
        self._dispatch()

    def tick(self) -> None:
        """Forget expected pages that have not come."""
        self._state.index.tick()

    def _dispatch(self) -> None:
        while self._queue:
            request = self._queue[0]
            pair = self._pair(request)
            if not isinstance(pair, Pair):
                return
            self._queue.popleft()
            self._pairs[request.request_id] = pair
            entry = make_entry(GATEWAY, request, pair, self._state.model, 0.0)
            self._in_flight.enter(request.key, entry)
            if pair.choice is not None:
                self._policy.expect(pair.choice, request.num_tokens)
            worker = self._workers[pair.computed_by.id]
            worker.take(request, pair.decode.id, pair.choice.source if pair.choice is not None else None)

    def _pair(self, request: Request) -> Pair | Unpaired | NoSlot | None:
        """Choose as `Dispatcher` does; None: no worker has a slot."""
        capacity = self._capacity
        prompt = NewPrompt(scheduling_class_of(request), request.num_tokens)
        if not capacity.can_compute(prompt):
            return None
        claim = TenantClaim(
            has_slot=partial(capacity.has_slot, prompt), needs_slot=capacity.prefills_are_full(prompt)
        )
        question = PairQuestion(Submit(request=request), self._reached, frozenset(), claim, 0)
        return pair_with_room(self._pairing, capacity, question)
