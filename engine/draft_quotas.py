"""Holds a plan to the quotas of pages: an account that has no more to get takes them from itself, or waits.

A sequence that finds no room in its quota holds up nothing but what is on its account. What else an account
uses in the ledger, for prompts that are under way or pages that are kept, counts as well, and ends by itself.
"""

from collections import Counter
from collections.abc import Collection
from math import inf
from typing import Protocol

from baton.engine.account_books import AccountBooks
from baton.engine.accounts import Account
from baton.engine.sequence import Sequence
from baton.engine.victims import Victims


class Draft(Protocol):
    """What is asked of the draft of a plan."""

    def seated(self) -> list[Sequence]: ...
    def num_missing(self, sequence: Sequence, num_tokens: int) -> int: ...
    def prospect(self, sequence: Sequence) -> tuple[int, list[int]]: ...
    def drop(self, victim: Sequence) -> None: ...


class DraftQuotas:
    def __init__(self, draft: Draft, books: AccountBooks, victims: Victims, headroom_pages: int) -> None:
        """headroom_pages: that each running sequence can grow by before a newcomer takes them."""
        self._draft = draft
        self._books = books
        self._victims = victims
        self._headroom_pages = headroom_pages
        self._held_back: set[str] = set()  # accounts that have no room for the next of their sequences

    def enforce(self) -> None:
        """Accounts that hold more than their quota, as pages may be brought, give the rest back."""
        for account in self._books.accounts_over_quota():
            for victim in self._victims.on_account(account):
                if self._books.room(account) < 0:
                    self._draft.drop(victim)

    def allow(self, sequence: Sequence, num_tokens: int = 0) -> bool:
        """Whether the account may hold all pages of a waiting sequence, even with the `num_tokens` it may
        grow to, beside what its running ones need."""
        account = sequence.account
        if not self._books.have_quotas or account.max_pages == inf:
            return True
        if account.name in self._held_back:
            return False
        _, shared = self._draft.prospect(sequence)
        num_missing = self._draft.num_missing(sequence, max(num_tokens, sequence.num_tokens))
        num_pages = max(0, num_missing - len(shared)) + self._books.num_new(account, shared)
        seated = [each for each in self._draft.seated() if each.account is account]
        num_needed = len(seated) * self._headroom_pages
        num_needed += sum(self._draft.num_missing(each, each.num_tokens) for each in seated)
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
        for victim in self._victims.of_own_account(sequence):
            if num_pages <= self._books.room(account):
                break
            self._draft.drop(victim)
        return num_pages <= self._books.room(account)
