"""Weighted fair shares among opaque keys.

- `FairShare` orders work that waits: the router's queues, and the gateway's tokenising with equal weights.
- `DecayedShares` orders keys by their recent work: the steps of an engine.
- `FairLru` evicts: the page pool, the prefix cache and the host tier.

None of them knows tenants: a key is a string or bytes.

`FairShare` is start-time fair queueing (Goyal, Vin, Cheng 1996) with the corrections of the virtual token
counter (Sheng et al. 2024):

1. A key that begins to wait joins. Each key has a virtual clock, in work divided by weight, which stands
   while the key is not served. A key that was away starts at the present of CREDIT_AGES ages ago: it may use
   its share of the time since then at once, as a burst, and has no credit for the time before.
2. The key with the earliest clock comes next; the present is that clock. Served work is charged: the clock
   advances by the work divided by the weight.
3. Expected work is charged at once, and corrected when the actual work is known.
4. A key that waits no more leaves. Its debt is remembered until the present has passed the debt.

For two keys that wait all the time, the served work divided by weight differs by at most the largest item
served to either, divided by its weight, plus the credit that one of them began with: no key starves. Every
operation takes O(log keys) and moves at most eight bytes a key.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

MAX_CLOCK: Final = float(2**44)  # beyond this, sums of small and large numbers would be coarse
CREDIT_AGES: Final = 12  # some seconds: an age is a tick of the router
MAX_IDLE: Final = 1024  # keys that do not wait, or have no items, above which such keys are forgotten
Turn: TypeAlias = tuple[float, int, str]  # clock, serial number, key: the least is first


class _Account:
    __slots__ = ("clock", "turn", "weight")

    def __init__(self, clock: float) -> None:
        self.clock = clock
        self.weight = 1.0
        self.turn: Turn | None = None  # None: the key does not wait


class FairShare:
    """Decides which of the waiting keys is served next, by weighted shares of work."""

    def __init__(self) -> None:
        self.present = 0.0
        # The present at the last CREDIT_AGES ages, oldest first.
        self._past = deque([0.0], maxlen=CREDIT_AGES)
        self.weights = 0.0  # sum over the waiting keys
        self._accounts: dict[str, _Account] = {}
        self._turns: list[Turn] = []  # of the waiting keys, in order
        self._num_turns = 0

    def __len__(self) -> int:
        """The number of waiting keys."""
        return len(self._turns)

    def join(self, key: str, weight: float, *, was_away: bool = True) -> None:
        """Let a key wait, or change the weight of a waiting key.

        was_away: False for a key that never stopped waiting and was only skipped.
        """
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account(self._past[0])
        if account.turn:
            self.weights += weight - account.weight
            account.weight = weight
            return
        account.weight = weight
        if was_away:
            account.clock = max(account.clock, self._past[0])
        self.weights += weight
        self._queue(key, account)

    def leave(self, key: str) -> None:
        """Stop waiting. The key must be waiting."""
        account = self._accounts[key]
        assert account.turn, key
        self._unqueue(account)
        self.weights = self.weights - account.weight if self._turns else 0.0
        if len(self._accounts) > 2 * len(self._turns) + MAX_IDLE:
            self._forget_even()

    def first(self) -> str | None:
        """Return the key to serve next; None when no key waits."""
        return self._turns[0][2] if self._turns else None

    def serve(self, key: str, work: float) -> None:
        """Charge a waiting key for being served `work`."""
        account = self._accounts[key]
        assert account.turn, key
        self.present = max(self.present, account.clock)
        self._move(key, account, work)
        if self.present > MAX_CLOCK:
            self._rebase()

    def correct(self, key: str, work: float) -> None:
        """Charge `work` more than was charged before; less if negative."""
        account = self._accounts.get(key)
        if account is None:
            if work <= 0:
                return
            account = self._accounts[key] = _Account(self._past[0])
        self._move(key, account, work)

    def age(self) -> None:
        """Advance one age. Call at even intervals."""
        self._past.append(self.present)

    def clock(self, key: str) -> float:
        """Return the virtual clock of a key, or the clock with which the key would start now."""
        account = self._accounts.get(key)
        return self._past[0] if account is None else max(account.clock, self._past[0])

    def is_known(self, key: str) -> bool:
        """Return whether the key waits or has a remembered debt."""
        return key in self._accounts

    def _move(self, key: str, account: _Account, work: float) -> None:
        waits = account.turn is not None
        if waits:
            self._unqueue(account)
        account.clock += work / account.weight
        if waits:
            self._queue(key, account)

    def _queue(self, key: str, account: _Account) -> None:
        self._num_turns += 1
        account.turn = (account.clock, self._num_turns, key)
        insort(self._turns, account.turn)

    def _unqueue(self, account: _Account) -> None:
        assert account.turn is not None
        del self._turns[bisect_left(self._turns, account.turn)]
        account.turn = None

    def _forget_even(self) -> None:
        kept = self._accounts.items()
        self._accounts = {
            key: account for key, account in kept if account.turn or account.clock > self._past[0]
        }

    def _rebase(self) -> None:
        for account in self._accounts.values():
            account.clock = max(account.clock - self.present, -MAX_CLOCK)
            if account.turn is not None:
                account.turn = (account.clock, *account.turn[1:])
        self._turns = sorted(account.turn for account in self._accounts.values() if account.turn is not None)
        self._past = deque((past - self.present for past in self._past), maxlen=CREDIT_AGES)
        self.present = 0.0


# Recent work.

HALF_LIFE_S: Final = 3.0  # the router's credit reaches as far back
# A key that joins starts with at least this share of all recent work. With a larger share it waits longer,
# and newcomers hold up the other keys for less time.
NEWCOMER_PART: Final = 1 / 64
FORGET_S: Final = 6 * HALF_LIFE_S  # by then a key that left has had less than a newcomer
MAX_AWAY: Final = 4096  # keys without sequences that are remembered
# A key is beyond its share when it has had more than its due and this share of the other keys' due. Keys that
# alternate differ by less; a larger share would let a key take more from the others.
EXCESS: Final = 0.1


@dataclass(slots=True, eq=False)
class Share:
    """One key of `DecayedShares`; read only outside this module."""

    key: str
    weight: float = 1.0
    work: float = 0.0  # recent work, divided by the weight
    quotas: Counter[float] = field(default_factory=Counter)  # quota -> users that joined with it

    @property
    def quota(self) -> float:
        """The largest quota of the users; inf if one of them has none."""
        return max(self.quotas, default=inf)


class _Away(NamedTuple):
    weight: float
    work: float  # recent work when the key left, not divided
    left_s: float


class DecayedShares:
    """Recent work of each key, divided by its weight; the key with the least comes next.

    1. `join` counts one more user of a key. The weight given last holds, and the largest quota of the users.
       Quotas change nothing here.
    2. `charge` adds the work of one step. Work counts half as much HALF_LIFE_S later, whether the key has
       users or not. A burst is therefore served at once while the key has had less recent work than keys that
       always want more, and no key pays for old work that no other key wanted.
    3. `leave` removes a user. The work of a key without users is remembered while it counts.
    4. A key that joins starts with NEWCOMER_PART of all recent work or its own remembered work, whichever is
       more. A key that had all the work, and still wants more, comes next after at most log2(1 /
       NEWCOMER_PART) half-lives, however many newcomers of its weight join; after log2(1 + n) half-lives with
       n newcomers.
    5. `is_beyond_share` names the keys that used much of what was due to other keys.
    """

    def __init__(self) -> None:
        self.active: dict[str, Share] = {}  # the keys with users
        self._away: OrderedDict[str, _Away] = OrderedDict()  # in the order in which they left
        self._charged_s = 0.0  # the time of the last charge; all work is decayed to this time
        self._work = 0.0  # recent work of all keys
        self._away_weight = 0.0

    @property
    def are_several(self) -> bool:
        """True when more than one key has users; with one key, no share makes a difference."""
        return len(self.active) > 1

    @property
    def total_weight(self) -> float:
        """The sum of the weights of the keys with users."""
        return sum(share.weight for share in self.active.values())

    @property
    def num_remembered(self) -> int:
        """The number of keys without users that are remembered."""
        return len(self._away)

    def join(self, key: str, weight: float, quota: float = inf) -> Share:
        """Add a user of `key`. quota: of the user; inf for none."""
        share = self.active.get(key)
        if share is None:
            share = self.active[key] = Share(key, weight, self._remembered_work(key) / weight)
        share.work *= share.weight / weight  # the undivided work is the same
        share.weight = weight
        share.quotas[quota] += 1
        return share

    def leave(self, share: Share, quota: float = inf) -> None:
        """Remove a user that joined with this quota."""
        share.quotas[quota] -= 1
        if not share.quotas[quota]:
            del share.quotas[quota]
        if not share.quotas:
            del self.active[share.key]
            self._away[share.key] = _Away(share.weight, share.work * share.weight, self._charged_s)
            self._away_weight += share.weight

    def charge(self, work: Iterable[tuple[Share, int]], now_s: float) -> None:
        """Add the work of one step. A clock that goes back decays nothing."""
        decay, self._charged_s = _decay(now_s - self._charged_s), max(self._charged_s, now_s)
        self._work *= decay
        for share in self.active.values():
            share.work *= decay
        for share, amount in work:
            share.work += amount / share.weight
            self._work += amount
        self._forget()

    def charge_only(self, amount: int, now_s: float) -> None:
        """Charge the only key with users."""
        self.charge([(share, amount) for share in self.active.values()], now_s)

    def is_beyond_share(self, share: Share) -> bool:
        """True when the key's recent work exceeds its share of all remembered keys by EXCESS of the rest."""
        if not self._away and not self.are_several:
            return False
        due = share.weight / (self.total_weight + self._away_weight)
        return share.work * share.weight > (due + EXCESS * (1 - due)) * self._work

    def _remembered_work(self, key: str) -> float:
        away, least = self._drop(key), NEWCOMER_PART * self._work
        return least if away is None else max(least, away.work * _decay(self._charged_s - away.left_s))

    def _drop(self, key: str) -> _Away | None:
        away = self._away.pop(key, None)
        if away is not None:
            self._away_weight = max(0.0, self._away_weight - away.weight) if self._away else 0.0
        return away

    def _forget(self) -> None:
        while self._away:
            key, away = next(iter(self._away.items()))
            if len(self._away) <= MAX_AWAY and self._charged_s - away.left_s <= FORGET_S:
                return
            self._drop(key)


