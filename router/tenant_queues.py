"""The requests that wait at the router, in the order in which they are let out.

The life of one that waits:

1. It is added. Strictly first comes the class of the lowest rank, within a rank the tenant whose turn it is
   (fair_share.py), of a tenant's own requests the one of lowest priority number, then the one that is due
   first, then the one that came first.
2. It is taken when it is its turn, and its tenant charged for its work; or removed, whatever the reason.
3. A tenant that has all that it may have is held: its requests stay, others' go past them. Released, it goes
   on as one that has just begun to wait.

Nothing here knows time or capacity. Every operation on one request, or tenant, takes microseconds, of a
million requests as well.
"""

from bisect import insort
from collections.abc import Iterator

from baton.control import Submit
from baton.router.books import Key
from baton.router.fair_share import FairShare
from baton.router.prompts_ahead import Party
from baton.router.work_line import Order, WorkLine
from baton.tenancy import MAX_CLASSES, Standing


class Waiting:
    """One attempt. `order` is the queue's own."""

    __slots__ = (
        *("due_s", "gateway", "key", "order", "rank"),
        *("since_s", "standing", "submit", "tenant", "work"),
    )

    def __init__(self, gateway: str, submit: Submit, *, since_s: float, due_s: float, work: float) -> None:
        """due_s: by when it should be let out. work: tokens that it is expected to take."""
        request = submit.request
        self.gateway = gateway
        self.submit = submit
        self.key: Key = (request.request_id, request.attempt)
        self.tenant = request.tenant
        self.standing: Standing = request.standing
        self.rank = request.standing.rank
        self.since_s = since_s
        self.due_s = due_s
        self.work = work
        self.order: Order = (request.priority, due_s, 0)  # and its number, which the queue gives it

    def queued_s(self, now_s: float) -> float:
        """For how long it waits for its turn: what workers have begun with was being answered before."""
        since_s = self.since_s + (self.submit.age_s if self.submit.is_begun else 0.0)
        return max(0.0, now_s - since_s)


class _Lane:
    """What waits of one tenant in one rank."""

    __slots__ = ("line", "weight")

    def __init__(self) -> None:
        self.line: WorkLine[Waiting] = WorkLine()
        self.weight = 1.0


