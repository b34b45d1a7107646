"""Whether workers have room for one more attempt; what they have no room for waits at the router.

An order can still change at the router, and a worker can be chosen with what is known then. So little waits
at the workers: as much as keeps them busy until the router has heard that a place is free.

A decode worker takes attempts up to its limits and a quarter more, as some of them have no token yet, and not
all grow as long as is expected. A worker that computes prompts has places for two, and for as many more as it
is thought to have done within AHEAD_S; a decode worker has them too where it may compute any prompt.

Workers order prompts by shares too, and what is overtaken there keeps its place. So a tenant that is owed
work by those who have places need not wait for one: it is let out besides, and overtakes. That comes to no
more than what has places, and one prompt of each tenant.
"""

from collections import Counter
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


class Capacity:
    def __init__(self, members: Membership, books: Books, *, decoders_compute: bool = False) -> None:
        """decoders_compute: a prompt of any length may be computed where it is decoded, if that is best."""
        self._members = members
        self.books = books
        self._prompts: dict[Key, _Prompt] = {}
        self._num_of: Counter[str] = Counter()  # tenant -> its prompts that have no token yet
        self._placed = 0.0  # work of prompts that were let out to a place
        self._besides = 0.0  # and of the others
        self._decoders_compute = decoders_compute
        self._taking_now: tuple[Sequence[Member], Sequence[Member]] = ((), ())
        self._version = -1

    def can_decode(self, member: Member, num_tokens: int) -> bool:
        """num_tokens: whose KV it is expected to need. A worker that has nothing takes anything."""
        account, worker = self.books.account(member.id), member.worker
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
        books = self.books
        shares = {each.id: books.account(each.id).share_of(each.worker) for each in decoders}
        return min(shares, key=lambda worker: shares[worker], default="")

    def can_compute(self, tenant: str, *, is_owed: bool) -> bool:
        """Whether a prompt of this tenant may go to a worker.

        is_owed: others have had more for their weight.
        """
        if not self.prefills_are_full() or self.may_overtake(tenant, is_owed=is_owed):
            return True
        return self._decoders_compute and any(self.has_place_at(each.id) for each in self._workers()[1])

    def prefills_are_full(self) -> bool:
        """None of them has a place. Where there are none at all, decode workers are asked."""
        prefills, decoders = self._workers()
        computers = prefills or decoders
        return bool(computers) and not any(self.has_place_at(each.id) for each in computers)

    def has_place_at(self, worker_id: str) -> bool:
        """Whether the next prompt would be computed there at once, or nearly so."""
        account = self.books.account(worker_id)
        if account.num_computing < MIN_COMPUTING or account.prompts.total < STEP_TOKENS:
            return True
        return self.books.wait_s(worker_id) < AHEAD_S

    def may_overtake(self, tenant: str, *, is_owed: bool) -> bool:
        """Whether its next prompt may go where there is no place."""
        return not self._num_of[tenant] or (is_owed and self._besides < self._placed)

    def dispatched(self, key: Key, tenant: str, work: float, computer: str) -> None:
        """The key must be new. To be called before the books know of it. computer: the worker's id."""
        self._num_of[tenant] += 1
        is_besides = self.prefills_are_full() and not self.has_place_at(computer)
        prompt = self._prompts[key] = _Prompt(tenant, work, is_besides)
        self._count(prompt, work)

    def started(self, key: Key) -> None:
        """It has its first token, or has ended. Unknown keys are no offence."""
        prompt = self._prompts.pop(key, None)
        if prompt is None:
            return
        self._count(prompt, -prompt.work)
        self._num_of[prompt.tenant] -= 1
        if not self._num_of[prompt.tenant]:
            del self._num_of[prompt.tenant]

    def _count(self, prompt: _Prompt, work: float) -> None:
        if prompt.is_besides:
            self._besides += work
        else:
            self._placed += work
        if not self._prompts:  # what sums of fractions leave
            self._besides = self._placed = 0.0

    def check_integrity(self) -> None:
        """AssertionError when the sums are not those of the prompts."""
        prompts = self._prompts.values()
        assert self._num_of == Counter(each.tenant for each in prompts)
        assert abs(self._besides - sum(each.work for each in prompts if each.is_besides)) < 1
        assert abs(self._placed - sum(each.work for each in prompts if not each.is_besides)) < 1

    def _workers(self) -> tuple[Sequence[Member], Sequence[Member]]:
        """Prefill and decode workers that take work."""
        if self._version != self._members.version:
            self._version = self._members.version
            self._taking_now = self._taking(WorkerRole.PREFILL), self._taking(WorkerRole.DECODE)
        return self._taking_now

    def _taking(self, role: WorkerRole) -> list[Member]:
        return [member for member in self._members.of_role(role) if not member.is_draining]
