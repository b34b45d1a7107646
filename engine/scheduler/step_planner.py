"""Plans one step: the tokens, seats and pages that a batching policy gives out, with quotas and preemption.

A planner reads the queues and the ledgers and never changes them. It counts the worst case: everything that
it grants is available when the plan is applied to the same state.

- `StepPlanner` counts the rest of the step while a policy schedules, admits and preempts.
- `PreemptionCandidates` orders the sequences that give pages when pages are short.
- `PageQuotas` bounds the pages of each scheduling key.
- `PressureMode` is the behaviour of steps while the cluster is overloaded.
- `CostCap` bounds how long a scheduling key beyond its share delays the others.

With one scheduling key and no quota, sequences are ordered by rank alone.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterable
from functools import cached_property
from math import ceil, inf, sqrt
from typing import Final, NamedTuple, TypeAlias

from baton.engine.cache.page_pool import PagePool
from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.scheduler.sequence import (
    Plan,
    PreemptMode,
    Sequence,
    SequenceKey,
    SequenceQueues,
    SequenceRank,
    SequenceStatus,
    rank_of,
)
from baton.fair_queue import DecayedShares, Share

# (class, pages in excess of the share, recent work, rank), or the rank alone.
PreemptionOrder: TypeAlias = tuple[int, float, float, SequenceRank] | SequenceRank

HEADROOM_TOKENS: Final = 16  # each running sequence can grow by this much before a newcomer takes its pages


class HeldPages:
    """The pages that each scheduling key holds once the plan is applied, its share of them, and its quota.

    The share of a key is that of its weight among the keys with live sequences.
    """

    def __init__(self, queues: SequenceQueues, pool: PagePool) -> None:
        self.are_several = queues.shares.are_several
        self.have_quotas = queues.have_quotas
        self.are_tracked = self.are_several or self.have_quotas
        self._queues = queues
        self._pool = pool
        self._change: Counter[str] = Counter()  # scheduling key -> pages granted less pages taken by the plan
        self._claimed: set[tuple[str, int]] = set()  # (key, page) that the key uses because of the plan
        self._released: Counter[tuple[str, int]] = Counter()  # (key, page) -> users that the plan preempts

    def preemption_order(self, sequence: Sequence) -> PreemptionOrder:
        """The sequence with the greatest value gives its pages first.

        Lower classes come before higher ones. In a class, the key that is most over its share of the pages
        comes first, then the key with the most recent work; of one key, the worst rank. A key within its
        share therefore never gives pages to a key that is over its own.
        """
        if not self.are_several:
            return sequence.rank
        share = sequence.share
        return sequence.scheduling_class, self.excess(share), share.work, sequence.rank

    def num_pages(self, share: Share) -> int:
        """Pages that the key holds, or expects."""
        return self._pool.accounts.held(share.key) + self._change[share.key]

    def due(self, share: Share) -> float:
        """Pages that are the key's share of the pool."""
        return self._pool.num_pages * share.weight / self._queues.shares.total_weight

    def excess(self, share: Share, num_lost: int = 0) -> float:
        """Pages, divided by the weight, that the key holds beyond its share after losing `num_lost`; 0 if
        none.
        """
        return max(0.0, self.num_pages(share) - num_lost - self.due(share)) / share.weight

    def room(self, share: Share) -> float:
        """Pages that the key's quota leaves; negative when the key holds more."""
        return self._queues.max_pages(share.key) - self.num_pages(share)

    def take(self, share: Share, num_pages: int) -> None:
        """Grant fresh pages; a negative number takes a grant back."""
        if self.are_tracked:
            self._change[share.key] += num_pages

    def num_new(self, share: Share, pages: Iterable[int]) -> int:
        """The number of these pages that the key does not use yet."""
        return sum(1 for page in pages if not self._uses(share, page))

    def claim(self, share: Share, pages: Iterable[int]) -> None:
        """Let one of the key's sequences share known pages."""
        if self.are_tracked:
            for page in pages:
                self._change[share.key] += not self._uses(share, page)
                self._claimed.add((share.key, page))

    def release(self, sequence: Sequence) -> None:
        """Take all pages of the sequence's table."""
        if self.are_tracked:
            share = sequence.share
            for page in sequence.page_table:
                used = self._uses(share, page)
                self._released[share.key, page] += 1
                self._change[share.key] -= used and not self._uses(share, page)

    def _uses(self, share: Share, page: int) -> bool:
        key = share.key, page
        if key in self._claimed:
            return True
        return self._pool.accounts.num_users(self._pool.owners(page), share.key) > self._released[key]


