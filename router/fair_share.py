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
the credit that one of them began with: so nobody starves. Every operation takes O(log tenants).
"""

from collections import deque
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

MAX_CLOCK: Final = float(2**44)  # beyond this, sums of small and large numbers would be coarse
CREDIT_AGES: Final = 4
MAX_IDLE: Final = 1024  # tenants that owe something and do not wait, before those that owe nothing go


class _Account:
    __slots__ = ("clock", "turn", "weight")

    def __init__(self, clock: float) -> None:
        self.clock = clock
        self.weight = 1.0
        self.turn = 0  # of its entry in the heap; 0: it does not wait


class FairShare:
    """Of tenants, by name."""

    def __init__(self) -> None:
        self.present = 0.0
        self._past = deque([0.0], maxlen=CREDIT_AGES)  # the present, at the last ages; the oldest first
        self.weights = 0.0  # of those that wait, together
        self._accounts: dict[str, _Account] = {}
        self._turns: list[tuple[float, int, str]] = []  # a heap; entries of another turn are void
        self._num_turns = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        """How many tenants wait."""
        return self._num_waiting

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
        self._num_waiting += 1
        self.weights += weight
        self._queue(tenant, account)

    def leave(self, tenant: str) -> None:
        """It must be waiting."""
        account = self._accounts[tenant]
        assert account.turn, tenant
        account.turn = 0
        self._num_waiting -= 1
        self.weights = self.weights - account.weight if self._num_waiting else 0.0
        if len(self._accounts) > 2 * self._num_waiting + MAX_IDLE:
            self._forget_even()

    def first(self) -> str | None:
        """Whose turn it is. None: nobody waits."""
        turns = self._turns
        while turns:
            _, turn, tenant = turns[0]
            account = self._accounts.get(tenant)
            if account is not None and account.turn == turn:
                return tenant
            heappop(turns)
        return None

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

    def _move(self, tenant: str, account: _Account, work: float) -> None:
        account.clock += work / account.weight
        if account.turn:
            self._queue(tenant, account)

    def _queue(self, tenant: str, account: _Account) -> None:
        former, self._num_turns = account.turn, self._num_turns + 1
        account.turn = self._num_turns
        entry = (account.clock, account.turn, tenant)
        if former and self._turns[0][1] == former:
            heapreplace(self._turns, entry)
            return
        heappush(self._turns, entry)
        if len(self._turns) > 4 * self._num_waiting + 256:
            self._collect()

    def _collect(self) -> None:
        """Leave out what is void."""
        self._turns = [
            (account.clock, account.turn, tenant)
            for tenant, account in self._accounts.items()
            if account.turn
        ]
        heapify(self._turns)

    def _forget_even(self) -> None:
        kept = self._accounts.items()
        self._accounts = {
            tenant: account for tenant, account in kept if account.turn or account.clock > self._past[0]
        }

    def _rebase(self) -> None:
        for account in self._accounts.values():
            account.clock = max(account.clock - self.present, -MAX_CLOCK)
        self._past = deque((past - self.present for past in self._past), maxlen=CREDIT_AGES)
        self.present = 0.0
        self._collect()
