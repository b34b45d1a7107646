"""The policies that predict costs: the pair of workers that is cheapest for a prompt, in seconds.

1. `PromptScorer` makes a candidate of each worker of a role. Where there are very many workers, only the
   workers that hold most of the prompt and a few drawn at random are scored.
2. `CostPolicy.choose` combines the best of either role, and selects among the pairs.
3. `CostPolicy.expect` remembers the dispatch: how busy workers are lately, and which pages they will hold.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import exp, inf
from operator import attrgetter
from typing import ClassVar, Final, TypeAlias

from baton.messages.control import PullSource
from baton.request import Request
from baton.router.in_flight import (
    EXPECTED_OUTPUT_TOKENS,
    Decoding,
    NewPrompt,
    SchedulingClass,
    WorkerInFlight,
    num_output_tokens,
    scheduling_class_of,
)
from baton.router.index.prefix_index import EXPECTED_FOR_S, Holdings
from baton.router.policies.base import (
    NO_CLAIM,
    ClusterView,
    PolicyContext,
    RoutingChoice,
    TenantClaim,
    WorkerPool,
    WorkerView,
)
from baton.router.policies.candidates import (
    DecodeCandidate,
    PairCandidate,
    PrefillCandidate,
    PromptCost,
    PullCandidate,
    cheapest,
    local_pair,
    longest,
    prompt_costs,
    remote_pair,
)
from baton.router.policies.cost_model import Speeds
from baton.router.sliced_work import Family

MAX_SOURCES: Final = 2
MAX_COMPARED: Final = 16  # up to this number, all workers of a role are scored; above it, a sample
MAX_HOLDERS: Final = 3  # in the sample: workers of each family that hold most of the prompt
NUM_DRAWN: Final = 4  # workers drawn at random for the sample
NUM_KEPT: Final = 2  # of the drawn workers, the least busy are scored; more when holders are few
MAX_DRAWS: Final = 32  # draws when some workers are left out
MAX_COMBINED: Final = 3  # workers of a role in pairs
MEMORY_S: Final = 30.0  # over which the cluster's arrivals are averaged
BALANCE_S: Final = 300.0  # over which workers of equal cost get equal numbers of tokens
MOST_BUSY: Final = 0.9

Rank: TypeAlias = float | tuple[float, float]  # each policy uses one of the two
_TOTAL_S: Final = attrgetter("total_s")


class PromptScorer:
    """Makes the candidates of one prompt: what each worker holds of it, its wait there, the time it takes."""

    def __init__(
        self,
        context: PolicyContext,
        request: Request,
        now_s: float,
        claim: TenantClaim = NO_CLAIM,
        arrival_rate: float = 0.0,
    ) -> None:
        """arrival_rate: see `prompt_costs`."""
        self.num_tokens = request.num_tokens
        self.arrival_rate = arrival_rate
        self._num_output_tokens = num_output_tokens(request)
        self._claim = claim
        self._context = context
        self._request = request
        self._now_s = now_s
        self._scheduling_class = scheduling_class_of(request)
        self._found: dict[Family, tuple[bytes, Holdings]] = {}
        self._located: dict[str, PullSource | None] = {}
        self._yields: dict[SchedulingClass, bool] = {}  # to the prompt, if its tenant has a deficit

    def holders(self, pool: WorkerPool, limit: int, first: WorkerView) -> list[WorkerView]:
        """Up to `limit` workers of each family that hold most of the prompt."""
        found: list[WorkerView] = []
        for family in pool.families:
            found += pool.holders(family, self._holdings(family), limit, first)
        return found

    def keys(self, view: WorkerView) -> bytes:
        """The keys of the prompt's pages, as this worker names them."""
        self._holdings(view.family)
        return self._found[view.family][0]

    def prefill_candidates(self, views: Sequence[WorkerView]) -> list[PrefillCandidate]:
        """A candidate for each worker, in order."""
        return [prefill for prefill, _, _ in self._score(views)]

    def decode_candidates(self, views: Sequence[WorkerView]) -> list[DecodeCandidate]:
        """A candidate for each worker, in order."""
        candidates, num_output_tokens = [], self._num_output_tokens
        num_tokens_more = self.num_tokens + num_output_tokens
        for view, (prefill, account, speeds) in zip(views, self._score(views), strict=True):
            num_running = account.num_attempts + account.num_unknown
            num_tokens = account.num_tokens + account.num_unknown_tokens
            fixed_s, sequence_s, context_s, token_s = speeds.step.coefficients
            step_s = fixed_s + sequence_s * num_running + context_s * num_tokens
            share = (num_tokens + num_tokens_more) / view.num_slots
            seats = (num_running + 1) / view.max_num_seqs
            excess = (seats if seats > share else share) - 1.0
            room_s = excess * EXPECTED_OUTPUT_TOKENS * step_s if excess > 0.0 else 0.0
            token_delay_s = sequence_s + context_s * self.num_tokens
            decode_delay_s = num_running * num_output_tokens * token_delay_s
            num_delayed, patience_s = 0, inf
            if account.decoding or account.num_unknown:
                num_delayed, num_delayed_tokens = self._delayed(account)
                if num_delayed and view.max_num_batched_tokens:
                    longest_s = step_s + token_s * view.max_num_batched_tokens
                    mean_left = 0.5 * num_delayed_tokens / num_delayed  # of each, on average
                    patience_s = max(0.0, mean_left * longest_s - account.wait_s(self._now_s))
            join_s = room_s + 0.5 * step_s
            candidates.append(
                DecodeCandidate(prefill, num_delayed, room_s, join_s, decode_delay_s, patience_s)
            )
        return candidates

    def sources(self, prefills: Sequence[PrefillCandidate]) -> list[PullCandidate]:
        """The workers that hold most of the prompt; expected pages count until `locate` was called."""
        held = [each.num_held_tokens for each in prefills]
        least = min(held)  # a worker that holds no more has nothing to pull
        able = [each for each, num in zip(prefills, held, strict=True) if num > least]
        most = [(self._num_located(each), each.worker, each.page_format, each.load_s) for each in able]
        most.sort(reverse=True)
        pulls_from = self._context.model.pulls_from
        return [
            PullCandidate(worker, num, pulls_from(worker), page_format, load_s)
            for num, worker, page_format, load_s in most[:MAX_SOURCES]
            if num
        ]

    def locate(self, view: WorkerView) -> PullSource | None:
        """The worker as a source of the pages that it has reported; None when no page of the prompt is."""
        if view.id not in self._located:
            num_tokens = self._context.index.num_reported(view.id, self.keys(view)) * view.page_size
            self._located[view.id] = PullSource(view.id, num_tokens) if num_tokens else None
        return self._located[view.id]

    def _score(self, views: Sequence[WorkerView]) -> list[tuple[PrefillCandidate, WorkerInFlight, Speeds]]:
        # Calls are inlined here and in `decode_candidates`: both loop over all workers that are compared.
        account_of, speeds_of = self._context.in_flight.account, self._context.model.of
        tier_token_s = self._context.model.tier_token_s
        family, found = None, []
        for view in views:
            account, speeds = account_of(view.id), speeds_of(view.id)
            if view.family is not family:
                family = view.family
                num_pages_at = self._holdings(family).num_pages
            num_held_tokens = num_pages_at(view.slot_bit) * view.page_size
            wait_s = self._wait_s(account, num_held_tokens) if account.num_computing else 0.0
            if account.num_unknown and view.is_prefill:
                wait_s += account.num_unknown * speeds.mean_compute_s
            coefficients, load_s = speeds.prefill.coefficients, 0.0
            if num_held_tokens and view.id in tier_token_s:
                load_s = self._load_s(view, num_held_tokens // view.page_size)
            prefill = PrefillCandidate(
                view.id, wait_s, num_held_tokens, coefficients, view.page_format, load_s
            )
            found.append((prefill, account, speeds))
        return found

    def _load_s(self, view: WorkerView, num_pages: int) -> float:
        """Seconds to bring the worker's pages of the prompt to its device from the tiers below."""
        num_on_host, num_on_disk = self._context.index.outside(view.id, self.keys(view), num_pages)
        host_s, disk_s = self._context.model.tier_token_s[view.id]
        return view.page_size * (num_on_host * host_s + num_on_disk * disk_s)

    def _wait_s(self, account: WorkerInFlight, num_held_tokens: int) -> float:
        num_new_tokens = max(1, self.num_tokens - num_held_tokens)
        prompt = NewPrompt(self._scheduling_class, num_new_tokens, self._claim.lag, self._claim.lag_of)
        return account.wait_s(self._now_s) * account.prompts.share_ahead_of(prompt)

    def _delayed(self, account: WorkerInFlight) -> Decoding:
        """The running decodes that a prompt computed there delays, without those that yield to the prompt.

        Decodes yield to the prompt of a tenant with a deficit when their tenant has none, or a lower rank.
        """
        yields, has_deficit = self._yields, self._claim.has_deficit
        num, num_tokens = account.num_unknown, EXPECTED_OUTPUT_TOKENS * account.num_unknown
        for scheduling_class, decoding in account.decoding.items():
            if has_deficit and scheduling_class not in yields:
                yields[scheduling_class] = self._yields_to_deficit(scheduling_class)
            if not has_deficit or not yields[scheduling_class]:
                num += decoding.num
                num_tokens += decoding.num_output_tokens
        return Decoding(num, num_tokens)

    def _yields_to_deficit(self, scheduling_class: SchedulingClass) -> bool:
        own, lag_of = self._scheduling_class, self._claim.lag_of
        if scheduling_class == own or scheduling_class.rank != own.rank or lag_of is None:
            return scheduling_class.rank > own.rank
        lag = lag_of(scheduling_class)
        return lag is not None and lag <= 0

    def _num_located(self, prefill: PrefillCandidate) -> int:
        if prefill.worker not in self._located:
            return prefill.num_held_tokens
        source = self._located[prefill.worker]
        return 0 if source is None else source.num_tokens

    def _holdings(self, family: Family) -> Holdings:
        found = self._found.get(family)
        if found is None:
            keys = self._context.keys.keys(family, self._request)
            found = self._found[family] = (keys, self._context.index.holdings(keys))
        return found[1]


class CostPolicy:
    """Chooses the pair with the lowest predicted cost in seconds (router/policies/candidates.py)."""

    uses_prefix_index: ClassVar[bool] = True
    weighs_local_prefill: ClassVar[bool] = True
    pulls_prefixes: ClassVar[bool] = True  # a worker may fetch a prefix from a peer
    needs_slots: ClassVar[bool] = True  # decode workers without a slot for the prompt compute none

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self._clock, self._random = context.clock, context.random
        now_s = self._clock.now_s()
        self._arrivals = Arrivals(now_s)
        self._deficit_arrivals = Arrivals(now_s)  # of tenants with a deficit: only those delay each other
        self._tokens: dict[str, DecayedSum] = {}  # given to each worker

    def choose(self, request: Request, view: ClusterView, claim: TenantClaim = NO_CLAIM) -> RoutingChoice:
        """See `RoutingPolicy.choose`."""
        now_s = self._clock.now_s()
        arrivals = self._deficit_arrivals if claim.has_deficit else self._arrivals
        scorer = PromptScorer(self._context, request, now_s, claim, arrivals.rate(now_s))
        decodes = scorer.decode_candidates(self._compared(scorer, view.decoders, view.left_out))
        prefills = scorer.prefill_candidates(self._compared(scorer, view.prefills, view.avoided))
        random, source = self._random.getrandbits(32), None
        for _ in range(MAX_SOURCES + 1):
            candidates = self._candidates(scorer, decodes, prefills, view.partners)
            candidates = self._with_slots(candidates, claim)
            chosen = self.select(candidates, random, lambda worker_id: self._given(worker_id).at(now_s))
            source = scorer.locate(view.worker_view(chosen.source)) if chosen.source else None
            if not chosen.source or (source and source.num_tokens >= chosen.num_held_tokens):
                break  # else the source does not hold the expected pages yet; the scorer has noted that
        keys = {each: scorer.keys(view.worker_view(each)) for each in (chosen.prefill, chosen.decode) if each}
        is_known = self._context.index.is_known(chosen.computed_by)
        return RoutingChoice(
            chosen.decode,
            chosen.prefill,
            chosen,
            candidates,
            source=source,
            keys=keys,
            is_blind=not is_known,
            has_deficit=claim.has_deficit,
            draw=random,
        )

    def expect(self, choice: RoutingChoice, num_tokens: int) -> None:
        """See `RoutingPolicy.expect`. Later prompts find the pages; the index keeps the held ones longer."""
        chosen, now_s = choice.candidate, self._clock.now_s()
        assert chosen is not None, "this policy predicts the cost of what it chooses"
        self._arrivals.add(chosen.computed_by, chosen.prompt_cost.compute_s, now_s)
        if choice.has_deficit:
            self._deficit_arrivals.add(chosen.computed_by, chosen.prompt_cost.compute_s, now_s)
        self._given(chosen.computed_by).add(num_tokens, now_s)
        ttl_s = chosen.terms.ttft_s + EXPECTED_FOR_S
        for worker_id, keys in choice.keys.items():
            self._context.index.expect(worker_id, keys, ttl_s)

    def forget(self, worker_id: str) -> None:
        """See `RoutingPolicy.forget`."""
        self._tokens.pop(worker_id, None)
        for arrivals in (self._arrivals, self._deficit_arrivals):
            arrivals.forget(worker_id, self._clock.now_s())

    def rank(self, cost: PromptCost) -> Rank:
        """The sort key of a worker that could compute the prompt; the lowest is best."""
        return cost.total_s

    def select(
        self, candidates: Sequence[PairCandidate], random: int, given: Callable[[str], float]
    ) -> PairCandidate:
        """The candidate that is chosen. random: 32 bits. given: the tokens that a worker was given lately."""
        return cheapest(candidates, random, given)

    def _given(self, worker_id: str) -> "DecayedSum":
        if worker_id not in self._tokens:
            self._tokens[worker_id] = DecayedSum(BALANCE_S, self._clock.now_s())
        return self._tokens[worker_id]

    def _compared(
        self, scorer: PromptScorer, pool: WorkerPool, left_out: Collection[str]
    ) -> list[WorkerView]:
        """The workers to score. The first of equals wins, so the order begins at random."""
        views, random = pool.views(self._context.index), self._random.random
        num = len(views)
        if num <= MAX_COMPARED:
            first = int(random() * num)
            return _without(left_out, [*views[first:], *views[:first]])
        found = scorer.holders(pool, MAX_HOLDERS + len(left_out), views[int(random() * num)])
        drawn = [views[int(random() * num)] for _ in range(MAX_DRAWS if left_out else NUM_DRAWN)]
        if left_out:
            found, drawn = _without(left_out, found), _without(left_out, drawn)[:NUM_DRAWN]
        drawn.sort(key=self._work)
        found = found[:MAX_HOLDERS]
        found += drawn[: MAX_HOLDERS + NUM_KEPT - len(found)]
        found = found or _without(left_out, views)[:MAX_COMPARED]
        return list({view.id: view for view in found}.values())

    def _work(self, view: WorkerView) -> tuple[float, int]:
        account = self._context.in_flight.account(view.id)
        return account.work_s, account.num_attempts

    def _candidates(
        self,
        scorer: PromptScorer,
        decodes: Sequence[DecodeCandidate],
        prefills: Sequence[PrefillCandidate],
        partners: Mapping[str, Collection[str]],
    ) -> list[PairCandidate]:
        handoff_s_of = self._context.model.handoff_s
        num_tokens, arrival_rate = scorer.num_tokens, scorer.arrival_rate
        local_prefills = [each.as_prefill for each in decodes]
        sources = scorer.sources([*local_prefills, *prefills]) if self.pulls_prefixes else []
        local_costs = prompt_costs(local_prefills, num_tokens, sources, arrival_rate)
        candidates = sorted(map(local_pair, local_costs, decodes), key=_TOTAL_S)[:MAX_COMBINED]
        remote_costs = prompt_costs(prefills, num_tokens, sources, arrival_rate)
        best = sorted(remote_costs, key=self.rank)[:MAX_COMBINED]
        for decode in sorted(decodes, key=_TOTAL_S)[:MAX_COMBINED]:
            worker = decode.as_prefill.worker
            num_moved = max(0, num_tokens - decode.as_prefill.num_held_tokens)
            for cost in best:
                prefill = cost.candidate.worker
                if prefill in partners[worker]:
                    candidates.append(remote_pair(cost, decode, handoff_s_of(prefill, worker, num_moved)))
        return candidates

    def _with_slots(self, candidates: list[PairCandidate], claim: TenantClaim) -> list[PairCandidate]:
        """The candidates without decode workers that lack a slot for the prompt, and without wanted workers.

        Returns all candidates when none would be left, or when the policy needs no slots.
        """
        if claim.has_slot is None or not self.needs_slots:
            return candidates
        wanted, has_slot_at = claim.wanted, claim.has_slot_at
        placed = [each for each in candidates if each.prefill or has_slot_at(each.decode)]
        return [each for each in placed if each.computed_by not in wanted] or placed or candidates


def predicted(
    context: PolicyContext, request: Request, view: ClusterView, claim: TenantClaim, decode: str, prefill: str
) -> PairCandidate:
    """The predicted cost of one pair of workers, whichever policy chose the pair; nothing is pulled.

    prefill: "": the decode worker computes the prompt.
    """
    scorer = PromptScorer(context, request, context.clock.now_s(), claim)
    views = {each.id: each for pool in (view.decoders, view.prefills) for each in pool.views(context.index)}
    (decoder,) = scorer.decode_candidates([views[decode]])
    computed = scorer.prefill_candidates([views[prefill]]) if prefill else [decoder.as_prefill]
    (cost,) = prompt_costs(computed, request.num_tokens, (), 0.0)
    if not prefill:
        return local_pair(cost, decoder)
    num_moved = max(0, request.num_tokens - decoder.as_prefill.num_held_tokens)
    return remote_pair(cost, decoder, context.model.handoff_s(prefill, decode, num_moved))


class PrefixPolicy(CostPolicy):
    """Chooses the workers that hold most of the prompt, whatever their load. Nothing is pulled."""

    weighs_local_prefill: ClassVar[bool] = False
    pulls_prefixes: ClassVar[bool] = False
    needs_slots: ClassVar[bool] = False

    def rank(self, cost: PromptCost) -> Rank:
        """See `CostPolicy.rank`."""
        return -cost.num_held_tokens, cost.total_s

    def select(
        self, candidates: Sequence[PairCandidate], random: int, given: Callable[[str], float]
    ) -> PairCandidate:
        """See `CostPolicy.select`."""
        return longest(candidates, random)


def _without(left_out: Collection[str], views: Sequence[WorkerView]) -> list[WorkerView]:
    return [each for each in views if each.id not in left_out] if left_out else list(views)


class DecayedSum:
    """A sum with fading terms: a term counts e times less after `memory_s`.

    A steady flow of 1 a second sums up to `memory_s`.
    """

    def __init__(self, memory_s: float, now_s: float) -> None:
        self._memory_s = memory_s
        self._sum = 0.0
        self._at_s = now_s

    def add(self, amount: float, now_s: float) -> None:
        """Add a term at the present time."""
        self._sum = self.at(now_s) + amount
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        """The sum as of `now_s`."""
        return self._sum * exp((self._at_s - now_s) / self._memory_s)


class RecentWork:
    """The work that workers were given lately, as a mean over workers that counts busy workers more."""

    def __init__(self, memory_s: float, now_s: float) -> None:
        """memory_s: see `DecayedSum`."""
        self._memory_s = memory_s
        self._given: dict[str, DecayedSum] = {}
        self._sum = DecayedSum(memory_s, now_s)
        self._squares = DecayedSum(memory_s / 2, now_s)  # of each worker's sum; squares fade twice as fast

    def add(self, worker_id: str, amount: float, now_s: float) -> None:
        """A worker was given `amount`, in any unit."""
        given = self._given.get(worker_id)
        if given is None:
            given = self._given[worker_id] = DecayedSum(self._memory_s, now_s)
        self._squares.add((2 * given.at(now_s) + amount) * amount, now_s)
        given.add(amount, now_s)
        self._sum.add(amount, now_s)

    def mean(self, now_s: float) -> float:
        """The mean of the workers' sums, each weighted by itself: the sum of the worker that gets the next
        unit.
        """
        total = self._sum.at(now_s)
        return self._squares.at(now_s) / total if total > 0.0 else 0.0

    def forget(self, worker_id: str, now_s: float) -> None:
        """Drop a worker that has left."""
        if self._given.pop(worker_id, None) is None:
            return
        left = [each.at(now_s) for each in self._given.values()]  # subtracting would leave rounding errors
        self._sum, self._squares = DecayedSum(self._memory_s, now_s), DecayedSum(self._memory_s / 2, now_s)
        self._sum.add(sum(left), now_s)
        self._squares.add(sum(each * each for each in left), now_s)


class Arrivals:
    """The rate of prompts that were dispatched lately."""

    def __init__(self, now_s: float) -> None:
        self._num = RecentWork(MEMORY_S, now_s)
        self._work_s = RecentWork(MEMORY_S, now_s)

    def add(self, worker_id: str, compute_s: float, now_s: float) -> None:
        """A worker was given a prompt."""
        self._num.add(worker_id, 1.0, now_s)
        self._work_s.add(worker_id, compute_s, now_s)

    def forget(self, worker_id: str, now_s: float) -> None:
        """Drop a worker that has left."""
        self._num.forget(worker_id, now_s)
        self._work_s.forget(worker_id, now_s)

    def rate(self, now_s: float) -> float:
        """Prompts a second that a worker receives, and more where these delay others in turn."""
        busy = min(MOST_BUSY, self._work_s.mean(now_s) / MEMORY_S)
        return self._num.mean(now_s) / MEMORY_S / (1 - busy)
