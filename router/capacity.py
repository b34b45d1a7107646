"""Whether workers have room for one more attempt; what they have no room for waits at the router.

An order can still change at the router, and a worker can be chosen with what is known then. So little waits
at the workers: as much as keeps them busy until the router has heard that a place is free.

A decode worker takes attempts up to its limits and a quarter more, as some of them have no token yet, and not
all grow as long as is expected. A worker that computes prompts takes two, and as many more as it is thought
to have done within AHEAD_S.

Workers order prompts by shares too. So a tenant that has less under way than its share of what was let out by
these rules need not wait for a place: it is let out besides, and overtakes there.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from baton.router.books import Books, Key
from baton.router.membership import Member, Membership
from baton.worker import WorkerRole

OVERCOMMIT: Final = 1.25
MIN_COMPUTING: Final = 2  # prompts: the next is there when one is done
AHEAD_S: Final = 0.1
STEP_TOKENS: Final = 2048  # that a step computes, if nobody has said otherwise


class _Prompt(NamedTuple):
    tenant: str
    work: float
    is_besides: bool


class _Computing:
    """One tenant's prompts that have no token yet."""

    __slots__ = ("num", "weight", "work")

    def __init__(self) -> None:
        self.num = 0
        self.work = 0.0
        self.weight = 1.0


class Capacity:
    def __init__(self, members: Membership, books: Books) -> None:
        self._members = members
        self._books = books
        self._prompts: dict[Key, _Prompt] = {}
        self._tenants: dict[str, _Computing] = {}
        self._weights = 0.0  # of these tenants
        self._work = 0.0  # of prompts, less those that were let out besides
        self._computers: Sequence[Member] = ()
        self._version = -1

    def can_decode(self, member: Member, num_tokens: int) -> bool:
        """num_tokens: whose KV it is expected to need. A worker that has nothing takes anything."""
        account, worker = self._books.account(member.id), member.worker
        num_attempts = account.num_attempts + account.num_unknown
        if not num_attempts:
            return True
        if num_attempts >= max(1, worker.max_num_seqs) * OVERCOMMIT:
            return False
        num_slots = worker.num_pages * worker.page_size * OVERCOMMIT
        return account.num_tokens + account.num_unknown_tokens + num_tokens <= num_slots

    def full(self, num_tokens: int) -> frozenset[str]:
        """The decode workers that can't take it."""
        decoders = self._members.of_role(WorkerRole.DECODE)
        return frozenset(each.id for each in decoders if not self.can_decode(each, num_tokens))

    def roomiest(self, reached: frozenset[str]) -> str:
        """The decode worker that takes work, of those reached, with the most room; "": there is none."""
        decoders = [each for each in self._taking(WorkerRole.DECODE) if each.id in reached]
        books = self._books
        shares = {each.id: books.account(each.id).share_of(each.worker) for each in decoders}
        return min(shares, key=lambda worker: shares[worker], default="")

    def can_compute(self, tenant: str, weight: float, weights: float) -> bool:
        """Whether a prompt of this tenant may go to a worker; weights: of all tenants that wait."""
        return self._has_place() or self._is_under_share(tenant, weight, weights)

    def dispatched(self, key: Key, tenant: str, weight: float, work: float) -> None:
        """The key must be new. To be called before the books know of it."""
        computing = self._tenants.get(tenant)
        if computing is None:
            computing = self._tenants[tenant] = _Computing()
        else:
            self._weights -= computing.weight
        computing.weight = weight
        computing.num += 1
        computing.work += work
        self._weights += weight
        prompt = self._prompts[key] = _Prompt(tenant, work, not self._has_place())
        if not prompt.is_besides:
            self._work += work

    def started(self, key: Key) -> None:
        """It has its first token, or has ended. Unknown keys are no offence."""
        prompt = self._prompts.pop(key, None)
        if prompt is None:
            return
        if not prompt.is_besides:
            self._work = self._work - prompt.work if self._prompts else 0.0
        computing = self._tenants[prompt.tenant]
        computing.num -= 1
        computing.work -= prompt.work
        if not computing.num:
            del self._tenants[prompt.tenant]
            self._weights = self._weights - computing.weight if self._tenants else 0.0

    def check_integrity(self) -> None:
        """AssertionError when the sums are not those of the prompts."""
        prompts = self._prompts.values()
        assert sum(each.num for each in self._tenants.values()) == len(self._prompts)
        assert abs(sum(each.work for each in self._tenants.values()) - sum(each.work for each in prompts)) < 1
        assert abs(self._work - sum(each.work for each in prompts if not each.is_besides)) < 1
        assert abs(self._weights - sum(each.weight for each in self._tenants.values())) < 1e-3

    def _is_under_share(self, tenant: str, weight: float, weights: float) -> bool:
        computing = self._tenants.get(tenant)
        if computing is None:
            return True
        return computing.work < self._work * weight / max(weight, weights, self._weights)

    def _has_place(self) -> bool:
        if self._version != self._members.version:
            self._version = self._members.version
            prefills = self._taking(WorkerRole.PREFILL)
            self._computers = prefills or self._taking(WorkerRole.DECODE)
        return any(map(self._is_open, self._computers)) or not self._computers

    def _taking(self, role: WorkerRole) -> list[Member]:
        return [member for member in self._members.of_role(role) if not member.is_draining]

    def _is_open(self, member: Member) -> bool:
        account = self._books.account(member.id)
        if account.num_computing < MIN_COMPUTING or account.prompts.total < STEP_TOKENS:
            return True
        return self._books.wait_s(member.id) < AHEAD_S
