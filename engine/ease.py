"""How long a step may keep others waiting who would come first, had they come before it began.

A prompt's chunks cost more the further in they are, as each token attends to all before it: a step full of
the last tokens of a long prompt takes several times as long as one full of first tokens. Where tenants share
a worker, an account beyond its share pays for that: what it computes takes as much of a step's budget as it
costs, over MAX_STRETCH. Whoever comes next overtakes it, and has to wait for the step that is on.
"""

from math import ceil, inf, sqrt
from typing import Final

from baton.engine.accounts import Account, Accounts

# As many full steps of first tokens may such an account's part of a step cost. With less its long prompts pay
# for more steps, with more others wait longer.
MAX_STRETCH: Final = 2.0


class Ease:
    """Cost is counted in first tokens."""

    def __init__(self, accounts: Accounts, attention_parity: float = inf) -> None:
        """attention_parity: see parameters.py; inf: all tokens cost the same."""
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
