"""Who gives pages when they are short, the first to give them first. Nothing here takes any.

A sequence can give pages that runs, or waits with pages that it has brought. AccountBooks has the order among
accounts, the rank is the order on one. Those that wait with pages also give them to sequences that come after
them, where these run: they may never run before one that runs has ended.
"""

from collections import Counter
from collections.abc import Container, Iterable
from time import perf_counter
from typing import Final, NamedTuple, TypeAlias

from baton.engine.cache.kv_pool import KvPool
from baton.engine.cache.page_pool import PagePool
from baton.engine.scheduler.accounts import Account, Accounts
from baton.engine.scheduler.plan import Batch, PreemptMode
from baton.engine.scheduler.queues import SequenceQueues, rank_of
from baton.engine.scheduler.sequence import Sequence, SequenceKey, SequenceRank, SequenceStatus

# (class, excess, work, rank), or the rank alone: the greatest gives its pages first.
Turn: TypeAlias = tuple[int, float, float, SequenceRank] | SequenceRank


class AccountBooks:
    """What each account holds while a plan is drafted, and whose pages go first when they are short.

    With one account, sequences come by their rank alone. With several, a sequence of a lower class goes
    before one of a higher; within a class first those of the account that is most over its share of the
    pages, then of the one that has had most work for its weight; the worst rank of an account goes first. So
    nobody within its share ever gives pages to an account that is over its own.

    An account's share of the pages is that of its weight among the accounts that have sequences here.
    """

    def __init__(self, accounts: Accounts, pool: PagePool) -> None:
        self.are_several = accounts.are_several
        self.have_quotas = accounts.have_quotas
        self._accounts = accounts
        self._pool = pool
        self._change: Counter[str] = Counter()  # pages that the plan gives, less those that it takes
        self._claimed: set[tuple[str, int]] = set()  # pages that an account uses because of the plan
        self._gone: Counter[tuple[str, int]] = (
            Counter()
        )  # users of the account whom the plan takes a page from

    @property
    def matter(self) -> bool:
        return self.are_several or self.have_quotas

    def turn_of(self, sequence: Sequence) -> Turn:
        if not self.are_several:
            return sequence.rank
        account = sequence.account
        return sequence.rank[0], self.excess(account), account.work, sequence.rank

    def num_pages(self, account: Account) -> int:
        return self._pool.accounts.held(account.name) + self._change[account.name]

    def share(self, account: Account) -> float:
        """Pages that the account is due."""
        return self._pool.num_pages * account.weight / self._accounts.total_weight

    def excess(self, account: Account, num_lost: int = 0) -> float:
        """Pages, for its weight, that the account has beyond its share once it has lost so many; 0: none."""
        return max(0.0, self.num_pages(account) - num_lost - self.share(account)) / account.weight

    def room(self, account: Account) -> float:
        """Pages that its quota leaves; negative when it holds more."""
        return account.max_pages - self.num_pages(account)

    def accounts_over_quota(self) -> list[Account]:
        if not self.have_quotas:
            return []
        return [account for account in self._accounts.live.values() if self.room(account) < 0]

    # What the plan does.

    def take(self, account: Account, num_pages: int) -> None:
        """Fresh pages; a negative number gives back what was taken for this plan."""
        if self.matter:
            self._change[account.name] += num_pages

    def num_new(self, account: Account, pages: Iterable[int]) -> int:
        """How many of these pages the account does not use yet."""
        return sum(1 for page in pages if not self._uses(account, page))

    def claim(self, account: Account, pages: Iterable[int]) -> None:
        """Pages with known contents, for one of its sequences."""
        if self.matter:
            for page in pages:
                self._change[account.name] += not self._uses(account, page)
                self._claimed.add((account.name, page))

    def let_go(self, sequence: Sequence) -> None:
        """All pages of its table."""
        if self.matter:
            account = sequence.account
            for page in sequence.page_table:
                used = self._uses(account, page)
                self._gone[account.name, page] += 1
                self._change[account.name] -= used and not self._uses(account, page)

    def _uses(self, account: Account, page: int) -> bool:
        key = account.name, page
        if key in self._claimed:
            return True
        return self._pool.accounts.num_users(self._pool.owners(page), account.name) > self._gone[key]


