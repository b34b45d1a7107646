"""Who of those that wait may begin, and the pages that are promised to prefill workers meanwhile.

The next is of the best class; in it of the tenant that holds fewest pages here for its weight; a tenant's own
come by priority and by when they are due. One that finds no room in its tenant's quota of pages holds up its
tenant's others; any other that finds no room holds up all that come after it.

A promise is made before a prefill worker is asked, and ends when that worker has reserved the pages or will
not come for them. So a prompt that has been computed never waits for memory.
"""

from bisect import insort
from itertools import count
from typing import NamedTuple

from baton.decode_worker.attempt import Attempt
from baton.engine.replica import Replica
from baton.engine.sequence import due_s


class _Waiting(NamedTuple):
    rank: int  # of its class
    priority: int
    due_s: float
    serial: int
    attempt: Attempt

    @property
    def order(self) -> tuple[int, int, float, int]:
        """On its tenant's account."""
        return self[:4]


class Admission:
    def __init__(self, engine: Replica) -> None:
        self._engine = engine
        self._waiting: dict[str, list[_Waiting]] = {}  # by tenant, in order; no list is empty
        self._serials = count()
        self._num_promised_pages = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def wait(self, attempt: Attempt) -> None:
        request = attempt.request
        waiting = _Waiting(
            request.standing.rank, request.priority, due_s(request), next(self._serials), attempt
        )
        insort(self._waiting.setdefault(request.tenant, []), waiting, key=_order)

    def first(self) -> Attempt | None:
        """The next to begin."""
        heads = [lane[0] for lane in self._waiting.values() if self._is_within_quota(lane[0].attempt)]
        return min(heads, key=self._turn).attempt if heads else None

    def leave(self, attempt: Attempt) -> None:
        """It waits no longer, for whatever reason."""
        tenant = attempt.request.tenant
        left = [each for each in self._waiting.pop(tenant, []) if each.attempt is not attempt]
        if left:
            self._waiting[tenant] = left

    def may_have_room(self, attempt: Attempt) -> bool:
        """Whether what it found no room for when it was last tried would fit now; True before that."""
        num_pages = attempt.num_wanted_pages
        return not num_pages or num_pages + self._num_promised_pages <= self._engine.num_available_pages

    def promise(self, attempt: Attempt, num_pages: int) -> bool:
        """Whether the pages will be there when the prefill worker asks for them. They are expected until
        `end_expectation`."""
        attempt.num_wanted_pages = num_pages
        if not self._is_within_quota(attempt) or not self.may_have_room(attempt):
            return False
        self._num_promised_pages += num_pages
        attempt.num_promised_pages = attempt.num_expected_pages = num_pages
        self._engine.pages.accounts.expect(attempt.request.tenant, num_pages)
        return True

    def end_promise(self, attempt: Attempt) -> None:
        self._num_promised_pages -= attempt.num_promised_pages
        attempt.num_promised_pages = 0

    def end_expectation(self, attempt: Attempt) -> None:
        """The pages are there, or will not come."""
        self._engine.pages.accounts.expect(attempt.request.tenant, -attempt.num_expected_pages)
        attempt.num_expected_pages = 0

    def _is_within_quota(self, attempt: Attempt) -> bool:
        """Whether what it was found to lack when it was last tried is; True before that."""
        request = attempt.request
        quota = request.standing.quotas.max_kv_pages
        held = self._engine.pages.accounts.held(request.tenant)
        return quota is None or attempt.num_wanted_pages + held <= quota

    def _turn(self, waiting: _Waiting) -> tuple[int, float, tuple[int, int, float, int]]:
        request = waiting.attempt.request
        num_pages = self._engine.pages.accounts.held(request.tenant)
        return waiting.rank, num_pages / request.standing.weight, waiting.order


def _order(waiting: _Waiting) -> tuple[int, int, float, int]:
    return waiting.order
