"""What each account holds while a plan is drafted, and whose pages go first when they are short.

With one account, sequences come by their rank alone. With several, a sequence of a lower class goes before
one of a higher; within a class first those of the account that is most over its share of the pages, then of
the one that has had most work for its weight; the worst rank of an account goes first. So nobody within its
share ever gives pages to an account that is over its own.

An account's share of the pages is that of its weight among the accounts that have sequences here.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from baton.engine.accounts import Account, Accounts
from baton.engine.pages import PagePool
from baton.engine.sequence import Sequence, SequenceRank

# (class, excess, work, rank), or the rank alone: the greatest gives its pages first.
Turn: TypeAlias = tuple[int, float, float, SequenceRank] | SequenceRank


class AccountBooks:
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