def _decay(seconds: float) -> float:
    """The part of any work that still counts after so long."""
    return float(0.5 ** max(0.0, seconds / HALF_LIFE_S))


Item = TypeVar("Item")
Group: TypeAlias = bytes  # an opaque key, such as that of a tenant


class FairLru(Generic[Item]):
    """Evicts items in LRU order, in groups that cannot displace each other.

    The next item to evict is the oldest of the group with the most items for its weight. So a group keeps at
    least its share, however fast other groups grow; a single group has everything.
    """

    def __init__(self) -> None:
        self._weights: dict[Group, float] = {}  # other than 1.0
        self._groups: dict[Group, OrderedDict[Item, None]] = {}  # oldest first, none empty

    def add(self, item: Item, group: Group) -> None:
        """Add as the newest of the group. The item must be in no group."""
        try:
            self._groups[group][item] = None
        except KeyError:
            self._groups[group] = OrderedDict(((item, None),))

    def remove(self, item: Item, group: Group) -> None:
        """Remove an item of the group."""
        items = self._groups[group]
        del items[item]
        if not items:
            del self._groups[group]

    def set_weight(self, group: Group, weight: float) -> None:
        """Set the weight of a group; a group without one has 1.0.

        With more than MAX_IDLE weights of groups without items, all of these but this one are forgotten.
        """
        if weight == 1.0:
            self._weights.pop(group, None)
            return
        self._weights[group] = weight
        if len(self._weights) > len(self._groups) + MAX_IDLE:
            kept = self._groups.keys() | {group}
            self._weights = {each: weight for each, weight in self._weights.items() if each in kept}

    def has(self, item: Item, group: Group) -> bool:
        """Return whether the item is in the group."""
        return item in self._groups.get(group, ())

    def num_of(self, group: Group) -> int:
        """Return the number of the group's items."""
        return len(self._groups.get(group, ()))

    def next_out(self) -> Item | None:
        """Return the item to evict next; None when there is none."""
        return next(iter(self._next_group()), None)

    def next_of_least_value(self, value: Callable[[Item], float], num_compared: int) -> Item | None:
        """Return the least valuable of the `num_compared` oldest items of the group that evicts next.

        Of equals, the oldest; None when there is none.
        """
        return min(islice(self._next_group(), num_compared), key=value, default=None)

    def _next_group(self) -> Iterable[Item]:
        groups = self._groups
        if len(groups) > 1:
            return groups[max(groups, key=self._num_for_weight)]
        for items in groups.values():
            return items
        return ()

    def _num_for_weight(self, group: Group) -> float:
        return len(self._groups[group]) / self._weights.get(group, 1.0)
