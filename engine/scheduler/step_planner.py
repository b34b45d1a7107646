"""Plans one step: the tokens, seats and pages that a batching policy gives to sequences.

A planner reads the queues and the ledgers and never changes them. It counts the worst case: all pages of the
plan are available when the plan is applied to the same state.

- `StepPlanner` counts the rest of the step while a policy schedules, admits and preempts.
- `PressureMode` is the behaviour of steps while the cluster is overloaded.
- `CostCap` bounds how long a scheduling key beyond its share delays the others.

preemption.py chooses the sequences that give pages when pages are short, and counts the pages of each
scheduling key.
"""

from collections import Counter
from collections.abc import Sequence as Ordered
from functools import cached_property
from math import ceil, inf, sqrt
from typing import Final, NamedTuple

from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.scheduler.preemption import HeldPages, PreemptionCandidates
from baton.engine.scheduler.sequence import Drafter, Plan, Sequence, SequenceKey, SequenceQueues, rank_of
from baton.fair_queue import DecayedShares, Share

HEADROOM_TOKENS: Final = 16  # each running sequence can grow by this much before a newcomer takes its pages


# Pressure mode.

CHUNK_DIVISOR: Final = 4  # prompts get at most this part of a step in small-chunks mode
LOW_WATER: Final = 0.1  # of all pages


class PressureMode(NamedTuple):
    """The behaviour of steps while the cluster is overloaded.

    small_chunks: while sequences decode, prompts get at most a quarter of a step, so that no running answer
    waits long for its next token. Chunks change no token. makes_room: while few pages are left and a better
    class runs, running sequences of the lowest class give their pages, the longest first. No sequence of that
    class is admitted that would leave few pages.
    """

    small_chunks: bool = False
    makes_room: bool = False


# Cost cap.

# The largest cost of an over-share key's tokens in a step, as a multiple of a full step at context length 0.
# A lower value cuts long prompts of that key into more steps; a higher value delays the other keys longer.
MAX_STRETCH: Final = 2.0


