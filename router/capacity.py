"""Whether workers have room for one more attempt; attempts that they have no room for wait at the router.

The order of requests can change while they wait at the router, and a worker can be chosen with later
knowledge. So few attempts wait at the workers: as many as keep the workers busy until the router hears of a
free slot.

A decode worker takes attempts up to 1.25 times its limits, because some have no token yet and not all grow as
long as expected. A worker has a slot for a prompt when less than MIN_COMPUTING prompts, or than one step
computes, or than AHEAD_S of work comes before the prompt. Where decode workers may compute any prompt, they
have slots too. Workers order prompts by fair shares (router/in_flight.py), so prompts that a new one
overtakes take no slot.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import cycle, islice
from typing import Final

from baton.messages.workers import WorkerRole
from baton.router.in_flight import InFlight, NewPrompt
from baton.router.membership import Member, Membership

OVERCOMMIT: Final = 1.25
MIN_COMPUTING: Final = 2  # prompts: the next one is there when the first is done
AHEAD_S: Final = 0.1
STEP_TOKENS: Final = 2048  # computed by one step
MAX_ASKED: Final = 32  # workers that one call looks at in detail


class Capacity:
    """Answers from the in-flight load and the members' limits."""

    def __init__(self, members: Membership, in_flight: InFlight, *, decoders_compute: bool = False) -> None:
        """decoders_compute: decode workers may compute prompts of any length."""
        self._members = members
        self.in_flight = in_flight
        self._decoders_compute = decoders_compute
        self._first_asked: Counter[WorkerRole] = Counter()
        self._taking_now: dict[WorkerRole, Sequence[Member]] = {}
        self._version = -1

    def can_decode(self, member: Member, num_tokens: int) -> bool:
        """True when a decode worker has room for an attempt with KV of `num_tokens`; an idle worker always
        has.
        """
        account, worker = self.in_flight.account(member.id), member.worker
        num_attempts = account.num_attempts + account.num_unknown
        if not num_attempts:
            return True
        if num_attempts >= max(1, worker.max_num_seqs) * OVERCOMMIT:
            return False
        num_slots = worker.num_pages * worker.page_size * OVERCOMMIT
        return account.num_tokens + account.num_unknown_tokens + num_tokens <= num_slots

    def full(self, num_tokens: int) -> frozenset[str]:
        """The decode workers without room for an attempt with KV of `num_tokens`."""
        decoders = self._members.of_role(WorkerRole.DECODE)
        return frozenset(each.id for each in decoders if not self.can_decode(each, num_tokens))

    def takes(self, worker_id: str) -> bool:
        """True for a decode worker that takes work."""
        return any(each.id == worker_id for each in self._taking(WorkerRole.DECODE))

    def roomiest(self, reached: frozenset[str], avoid: Collection[str] = ()) -> str:
        """The reached decode worker with the most room; "" when there is none.

        A worker of `avoid` is returned only when there is no other.
        """
        decoders = [each for each in self._taking(WorkerRole.DECODE) if each.id in reached]
        decoders = [each for each in decoders if each.id not in avoid] or decoders
        in_flight = self.in_flight
        shares = {each.id: in_flight.account(each.id).share_of(each.worker) for each in decoders}
        return min(shares, key=lambda worker: shares[worker], default="")

    def can_compute(self, prompt: NewPrompt) -> bool:
        """True when any worker has a slot for the prompt."""
        if not self.prefills_are_full(prompt):
            return True
        return self._decoders_compute and self._any_has_slot(prompt, WorkerRole.DECODE)

    def prefills_are_full(self, prompt: NewPrompt) -> bool:
        """True when no prefill worker has a slot; decode workers count where there are no prefill workers."""
        workers = self._workers()
        role = WorkerRole.PREFILL if workers[WorkerRole.PREFILL] else WorkerRole.DECODE
        return bool(workers[role]) and not self._any_has_slot(prompt, role)

    def has_slot(self, prompt: NewPrompt, worker_id: str) -> bool:
        """True when the worker would compute the prompt at once, or nearly so."""
        return self._has_slot_for_any(worker_id) or self._overtakes(prompt, worker_id)

    def _any_has_slot(self, prompt: NewPrompt, role: WorkerRole) -> bool:
        workers = self._workers()[role]
        if any(self._has_slot_for_any(each.id) for each in workers):
            return True
        # All are full: find out, at some of them in turn, whether the prompt would overtake others.
        num = min(len(workers), MAX_ASKED)
        first = self._first_asked[role]
        asked = islice(cycle(workers), first, first + num)
        self._first_asked[role] = (first + num) % max(1, len(workers))
        return any(self._overtakes(prompt, each.id) for each in asked)

    def _has_slot_for_any(self, worker_id: str) -> bool:
        """True when a prompt behind all others there would still be computed nearly at once."""
        account = self.in_flight.account(worker_id)
        if account.num_computing < MIN_COMPUTING or account.prompts.total < STEP_TOKENS:
            return True
        return self.in_flight.wait_s(worker_id) < AHEAD_S

    def _overtakes(self, prompt: NewPrompt, worker_id: str) -> bool:
        prompts = self.in_flight.account(worker_id).prompts
        num, num_tokens = prompts.ahead_of(prompt)
        if num < MIN_COMPUTING or num_tokens < STEP_TOKENS:
            return True
        return self.in_flight.wait_s(worker_id) * num_tokens / prompts.total < AHEAD_S

    def _workers(self) -> dict[WorkerRole, Sequence[Member]]:
        if self._version != self._members.version:
            self._version = self._members.version
            self._taking_now = {role: self._taking(role) for role in WorkerRole}
        return self._taking_now

    def _taking(self, role: WorkerRole) -> list[Member]:
        return [member for member in self._members.of_role(role) if not member.is_draining]
