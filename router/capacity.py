"""Whether workers have room for one more attempt; what they have no room for waits at the router.

An order can still change at the router, and a worker can be chosen with what is known then. So little waits
at the workers: as much as keeps them busy until the router has heard that a place is free.

A decode worker takes attempts up to its limits and a quarter more, as some of them have no token yet, and not
all grow as long as is expected. A worker that computes prompts has a place for one if no more than another
comes before it, or than one step computes, or than is done within AHEAD_S; a decode worker has it too where
it may compute any prompt. Workers order prompts by shares too (router/policies/prompts_ahead.py): those that
a prompt overtakes there take no place from it.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import cycle, islice
from typing import Final

from baton.messages.workers import WorkerRole
from baton.router.in_flight import InFlight
from baton.router.membership import Member, Membership
from baton.router.policies.prompts_ahead import Claim

OVERCOMMIT: Final = 1.25
MIN_COMPUTING: Final = 2  # prompts: the next is there when one is done
AHEAD_S: Final = 0.1
STEP_TOKENS: Final = 2048  # that a step computes, if nobody has said otherwise
MAX_ASKED: Final = 32  # at one look


class Capacity:
    def __init__(self, members: Membership, in_flight: InFlight, *, decoders_compute: bool = False) -> None:
        """decoders_compute: a prompt of any length may be computed where it is decoded, if that is best."""
        self._members = members
        self.in_flight = in_flight
        self._decoders_compute = decoders_compute
        self._first_asked: Counter[WorkerRole] = Counter()  # at the next look
        self._taking_now: dict[WorkerRole, Sequence[Member]] = {}
        self._version = -1

    def can_decode(self, member: Member, num_tokens: int) -> bool:
        """num_tokens: whose KV it is expected to need. A worker that has nothing takes anything."""
        account, worker = self.in_flight.account(member.id), member.worker
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

    def takes(self, worker_id: str) -> bool:
        """Whether it is a decode worker that takes work."""
        return any(each.id == worker_id for each in self._taking(WorkerRole.DECODE))

    def roomiest(self, reached: frozenset[str], avoid: Collection[str] = ()) -> str:
        """The decode worker that takes work, of those reached, with the most room; "": there is none.

        One of `avoid` only where there is no other.
        """
        decoders = [each for each in self._taking(WorkerRole.DECODE) if each.id in reached]
        decoders = [each for each in decoders if each.id not in avoid] or decoders
        in_flight = self.in_flight
        shares = {each.id: in_flight.account(each.id).share_of(each.worker) for each in decoders}
        return min(shares, key=lambda worker: shares[worker], default="")

    def can_compute(self, claim: Claim) -> bool:
        """Whether any worker has a place for this prompt."""
        if not self.prefills_are_full(claim):
            return True
        return self._decoders_compute and self._any_has_place(claim, WorkerRole.DECODE)

    def prefills_are_full(self, claim: Claim) -> bool:
        """None of them has a place for it. Where there are none at all, decode workers are asked."""
        workers = self._workers()
        role = WorkerRole.PREFILL if workers[WorkerRole.PREFILL] else WorkerRole.DECODE
        return bool(workers[role]) and not self._any_has_place(claim, role)

    def has_place(self, claim: Claim, worker_id: str) -> bool:
        """Whether the prompt would be computed there at once, or nearly so."""
        return self._has_place_for_any(worker_id) or self._overtakes(claim, worker_id)

    def _any_has_place(self, claim: Claim, role: WorkerRole) -> bool:
        """Of very many that are full some are asked, in turns, what the prompt would overtake there."""
        workers = self._workers()[role]
        if any(self._has_place_for_any(each.id) for each in workers):
            return True
        num = min(len(workers), MAX_ASKED)
        first = self._first_asked[role]
        asked = islice(cycle(workers), first, first + num)
        self._first_asked[role] = (first + num) % max(1, len(workers))
        return any(self._overtakes(claim, each.id) for each in asked)

    def _has_place_for_any(self, worker_id: str) -> bool:
        """Though all that is there come before it."""
        account = self.in_flight.account(worker_id)
        if account.num_computing < MIN_COMPUTING or account.prompts.total < STEP_TOKENS:
            return True
        return self.in_flight.wait_s(worker_id) < AHEAD_S

    def _overtakes(self, claim: Claim, worker_id: str) -> bool:
        """So much that little is left before it."""
        prompts = self.in_flight.account(worker_id).prompts
        num, num_tokens = prompts.before(claim)
        if num < MIN_COMPUTING or num_tokens < STEP_TOKENS:
            return True
        return self.in_flight.wait_s(worker_id) * num_tokens / prompts.total < AHEAD_S

    def _workers(self) -> dict[WorkerRole, Sequence[Member]]:
        """Those that take work."""
        if self._version != self._members.version:
            self._version = self._members.version
            self._taking_now = {role: self._taking(role) for role in WorkerRole}
        return self._taking_now

    def _taking(self, role: WorkerRole) -> list[Member]:
        return [member for member in self._members.of_role(role) if not member.is_draining]
