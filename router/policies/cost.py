"""The policy that knows costs: which pair of workers is cheapest for a prompt, in seconds (see
router/policies/costs.py).

Each worker is asked what the prompt would cost there: all of them, or, where there are very many, those that
hold most of it and some others by chance. Then the best of either role are combined.
"""

from collections.abc import Collection, Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import ClassVar, Final, TypeAlias

from baton.messages.control import PullSource
from baton.request import Request
from baton.router.in_flight import (
    EXPECTED_OUTPUT_TOKENS,
    Decoding,
    WorkerInFlight,
    num_kv_tokens,
    scheduling_class_of,
)
from baton.router.index.match import Holdings
from baton.router.index.prompt_keys import Family
from baton.router.policies.base import (
    NO_TURN,
    ClusterView,
    KnownWorkers,
    PolicyContext,
    RoutingChoice,
    TenantClaim,
)
from baton.router.policies.cost_model import DecayedSum, Speeds
from baton.router.policies.costs import (
    CandidateLoad,
    DecodeCandidate,
    FilledCandidate,
    PairCandidate,
    PrefillCandidate,
    PullCandidate,
    Select,
    WorkerPool,
    WorkerView,
    cheapest,
    fill,
    local,
    longest,
    remote,
)
from baton.router.policies.prompts_ahead import Claim, SchedulingClass

# One prompt as it would be at each worker: what is held there, what it would wait for and take.

MAX_SOURCES: Final = 2