# Preemption.


class PreemptionRates(NamedTuple):
    """Costs of preemption on this machine, measured by the engine."""

    recompute_s_per_token: float  # prefill time of one token
    swap_s_per_page: float  # one page, one way


def cheaper_mode(num_computed_tokens: int, num_pages: int, rates: PreemptionRates | None) -> PreemptMode:
    """The mode that costs fewer seconds until the sequence is back; recompute while nothing is measured.

    A swapped page crosses twice. Recompute needs no host memory and wins ties.
    """
    if rates is None:
        return PreemptMode.RECOMPUTE
    recompute_s = num_computed_tokens * rates.recompute_s_per_token
    swap_s = 2 * num_pages * rates.swap_s_per_page
    return PreemptMode.SWAP if swap_s < recompute_s else PreemptMode.RECOMPUTE


class PreemptionCandidates:
    """Lists the sequences that may give pages, the first to give them first. Preempts none.

    Two kinds of sequences hold pages: running ones, and waiting ones that brought pages with them. A waiting
    sequence may never run before a running one has ended, so it also gives pages to sequences that come after
    it.
    """

    def __init__(
        self,
        queues: SequenceQueues,
        pool: PagePool,
        held: HeldPages,
        admitted: Container[SequenceKey],
        preempted: Container[SequenceKey],
    ) -> None:
        """admitted, preempted: by the plan so far; neither gives anything more."""
        self._queues = queues
        self._pool = pool
        self._held = held
        self._admitted = admitted
        self._preempted = preempted

    def of_running(self, sequence: Sequence, *, may_wait: bool) -> list[Sequence]:
        """Candidates for a running sequence.

        may_wait: other sequences advance in this step, so waiting sequences of other keys keep their pages
        from a sequence that comes after them.
        """
        order = self._held.preemption_order
        own, spares = order(sequence), may_wait and self._held.are_several
        others = sorted(self._holders(), key=order, reverse=True)
        return [other for other in others if order(other) > own or not (spares or other.is_running)]

    def of_waiting(self, sequence: Sequence, num_lacking: int) -> list[Sequence]:
        """Candidates for a sequence that does not fit although none runs; empty if all together are too few.

        Then holders outside the scheduler have the rest, and will release it.
        """
        others = [other for other in self._waiting_with_pages() if other is not sequence]
        return self._enough(sorted(others, key=self._held.preemption_order, reverse=True), num_lacking)

    def of_newcomer(
        self, sequence: Sequence, num_pages: int, num_lacking: int, headroom_pages: int
    ) -> list[Sequence]:
        """Candidates for a sequence that does not fit beside the running ones; empty if together too few.

        These are sequences of lower classes and, if the newcomer's key stays within its share with
        `num_pages` more, sequences of keys over their shares. headroom_pages: kept free for each running
        sequence.
        """
        held, share = self._held, sequence.share
        is_due = held.num_pages(share) + num_pages <= held.due(share)
        num_lost = Counter[str]()
        candidates = []
        for other in sorted(self._holders(), key=held.preemption_order, reverse=True):
            is_over = is_due and held.excess(other.share, num_lost[other.share.key]) > 0
            same_class = other.scheduling_class == sequence.scheduling_class
            if other.scheduling_class > sequence.scheduling_class or (same_class and is_over):
                candidates.append(other)
                num_lost[other.share.key] += len(other.page_table)
        return self._enough(candidates, num_lacking, headroom_pages)

    def of_lowest_class(self, num_lacking: int) -> list[Sequence]:
        """Running sequences of the lowest class, the longest first; all if too few."""
        running = [s for s in self._queues.running() if s.key not in self._preempted]
        classes = {sequence.scheduling_class for sequence in running}
        if len(classes) < 2:
            return []
        lowest = [sequence for sequence in running if sequence.scheduling_class == max(classes)]
        lowest.sort(key=lambda sequence: len(sequence.page_table), reverse=True)
        return self._enough(lowest, num_lacking) or lowest

    def of_key(self, share: Share) -> list[Sequence]:
        """All holders of pages of one scheduling key, the worst rank first."""
        return sorted((s for s in self._holders() if s.share is share), key=rank_of, reverse=True)

    def of_same_key(self, sequence: Sequence) -> list[Sequence]:
        """Candidates for a sequence of a scheduling key that has reached its quota."""
        others = [other for other in self.of_key(sequence.share) if other is not sequence]
        return [other for other in others if other.rank > sequence.rank or not other.is_running]

    def _enough(
        self, candidates: list[Sequence], num_lacking: int, headroom_pages: int = 0
    ) -> list[Sequence]:
        """The first candidates that together free `num_lacking` pages, counting their headroom; else none."""
        num_owners = Counter[int]()
        for index, candidate in enumerate(candidates):
            num_owners.update(candidate.page_table)
            num_lacking -= sum(
                self._pool.is_freed_by(page, num_owners[page]) for page in candidate.page_table
            )
            num_lacking -= headroom_pages * candidate.is_running
            if num_lacking <= 0:
                return candidates[: index + 1]
        return []

    def _holders(self) -> list[Sequence]:
        running = [s for s in self._queues.running() if s.key not in self._preempted]
        return running + self._waiting_with_pages()

    def _waiting_with_pages(self) -> list[Sequence]:
        return [
            s
            for s in self._queues.waiting
            if s.page_table and s.key not in self._admitted and s.key not in self._preempted
        ]


