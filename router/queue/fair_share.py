"""Whose turn it is among tenants that wait: weighted fair shares of work.

1. A tenant that begins to wait joins. Each has a clock, in work by weight, which stands while nobody serves
   it. One that was away is set to what was the present CREDIT_AGES ages ago: what its share would have been
   since then it may still have, at once, for that is what a burst is; of the time before it has no credit.
2. The tenant whose clock is earliest comes next; the present is that clock. What it is served is charged:
   its clock goes forward by the work, divided by its weight.
3. Work is charged as it is expected, and corrected once it is known, either way.
4. A tenant that waits no more leaves. What it owes is remembered until the present has passed it.

This is start-time fair queueing (Goyal, Vin, Cheng 1996) with the corrections of the virtual token counter
(Sheng et al. 2024). Of two tenants that wait all the while, what either was served, divided by its weight,
differs from the other's by no more than the largest thing that each was served, divided by its weight, and
the credit that one of them began with: so nobody starves. Every operation takes O(log tenants), and moves
eight bytes for each at most.
"""

from bisect import bisect_left, insort
from collections import deque
from typing import Final, TypeAlias

MAX_CLOCK: Final = float(2**44)  # beyond this, sums of small and large numbers would be coarse
CREDIT_AGES: Final = 12  # some seconds: an age is a tick of the router
MAX_IDLE: Final = 1024  # tenants that owe something and do not wait, before those that owe nothing go

Turn: TypeAlias = tuple[float, int, str]  # clock, number, whose: the least is first


class _Account:
    __slots__ = ("clock", "turn", "weight")

    def __init__(self, clock: float) -> None:
        self.clock = clock
        self.weight = 1.0
        self.turn: Turn | None = None  # None: it does not wait


class FairShare:
    """Of tenants, by name."""

    def __init__(self) -> None:
        self.present = 0.0
        self._past = deque([0.0], maxlen=CREDIT_AGES)  # the present, at the last ages; the oldest first
        self.weights = 0.0  # of those that wait, together
        self._accounts: dict[str, _Account] = {}
        self._turns: list[Turn] = []  # of those that wait, in order
        self._num_turns = 0

    def __len__(self) -> int:
        """How many tenants wait."""
        return len(self._turns)

    def join(self, tenant: str, weight: float, *, was_away: bool = True) -> None:
        """Of one that waits already: its weight from now on. was_away: else it was only not to come next."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self._past[0])
        if account.turn:
            self.weights += weight - account.weight
            account.weight = weight
            return
        account.weight = weight
        if was_away:
            account.clock = max(account.clock, self._past[0])
        self.weights += weight
        self._queue(tenant, account)

    def leave(self, tenant: str) -> None:
        """It must be waiting."""
        account = self._accounts[tenant]
        assert account.turn, tenant
        self._unqueue(account)
        self.weights = self.weights - account.weight if self._turns else 0.0
        if len(self._accounts) > 2 * len(self._turns) + MAX_IDLE:
            self._forget_even()

    def first(self) -> str | None:
        """Whose turn it is. None: nobody waits."""
        return self._turns[0][2] if self._turns else None

    def serve(self, tenant: str, work: float) -> None:
        """It must be waiting: this is its turn, which it is charged `work` for."""
        account = self._accounts[tenant]
        assert account.turn, tenant
        self.present = max(self.present, account.clock)
        self._move(tenant, account, work)
        if self.present > MAX_CLOCK:
            self._rebase()

    def correct(self, tenant: str, work: float) -> None:
        """It was served so much more than it was charged, or less."""
        account = self._accounts.get(tenant)
        if account is None:
            if work <= 0:
                return
            account = self._accounts[tenant] = _Account(self._past[0])
        self._move(tenant, account, work)

    def age(self) -> None:
        """To be called at even intervals."""
        self._past.append(self.present)

    def clock(self, tenant: str) -> float:
        """What it is, or would be if it joined now."""
        account = self._accounts.get(tenant)
        return self._past[0] if account is None else max(account.clock, self._past[0])

    def is_known(self, tenant: str) -> bool:
        """Whether anything is remembered of it."""
        return tenant in self._accounts

    def _move(self, tenant: str, account: _Account, work: float) -> None:
        waits = account.turn is not None
        if waits:
            self._unqueue(account)
        account.clock += work / account.weight
        if waits:
            self._queue(tenant, account)

    def _queue(self, tenant: str, account: _Account) -> None:
        self._num_turns += 1
        account.turn = (account.clock, self._num_turns, tenant)
        insort(self._turns, account.turn)

    def _unqueue(self, account: _Account) -> None:
        assert account.turn is not None
        del self._turns[bisect_left(self._turns, account.turn)]
        account.turn = None

    def _forget_even(self) -> None:
        kept = self._accounts.items()
        self._accounts = {
            tenant: account for tenant, account in kept if account.turn or account.clock > self._past[0]
        }

    def _rebase(self) -> None:
        for account in self._accounts.values():
            account.clock = max(account.clock - self.present, -MAX_CLOCK)
            if account.turn is not None:
                account.turn = (account.clock, *account.turn[1:])
        self._turns = sorted(account.turn for account in self._accounts.values() if account.turn is not None)
        self._past = deque((past - self.present for past in self._past), maxlen=CREDIT_AGES)
        self.present = 0.0