class CostCap:
    """Caps how long one step of an over-share scheduling key delays the other keys.

    Each token attends to all tokens before it, so a step full of the last tokens of a long prompt takes
    several times as long as a step of first tokens. Tokens of a key beyond its share therefore take as much
    of a step's budget as they cost, divided by MAX_STRETCH. Costs are counted in first tokens.
    """

    def __init__(self, shares: DecayedShares, attention_mlp_crossover: float) -> None:
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

    `budget` is the number of tokens left in the step, `available` the number of pages left, and `seats` the
    number of sequences that may still join. One health check may join beyond them, so that a worker whose
    seats are all taken answers it; `seats` is -1 then.
    """

    def __init__(
        self,
        queues: SequenceQueues,
        cache: PrefixCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        pressure_mode: PressureMode,
        cost_cap: CostCap,
        num_batches: int = 1,
    ) -> None:
        """num_batches: see Scheduler."""
        self.queues = queues
        self.budget = max_num_batched_tokens
        self.seats = max_num_seqs - queues.num_running
        self.pressure_mode = pressure_mode
        self.num_padded_tokens = 0
        self._cost_cap = cost_cap
        self._max_decodes = ceil(queues.num_running / num_batches)
        self._cache = cache
        self._pool = cache.pool
        self.available = cache.pool.num_available
        self._tracks_keys = queues.shares.are_several or queues.have_quotas
        # Scheduling keys without room in their quotas for the next sequence.
        self._full_keys: set[str] = set()
        self._admits = True  # until a sequence does not fit, or preemption frees pages for another one
        self._decodes: dict[SequenceKey, int] = {}
        self._drafts: dict[SequenceKey, Ordered[int]] = {}
        self._chunks: dict[SequenceKey, int] = {}
        self._page_needs: dict[SequenceKey, int] = {}
        # sequence -> (first token to compute, pages it starts with)
        self._admitted: dict[SequenceKey, tuple[int, int]] = {}
        self._preempted: dict[SequenceKey, None] = {}
        self._lacking: tuple[Sequence, int] | None = None  # found no room, and the pages that it wants
        self._num_leaving = 0  # running sequences that this plan preempts
        self._freed: set[int] = set()  # pages without a holder after the preemptions
        self._claimed: set[int] = set()  # cached pages that admitted sequences will share
        # Pages that running prefills will still ask for.
        self._committed = sum(map(self._num_missing_before, queues.prefilling.values()))

    @property
    def _headroom_pages(self) -> int:
        """Pages kept free for the growth of each running sequence."""
        return self._pool.pages_for(HEADROOM_TOKENS)

    # Created on first use: only shortage needs them.

    @cached_property
    def _held(self) -> HeldPages:
        return HeldPages(self.queues, self._pool)

    @cached_property
    def _released(self) -> Counter[int]:
        """Page -> owners that the preemptions remove."""
        return Counter()

    @cached_property
    def _candidates(self) -> PreemptionCandidates:
        return PreemptionCandidates(self.queues, self._pool, self._held, self._admitted, self._preempted)

    # Running sequences.

    def schedule_decodes(self) -> int:
        """Give every decode its token and, when its last page is full, a page; return how many run.

        A pipeline runs the decodes that have waited longest and leaves the rest to the next steps. When a
        decode gets no page, one of the rest runs in its place: otherwise no step in flight might ever free a
        page.
        """
        # Without shortage, what follows up to the first return is all that planning a decode step costs.
        decodes, page_size = self.queues.decodes, self._pool.page_size
        sequences = decodes.sequences[: self._max_decodes]
        at_page_end = [sequences[index] for index in decodes.page_starts if index < len(sequences)]
        full = [s for s in at_page_end if s.num_computed_tokens == len(s.page_table) * page_size]
        has_pages = len(full) <= self.available
        has_pages = has_pages and (not self.queues.have_quotas or self._held.allow_page_each(full))
        if has_pages and len(sequences) <= self.budget and not self._preempted:
            is_whole = len(sequences) == len(decodes.sequences)
            self._decodes = decodes.lengths.copy() if is_whole else {each.key: 1 for each in sequences}
            self.budget -= len(sequences)
            self._page_needs.update({sequence.key: 1 for sequence in full})
            self.available -= len(full)
            if self._tracks_keys:
                for sequence in full:
                    self._held.add(sequence.share, 1)
            return len(sequences)
        order, others = self._held.preemption_order, decodes.sequences[len(sequences) :]
        for sequence in (*sorted(sequences, key=order), *sorted(others, key=order)):
            if not self.budget or len(self._decodes) == self._max_decodes:
                break
            if not self.is_preempted(sequence) and self._find_pages(sequence, 1):
                self._take_pages(sequence, 1)
                self._decodes[sequence.key] = 1
                self.budget -= 1
        return len(self._decodes)

    def schedule_drafts(self, drafter: Drafter) -> None:
        """Lengthen decodes by drafts, with the budget and the pages that nothing else of this step wants."""
        decodes = [self.queues.by_key[key] for key in self._decodes]
        decodes = [each for each in decodes if not each.needs_prompt_logprobs]
        if not decodes:
            return
        drafts = drafter.propose(decodes, sum(self._decodes.values()) + sum(self._chunks.values()))
        for key, token_ids in drafts.items():
            sequence = self.queues.by_key[key]
            num_pages = self.available - self._committed - self._headroom()
            if self.queues.have_quotas:
                num_pages = self._held.limit(sequence.share, num_pages)
            num_pages = self._num_held(sequence) + max(0, num_pages)
            num_tokens = min(
                len(token_ids),
                self.budget,
                num_pages * self._pool.page_size - sequence.num_tokens,
                sequence.max_num_tokens - sequence.num_tokens - 1,
            )
            if num_tokens < 1:
                continue
            self._take_pages(sequence, 1 + num_tokens)
            self._drafts[key] = token_ids[:num_tokens]
            self._decodes[key] += num_tokens
            self.budget -= num_tokens

    def prefills(self) -> list[Sequence]:
        """The running sequences that lack the KV of more than one token, best rank first."""
        return sorted((s for s in self.queues.prefilling.values() if not self.is_preempted(s)), key=rank_of)

    def remaining(self, sequence: Sequence) -> int:
        """Tokens still to compute after this plan; an admitted sequence starts after its cached prefix."""
        return sequence.num_tokens - self._end(sequence)

    def num_scheduled(self, sequence: Sequence) -> int:
        """Prompt tokens that this plan computes."""
        return self._chunks.get(sequence.key, 0)

    def schedule_prefill(self, sequence: Sequence, num_tokens: int) -> int:
        """Schedule up to `num_tokens` more tokens of a running or admitted sequence; return how many.

        Fewer when pages are short. Only a sequence that could not advance at all preempts others.
        """
        share, start = sequence.share, self._end(sequence)
        num_tokens = min(
            self._cost_cap.most(share, start, min(num_tokens, self.budget)), self.remaining(sequence)
        )
        if num_tokens < 1 or self.is_preempted(sequence) or not self._find_pages(sequence, 1):
            return 0
        num_pages = self._held.limit(share, self.available) if self.queues.have_quotas else self.available
        num_pages += self._num_held(sequence)
        num_tokens = min(num_tokens, num_pages * self._pool.page_size - start)
        self._committed -= self._take_pages(sequence, num_tokens)
        self._chunks[sequence.key] = self._chunks.get(sequence.key, 0) + num_tokens
        self.budget -= self._cost_cap.price(share, start, num_tokens, self.budget)
        return num_tokens

    # Waiting sequences.

    def may_admit(self, sequence: Sequence) -> bool:
        """Return whether this waiting sequence may still get a seat."""
        return self._admits and self.seats >= (0 if sequence.is_health_check else 1)

    def admit(self, sequence: Sequence, num_tokens: int = 0) -> bool:
        """Give a seat to a waiting sequence if it fits beside the needs of the running sequences.

        Once a sequence does not fit, no other is admitted. num_tokens: the length that the sequence may grow
        to; all its present tokens count in any case.
        """
        self._admits = self.may_admit(sequence) and self._seat(sequence, num_tokens)
        return self._admits

    def _seat(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give the sequence a seat if it fits, and preempt for it where no sequence runs."""
        if self.is_preempted(sequence):
            return False
        start, shared = self._prospect(sequence)
        claimed = [page for page in shared if self._is_claimable(page)]
        num_held = len(shared) + len(sequence.page_table)
        num_new = self._pool.num_missing(max(sequence.num_tokens, num_tokens), num_held)
        num_wanted = len(claimed) + num_new
        if num_wanted + self._committed + self._headroom() > self.available:
            self._lacking = sequence, num_wanted
            if not self._num_seated():
                for victim in self._candidates.of_waiting(sequence, num_wanted - self.available):
                    self._preempt_for_pages(victim)
            return False
        self._claimed.update(claimed)
        if self._tracks_keys:
            self._held.claim(sequence.share, shared)
        self.available -= len(claimed)
        self._committed += num_new
        self._admitted[sequence.key] = (start, num_held)
        self.seats -= 1
        return True

    def preempt_for(self, sequence: Sequence) -> bool:
        """Preempt others for the pages that `admit` has just missed; return whether the sequence has a seat.

        No later sequence is admitted then: it would take pages that others gave for this one.
        """
        # A page that a victim shared counts as wanted once the victim is gone: then one more may be needed.
        while self._lacking is not None and self._lacking[0] is sequence and self._num_seated():
            num_pages, self._lacking = self._lacking[1], None
            num_lacking = num_pages + self._committed + self._headroom() - self.available
            victims = self._candidates.of_newcomer(sequence, num_pages, num_lacking, self._headroom_pages)
            for victim in victims:
                self._preempt_for_pages(victim)
            if victims and self._seat(sequence, 0):
                return True
        return False

    # Page quotas.

    def enforce_quotas(self) -> None:
        """Preempt sequences of keys that hold more than their quotas; pulled pages can exceed one."""
        if self.queues.have_quotas:
            for share in list(self.queues.shares.active.values()):
                if self._held.room(share) < 0:
                    self._take_from(self._candidates.of_key(share), share, 0)

    def make_room_in_quota(self, sequence: Sequence, num_tokens: int = 0) -> bool:
        """Return whether the quota of the sequence's key has room for all its pages beside the key's running
        sequences. When none of these run, waiting sequences of the key are preempted to make room for the
        next plan.

        A sequence that finds no room delays only later sequences of its key. num_tokens: the length that the
        sequence may grow to.
        """
        share = sequence.share
        if not self.queues.have_quotas or self._held.room(share) == inf:
            return True
        if share.key in self._full_keys:
            return False
        _, shared = self._prospect(sequence)
        num_missing = self._num_missing(sequence, max(num_tokens, sequence.num_tokens))
        num_pages = max(0, num_missing - len(shared)) + self._held.num_new(share, shared)
        seated = [each for each in self._seated() if each.share is share]
        growth = (self._num_missing(each, each.num_tokens) + self._headroom_pages for each in seated)
        if num_pages + sum(growth) <= self._held.room(share):
            return True
        self._full_keys.add(share.key)
        if not seated:
            self._take_from(self._candidates.of_same_key(sequence), share, num_pages)
        return False

    def _take_from(self, candidates: Ordered[Sequence], share: Share, num_pages: int) -> bool:
        """Preempt candidates until the key's quota has room for `num_pages` pages; return whether it has."""
        for candidate in candidates:
            if num_pages <= self._held.room(share):
                break
            self.preempt(candidate)
        return num_pages <= self._held.room(share)

    # Pressure mode.

    def relieve_pressure(self) -> None:
        """Preempt sequences of the lowest class until the low-water mark is free."""
        num_lacking = int(self._pool.num_pages * LOW_WATER) - self.available
        if num_lacking > 0:
            for victim in self._candidates.of_lowest_class(num_lacking):
                self.preempt(victim)

    def leaves_low_water(self, sequence: Sequence) -> bool:
        """Return True when admitting a waiting sequence leaves the low-water mark free, or the sequence
        has the best class."""
        if all(each.scheduling_class >= sequence.scheduling_class for each in self._seated()):
            return True
        num_left = self.available - self._num_missing(sequence, sequence.num_tokens)
        return num_left >= int(self._pool.num_pages * LOW_WATER)

    # Preemption.

    def is_preempted(self, sequence: Sequence) -> bool:
        """True when this plan preempts the sequence."""
        return sequence.key in self._preempted

    def preempt(self, sequence: Sequence) -> None:
        """Take all pages of a sequence that runs, or waits with pages that it has brought."""
        key = sequence.key
        self.budget += self._decodes.pop(key, 0) + self._chunks.pop(key, 0)
        num_taken = self._page_needs.pop(key, 0)
        self.available += num_taken
        if self._tracks_keys:
            self._held.add(sequence.share, -num_taken)
            self._held.release(sequence)
        if key in self.queues.prefilling:
            self._committed -= self._num_missing_before(sequence) - num_taken
        self._preempted[key] = None
        if sequence.is_running:
            self._num_leaving += 1
            self.seats += 1
        for page in sequence.page_table:
            self._released[page] += 1
            if self._pool.is_freed_by(page, self._released[page]):
                self._freed.add(page)
                self.available += 1

    # The result.

    def finish(self, wait_s: float | None) -> Plan:
        """The plan of everything that was scheduled, admitted and preempted."""
        scheduled, num_decodes = self._decodes, len(self._decodes)
        if self._chunks or self._drafts:
            chunks = self._decodes | self._chunks
            scheduled = {key: num for key, num in chunks.items() if num == 1}
            num_decodes = len(scheduled)
            scheduled |= {key: chunks[key] for key in self._drafts}
            scheduled |= self._chunks
        return Plan(
            scheduled=scheduled,
            num_decodes=num_decodes,
            is_pure_decode=not (self._chunks or self._drafts),
            drafts=self._drafts,
            page_needs=self._page_needs,
            admitted=tuple(self._admitted),
            preempted=tuple(self._preempted),
            num_padded_tokens=self.num_padded_tokens,
            wait_s=None if scheduled else wait_s,
        )

    def _prospect(self, sequence: Sequence) -> tuple[int, list[int]]:
        """(first token to compute, known pages to share) of a waiting sequence once it is admitted."""
        if sequence.page_table:
            return sequence.num_computed_tokens, []
        device_pages, host_keys = self._cache.match(sequence)
        return (len(device_pages) + len(host_keys)) * self._pool.page_size, device_pages

    def _num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that the sequence lacks for `num_tokens` tokens after this plan."""
        return self._pool.num_missing(num_tokens, self._num_held(sequence))

    def _seated(self) -> list[Sequence]:
        """All sequences that run after this plan."""
        running = [s for s in self.queues.running() if not self.is_preempted(s)]
        return running + [self.queues.by_key[key] for key in self._admitted]

    def _is_claimable(self, page: int) -> bool:
        return (self._pool.is_available(page) or page in self._freed) and page not in self._claimed

    def _headroom(self) -> int:
        return self._num_seated() * self._headroom_pages

    def _num_seated(self) -> int:
        return self.queues.num_running + len(self._admitted) - self._num_leaving

    def _find_pages(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make pages available for the next tokens of a running sequence, preempting others if needed.

        False: all candidates together free too few pages. The sequence then keeps its pages and waits. The
        best-ranked sequence always gets its pages, so every step advances some sequence.
        """
        need, share = self._num_new_pages(sequence, num_tokens), sequence.share
        lacks_quota = self.queues.have_quotas and need > self._held.room(share)
        if lacks_quota and not self._take_from(self._candidates.of_same_key(sequence), share, need):
            return False
        if need <= self.available:
            return True
        may_wait = bool(self._decodes or self._chunks or self.queues.in_flight)
        for victim in self._candidates.of_running(sequence, may_wait=may_wait):
            self._preempt_for_pages(victim)
            if need <= self.available:
                return True
        return False

    def _preempt_for_pages(self, victim: Sequence) -> None:
        self.preempt(victim)
        self._admits = False  # no newcomer takes these pages

    def _num_missing_before(self, sequence: Sequence) -> int:
        return self._pool.num_missing(sequence.num_tokens, len(sequence.page_table))

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
        return self._num_missing(sequence, self._end(sequence) + num_tokens)

    def _take_pages(self, sequence: Sequence, num_tokens: int) -> int:
        num_pages = self._num_new_pages(sequence, num_tokens)
        if num_pages:
            self._page_needs[sequence.key] = self._page_needs.get(sequence.key, 0) + num_pages
            self.available -= num_pages
            if self._tracks_keys:
                self._held.add(sequence.share, num_pages)
        return num_pages
