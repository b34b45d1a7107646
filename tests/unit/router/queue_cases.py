"""Requests that wait, and a queue so plain that it can't be wrong."""

from collections import defaultdict

from baton.fair_queue import CREDIT_AGES
from baton.messages.control import Submit
from baton.request import Request, SamplingParams
from baton.router.queue.quotas import RequestWork
from baton.router.queue.tenant_queues import QueuedAttempt
from baton.tenants import Degradation, Quotas, SchedulingKey, Sla
from tests.node_peers import id_of


def asked(
    name: str,
    tenant: str = "a",
    *,
    num_tokens: int = 100,
    max_tokens: int = 10,
    sla: Sla | None = None,
    attempt: int = 0,
    priority: int = 0,
    quotas: Quotas | None = None,
    degradation: Degradation | None = None,
    **scheduling_key: float,
) -> Submit:
    """By a gateway. standing: weight, rank, max_queue_delay_ms."""
    request = Request(
        request_id=id_of(name),
        token_ids=(1,) * num_tokens,
        sampling=SamplingParams(max_tokens=max_tokens),
        tenant=tenant,
        sla=sla or Sla(),
        attempt=attempt,
        priority=priority,
        scheduling_key=SchedulingKey(
            quotas=quotas or Quotas(),
            degradation=degradation or Degradation(),
            **scheduling_key,  # type: ignore[arg-type]
        ),
    )
    return Submit(request=request, is_begun=attempt > 0)


def waits(
    name: str,
    tenant: str = "a",
    *,
    work: float = 10.0,
    due_s: float = 0.0,
    priority: int = 0,
    weight: float = 1.0,
    rank: int = 0,
) -> QueuedAttempt:
    submit = asked(name, tenant, num_tokens=1, priority=priority, weight=weight, rank=rank)
    return QueuedAttempt(id_of("g"), submit, since_s=0.0, due_s=due_s, work=RequestWork(0.0, work))


class PlainQueues:
    """Everything is looked at, every time."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, QueuedAttempt]] = []  # number of coming
        self.clocks: defaultdict[tuple[int, str], float] = defaultdict(float)
        self.joined: dict[tuple[int, str], int] = {}  # when its clock last changed, or it came
        self.present: defaultdict[int, float] = defaultdict(float)
        self.ages: list[defaultdict[int, float]] = [defaultdict(float)]  # what the present was
        self.weights: dict[tuple[int, str], float] = {}
        self.held: set[str] = set()
        self.served: set[tuple[int, str]] = set()
        self._num = 0

    def age(self) -> None:
        self.ages.append(self.present.copy())

    def _turn(self) -> int:
        self._num += 1
        return self._num

    def _begin(self, place: tuple[int, str]) -> None:
        self.clocks[place] = max(self.clocks[place], self.ages[-CREDIT_AGES:][0][place[0]])
        self.joined[place] = self._turn()

    def _is_here(self, place: tuple[int, str]) -> bool:
        return any((each.rank, each.tenant) == place for _, each in self.waiting)

    def add(self, waiting: QueuedAttempt) -> None:
        place = (waiting.rank, waiting.tenant)
        self.weights[place] = waiting.scheduling_key.weight
        if not self._is_here(place) and waiting.tenant not in self.held:
            self._begin(place)
        self.waiting.append((self._turn(), waiting))

    def first(self) -> QueuedAttempt | None:
        free = [(number, each) for number, each in self.waiting if each.tenant not in self.held]
        if not free:
            return None
        rank = min(each.rank for _, each in free)
        places = {(rank, each.tenant) for _, each in free if each.rank == rank}
        place = min(places, key=lambda place: (self.clocks[place], self.joined[place]))
        mine = [(number, each) for number, each in free if (each.rank, each.tenant) == place]
        return min(mine, key=lambda entry: (entry[1].order[:2], entry[0]))[1]

    def take(self, waiting: QueuedAttempt) -> None:
        place = (waiting.rank, waiting.tenant)
        self.present[waiting.rank] = max(self.present[waiting.rank], self.clocks[place])
        self.served.add(place)
        self.remove(waiting)
        self.correct(waiting.rank, waiting.tenant, waiting.work)

    def remove(self, waiting: QueuedAttempt) -> None:
        self.waiting = [entry for entry in self.waiting if entry[1] is not waiting]

    def correct(self, rank: int, tenant: str, work: float) -> None:
        place = (rank, tenant)
        self.clocks[place] += work / self.weights.get(place, 1.0)
        self.joined[place] = self._turn()

    def hold(self, tenant: str) -> None:
        self.held.add(tenant)

    def release(self, tenant: str) -> None:
        if tenant in self.held:
            self.held.remove(tenant)
            for place in sorted({(each.rank, each.tenant) for _, each in self.waiting}):
                if place[1] == tenant:
                    self._begin(place)