class PageQuotas:
    """Keeps a plan within the page quotas: a key at its quota takes pages from its own sequences, or waits.

    A sequence that finds no room in its quota delays only sequences of the same key. Pages that the key uses
    outside the scheduler (incoming transfers, kept pages) count as well, and are released without the
    planner.
    """

    def __init__(self, planner: "StepPlanner", held: HeldPages, candidates: PreemptionCandidates) -> None:
        self._planner = planner
        self._held = held
        self._candidates = candidates
        self._full: set[str] = set()  # keys without room for their next sequence

    def enforce(self) -> None:
        """Preempt sequences of keys that hold more than their quotas, which brought pages can cause."""
        shares = self._planner.queues.shares.active.values()
        for share in [share for share in shares if self._held.room(share) < 0]:
            for victim in self._candidates.of_key(share):
                if self._held.room(share) < 0:
                    self._planner.drop(victim)

    def allow(self, sequence: Sequence, num_tokens: int = 0) -> bool:
        """Return True when all pages of a waiting sequence fit in the quota beside the running sequences
        of its key.

        num_tokens: the length that the sequence may grow to.
        """
        share = sequence.share
        if not self._held.have_quotas or self._held.room(share) == inf:
            return True
        if share.key in self._full:
            return False
        planner = self._planner
        _, shared = planner.prospect(sequence)
        num_missing = planner.num_missing(sequence, max(num_tokens, sequence.num_tokens))
        num_pages = max(0, num_missing - len(shared)) + self._held.num_new(share, shared)
        seated = [each for each in planner.seated() if each.share is share]
        num_needed = len(seated) * planner.headroom_pages
        num_needed += sum(planner.num_missing(each, each.num_tokens) for each in seated)
        if num_pages + num_needed <= self._held.room(share):
            return True
        self._full.add(share.key)
        if not seated:
            self._free(sequence, num_pages)
        return False

    def leave(self, sequence: Sequence, num_pages: int) -> bool:
        """Whether a running sequence may have so many pages, preempting others of its key if needed."""
        if not self._held.have_quotas or num_pages <= self._held.room(sequence.share):
            return True
        return self._free(sequence, num_pages)

    def leave_all(self, sequences: Collection[Sequence]) -> bool:
        """Whether each sequence may have a page without preemption."""
        if not self._held.have_quotas:
            return True
        needs = Counter(sequence.share for sequence in sequences)
        return all(num_pages <= self._held.room(share) for share, num_pages in needs.items())

    def most(self, share: Share, num_pages: int) -> int:
        """The part of `num_pages` that the key may have."""
        if not self._held.have_quotas:
            return num_pages
        return int(max(0, min(num_pages, self._held.room(share))))

    def _free(self, sequence: Sequence, num_pages: int) -> bool:
        for victim in self._candidates.of_same_key(sequence):
            if num_pages <= self._held.room(sequence.share):
                break
            self._planner.drop(victim)
        return num_pages <= self._held.room(sequence.share)


