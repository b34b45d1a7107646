"""On whose account sequences run: what each account is due, and what it has had.

An account is a name with a weight and perhaps a quota of pages. The engine knows nothing else of who is
behind it, and where all requests are on one account nothing of this makes a difference.

1. `open` puts a new sequence on its account. What it says of the weight holds from now on.
2. `charge` adds what each has computed in a step, in tokens for its weight: of one class, the account that
   has had least comes next. What an account has had counts half as much HALF_LIFE_S later, whether it has
   sequences or not: so requests that come in bursts are computed at once, as long as the account has had less
   of late than those that always want more; and nobody is held to what it had long ago, when nobody else
   wanted it. A newcomer counts as if it had had a small part of all that was computed of late. So one that
   has had all, and still wants more, comes next after no more than log2(1 / PART) half-lives at as many
   tokens a second, however many newcomers of its weight there are; after log2(1 + n) of them if they are n.
3. `close` ends a sequence. What an account without sequences has had is remembered, as long as it counts.
4. `is_beyond_share` tells who has had much of what others were due, because they did not ask for it. Whoever
   comes next of those, in its class, overtakes it: so it should not keep them waiting for a long step.

A quota bounds the pages that an account's sequences use in the ledger (engine/cache/page_pool.py). Each
sequence may count on the one that it came with: so the largest holds, and a lesser one from when those have
ended.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple, Protocol

from baton.tenants import SchedulingKey

HALF_LIFE_S: Final = 3.0  # as far back as a tenant's credit at the router reaches (baton/fair_queue.py)
PART: Final = 1 / 64  # of what all have had of late: nobody who comes has had less
FORGET_S: Final = 6 * HALF_LIFE_S  # whoever has been away for longer has had less
MAX_AWAY: Final = 4096  # accounts without sequences that are remembered
MUCH: Final = 0.1  # of what others were due: accounts that take turns are not so far apart


@dataclass(slots=True, eq=False)
class Account:
    name: str
    weight: float = 1.0
    work: float = 0.0  # tokens for its weight that it has had, of late
    quotas: Counter[float] = field(
        default_factory=Counter
    )  # pages, inf for none -> sequences that count on it

    @property
    def max_pages(self) -> float:
        """inf without a quota."""
        return max(self.quotas, default=inf)


class _Away(NamedTuple):
    """An account without sequences."""

    weight: float
    num_tokens: float  # that it had had, of late, when it left
    left_s: float


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
        self._at_s = 0.0  # when anything was computed last: what is kept of anybody is as of then
        self._num_tokens = 0.0  # that all have had, of late
        self._away: OrderedDict[str, _Away] = OrderedDict()  # in the order in which they left
        self._away_weight = 0.0

    @property
    def are_several(self) -> bool:
        return len(self.live) > 1

    @property
    def total_weight(self) -> float:
        return sum(account.weight for account in self.live.values())

    def is_beyond_share(self, account: Account) -> bool:
        """Whether it has had more of late than its share among all that are remembered, by MUCH of theirs."""
        if not self._away and not self.are_several:
            return False
        share = account.weight / (self.total_weight + self._away_weight)
        return account.work * account.weight > (share + MUCH * (1 - share)) * self._num_tokens

    def clear(self) -> None:
        self.live.clear()
        self.have_quotas = False
        self._num_tokens = self._away_weight = 0.0
        self._away.clear()

    def open(self, name: str, scheduling_key: SchedulingKey) -> Account:
        """The account of a sequence that comes."""
        account, weight = self.live.get(name), scheduling_key.weight
        if account is None:
            account = self.live[name] = Account(name, weight, self._num_tokens_of(name) / weight)
        account.work *= account.weight / weight  # the tokens are the same
        account.weight = weight
        quota = scheduling_key.quotas.max_kv_pages
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

    def charge(self, computed: Iterable[tuple[Account, int]], now_s: float) -> None:
        """Tokens that are computed in one step."""
        fading, self._at_s = _fading(now_s - self._at_s), max(self._at_s, now_s)
        self._num_tokens *= fading
        for account in self.live.values():
            account.work *= fading
        for account, num_tokens in computed:
            account.work += num_tokens / account.weight
            self._num_tokens += num_tokens
        self._forget()

    def charge_only(self, num_tokens: int, now_s: float) -> None:
        """The same where there is one account."""
        self.charge(((account, num_tokens) for account in self.live.values()), now_s)

    def _leave(self, account: Account) -> None:
        del self.live[account.name]
        self._away[account.name] = _Away(account.weight, account.work * account.weight, self._at_s)
        self._away_weight += account.weight

    def _num_tokens_of(self, name: str) -> float:
        """What counts of those that it has had, when it comes."""
        away, least = self._drop(name), PART * self._num_tokens
        if away is None:
            return least
        return max(least, away.num_tokens * _fading(self._at_s - away.left_s))

    def _drop(self, name: str) -> _Away | None:
        away = self._away.pop(name, None)
        if away is not None:
            self._away_weight = max(0.0, self._away_weight - away.weight) if self._away else 0.0
        return away

    def _forget(self) -> None:
        while self._away:
            name, away = next(iter(self._away.items()))
            if len(self._away) <= MAX_AWAY and self._at_s - away.left_s <= FORGET_S:
                return
            self._drop(name)


def _fading(seconds: float) -> float:
    """What is left of anything after so long."""
    return float(0.5 ** max(0.0, seconds / HALF_LIFE_S))
