"""What a router knows beside who is there: what workers hold, how fast they are, and why it chose as it did.

Workers are asked for what they hold only by a router whose policy looks at it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from baton.clock import Clock
from baton.config.router import RouterSettings
from baton.messages.control import Decision, KvEventBatch, KvEventsWanted, Measured, Submit, Weighed
from baton.messages.workers import Worker
from baton.router.decisions import (
    DecisionHistory,
    DispatchedLine,
    EndedLine,
    encode_line,
    keys_as_text,
    weighed,
)
from baton.router.in_flight import InFlight, InFlightAttempt, Key
from baton.router.index.prefix_index import PrefixIndex
from baton.router.index.prompt_keys import PromptKeys, family_of
from baton.router.policies.base import KnownWorkers, PolicyContext, RoutingChoice, RoutingPolicy
from baton.router.policies.cost_model import CostModel
from baton.router.policies.costs import PairCandidate
from baton.router.policies.load import LeastLoaded, LoadPolicy
from baton.router.policies.pairing import Pair
from baton.router.policies.registry import policy_class
from baton.router.redis.messages import AnyShared
from baton.router.sharing import Sharing, SharingLink
from baton.rpc.peers import Peer

MIN_INDEX_PAGES: Final = 1024  # of an index that nobody asks


class ClusterState:
    def __init__(
        self,
        config: RouterSettings,
        clock: Clock,
        in_flight: InFlight,
        counters: Counter[str],
        max_index_pages: int,
    ) -> None:
        policy = policy_class(config.policy)
        max_pages = max_index_pages if policy.uses_prefix_index else MIN_INDEX_PAGES
        self.index = PrefixIndex(clock, max_pages, seed=config.seed)
        self.model = CostModel()
        self.decisions = DecisionHistory(clock)
        self.sharing: Sharing | None = None
        self._log: Callable[[bytes], object] | None = None
        self._clock = clock
        self.counters = counters
        self._in_flight = in_flight
        self._keys = PromptKeys()
        known = KnownWorkers(in_flight, self.index, self.model, self._keys)
        context = PolicyContext(clock, known, Random(config.seed))
        self.policy: RoutingPolicy = policy(context)
        self.by_load = self.policy if isinstance(self.policy, LoadPolicy) else LeastLoaded(context)

    def link(self, link: SharingLink) -> None:
        """From now on other routers are told, once a worker has joined and what is sent out."""
        self.sharing = Sharing(link, self._in_flight, self.index, self.model, self.counters)

    def log_to(self, write: Callable[[bytes], object]) -> None:
        """A line for what is sent out and for what ends, from now on."""
        self._log = write

    def heard(self, message: AnyShared) -> None:
        if self.sharing is not None:
            self.sharing.heard(message)

    def joined(self, worker: Worker, peer: Peer) -> None:
        self.model.join(worker.id, _alike(worker))
        if self.policy.uses_prefix_index:
            self.index.join(worker)
            if self.sharing is not None:
                self.sharing.link.joined(worker)
            peer.send(KvEventsWanted())

    def gone(self, worker_id: str) -> None:
        if self.sharing is not None:
            self.sharing.link.left(worker_id)
        self.index.forget(worker_id)
        self.model.forget(worker_id)
        self.policy.forget(worker_id)

    def tick(self) -> None:
        self.index.tick()

    def pages(self, peer: Peer, events: KvEventBatch) -> None:
        """Changes of what this worker holds, of which some may have been lost."""
        if not self.policy.uses_prefix_index:
            return
        if not self.index.apply(peer.hello.id, events):
            peer.send(KvEventsWanted())
        if self.sharing is not None:
            self.sharing.link.pages(peer.hello.id, events)

    def measured(self, worker_id: str, measured: Measured) -> None:
        self.model.learn(worker_id, measured)
        for times in measured.prefills:
            decision = self.decisions.get((times.request_id, times.attempt))
            if decision is None or worker_id not in (decision.chosen.prefill, decision.chosen.decode):
                continue
            self.decisions.measured(times)
            chosen = decision.chosen
            if times.pulled_bytes and chosen.source:
                self.model.learn_pull(chosen.source, worker_id, times)
            if times.moved_bytes and chosen.prefill == worker_id:
                self.model.learn_handoff(worker_id, chosen.decode, times)
                self.model.learn_size(times.moved_bytes, times.num_tokens)

    def dispatched(self, submit: Submit, pair: Pair, entry: InFlightAttempt) -> None:
        if self.sharing is None and self._log is None:
            return
        request, worker = submit.request, pair.computer.worker
        known = pair.choice.keys.get(worker.id) if pair.choice is not None else None
        keys = self._keys.keys(family_of(worker), request) if known is None else known
        key = (request.request_id, request.attempt)
        if self.sharing is not None:
            self.sharing.dispatched(key, entry, keys)
        if self._log is not None:
            line = DispatchedLine(
                at_s=self._clock.now_s(),
                decision=self.decisions.full(key),
                page_size=worker.page_size,
                num_output_tokens=entry.num_tokens - request.num_tokens,
                keys=keys_as_text(keys),
            )
            self._log(encode_line(line))

    def started(self, attempts: Sequence[Key]) -> None:
        for key in attempts:
            self.decisions.started(key)
        if self.sharing is not None:
            self.sharing.started(attempts)

    def ended(self, attempts: Sequence[Key]) -> None:
        if self.sharing is not None:
            self.sharing.ended(attempts)
        if self._log is not None:
            for request_id, attempt in attempts:
                self._log(encode_line(self._end_of(request_id, attempt)))

    def decided(self, submit: Submit, pair: Pair) -> None:
        request, choice = submit.request, pair.choice
        chosen = Weighed(decode=pair.decode.id, prefill=pair.prefill.id if pair.prefill else "")
        candidates: Sequence[PairCandidate] = ()
        if choice is not None:
            self.policy.expect(choice, request.num_tokens)
            if choice.candidate is not None:
                chosen, candidates = weighed(choice.candidate), choice.candidates
                self._count(choice)
        decision = Decision(
            request_id=request.request_id,
            attempt=request.attempt,
            age_s=0.0,
            reason=pair.reason,
            num_tokens=request.num_tokens,
            chosen=chosen,
        )
        self.decisions.add(decision, candidates)

    def _end_of(self, request_id: str, attempt: int) -> EndedLine:
        decision = self.decisions.get((request_id, attempt))
        return EndedLine(
            at_s=self._clock.now_s(),
            request_id=request_id,
            attempt=attempt,
            first_token_s=decision.first_token_s if decision is not None else None,
            measured=decision.measured if decision is not None else None,
        )

    def _count(self, choice: RoutingChoice) -> None:
        self.counters["decisions"] += 1
        self.counters["blind_decisions"] += choice.is_blind
        self.counters["pulls"] += choice.source is not None
        self.counters["computed_locally"] += not choice.prefill


def _alike(worker: Worker) -> str:
    """Workers of which this is the same have steps that are alike."""
    return f"{worker.role} {worker.fingerprint} {worker.kv_dtype} {worker.tensor_parallel_size}"