# Pressure mode.

CHUNK_DIVISOR: Final = 4  # prompts get at most this part of a step in small-chunks mode
LOW_WATER: Final = 0.1  # of all pages


class PressureMode(NamedTuple):
    """The behaviour of steps while the cluster is overloaded.

    small_chunks: while sequences decode, prompts get at most a quarter of a step, so that no running answer
    waits long for its next token. Chunks change no token. makes_room: while few pages are left and a better
    class runs, running sequences of the lowest class give their pages, the longest first: to the host tier if
    it has room, else their KV is computed again. No sequence of that class is admitted that would leave few
    pages.
    """

    small_chunks: bool = False
    makes_room: bool = False


NO_PRESSURE: Final = PressureMode()


# Cost cap.

# The cost of an over-share key's part of a step, in full steps of first tokens. A lower value cuts long
# prompts of that key into more steps; a higher value delays the other keys longer.
MAX_STRETCH: Final = 2.0


class CostCap:
    """Caps how long a step of a key beyond its share delays the sequences that come before it next.

    Each token attends to all tokens before it, so a step full of the last tokens of a long prompt takes
    several times as long as a step of first tokens. Tokens of a key beyond its share therefore take as much
    of a step's budget as they cost, divided by MAX_STRETCH. Costs are counted in first tokens.
    """

    def __init__(self, shares: DecayedShares, attention_mlp_crossover: float = inf) -> None:
        """attention_mlp_crossover: see `Model.attention_mlp_crossover`; inf: all tokens cost the same."""
        self._shares = shares
        self._crossover = attention_mlp_crossover

    def most(self, share: Share, start: int, budget: int) -> int:
        """The number of tokens from `start` on that fit in this budget; at least one."""
        limit = budget * MAX_STRETCH
        if self.cost(start, budget) <= limit or not self._shares.is_beyond_share(share):
            return budget
        # The positive n of n * (1 + (start + n / 2) / crossover) = limit
        half, wanted = self._crossover + start, 2 * self._crossover * limit
        return max(1, min(budget, int(wanted / (half + sqrt(half * half + wanted)))))

    def price(self, share: Share, start: int, num_tokens: int, budget: int) -> int:
        """The part of the budget that these tokens take."""
        price = ceil(self.cost(start, num_tokens) / MAX_STRETCH)
        if price <= num_tokens or not self._shares.is_beyond_share(share):
            return num_tokens
        return min(budget, price)

    def cost(self, start: int, num_tokens: int) -> float:
        """The cost of `num_tokens` tokens from `start` on."""
        return num_tokens * (1 + (start + num_tokens / 2) / self._crossover)