class PromptView:
    def __init__(self, known: KnownWorkers, request: Request, load: CandidateLoad, now_s: float) -> None:
        self._known = known
        self._request = request
        self.load = load
        self._now_s = now_s
        self._scheduling_class = scheduling_class_of(request)
        self._found: dict[Family, tuple[bytes, Holdings]] = {}
        self._located: dict[str, PullSource | None] = {}
        self._yields: dict[SchedulingClass, bool] = {}  # to the prompt, if that is owed work

    def holders(self, side: WorkerPool, limit: int, first: WorkerView) -> list[WorkerView]:
        """At most so many of each family, and none that is left out holds more of the prompt."""
        found: list[WorkerView] = []
        for family in side.families:
            found += side.holders(family, self._holdings(family), limit, first)
        return found

    def keys(self, worker_view: WorkerView) -> bytes:
        """Of the prompt's pages, as this worker names them."""
        self._holdings(worker_view.family)
        return self._found[worker_view.family][0]

    def computers(self, stations: Sequence[WorkerView]) -> list[PrefillCandidate]:
        return [computer for computer, _, _ in self._at(stations)]

    def decoders(self, stations: Sequence[WorkerView]) -> list[DecodeCandidate]:
        load, decoders = self.load, []
        num_tokens_more = load.num_tokens + load.num_output_tokens
        for worker_view, (computer, account, speeds) in zip(stations, self._at(stations), strict=True):
            num_running = account.num_attempts + account.num_unknown
            num_tokens = account.num_tokens + account.num_unknown_tokens
            fixed_s, sequence_s, context_s, token_s = speeds.step.coefficients
            step_s = fixed_s + sequence_s * num_running + context_s * num_tokens
            share = (num_tokens + num_tokens_more) / worker_view.num_slots
            seats = (num_running + 1) / worker_view.max_num_seqs
            excess = (seats if seats > share else share) - 1.0
            room_s = excess * EXPECTED_OUTPUT_TOKENS * step_s if excess > 0.0 else 0.0
            token_harm_s = sequence_s + context_s * load.num_tokens
            harm_s = num_running * load.num_output_tokens * token_harm_s
            held_up, patience_s = self._held_up(account), inf
            if held_up.num and worker_view.max_num_batched_tokens:
                num_left = 0.5 * held_up.num_output_tokens / held_up.num  # of each, on average
                longest_s = step_s + token_s * worker_view.max_num_batched_tokens
                patience_s = max(0.0, num_left * longest_s - account.wait_s(self._now_s))
            join_s = room_s + 0.5 * step_s
            decoders.append(DecodeCandidate(computer, held_up.num, room_s, join_s, harm_s, patience_s))
        return decoders

    def _at(self, stations: Sequence[WorkerView]) -> list[tuple[PrefillCandidate, WorkerInFlight, Speeds]]:
        """Flat, as `decoders` is: it is asked for each worker that is compared."""
        account_of, speeds_of = self._known.in_flight.account, self._known.model.of
        family, found = None, []
        for worker_view in stations:
            account, speeds = account_of(worker_view.id), speeds_of(worker_view.id)
            if worker_view.family is not family:
                family = worker_view.family
                num_pages_at = self._holdings(family).num_pages
            num_held_tokens = num_pages_at(worker_view.slot_bit) * worker_view.page_size
            wait_s = self._wait_s(account, num_held_tokens) if account.num_computing else 0.0
            if account.num_unknown and worker_view.is_prefill:
                wait_s += account.num_unknown * speeds.mean_compute_s
            coefficients = speeds.prefill.coefficients
            computer = PrefillCandidate(
                worker_view.id, wait_s, num_held_tokens, coefficients, worker_view.kin
            )
            found.append((computer, account, speeds))
        return found

    def _wait_s(self, account: WorkerInFlight, num_held_tokens: int) -> float:
        load = self.load
        num_new_tokens = max(1, load.num_tokens - num_held_tokens)
        claim = Claim(self._scheduling_class, num_new_tokens, load.lead, load.lead_of)
        return account.wait_s(self._now_s) * account.prompts.part_before(claim)

    def _held_up(self, account: WorkerInFlight) -> Decoding:
        """Of those that decode there, who would wait for the prompt and has no less right to go on: all, but
        where its tenant is owed work, none of its class that is not, and none of a lower one.
        """
        yields, lead = self._yields, self.load.lead
        is_owed = lead is not None and lead < 0
        num, num_tokens = account.num_unknown, EXPECTED_OUTPUT_TOKENS * account.num_unknown
        for scheduling_class, decoding in account.decoding.items():
            if is_owed and scheduling_class not in yields:
                yields[scheduling_class] = self._yields_to_owed(scheduling_class)
            if not is_owed or not yields[scheduling_class]:
                num += decoding.num
                num_tokens += decoding.num_output_tokens
        return Decoding(num, num_tokens)

    def _yields_to_owed(self, scheduling_class: SchedulingClass) -> bool:
        own, lead_of = self._scheduling_class, self.load.lead_of
        if scheduling_class == own or scheduling_class.rank != own.rank or lead_of is None:
            return scheduling_class.rank > own.rank
        lead = lead_of(scheduling_class)
        return lead is not None and lead >= 0

    def sources(self, computers: Sequence[PrefillCandidate]) -> list[PullCandidate]:
        """Those that hold most of the prompt; expected pages count until `locate` was asked."""
        held = [each.num_held_tokens for each in computers]
        least = min(held)  # who holds no more than that has nothing that anybody wants
        able = [each for each, num in zip(computers, held, strict=True) if num > least]
        most = [(self._num_at(each), each.worker, each.kin) for each in able]
        most.sort(reverse=True)
        pulls_from = self._known.model.pulls_from
        return [
            PullCandidate(worker, num, pulls_from(worker), kin)
            for num, worker, kin in most[:MAX_SOURCES]
            if num
        ]

    def _num_at(self, computer: PrefillCandidate) -> int:
        if computer.worker not in self._located:
            return computer.num_held_tokens
        source = self._located[computer.worker]
        return 0 if source is None else source.num_tokens

    def locate(self, worker_view: WorkerView) -> PullSource | None:
        """None: it is expected to hold them, and has not said yet where."""
        if worker_view.id not in self._located:
            located = self._known.index.locate(worker_view.id, self.keys(worker_view))
            num_tokens = len(located.pages) * worker_view.page_size
            source = PullSource(worker_view.id, num_tokens, *located) if located.pages else None
            self._located[worker_view.id] = source
        return self._located[worker_view.id]

    def _holdings(self, family: Family) -> Holdings:
        found = self._found.get(family)
        if found is None:
            keys = self._known.keys.keys(family, self._request)
            found = self._found[family] = (keys, self._known.index.holdings(keys))
        return found[1]


class Spread:
    """How work is spread over workers, of late: most of it may go to few of them."""

    def __init__(self, memory_s: float, now_s: float) -> None:
        """memory_s: see Fading."""
        self._memory_s = memory_s
        self._given: dict[str, DecayedSum] = {}
        self._sum = DecayedSum(memory_s, now_s)
        self._squares = DecayedSum(memory_s / 2, now_s)  # of what each was given: they fade twice as fast

    def add(self, worker_id: str, amount: float, now_s: float) -> None:
        given = self._given.get(worker_id)
        if given is None:
            given = self._given[worker_id] = DecayedSum(self._memory_s, now_s)
        self._squares.add((2 * given.at(now_s) + amount) * amount, now_s)
        given.add(amount, now_s)
        self._sum.add(amount, now_s)

    def mean(self, now_s: float) -> float:
        """What a worker was given: the mean over all that was given, not over workers. A worker that was
        given little counts little, and one that was given nothing does not count.
        """
        total = self._sum.at(now_s)
        return self._squares.at(now_s) / total if total > 0.0 else 0.0

    def forget(self, worker_id: str, now_s: float) -> None:
        """It is gone."""
        if self._given.pop(worker_id, None) is None:
            return
        left = [each.at(now_s) for each in self._given.values()]  # taken off, it would leave rounding errors
        self._sum, self._squares = DecayedSum(self._memory_s, now_s), DecayedSum(self._memory_s / 2, now_s)
        self._sum.add(sum(left), now_s)
        self._squares.add(sum(each * each for each in left), now_s)


