"""The books of one plan while a policy fills it in: tokens, seats and pages that are left.

A draft reads the queues and the ledgers and never changes them. It accounts for the worst case: what it
grants can be had when the plan is applied to the same state.
"""

from collections import Counter
from collections.abc import Collection
from functools import cached_property
from math import ceil, inf, sqrt
from typing import Final, NamedTuple

from baton.engine.cache.page_pool import PagePool
from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.scheduler.accounts import Account, Accounts
from baton.engine.scheduler.plan import Plan, PreemptMode
from baton.engine.scheduler.preemption import (
    AccountBooks,
    PreemptionCandidates,
    PreemptionRates,
    cheaper_mode,
)
from baton.engine.scheduler.queues import SequenceQueues, rank_of
from baton.engine.scheduler.sequence import Sequence, SequenceKey, SequenceStatus
from baton.messages.status import OverloadLevel


class PageQuotas:
    """Holds a plan to the quotas of pages: an account that has no more to get takes them from itself, or
    waits.

    A sequence that finds no room in its quota holds up nothing but what is on its account. What else an
    account uses in the ledger, for prompts that are under way or pages that are kept, counts as well, and
    ends by itself.
    """

    def __init__(
        self,
        planner: "StepPlanner",
        books: AccountBooks,
        candidates: PreemptionCandidates,
        headroom_pages: int,
    ) -> None:
        """headroom_pages: that each running sequence can grow by before a newcomer takes them."""
        self._planner = planner
        self._books = books
        self._candidates = candidates
        self._headroom_pages = headroom_pages
        self._held_back: set[str] = set()  # accounts that have no room for the next of their sequences

    def enforce(self) -> None:
        """Accounts that hold more than their quota, as pages may be brought, give the rest back."""
        for account in self._books.accounts_over_quota():
            for victim in self._candidates.on_account(account):
                if self._books.room(account) < 0:
                    self._planner.drop(victim)

    def allow(self, sequence: Sequence, num_tokens: int = 0) -> bool:
        """Whether the account may hold all pages of a waiting sequence, even with the `num_tokens` it may
        grow to, beside what its running ones need."""
        account = sequence.account
        if not self._books.have_quotas or account.max_pages == inf:
            return True
        if account.name in self._held_back:
            return False
        _, shared = self._planner.prospect(sequence)
        num_missing = self._planner.num_missing(sequence, max(num_tokens, sequence.num_tokens))
        num_pages = max(0, num_missing - len(shared)) + self._books.num_new(account, shared)
        seated = [each for each in self._planner.seated() if each.account is account]
        num_needed = len(seated) * self._headroom_pages
        num_needed += sum(self._planner.num_missing(each, each.num_tokens) for each in seated)
        if num_pages + num_needed <= self._books.room(account):
            return True
        self._held_back.add(account.name)
        if not seated:
            self._free(sequence, num_pages)
        return False

    def leave(self, sequence: Sequence, num_pages: int) -> bool:
        """Whether the account may have so many pages for a running sequence, if others on it give theirs."""
        if not self._books.have_quotas or num_pages <= self._books.room(sequence.account):
            return True
        return self._free(sequence, num_pages)

    def leave_all(self, sequences: Collection[Sequence]) -> bool:
        """Whether each of them may have a page, with nothing to be done for it."""
        if not self._books.have_quotas:
            return True
        needs = Counter(sequence.account for sequence in sequences)
        return all(num_pages <= self._books.room(account) for account, num_pages in needs.items())

    def most(self, account: Account, num_pages: int) -> int:
        """Of so many pages those that the account may have."""
        if not self._books.have_quotas:
            return num_pages
        return int(max(0, min(num_pages, self._books.room(account))))

    def _free(self, sequence: Sequence, num_pages: int) -> bool:
        account = sequence.account
        for victim in self._candidates.of_own_account(sequence):
            if num_pages <= self._books.room(account):
                break
            self._planner.drop(victim)
        return num_pages <= self._books.room(account)


# What a plan does for a machine that is overloaded, when it is told to.
#
# - Small chunks: while sequences decode, prompts get a quarter of a step at most, so that no answer waits
#   long for its next token. Chunks change no token.
# - Room: while few pages are left, running sequences of the lowest class give theirs, the longest first.
#   Their KV goes to the host tier if there is one with room, and is computed again if not. None of that class
#   comes in that would leave few pages. Nothing happens where no better class runs.