class StepPlanner:
    """The plan of one step while a policy fills it.

    `budget` is the number of tokens left in the step, `seats` the number of sequences that may still join,
    `available` the number of pages left.
    """

    def __init__(
        self,
        queues: SequenceQueues,
        cache: PrefixCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        rates: PreemptionRates | None = None,
        pressure_mode: PressureMode = NO_PRESSURE,
        cost_cap: CostCap | None = None,
    ) -> None:
        """rates: None preempts by recomputing. cost_cap: None lets all tokens cost the same."""
        self.queues = queues
        self.budget = max_num_batched_tokens
        self.seats = max_num_seqs - queues.num_running
        self.pressure_mode = pressure_mode
        self.num_padded_tokens = 0
        self._rates = rates
        self._cost_cap = cost_cap or CostCap(queues.shares)
        self._cache = cache
        self._pool = cache.pool
        self.available = cache.pool.num_available
        self._host_available = cache.host.num_available
        self._tracks_keys = queues.shares.are_several or queues.have_quotas
        self._may_admit = True
        self._decodes: dict[SequenceKey, int] = {}
        self._chunks: dict[SequenceKey, int] = {}
        self._page_needs: dict[SequenceKey, int] = {}
        # sequence -> (first token to compute, pages it starts with)
        self._admitted: dict[SequenceKey, tuple[int, int]] = {}
        self._preempted: dict[SequenceKey, PreemptMode] = {}
        self._lacking: tuple[Sequence, int] | None = None  # found no room, and the pages that it wants
        self._preempted_for: SequenceKey | None = None
        self._released: Counter[int] = Counter()  # page -> owners that the preemptions remove
        self._num_leaving = 0  # running sequences that this plan preempts
        self._freed: set[int] = set()  # pages without a holder after the preemptions
        self._claimed: set[int] = set()  # cached pages that admitted sequences will share
        # Pages that running prefills will still ask for.
        self._committed = sum(map(self._num_missing_pages, queues.prefilling.values()))

    @property
    def headroom_pages(self) -> int:
        """Pages kept free for the growth of each running sequence."""
        return self._pool.pages_for(HEADROOM_TOKENS)

    # Made when something is short, which is rare.

    @cached_property
    def quotas(self) -> PageQuotas:
        return PageQuotas(self, self._held, self._candidates)

    @cached_property
    def _held(self) -> HeldPages:
        return HeldPages(self.queues, self._pool)

    @cached_property
    def _candidates(self) -> PreemptionCandidates:
        return PreemptionCandidates(self.queues, self._pool, self._held, self._admitted, self._preempted)

    # Running sequences.

    def schedule_decodes(self) -> int:
        """Give every decode its token and, when its last page is full, a page; return how many run.

        Without shortage this is the whole cost of a decode step: one pass, one dictionary.
        """
        decoding, page_size = self.queues.decoding, self._pool.page_size
        at_page_end = [s for s in decoding.values() if not s.num_computed_tokens % page_size]
        has_pages = len(at_page_end) <= self.available
        has_pages = has_pages and (not self._tracks_keys or self.quotas.leave_all(at_page_end))
        if has_pages and len(decoding) <= self.budget and not self._preempted:
            self._decodes = dict.fromkeys(decoding, 1)
            self.budget -= len(decoding)
            for sequence in at_page_end:
                self._take_pages(sequence, 1)
            return len(decoding)
        for sequence in sorted(decoding.values(), key=self._held.preemption_order):
            if self.budget and not self.is_preempted(sequence) and self._find_pages(sequence, 1):
                self._take_pages(sequence, 1)
                self._decodes[sequence.key] = 1
                self.budget -= 1
        return len(self._decodes)

    def prefills(self) -> list[Sequence]:
        """The running sequences that lack the KV of more than one token, best rank first."""
        return sorted((s for s in self.queues.prefilling.values() if not self.is_preempted(s)), key=rank_of)

    def remaining(self, sequence: Sequence) -> int:
        """Tokens still to compute after this plan; an admitted sequence starts after its cached prefix."""
        return sequence.num_tokens - self._end(sequence)

    def granted(self, sequence: Sequence) -> int:
        """Prompt tokens that this plan computes."""
        return self._chunks.get(sequence.key, 0)

    def grant(self, sequence: Sequence, num_tokens: int) -> int:
        """Schedule up to `num_tokens` more tokens of a running or admitted sequence; return how many.

        Fewer when pages are short. Only a sequence that could not advance at all preempts others.
        """
        share, start = sequence.share, self._end(sequence)
        num_tokens = min(
            self._cost_cap.most(share, start, min(num_tokens, self.budget)), self.remaining(sequence)
        )
        if num_tokens < 1 or self.is_preempted(sequence) or not self._find_pages(sequence, 1):
            return 0
        num_pages = self.quotas.most(share, self.available) if self._tracks_keys else self.available
        num_pages += self._num_held(sequence)
        num_tokens = min(num_tokens, num_pages * self._pool.page_size - start)
        self._committed -= self._take_pages(sequence, num_tokens)
        self._chunks[sequence.key] = self._chunks.get(sequence.key, 0) + num_tokens
        self.budget -= self._cost_cap.price(share, start, num_tokens, self.budget)
        return num_tokens

    # Waiting sequences.

    def admit(self, sequence: Sequence, num_tokens: int = 0) -> bool:
        """Give a seat to a waiting sequence if it fits beside the needs of the running sequences.

        num_tokens: the length that the sequence may grow to; all its present tokens count in any case.
        """
        if not self.seats or not self._may_admit or self.is_preempted(sequence):
            return False
        start, shared = self.prospect(sequence)
        claimed = [page for page in shared if self._is_claimable(page)]
        num_held = len(shared) + len(sequence.page_table)
        num_new = max(0, self._pool.pages_for(max(sequence.num_tokens, num_tokens)) - num_held)
        num_wanted = len(claimed) + num_new
        if num_wanted + self._committed + self._headroom() > self.available:
            self._lacking = sequence, num_wanted
            if not self._num_seated():
                for victim in self._candidates.of_waiting(sequence, num_wanted - self.available):
                    self._take_back(victim)
            return False
        self._claimed.update(claimed)
        if self._tracks_keys:
            self._held.claim(sequence.share, shared)
        self.available -= len(claimed)
        self._committed += num_new
        self._admitted[sequence.key] = (start, num_held)
        self.seats -= 1
        return True

    def preempt_for(self, sequence: Sequence) -> None:
        """Preempt others, for the next plan, to free the pages that `admit` has just missed."""
        if self._lacking is None or self._lacking[0] is not sequence or not self._num_seated():
            return
        num_pages = self._lacking[1]
        num_lacking = num_pages + self._committed + self._headroom() - self.available
        for victim in self._candidates.of_newcomer(sequence, num_pages, num_lacking, self.headroom_pages):
            self._take_back(victim)
            self._preempted_for = sequence.key

    # Pressure mode.

    def relieve_pressure(self) -> None:
        """Preempt sequences of the lowest class until the low-water mark is free."""
        num_lacking = int(self._pool.num_pages * LOW_WATER) - self.available
        if num_lacking > 0:
            for victim in self._candidates.of_lowest_class(num_lacking):
                self.preempt(victim, PreemptMode.SWAP)

    def leaves_low_water(self, sequence: Sequence) -> bool:
        """Return True when admitting a waiting sequence leaves the low-water mark free, or the sequence
        has the best class."""
        if all(each.scheduling_class >= sequence.scheduling_class for each in self.seated()):
            return True
        num_left = self.available - self.num_missing(sequence, sequence.num_tokens)
        return num_left >= int(self._pool.num_pages * LOW_WATER)

    # Preemption.

    def is_preempted(self, sequence: Sequence) -> bool:
        """Whether this plan preempts the sequence."""
        return sequence.key in self._preempted

    def drop(self, victim: Sequence) -> None:
        """Preempt a sequence in the cheaper mode."""
        num_computed = victim.num_computed_tokens
        self.preempt(victim, cheaper_mode(num_computed, self._pool.pages_for(num_computed), self._rates))

    def preempt(self, sequence: Sequence, mode: PreemptMode) -> None:
        """Take all pages of a sequence that runs, or waits with pages that it has brought.

        Without host pages for a swap, the sequence recomputes.
        """
        key = sequence.key
        self.budget += self._decodes.pop(key, 0) + self._chunks.pop(key, 0)
        num_taken = self._page_needs.pop(key, 0)
        self.available += num_taken
        self._held.take(sequence.share, -num_taken)
        self._held.release(sequence)
        if key in self.queues.prefilling:
            self._committed -= self._num_missing_pages(sequence) - num_taken
        num_pages = self._pool.pages_for(sequence.num_computed_tokens)
        if not 0 < num_pages <= self._host_available:
            mode = PreemptMode.RECOMPUTE
        if mode is PreemptMode.SWAP:
            self._host_available -= num_pages
            self._may_admit = False  # the swap may evict the host pages that a newcomer would start with
        self._preempted[key] = mode
        if sequence.is_running:
            self._num_leaving += 1
            self.seats += 1
        for page in sequence.page_table:
            self._released[page] += 1
            if self._pool.is_freed_by(page, self._released[page]):
                self._freed.add(page)
                self.available += 1

    # The result.

    def finish(self, version: int, wait_s: float | None) -> Plan:
        """The plan of everything that was granted, admitted and preempted."""
        scheduled, num_decodes = self._decodes, len(self._decodes)
        if self._chunks:
            singles = {key: num for key, num in self._chunks.items() if num == 1}
            scheduled = scheduled | singles | self._chunks
            num_decodes += len(singles)
        return Plan(
            version=version,
            scheduled=scheduled,
            num_decodes=num_decodes,
            page_needs=self._page_needs,
            admitted=tuple(self._admitted),
            preempted=self._preempted,
            num_padded_tokens=self.num_padded_tokens,
            wait_s=None if scheduled else wait_s,
            preempted_for=self._preempted_for,
        )

    # Questions of quotas.

    def prospect(self, sequence: Sequence) -> tuple[int, list[int]]:
        """(first token to compute, known pages to share) of a waiting sequence once it is admitted."""
        if sequence.page_table:
            return sequence.num_computed_tokens, []
        if sequence.status is SequenceStatus.SWAPPED:
            return sequence.num_computed_tokens, self._cache.match_swapped(sequence).device_pages
        match = self._cache.match(sequence)
        return match.num_pages * self._pool.page_size, match.device_pages

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that the sequence lacks for `num_tokens` tokens after this plan."""
        return max(0, self._pool.pages_for(num_tokens) - self._num_held(sequence))

    def seated(self) -> list[Sequence]:
        """All sequences that run after this plan."""
        running = [s for s in self.queues.running() if not self.is_preempted(s)]
        return running + [self.queues.by_key[key] for key in self._admitted]

    def _is_claimable(self, page: int) -> bool:
        return (self._pool.is_available(page) or page in self._freed) and page not in self._claimed

    def _headroom(self) -> int:
        return self._num_seated() * self.headroom_pages

    def _num_seated(self) -> int:
        return self.queues.num_running + len(self._admitted) - self._num_leaving

    def _find_pages(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make pages available for the next tokens of a running sequence, preempting others if needed.

        False: all candidates together free too few pages. The sequence then keeps its pages and waits. The
        best-ranked sequence always gets its pages, so every step advances some sequence.
        """
        need = self._num_new_pages(sequence, num_tokens)
        if self._tracks_keys and not self.quotas.leave(sequence, need):
            return False
        if need <= self.available:
            return True
        may_wait = bool(self._decodes or self._chunks)
        for victim in self._candidates.of_running(sequence, may_wait=may_wait):
            self._take_back(victim)
            if need <= self.available:
                return True
        return False

    def _take_back(self, victim: Sequence) -> None:
        self.drop(victim)
        self._may_admit = False

    def _num_missing_pages(self, sequence: Sequence) -> int:
        return max(0, self._pool.pages_for(sequence.num_tokens) - len(sequence.page_table))

    def _end(self, sequence: Sequence) -> int:
        """The first token that is not computed after this plan."""
        admitted = self._admitted.get(sequence.key)
        start = admitted[0] if admitted else sequence.num_computed_tokens
        return start + self._chunks.get(sequence.key, 0)

    def _num_held(self, sequence: Sequence) -> int:
        admitted = self._admitted.get(sequence.key)
        num_held = admitted[1] if admitted else len(sequence.page_table)
        return num_held + self._page_needs.get(sequence.key, 0)

    def _num_new_pages(self, sequence: Sequence, num_tokens: int) -> int:
        return self.num_missing(sequence, self._end(sequence) + num_tokens)

    def _take_pages(self, sequence: Sequence, num_tokens: int) -> int:
        num_pages = self._num_new_pages(sequence, num_tokens)
        if num_pages:
            self._page_needs[sequence.key] = self._page_needs.get(sequence.key, 0) + num_pages
            self.available -= num_pages
            if self._tracks_keys:
                self._held.take(sequence.share, num_pages)
        return num_pages