MAX_COMPARED: Final = 16  # of a role; where there are more:
MAX_HOLDERS: Final = 3  # those of each way to name pages that hold most
NUM_DRAWN: Final = 4  # and of some by chance
NUM_KEPT: Final = 2  # those with the least to do, and more where fewer hold any; see decision 11
MAX_DRAWS: Final = 32  # for these, where some workers are left out
MAX_COMBINED: Final = 3  # of a role
MEMORY_S: Final = 30.0  # of how busy the cluster has been
BALANCE_S: Final = 300.0  # over which workers that cost the same are to be given the same
MOST_BUSY: Final = 0.9
EXPECTED_FOR_S: Final = 2.0  # after the prompt should be there

Rank: TypeAlias = float | tuple[float, float]  # one policy uses one of the two
_TOTAL_S: Final = attrgetter("total_s")


class CostPolicy:
    """Chooses the pair with the lowest predicted cost in seconds (router/policies/costs.py)."""

    uses_prefix_index: ClassVar[bool] = True
    weighs_local_prefill: ClassVar[bool] = True
    pulls_prefixes: ClassVar[bool] = True  # a worker may fetch a prefix from a peer

    def __init__(self, context: PolicyContext) -> None:
        self._clock, self._known, self._random = context
        self.select: Select = cheapest
        now_s = self._clock.now_s()
        self._crowd = _Crowd(now_s)
        self._owed_crowd = _Crowd(now_s)  # of tenants that were owed work: those alone wait behind each other
        self._tokens: dict[str, DecayedSum] = {}  # by worker

    def choose(self, request: Request, field: ClusterView, turn: TenantClaim = NO_TURN) -> RoutingChoice:
        """It is no more than an answer until `expect` says that it is followed."""
        now_s = self._clock.now_s()
        look = PromptView(self._known, request, self._load(request, turn, now_s), now_s)
        decoders = self._compared(look, field.decoders, field.left_out)
        fillers = self._compared(look, field.fillers, field.avoided)
        decoding, filling = look.decoders(decoders), look.computers(fillers)
        random, source = self._random.getrandbits(32), None
        for _ in range(MAX_SOURCES + 1):
            candidates = self._candidates(look, decoding, filling, field.partners)
            candidates = self._placed(candidates, turn)
            chosen = self.select(candidates, random, lambda worker_id: self._given(worker_id).at(now_s))
            source = look.locate(field.worker_view(chosen.source)) if chosen.source else None
            if not chosen.source or (source and source.num_tokens >= chosen.num_held_tokens):
                break  # else it is only expected to hold so much: look knows that now
        keys = {each: look.keys(field.worker_view(each)) for each in (chosen.prefill, chosen.decode) if each}
        is_known = self._known.index.is_known(chosen.computer)
        return RoutingChoice(
            chosen.decode, chosen.prefill, chosen, candidates, source, keys, not is_known, turn.is_owed
        )

    def expect(self, choice: RoutingChoice, num_tokens: int) -> None:
        """A prompt of so many tokens was sent there: its siblings find its pages, and what is there already
        stays young.
        """
        chosen, now_s = choice.candidate, self._clock.now_s()
        assert chosen is not None, "this policy predicts the cost of what it chooses"
        self._crowd.add(chosen.computer, chosen.filled.compute_s, now_s)
        if choice.is_owed:
            self._owed_crowd.add(chosen.computer, chosen.filled.compute_s, now_s)
        self._given(chosen.computer).add(num_tokens, now_s)
        ttl_s = chosen.terms.ttft_s + EXPECTED_FOR_S
        for worker_id, keys in choice.keys.items():
            self._known.index.expect(worker_id, keys, ttl_s)

    def forget(self, worker_id: str) -> None:
        """It is gone."""
        self._tokens.pop(worker_id, None)
        for crowd in (self._crowd, self._owed_crowd):
            crowd.forget(worker_id, self._clock.now_s())

    def rank(self, filled: FilledCandidate) -> Rank:
        """The sort key of a worker that could compute the prompt; the lowest is best."""
        return filled.total_s

    def _given(self, worker_id: str) -> DecayedSum:
        if worker_id not in self._tokens:
            self._tokens[worker_id] = DecayedSum(BALANCE_S, self._clock.now_s())
        return self._tokens[worker_id]

    def _load(self, request: Request, turn: TenantClaim, now_s: float) -> CandidateLoad:
        crowd = self._owed_crowd if turn.is_owed else self._crowd
        num_tokens = request.num_tokens
        num_output_tokens = num_kv_tokens(request) - num_tokens
        return CandidateLoad(num_tokens, num_output_tokens, crowd.rate(now_s), turn.lead, turn.lead_of)

    def _compared(self, look: PromptView, side: WorkerPool, left_out: Collection[str]) -> list[WorkerView]:
        """In an order that begins with another one each time: what comes first wins where all is alike."""
        stations, random = side.stations(self._known.index), self._random.random
        num = len(stations)
        if num <= MAX_COMPARED:
            first = int(random() * num)
            return _without(left_out, [*stations[first:], *stations[:first]])
        found = look.holders(side, MAX_HOLDERS + len(left_out), stations[int(random() * num)])
        drawn = [stations[int(random() * num)] for _ in range(MAX_DRAWS if left_out else NUM_DRAWN)]
        if left_out:
            found, drawn = _without(left_out, found), _without(left_out, drawn)[:NUM_DRAWN]
        drawn.sort(key=self._work)
        found = found[:MAX_HOLDERS]
        found += drawn[: MAX_HOLDERS + NUM_KEPT - len(found)]
        found = found or _without(left_out, stations)[:MAX_COMPARED]
        return list({worker_view.id: worker_view for worker_view in found}.values())

    def _work(self, worker_view: WorkerView) -> tuple[float, int]:
        account = self._known.in_flight.account(worker_view.id)
        return account.work_s, account.num_attempts

    def _candidates(
        self,
        look: PromptView,
        decoders: Sequence[DecodeCandidate],
        computers: Sequence[PrefillCandidate],
        partners: Mapping[str, Collection[str]],
    ) -> list[PairCandidate]:
        load, handoff_s_of = look.load, self._known.model.handoff_s
        there = [decoder.computer for decoder in decoders]
        sources = look.sources([*there, *computers]) if self.pulls_prefixes else []
        by_itself = map(local, fill(there, load, sources), decoders)
        candidates = sorted(by_itself, key=_TOTAL_S)[:MAX_COMBINED]
        best = sorted(fill(computers, load, sources), key=self.rank)[:MAX_COMBINED]
        for decoder in sorted(decoders, key=_TOTAL_S)[:MAX_COMBINED]:
            computer = decoder.computer
            decode, num_moved = computer.worker, max(0, load.num_tokens - computer.num_held_tokens)
            for each in best:
                prefill = each.computer.worker
                if prefill in partners[decode]:
                    candidates.append(remote(each, decoder, handoff_s_of(prefill, decode, num_moved)))
        return candidates

    def _placed(self, candidates: list[PairCandidate], turn: TenantClaim) -> list[PairCandidate]:
        """Without those that a decode worker has no place for and would compute itself, and without workers
        that others wait for, if any are left.

        Another rule of choice goes by nothing else.
        """
        if turn.has_place is None or self.select is not cheapest:
            return candidates
        wanted, has_place_at = turn.wanted, turn.has_place_at
        placed = [each for each in candidates if each.prefill or has_place_at(each.decode)]
        return [each for each in placed if each.computer not in wanted] or placed or candidates


