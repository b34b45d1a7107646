"""On whose account sequences run: what each account is due, and what it has had.

An account is a name with a weight and perhaps a quota of pages. The engine knows nothing else of who is
behind it, and where all sequences are on one account nothing of this makes a difference.

1. `open` puts a new sequence on its account. What it says of the weight holds from now on.
2. `charge` adds what each has computed in a step, in tokens for its weight: of one class, the account that
   has had least comes next. The present is the least that any of those had that were computed: one that
   waits behind a higher class or at its quota does not hold it up.
3. `close` ends a sequence. An account that has none any more and comes back is as far ahead of the others as
   it was, so that it gains nothing by leaving, even where all leave: whoever lets prompts in one by one
   leaves an engine without any now and then. One that was away begins at what was the present CREDIT_STEPS
   steps ago: what its share would have been since then it may still have, at once, for requests come in
   bursts; it gets nothing for the time before. The router's queues do the same (router/fair_share.py).

A quota bounds the pages that an account's sequences use in the ledger (page_accounts.py). Each sequence may
count on the one that it came with: so the largest holds, and a lesser one from when those have ended.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Final, Protocol

from baton.tenancy import Standing

CREDIT_STEPS: Final = 64  # a second or two, of prompts and of tokens
MAX_AHEAD: Final = 4096  # accounts without sequences that are remembered
MAX_WORK: Final = float(2**44)  # beyond this, sums of small and large numbers would be coarse


@dataclass(slots=True, eq=False)
class Account:
    name: str
    weight: float = 1.0
    work: float = 0.0  # tokens for its weight that it has had
    quotas: Counter[float] = field(
        default_factory=Counter
    )  # pages, inf for none -> sequences that count on it

    @property
    def max_pages(self) -> float:
        """inf without a quota."""
        return max(self.quotas, default=inf)


class OnAccount(Protocol):
    """A sequence, as far as it matters here."""

    @property
    def account(self) -> Account: ...

    @property
    def max_kv_pages(self) -> int | None: ...


class Accounts:
    def __init__(self) -> None:
        self.live: dict[str, Account] = {}  # those with a sequence
        self.have_quotas = False
        self._present = 0.0  # the least work of those computed last; it never goes back
        self._past = deque([0.0], maxlen=CREDIT_STEPS)  # the present, at the last steps; the oldest first
        self._ahead: dict[str, float] = {}  # work of others, where it was more than the past

    @property
    def are_several(self) -> bool:
        return len(self.live) > 1

    @property
    def total_weight(self) -> float:
        return sum(account.weight for account in self.live.values())

    def clear(self) -> None:
        self.live.clear()
        self.have_quotas = False
        self._ahead.clear()
        self._present = 0.0
        self._past = deque([0.0], maxlen=CREDIT_STEPS)

    def open(self, name: str, standing: Standing) -> Account:
        """The account of a sequence that comes."""
        account = self.live.get(name)
        if account is None:
            past = self._past[0]
            account = Account(name, work=max(past, self._ahead.pop(name, past)))
            self.live[name] = account
        account.weight = standing.weight
        quota = standing.quotas.max_kv_pages
        account.quotas[inf if quota is None else quota] += 1
        self.have_quotas = self.have_quotas or quota is not None
        return account

    def close(self, sequence: OnAccount) -> None:
        """The sequence has ended."""
        account, quota = sequence.account, sequence.max_kv_pages
        key = inf if quota is None else quota
        account.quotas[key] -= 1
        if account.quotas[key]:
            return
        del account.quotas[key]
        if not account.quotas:
            self._leave(account)
        self.have_quotas = any(each.max_pages < inf for each in self.live.values())

    def charge(self, computed: Iterable[tuple[Account, int]]) -> None:
        """Tokens that have been computed in one step."""
        served = list(computed)
        self._age(account for account, _ in served)
        for account, num_tokens in served:
            account.work += num_tokens / account.weight

    def charge_only(self, num_tokens: int) -> None:
        """The same where there is one account."""
        self._age(self.live.values())
        for account in self.live.values():
            account.work += num_tokens / account.weight

    def _age(self, served: Iterable[Account]) -> None:
        least = min((account.work for account in served), default=self._present)
        self._present = max(self._present, least)
        self._past.append(self._present)
        if self._past[0] > MAX_WORK:
            self._rebase()

    def _leave(self, account: Account) -> None:
        del self.live[account.name]
        past = self._past[0]
        if account.work > past:
            self._ahead[account.name] = account.work
        if len(self._ahead) > MAX_AHEAD:
            self._ahead = {name: work for name, work in self._ahead.items() if work > past}
            while len(self._ahead) > MAX_AHEAD:
                del self._ahead[next(iter(self._ahead))]

    def _rebase(self) -> None:
        shift = self._past[0]
        for account in self.live.values():
            account.work -= shift
        self._ahead = {name: work - shift for name, work in self._ahead.items()}
        self._past = deque((past - shift for past in self._past), maxlen=CREDIT_STEPS)
        self._present -= shift