class TenantQueues:
    def __init__(self) -> None:
        self._shares = [FairShare() for _ in range(MAX_CLASSES)]  # by rank
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._ranks: dict[str, list[int]] = {}  # tenant -> ranks of its lanes
        self._held: set[str] = set()  # tenants
        self._queued: dict[Key, Waiting] = {}  # in the order of coming
        self._num_added = 0
        self._busy: list[int] = []  # ranks in which anybody waits, the highest class first
        self._work = [0.0] * MAX_CLASSES
        self._num = [0] * MAX_CLASSES

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, key: Key) -> bool:
        return key in self._queued

    def __iter__(self) -> Iterator[Waiting]:
        """In the order of coming."""
        return iter(self._queued.values())

    def add(self, waiting: Waiting) -> None:
        """Its key must be new."""
        assert waiting.key not in self._queued, waiting.key
        self._num_added += 1
        priority, due_s, _ = waiting.order
        waiting.order = (priority, due_s, self._num_added)
        self._queued[waiting.key] = waiting
        place = (waiting.rank, waiting.tenant)
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes[place] = _Lane()
            self._ranks.setdefault(waiting.tenant, []).append(waiting.rank)
        lane.line.add(waiting.order, waiting, waiting.work)
        lane.weight = waiting.standing.weight
        if not self._num[waiting.rank]:
            insort(self._busy, waiting.rank)
        self._num[waiting.rank] += 1
        self._work[waiting.rank] += waiting.work
        if waiting.tenant not in self._held:
            self._shares[waiting.rank].join(waiting.tenant, lane.weight)

    def first(self) -> Waiting | None:
        """Whose turn it is. None: nobody waits who is not held."""
        for rank in self._busy:
            tenant = self._shares[rank].first()
            if tenant is not None:
                return self._lanes[rank, tenant].line.first()
        return None

    def heads(self) -> Iterator[Waiting]:
        """Of each tenant that is not held, in each rank, the first."""
        for (_, tenant), lane in self._lanes.items():
            if tenant not in self._held:
                yield lane.line.first()

    def take(self, waiting: Waiting) -> None:
        """Let it out, and charge its tenant its work. It must be the first."""
        self._shares[waiting.rank].serve(waiting.tenant, waiting.work)
        self._remove(waiting)

    def remove(self, key: Key) -> Waiting | None:
        """Uncharged. None: it is not here."""
        waiting = self._queued.get(key)
        if waiting is not None:
            self._remove(waiting)
        return waiting

    def correct(self, rank: int, tenant: str, work: float) -> None:
        """What was taken has used so much more than it was charged, or less."""
        self._shares[rank].correct(tenant, work)

    def age(self) -> None:
        """To be called at even intervals: how far back credit reaches is counted in them."""
        for share in self._shares:
            share.age()

    def hold(self, tenant: str) -> None:
        if tenant in self._held:
            return
        self._held.add(tenant)
        for rank in self._ranks.get(tenant, ()):
            self._shares[rank].leave(tenant)

    def release(self, tenant: str, *, was_away: bool = True) -> None:
        """was_away: else it has waited all the while, and loses nothing by it."""
        if tenant not in self._held:
            return
        self._held.remove(tenant)
        for rank in self._ranks.get(tenant, ()):
            self._shares[rank].join(tenant, self._lanes[rank, tenant].weight, was_away=was_away)

    @property
    def work(self) -> float:
        return sum(self._work)

    def lead_of(self, waiting: Waiting) -> float:
        """Work, for its weight, that its tenant has had or is to have more than who was served last.

        Below 0: it is owed so much.
        """
        share = self._shares[waiting.rank]
        return share.clock(waiting.tenant) - share.present

    def known_lead(self, party: Party) -> float | None:
        """The same of any tenant. None: nothing was charged to it here."""
        share = self._shares[party.rank]
        return share.clock(party.tenant) - share.present if share.is_known(party.tenant) else None

    def is_held(self, tenant: str) -> bool:
        return tenant in self._held

    def num_of(self, tenant: str) -> int:
        return sum(self._lanes[rank, tenant].line.num for rank in self._ranks.get(tenant, ()))

    def of_rank(self, rank: int) -> Iterator[Waiting]:
        """In the order of coming."""
        return (waiting for waiting in self._queued.values() if waiting.rank == rank)

    def last_rank(self) -> int | None:
        """The lowest class that waits."""
        return self._busy[-1] if self._busy else None

    def work_before(self, waiting: Waiting) -> float:
        """That would be let out before it, if it came now and nothing else came after it.

        That of higher classes, its tenant's own, and what others are due until its tenant's turn comes.
        """
        rank, weight = waiting.rank, waiting.standing.weight
        share, lane = self._shares[rank], self._lanes.get((rank, waiting.tenant))
        priority, due_s, number = waiting.order
        own, others, weights = 0.0, self._work[rank], share.weights
        if lane is not None:
            own = lane.line.work_before((priority, due_s, number or self._num_added + 1))
            others -= lane.line.work
            weights -= lane.weight
        due = max(0.0, own / weight + self.lead_of(waiting)) * max(0.0, weights)
        return sum(self._work[:rank]) + own + min(max(0.0, others), due)

    def check_integrity(self) -> None:
        """AssertionError when the counts are not those of what waits."""
        assert sum(lane.line.num for lane in self._lanes.values()) == len(self._queued) == sum(self._num)
        for (rank, tenant), lane in self._lanes.items():
            lane.line.check_integrity()
            assert lane.line.num > 0 and rank in self._ranks[tenant], (rank, tenant)
            assert all(self._queued[waiting.key] is waiting for waiting in lane.line)
        for rank, share in enumerate(self._shares):
            open_lanes = {tenant for of, tenant in self._lanes if of == rank and tenant not in self._held}
            assert len(share) == len(open_lanes), rank

    def _remove(self, waiting: Waiting) -> None:
        del self._queued[waiting.key]
        self._num[waiting.rank] -= 1
        rest = self._work[waiting.rank] - waiting.work
        self._work[waiting.rank] = rest if self._num[waiting.rank] else 0.0
        if not self._num[waiting.rank]:
            self._busy.remove(waiting.rank)
        place = (waiting.rank, waiting.tenant)
        lane = self._lanes[place]
        lane.line.remove(waiting.order)
        if not lane.line.num:
            del self._lanes[place]
            self._ranks[waiting.tenant].remove(waiting.rank)
            if not self._ranks[waiting.tenant]:
                del self._ranks[waiting.tenant]
            if waiting.tenant not in self._held:
                self._shares[waiting.rank].leave(waiting.tenant)