class PrefixPolicy(CostPolicy):
    """Chooses the workers that hold most of the prompt, whatever else they have to do. Nothing is pulled."""

    weighs_local_prefill: ClassVar[bool] = False
    pulls_prefixes: ClassVar[bool] = False

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.select = longest

    def rank(self, filled: FilledCandidate) -> Rank:
        return -filled.num_held_tokens, filled.total_s


class _Crowd:
    """Prompts that were given out lately."""

    def __init__(self, now_s: float) -> None:
        self._num = Spread(MEMORY_S, now_s)
        self._work_s = Spread(MEMORY_S, now_s)

    def add(self, worker_id: str, compute_s: float, now_s: float) -> None:
        self._num.add(worker_id, 1.0, now_s)
        self._work_s.add(worker_id, compute_s, now_s)

    def forget(self, worker_id: str, now_s: float) -> None:
        self._num.forget(worker_id, now_s)
        self._work_s.forget(worker_id, now_s)

    def rate(self, now_s: float) -> float:
        """How many a second come to a worker, and more where these hold up others in turn."""
        busy = min(MOST_BUSY, self._work_s.mean(now_s) / MEMORY_S)
        return self._num.mean(now_s) / MEMORY_S / (1 - busy)


def _without(left_out: Collection[str], stations: Sequence[WorkerView]) -> list[WorkerView]:
    return [each for each in stations if each.id not in left_out] if left_out else list(stations)
