"""The router's knowledge of workers and dispatches: pages, speeds, decisions, other routers' dispatches.

Workers report their pages only when the router's policy uses the prefix index.

Several routers tell each other what they dispatch, through a `SharingLink` (router/redis/link.py):

1. A router shares each dispatch. The others enter the attempt as another's (`OTHERS`) in their in-flight
   load, and expect the prompt's pages at its workers.
2. The first token and the end of the attempt are shared too.
3. A router may die before the end of its attempts. Then heartbeats of the worker that do not name an attempt
   free it (router/in_flight.py).

Nothing waits for the link. Load that is not shared counts by the workers' own reports.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Final, Protocol

from baton.messages.bounds import MAX_EVENTS
from baton.messages.control import (
    Decision,
    Ended,
    KvEventBatch,
    KvEventsWanted,
    Measured,
    Rejected,
    Started,
    Submit,
    Weighed,
)
from baton.messages.workers import Worker
from baton.request import AttemptKey, Request
from baton.router.checkpoint import attributes_of
from baton.router.decisions import (
    DecisionHistory,
    DispatchedLine,
    EndedLine,
    Hindsight,
    encode_line,
    keys_as_text,
    weighed,
)
from baton.router.in_flight import OTHERS, InFlightAttempt
from baton.router.index.prefix_index import EXPECTED_FOR_S
from baton.router.policies.base import Pair, PolicyContext, RoutingChoice, RoutingPolicy
from baton.router.policies.candidates import PairCandidate
from baton.router.redis.messages import AnyShared, SharedDispatch
from baton.router.sliced_work import Family, family_of
from baton.rpc.peers import Peer

MAX_OTHERS: Final = 2**16  # attempts of other routers that are entered


class SharingLink(Protocol):
    """A link to the other routers and to Redis. No method waits."""

    def joined(self, worker: Worker) -> None:
        """A worker has joined this router and its index."""

    def left(self, worker_id: str) -> None:
        """A worker has left this router."""

    def pages(self, worker_id: str, events: KvEventBatch) -> None:
        """Events of a worker have been applied to the index."""

    def share(self, message: AnyShared) -> None:
        """Send a message to the other routers."""


class ClusterState:
    """Updates the index, the cost model and the decisions, and shares dispatches with other routers."""

    def __init__(self, context: PolicyContext, policy: RoutingPolicy, counters: Counter[str]) -> None:
        """context: the one that `policy` was made with. counters: of the router, shown to operators."""
        self.index = context.index
        self.model = context.model
        self.decisions = DecisionHistory(context.clock)
        self.hindsight = Hindsight(counters)
        self.policy = policy
        self.counters = counters
        self.keys = context.keys
        # Called with each decision and its choice, if the policy made one, and with each rejection.
        self.on_outcome: Callable[[Decision | Rejected, RoutingChoice | None], object] | None = None
        self._clock = context.clock
        self.in_flight = context.in_flight
        self._workers: dict[str, Worker] = {}  # by id
        self._families: dict[str, frozenset[Family]] = {}  # by model; "": of all workers
        self.sharing: SharingLink | None = None  # gets dispatches, and workers' pages
        self.log: Callable[[bytes], object] | None = None  # writes a line for each dispatch and each end

    def __getstate__(self) -> dict[str, object]:
        return attributes_of(self) | {"on_outcome": None}

    def joined(self, worker: Worker, peer: Peer) -> None:
        """A worker has joined."""
        self.model.join(worker.id, _kind_of(worker))
        self._workers[worker.id] = worker
        self._find_families()
        if self.policy.uses_prefix_index:
            self.index.join(worker)
            if self.sharing is not None:
                self.sharing.joined(worker)
            peer.send(KvEventsWanted())

    def gone(self, worker_id: str) -> None:
        """A worker has left."""
        if self.sharing is not None:
            self.sharing.left(worker_id)
        self.index.forget(worker_id)
        self._workers.pop(worker_id, None)
        self._find_families()
        self.model.forget(worker_id)
        self.policy.forget(worker_id)

    def pages(self, peer: Peer, events: KvEventBatch) -> None:
        """Apply a worker's events, and ask the worker for all its pages after a gap."""
        if not self.policy.uses_prefix_index:
            return
        if not self.index.apply(peer.hello.id, events):
            peer.send(KvEventsWanted())
        if self.sharing is not None:
            self.sharing.pages(peer.hello.id, events)

    def measured(self, worker_id: str, measured: Measured) -> None:
        """Learn from a worker's measurements."""
        self.model.learn(worker_id, measured)
        for times in measured.prefills:
            known = self.decisions.measured(worker_id, times)
            if known is None:
                continue
            self.hindsight.measured(*known)
            chosen = known[0].chosen
            decode = chosen.decode if chosen.prefill == worker_id else ""
            self.model.learn_transfers(worker_id, times, chosen.source, decode)

    def has_keys(self, submit: Submit) -> bool:
        """Return True when dispatching the attempt needs no page keys, or only keys that are quick to get."""
        is_recording = self.sharing is not None or self.log is not None
        has_worker = bool(submit.sticky_worker or submit.migrates_from)
        needs_lookup = self.policy.uses_prefix_index and not has_worker
        if not needs_lookup and not is_recording:
            return True
        return self.keys.are_ready(self._families_of(submit.request), submit.request)

    def prepare_keys(self, request: Request) -> Iterator[None]:
        """Compute the page keys of a long prompt, a slice at each step."""
        return self.keys.prepare(self._families_of(request), request)

    def _families_of(self, request: Request) -> frozenset[Family]:
        """The families of the workers that the request may run on."""
        return self._families.get(request.model, frozenset())

    def _find_families(self) -> None:
        workers = self._workers.values()
        self._families = {
            model: frozenset(family_of(each) for each in workers if each.serves(model))
            for model in {"", *(each.model for each in workers)}
        }

    def dispatched(self, submit: Submit, pair: Pair, entry: InFlightAttempt) -> None:
        """Tell the policy about its choice, keep the decision, share and log the dispatch."""
        request, choice = submit.request, pair.choice
        chosen = Weighed(decode=pair.decode.id, prefill=pair.prefill_id)
        candidates: Sequence[PairCandidate] = ()
        if choice is not None:
            self.policy.expect(choice, request.num_tokens)
            if choice.candidate is not None:
                chosen, candidates = weighed(choice.candidate), choice.candidates
                self._count(choice)
                keys = choice.keys.get(choice.computed_by, b"")
                if not request.attempt:  # a replay begins like itself
                    self.hindsight.dispatched(keys, request.num_tokens, pair.computed_by.worker.page_size)
        decision = Decision(
            request_id=request.request_id,
            attempt=request.attempt,
            age_s=0.0,
            reason=pair.reason,
            num_tokens=request.num_tokens,
            chosen=chosen,
        )
        self.decisions.add(decision, candidates)
        if self.on_outcome is not None:
            self.on_outcome(decision, choice)
        if self.sharing is not None or self.log is not None:
            self._share(request, pair, entry)
        self.keys.forget(request.key)

    def rejected(self, rejected: Rejected) -> None:
        """An attempt was not dispatched."""
        self.keys.forget(rejected.key)
        if self.on_outcome is not None:
            self.on_outcome(rejected, None)

    def started(self, attempts: Sequence[AttemptKey]) -> None:
        """Attempts have their first token."""
        for key in attempts:
            self.decisions.started(key)
        if self.sharing is not None and attempts:
            self.sharing.share(Started(attempts=tuple(attempts)))

    def ended(self, attempts: Sequence[AttemptKey], num_tokens: Sequence[int] = ()) -> None:
        """Attempts have ended. num_tokens: as of `Dispatchers.ended`."""
        for key in attempts:
            self.keys.forget(key)
        if self.sharing is not None:
            for first in range(0, len(attempts), MAX_EVENTS):
                self.sharing.share(Ended(attempts=tuple(attempts[first : first + MAX_EVENTS])))
        if self.log is not None:
            for key, number in zip(attempts, chain(num_tokens, repeat(None)), strict=False):
                self.log(encode_line(self._ended_line(key, number)))

    def heard(self, message: AnyShared) -> None:
        """Apply a message of another router. Attempts that this router dispatched itself stay as they are."""
        match message:
            case SharedDispatch():
                self._enter_anothers(message)
            case Started():
                for key in filter(self.in_flight.is_anothers, message.attempts):
                    self.in_flight.started(key)
            case Ended():
                for key in filter(self.in_flight.is_anothers, message.attempts):
                    self.in_flight.ended(key)

    def _enter_anothers(self, shared: SharedDispatch) -> None:
        key = (shared.request_id, shared.attempt)
        if key in self.in_flight:
            return
        if self.in_flight.num_others >= MAX_OTHERS:
            self.counters["others_left_out"] += 1
            return
        num_new = shared.num_prompt_tokens
        entry = InFlightAttempt(
            OTHERS,
            shared.decode,
            shared.prefill,
            num_new,
            shared.num_tokens,
            self.model.of(shared.prefill or shared.decode).compute_s(num_new, num_new),
            num_output_tokens=shared.num_output_tokens,
        )
        self.in_flight.enter(key, entry)
        ttl_s = self.in_flight.wait_s(entry.computed_by) + EXPECTED_FOR_S
        self.index.expect(entry.computed_by, shared.keys, ttl_s)

    def _share(self, request: Request, pair: Pair, entry: InFlightAttempt) -> None:
        worker = pair.computed_by.worker
        known = pair.choice.keys.get(worker.id) if pair.choice is not None else None
        keys = self.keys.keys(family_of(worker), request) if known is None else known
        if self.sharing is not None:
            self.sharing.share(_shared_dispatch(request.key, entry, keys))
        if self.log is not None:
            line = DispatchedLine(
                at_s=self._clock.now_s(),
                decision=self.decisions.full(request.key),
                page_size=worker.page_size,
                num_output_tokens=entry.num_output_tokens,
                keys=keys_as_text(keys),
            )
            self.log(encode_line(line))

    def _ended_line(self, key: AttemptKey, num_tokens: int | None) -> EndedLine:
        decision = self.decisions.get(key)
        return EndedLine(
            at_s=self._clock.now_s(),
            request_id=key[0],
            attempt=key[1],
            num_tokens=num_tokens,
            first_token_s=decision.first_token_s if decision is not None else None,
            measured=decision.measured if decision is not None else None,
        )

    def _count(self, choice: RoutingChoice) -> None:
        self.counters["decisions"] += 1
        self.counters["blind_decisions"] += choice.is_blind
        self.counters["pulls"] += choice.source is not None
        self.counters["computed_locally"] += not choice.prefill


def _shared_dispatch(key: AttemptKey, entry: InFlightAttempt, keys: bytes) -> SharedDispatch:
    return SharedDispatch(
        request_id=key[0],
        attempt=key[1],
        decode=entry.decode,
        prefill=entry.prefill,
        num_prompt_tokens=entry.num_prompt_tokens,
        num_tokens=entry.num_tokens,
        num_output_tokens=entry.num_output_tokens,
        keys=keys,
    )


def _kind_of(worker: Worker) -> str:
    """Workers of one kind have similar steps."""
    ranks = f"{worker.tensor_parallel_size} x {worker.pipeline_parallel_size}"
    return f"{worker.role} {worker.fingerprint} {worker.kv_dtype} {ranks}"