class PreemptionCandidates:
    def __init__(
        self,
        queues: SequenceQueues,
        pool: PagePool,
        books: AccountBooks,
        admitted: Container[SequenceKey],
        preempted: Container[SequenceKey],
    ) -> None:
        """admitted, preempted: by the plan so far; neither gives anything more."""
        self._queues = queues
        self._pool = pool
        self._books = books
        self._admitted = admitted
        self._preempted = preempted

    def of_running(self, sequence: Sequence, *, may_wait: bool) -> list[Sequence]:
        """For one that runs. may_wait: it is not the last hope of the step, so other accounts that wait with
        pages keep them from one that comes after."""
        turn_of = self._books.turn_of
        own, spares = turn_of(sequence), may_wait and self._books.are_several
        others = sorted(self._holders(), key=turn_of, reverse=True)
        return [other for other in others if turn_of(other) > own or not (spares or _runs(other))]

    def of_waiting(self, sequence: Sequence, num_lacking: int) -> list[Sequence]:
        """For one that does not fit although nothing runs; none when all together would not do.

        Then somebody outside holds the rest, and will let go.
        """
        others = [other for other in self._waiting_with_pages() if other is not sequence]
        return self._enough(sorted(others, key=self._books.turn_of, reverse=True), num_lacking)

    def of_newcomer(
        self, sequence: Sequence, num_pages: int, num_lacking: int, headroom_pages: int
    ) -> list[Sequence]:
        """For one that does not fit beside those that run: of lower classes, and, if its account stays within
        its share with so many pages more, of accounts that are over theirs; none when that would not do.

        headroom_pages: that are kept free for each one that runs."""
        books, account = self._books, sequence.account
        is_due = books.num_pages(account) + num_pages <= books.share(account)
        num_lost = Counter[str]()
        yielding = []
        for other in sorted(self._holders(), key=books.turn_of, reverse=True):
            is_over = is_due and books.excess(other.account, num_lost[other.account.name]) > 0
            if other.rank[0] > sequence.rank[0] or (other.rank[0] == sequence.rank[0] and is_over):
                yielding.append(other)
                num_lost[other.account.name] += len(other.page_table)
        return self._enough(yielding, num_lacking, headroom_pages)

    def of_lowest_class(self, num_lacking: int) -> list[Sequence]:
        """For better classes that run: of the lowest that runs, the longest first; all if that is too few."""
        running = [s for s in self._queues.running() if s.key not in self._preempted]
        classes = {sequence.rank[0] for sequence in running}
        if len(classes) < 2:
            return []
        lowest = [sequence for sequence in running if sequence.rank[0] == max(classes)]
        lowest.sort(key=lambda sequence: len(sequence.page_table), reverse=True)
        return self._enough(lowest, num_lacking) or lowest

    def on_account(self, account: Account) -> list[Sequence]:
        return sorted((s for s in self._holders() if s.account is account), key=rank_of, reverse=True)

    def of_own_account(self, sequence: Sequence) -> list[Sequence]:
        """For a sequence whose account has no more pages to get."""
        others = [other for other in self.on_account(sequence.account) if other is not sequence]
        return [other for other in others if other.rank > sequence.rank or not _runs(other)]

    def _enough(
        self, candidates: list[Sequence], num_lacking: int, headroom_pages: int = 0
    ) -> list[Sequence]:
        """The first of them that together free so many pages, and their headroom with them."""
        num_owners = Counter[int]()
        for index, victim in enumerate(candidates):
            num_owners.update(victim.page_table)
            num_lacking -= sum(self._pool.is_freed_by(page, num_owners[page]) for page in victim.page_table)
            num_lacking -= headroom_pages * _runs(victim)
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


def _runs(sequence: Sequence) -> bool:
    return sequence.status is SequenceStatus.RUNNING


# Which way to take the pages of a running sequence: drop and recompute, or swap to host memory.


class PreemptionRates(NamedTuple):
    """Measured on this machine by whoever runs the model."""

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


# Measures, while the engine runs, what preemption costs on this machine.
WEIGHT: Final = 0.2  # of a new observation in the running mean
MIN_PREFILL_TOKENS: Final = 16  # fewer say little about the cost of a token
NUM_PROBE_PAGES: Final = 4


class PreemptionMeter:
    """`rates` is None without host pages, where there is no choice, and until a prefill has been seen."""

    def __init__(self, pool: KvPool) -> None:
        self.rates: PreemptionRates | None = None
        self._recompute_s_per_token: float | None = None
        self._num_seen = 0
        self._swap_s_per_page = _time_swap(pool) if len(pool.host) else None

    def observe(self, batch: Batch, step_s: float) -> None:
        """A step took `step_s` seconds; steps that compute prompts tell what a recomputed token costs."""
        num_tokens = sum(chunk.num_tokens for chunk in batch.chunks[batch.num_decodes :])
        if self._swap_s_per_page is None or num_tokens < MIN_PREFILL_TOKENS:
            return
        self._num_seen += 1
        if self._num_seen == 1:
            return  # the first prefill compiles kernels
        cost_s = step_s / (num_tokens + batch.num_decodes)
        mean_s = self._recompute_s_per_token
        self._recompute_s_per_token = cost_s if mean_s is None else mean_s + WEIGHT * (cost_s - mean_s)
        self.rates = PreemptionRates(self._recompute_s_per_token, self._swap_s_per_page)


def _time_swap(pool: KvPool) -> float:
    """Seconds a page takes one way, from a round trip of pages that hold nothing yet."""
    num_pages = min(NUM_PROBE_PAGES, len(pool.host), len(pool.device))
    copies = [(page, page) for page in range(num_pages)]
    pool.copy(copies, copies)  # the first touch of the memory is not what a swap costs
    started_s = perf_counter()
    pool.copy(copies, copies)
    return (perf_counter() - started_s) / (2 * num_pages)
