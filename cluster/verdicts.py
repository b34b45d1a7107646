"""Decides which workers a cluster replaces, from what its routers say of them.

1. A router removes a worker that is silent, or whose step takes too long: WorkerRemoved is a verdict. Its
   requests go elsewhere from then on.
2. The worker is replaced once no connected router lists it: a router that a partition cuts off from the
   workers removes all of them, and the others keep them. A router that has just started and does not know
   all workers yet is waited for.
3. A silent worker is given SILENCE_GRACE_S more, since its successor has to load the model: a process that
   was only held up for a moment comes back, and its router lists it again. That drops the verdict.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

from baton.control import Members
from baton.operating import WorkerRemoved

SILENCE_GRACE_S: Final = 3.0
NOTHING_YET: Final = Members(workers=(), is_complete=False)

# Worker's name, the reason, seconds since its first router removed it.
Replace: TypeAlias = Callable[[str, str, float], None]


class Verdicts:
    """Calls `replace` once for each worker that all connected routers have lost."""

    def __init__(self, now_s: Callable[[], float], replace: Replace) -> None:
        self._now_s = now_s
        self._replace = replace
        self._lists: dict[str, Members] = {}  # id of a connected router -> the workers that it lists
        self._pending: dict[str, tuple[WorkerRemoved, str, float]] = {}  # id of a worker -> router, when

    def joined(self, router: str) -> None:
        self._lists[router] = NOTHING_YET

    def left(self, router: str) -> None:
        """The router's verdicts stand: the worker was silent to it while it was connected."""
        self._lists.pop(router, None)
        self._judge()

    def listed(self, router: str, members: Members) -> None:
        """Take the router's present list of workers."""
        self._lists[router] = members
        for worker in members.workers:
            _, by, _ = self._pending.get(worker.id, (None, "", 0.0))
            if by == router:
                del self._pending[worker.id]
        self._judge()

    def removed(self, router: str, removed: WorkerRemoved) -> None:
        """Take the router's verdict; its list is from before that."""
        members = self._lists.get(router, NOTHING_YET)
        others = tuple(worker for worker in members.workers if worker.id != removed.worker)
        self._lists[router] = Members(workers=others, is_complete=members.is_complete)
        _, _, since_s = self._pending.get(removed.worker, (None, "", self._now_s()))
        self._pending[removed.worker] = (removed, router, since_s)
        self._judge()

    def tick(self) -> None:
        """Replace those whose grace is over; to be called several times a second."""
        if self._pending:
            self._judge()

    def _judge(self) -> None:
        if not all(members.is_complete for members in self._lists.values()):
            return
        listed = [worker for members in self._lists.values() for worker in members.workers]
        ids, names = {worker.id for worker in listed}, {worker.name for worker in listed}
        for worker, (removed, _, since_s) in list(self._pending.items()):
            age_s = self._now_s() - since_s
            if worker in ids or not (removed.is_hung or age_s >= SILENCE_GRACE_S):
                continue
            del self._pending[worker]
            if removed.name not in names:  # else its successor is there already
                self._replace(removed.name, removed.reason, age_s)