CHUNK_SHARE: Final = 4  # of a step, one part
LOW_WATER: Final = 0.1  # of all pages


class PressureMode(NamedTuple):
    small_chunks: bool = False
    makes_room: bool = False


def pressure_mode_at(level: OverloadLevel) -> PressureMode:
    return PressureMode(
        small_chunks=level >= OverloadLevel.SMALL_CHUNKS, makes_room=level >= OverloadLevel.MAKE_ROOM
    )


class PressureRelief:
    def __init__(self, planner: "StepPlanner", pool: PagePool, candidates: PreemptionCandidates) -> None:
        self._planner = planner
        self._candidates = candidates
        self._low_water = int(pool.num_pages * LOW_WATER)

    def make_room(self) -> None:
        num_lacking = self._low_water - self._planner.available
        if num_lacking > 0:
            for victim in self._candidates.of_lowest_class(num_lacking):
                self._planner.preempt(victim, PreemptMode.SWAP)

    def allows(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may come in."""
        if all(each.rank[0] >= sequence.rank[0] for each in self._planner.seated()):
            return True
        num_pages = self._planner.num_missing(sequence, sequence.num_tokens)
        return self._planner.available - num_pages >= self._low_water


# How long a step may keep others waiting who would come first, had they come before it began.
#
# A prompt's chunks cost more the further in they are, as each token attends to all before it: a step full of
# the last tokens of a long prompt takes several times as long as one full of first tokens. Where tenants
# share a worker, an account beyond its share pays for that: what it computes takes as much of a step's budget
# as it costs, over MAX_STRETCH. Whoever comes next overtakes it, and has to wait for the step that is on.

# As many full steps of first tokens may such an account's part of a step cost. With less its long prompts pay
# for more steps, with more others wait longer.
MAX_STRETCH: Final = 2.0


class CostCap:
    """Cost is counted in first tokens."""

    def __init__(self, accounts: Accounts, attention_parity: float = inf) -> None:
        """attention_parity: see engine/models/parameters.py; inf: all tokens cost the same."""
        self._accounts = accounts
        self._parity = attention_parity

    def most(self, account: Account, start: int, budget: int) -> int:
        """How many tokens from `start` on can be had for so much of a step's budget: of any, one at least."""
        limit = budget * MAX_STRETCH
        if self.cost(start, budget) <= limit or not self._accounts.is_beyond_share(account):
            return budget
        # The positive n of n * (1 + (start + n / 2) / parity) = limit
        half, wanted = self._parity + start, 2 * self._parity * limit
        return max(1, min(budget, int(wanted / (half + sqrt(half * half + wanted)))))

    def price(self, account: Account, start: int, num_tokens: int, budget: int) -> int:
        """What of the budget these take."""
        price = ceil(self.cost(start, num_tokens) / MAX_STRETCH)
        if price <= num_tokens or not self._accounts.is_beyond_share(account):
            return num_tokens
        return min(budget, price)

    def cost(self, start: int, num_tokens: int) -> float:
        """Of so many tokens from `start` on."""
        return num_tokens * (1 + (start + num_tokens / 2) / self._parity)


HEADROOM_TOKENS = 16  # each running sequence can grow by this much before a newcomer takes its pages


class StepPlanner:
    """`budget`: tokens left in the step; `seats`: sequences that may still join."""

    def __init__(
        self, queues: SequenceQueues, cache: PrefixCache, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.queues = queues
        self.budget = max_num_batched_tokens
        self.seats = max_num_seqs - queues.num_running
        self.rates: PreemptionRates | None = None
        self.pressure_mode = PressureMode()
        self.cost_cap = CostCap(queues.accounts)
        self.num_padded_tokens = 0
        self._tells_apart = queues.accounts.are_several or queues.accounts.have_quotas
        self._may_admit = True
        self._cache = cache
        self._pool = cache.pool
        self.available = cache.pool.num_available
        self._host_available = cache.host.num_available
        self._decodes: dict[SequenceKey, int] = {}
        self._chunks: dict[SequenceKey, int] = {}
        self._page_needs: dict[SequenceKey, int] = {}
        self._admitted: dict[SequenceKey, tuple[int, int]] = {}  # key -> (first token, pages it comes with)
        self._preempted: dict[SequenceKey, PreemptMode] = {}
        self._lacking: tuple[Sequence, int] | None = None  # that was not admitted, and the pages it needs
        self._way_for: SequenceKey | None = None
        self._released: Counter[int] = Counter()  # page -> owners that this plan preempts
        self._num_leaving = 0  # running sequences that this plan preempts
        self._freed: set[int] = set()  # pages that nobody will hold after the preemptions
        self._claimed: set[int] = set()  # cached pages that admitted sequences will share
        # Pages that running prefills will still ask for.
        self._committed = sum(map(self._num_missing_pages, queues.prefilling.values()))

    # Made when something is short, which it rarely is.

    @cached_property
    def quotas(self) -> PageQuotas:
        return PageQuotas(self, self._books, self._candidates, self._pool.pages_for(HEADROOM_TOKENS))

    @cached_property
    def easing(self) -> PressureRelief:
        return PressureRelief(self, self._pool, self._candidates)

    @cached_property
    def _books(self) -> AccountBooks:
        return AccountBooks(self.queues.accounts, self._pool)

    @cached_property
    def _candidates(self) -> PreemptionCandidates:
        return PreemptionCandidates(self.queues, self._pool, self._books, self._admitted, self._preempted)

    # Running sequences.

    def schedule_decodes(self) -> int:
        """Give every decode its token and, when its last page is full, a page; return how many run.

        Without shortage this is the whole cost of a decode step: one pass, one dictionary.
        """
        decoding, page_size = self.queues.decoding, self._pool.page_size
        at_page_end = [s for s in decoding.values() if not s.num_computed_tokens % page_size]
        has_pages = len(at_page_end) <= self.available
        has_pages = has_pages and (not self._tells_apart or self.quotas.leave_all(at_page_end))
        if has_pages and len(decoding) <= self.budget and not self._preempted:
            self._decodes = dict.fromkeys(decoding, 1)
            self.budget -= len(decoding)
            for sequence in at_page_end:
                self._take_pages(sequence, 1)
            return len(decoding)
        for sequence in sorted(decoding.values(), key=self._books.turn_of):
            if self.budget and not self.is_preempted(sequence) and self._find_pages(sequence, 1):
                self._take_pages(sequence, 1)
                self._decodes[sequence.key] = 1
                self.budget -= 1
        return len(self._decodes)

    def prefills(self) -> list[Sequence]:
        """The running sequences that are behind by more than a token, best rank first."""
        return sorted((s for s in self.queues.prefilling.values() if not self.is_preempted(s)), key=rank_of)

    def remaining(self, sequence: Sequence) -> int:
        """Tokens still to compute after what this plan grants; an admitted one starts after its hits."""
        return sequence.num_tokens - self._end(sequence)

    def granted(self, sequence: Sequence) -> int:
        return self._chunks.get(sequence.key, 0)

    def grant(self, sequence: Sequence, num_tokens: int) -> int:
        """Schedule up to `num_tokens` more tokens of a running or admitted sequence; return how many.

        Fewer when pages are short. Only a sequence that could not advance at all preempts others.
        """
        account, start = sequence.account, self._end(sequence)
        num_tokens = min(
            self.cost_cap.most(account, start, min(num_tokens, self.budget)), self.remaining(sequence)
        )
        if num_tokens < 1 or self.is_preempted(sequence) or not self._find_pages(sequence, 1):
            return 0
        num_pages = self.quotas.most(account, self.available) if self._tells_apart else self.available
        num_pages += self._num_held(sequence)
        num_tokens = min(num_tokens, num_pages * self._pool.page_size - start)
        self._committed -= self._take_pages(sequence, num_tokens)
        self._chunks[sequence.key] = self._chunks.get(sequence.key, 0) + num_tokens
        self.budget -= self.cost_cap.price(account, start, num_tokens, self.budget)
        return num_tokens

    # Waiting sequences.

    def admit(self, sequence: Sequence, num_tokens: int = 0) -> bool:
        """Seat a waiting sequence if all its tokens, or even the `num_tokens` it may grow to, fit beside
        what the running ones will need."""
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
        if self._tells_apart:
            self._books.claim(sequence.account, shared)
        self.available -= len(claimed)
        self._committed += num_new
        self._admitted[sequence.key] = (start, num_held)
        self.seats -= 1
        return True

    def preempt_for(self, sequence: Sequence) -> None:
        """Take back pages, for the next plan, that a sequence lacks which was not admitted beside others."""
        if self._lacking is None or self._lacking[0] is not sequence or not self._num_seated():
            return
        num_pages, headroom = self._lacking[1], self._pool.pages_for(HEADROOM_TOKENS)
        num_lacking = num_pages + self._committed + self._headroom() - self.available
        for victim in self._candidates.of_newcomer(sequence, num_pages, num_lacking, headroom):
            self._take_back(victim)
            self._way_for = sequence.key

    # Preemption.

    def is_preempted(self, sequence: Sequence) -> bool:
        return sequence.key in self._preempted

    def drop(self, victim: Sequence) -> None:
        """Preempt it the cheaper way."""
        num_computed = victim.num_computed_tokens
        self.preempt(victim, cheaper_mode(num_computed, self._pool.pages_for(num_computed), self.rates))

    def preempt(self, sequence: Sequence, mode: PreemptMode) -> None:
        """Take all pages of a sequence that runs, or waits with pages that it has brought; without host
        pages for a swap, it will recompute."""
        key = sequence.key
        self.budget += self._decodes.pop(key, 0) + self._chunks.pop(key, 0)
        num_taken = self._page_needs.pop(key, 0)
        self.available += num_taken
        self._books.take(sequence.account, -num_taken)
        self._books.let_go(sequence)
        if key in self.queues.prefilling:
            self._committed -= self._num_missing_pages(sequence) - num_taken
        num_pages = self._pool.pages_for(sequence.num_computed_tokens)
        if not 0 < num_pages <= self._host_available:
            mode = PreemptMode.RECOMPUTE
        if mode is PreemptMode.SWAP:
            self._host_available -= num_pages
            self._may_admit = False  # the swap may push out what a newcomer would find on the host
        self._preempted[key] = mode
        if sequence.status is SequenceStatus.RUNNING:
            self._num_leaving += 1
            self.seats += 1
        self._free_pages(sequence)

    # The result.

    def finish(self, version: int, wait_s: float | None) -> Plan:
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
            way_for=self._way_for,
        )

    def prospect(self, sequence: Sequence) -> tuple[int, list[int]]:
        """(first token to compute, pages that the sequence will share) once it is admitted."""
        if sequence.page_table:
            return sequence.num_computed_tokens, []
        if sequence.status is SequenceStatus.SWAPPED:
            return sequence.num_computed_tokens, self._cache.match_swapped(sequence).device_pages
        match = self._cache.match(sequence)
        return match.num_pages * self._pool.page_size, match.device_pages

    def _is_claimable(self, page: int) -> bool:
        return (self._pool.is_available(page) or page in self._freed) and page not in self._claimed

    def _headroom(self) -> int:
        return self._num_seated() * self._pool.pages_for(HEADROOM_TOKENS)

    def _num_seated(self) -> int:
        return self.queues.num_running + len(self._admitted) - self._num_leaving

    def _find_pages(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make pages available for the next tokens, preempting worse-ranked sequences, the worst first, then
        any that waits with pages: it may never run before one that runs has ended.

        False: all of them together do not free enough. The sequence then keeps what it has and waits for
        those of better rank; the best one always gets its pages, so some sequence always advances.
        """
        need = self._num_new_pages(sequence, num_tokens)
        if self._tells_apart and not self.quotas.leave(sequence, need):
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

    def _free_pages(self, sequence: Sequence) -> None:
        for page in sequence.page_table:
            self._released[page] += 1
            if self._pool.is_freed_by(page, self._released[page]):
                self._freed.add(page)
                self.available += 1

    def _num_missing_pages(self, sequence: Sequence) -> int:
        return max(0, self._pool.pages_for(sequence.num_tokens) - len(sequence.page_table))

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that it lacks for so many tokens after what this plan grants."""
        return max(0, self._pool.pages_for(num_tokens) - self._num_held(sequence))

    def seated(self) -> list[Sequence]:
        """All that will run after this plan."""
        running = [s for s in self.queues.running() if not self.is_preempted(s)]
        return running + [self.queues.by_key[key] for key in self._admitted]

    def _end(self, sequence: Sequence) -> int:
        """The token before which everything is computed once the plan is done."""
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
            if self._tells_apart:
                self._books.take(sequence.account, num_pages)
        return num_pages
