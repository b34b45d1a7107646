from bisect import insort
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.fair_queue import CREDIT_AGES
from baton.router.queue.quotas import RequestWork
from baton.router.queue.tenant_queues import (
    MIN_KEPT,
    Deadlines,
    Order,
    QueuedAttempt,
    TenantQueues,
    WorkLine,
)
from tests.node_peers import id_of, name_of
from tests.unit.router.queue_cases import asked


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
    """The oracle: each call looks at all waiting requests."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, QueuedAttempt]] = []  # number of arrival
        self.clocks: defaultdict[tuple[int, str], float] = defaultdict(float)
        self.joined: dict[tuple[int, str], int] = {}  # number of the last change of the clock
        self.present: defaultdict[int, float] = defaultdict(float)
        self.ages: list[defaultdict[int, float]] = [defaultdict(float)]  # the present at each age
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
        return min(mine, key=lambda entry: (entry[1].submit.request.priority, entry[1].due_s, entry[0]))[1]

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


def order_of(queues: TenantQueues) -> list[str]:
    """The names of all requests, in the order in which they are taken."""
    names = []
    while (waiting := queues.first()) is not None:
        queues.take(waiting)
        names.append(name_of(waiting.key[0]))
    return names


def queues_of(*waiting: QueuedAttempt) -> TenantQueues:
    queues = TenantQueues()
    for each in waiting:
        queues.add(each)
    return queues


def test_skipped_tenant_keeps_its_credit_and_an_absent_one_does_not() -> None:
    for was_away, expected in ((False, ["a0", "a1", "b9"]), (True, ["a0", "b9", "a1"])):
        queues = queues_of(waits("a0"), waits("a1"), *(waits(f"b{n}", "b") for n in range(10)))
        queues.hold("a")
        for _ in range(9):
            first = queues.first()
            assert first is not None
            queues.take(first)
        for _ in range(CREDIT_AGES):
            queues.age()
        queues.release("a", was_away=was_away)
        assert order_of(queues) == expected


def test_work_before_counts_the_work_that_would_be_dispatched_before() -> None:
    mine = [waits(f"a{n}", work=5, due_s=n) for n in range(4)]
    others = [waits(f"b{n}", "b", work=5) for n in range(100)]
    high = [waits("h", "h", rank=0, work=7)]
    queues = queues_of(*others, *mine)
    # Two of its own, of which one is due as early, and as much of the other's.
    assert queues.work_before(waits("new", due_s=1)) == 2 * 5 + 2 * 5
    assert queues.work_before(waits("new", "c")) == 0
    assert queues.work_before(waits("new", "b", due_s=1)) == 500 + 20  # there is no more of the other's
    ranked = queues_of(*high, waits("l", "l", rank=1, work=3))
    assert ranked.work_before(waits("new", "new", rank=1)) == 7
    assert ranked.work_before(waits("new", "l", rank=1, due_s=1)) == 10


TENANTS = st.sampled_from(["a", "b", "c"])


def test_deadlines_of_dispatched_requests_are_dropped() -> None:
    deadlines = Deadlines(queues_of())
    for number in range(3 * MIN_KEPT):
        deadlines.add(float(number), (id_of(f"r{number}"), 0))
    assert len(deadlines) <= MIN_KEPT + 1


class QueueMachine(RuleBasedStateMachine):
    """Any sequence of operations, compared with the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.queues = TenantQueues()
        self.plain = PlainQueues()
        self.num_added = 0

    @rule(tenant=TENANTS, rank=st.integers(0, 2), work=st.integers(1, 64), due=st.integers(0, 3))
    def add(self, tenant: str, rank: int, work: int, due: int) -> None:
        self.num_added += 1
        weight = {"a": 1.0, "b": 2.0, "c": 0.5}[tenant]
        waiting = waits(
            f"r{self.num_added}", tenant, work=work, due_s=due, priority=due % 2, weight=weight, rank=rank
        )
        self.queues.add(waiting)
        self.plain.add(waiting)

    @precondition(lambda self: self.queues.first() is not None)
    @rule()
    def take(self) -> None:
        waiting = self.queues.first()
        assert waiting is not None
        self.queues.take(waiting)
        self.plain.take(waiting)

    @precondition(lambda self: len(self.queues) > 0)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        waiting: QueuedAttempt = data.draw(st.sampled_from(list(self.queues)))
        self.queues.remove(waiting)
        assert waiting.key not in self.queues
        self.plain.remove(waiting)

    @rule(tenant=TENANTS, work=st.integers(-8, 64))
    def correct(self, tenant: str, work: int) -> None:
        if (0, tenant) in self.plain.served:
            self.queues.correct(0, tenant, work)
            self.plain.correct(0, tenant, work)

    @rule(times=st.integers(1, 3))
    def age(self, times: int) -> None:
        for _ in range(times):
            self.queues.age()
            self.plain.age()

    @rule(tenant=TENANTS)
    def hold(self, tenant: str) -> None:
        self.queues.hold(tenant)
        self.plain.hold(tenant)

    @rule(tenant=TENANTS)
    def release(self, tenant: str) -> None:
        self.queues.release(tenant)
        self.plain.release(tenant)

    @invariant()
    def same_turn(self) -> None:
        self.queues.check_integrity()
        expected, got = self.plain.first(), self.queues.first()
        assert (expected and expected.key) == (got and got.key)
        assert len(self.queues) == len(self.plain.waiting)


TestQueues = QueueMachine.TestCase
TestQueues.settings = settings(max_examples=40, stateful_step_count=30)


class PlainLine:
    """A sorted list, added up every time."""

    def __init__(self) -> None:
        self.entries: list[tuple[Order, float]] = []

    def work_before(self, order: Order) -> float:
        return sum(work for other, work in self.entries if other < order)


def check(line: WorkLine[Order], plain: PlainLine) -> None:
    line.check_integrity()
    assert list(line) == [order for order, _ in plain.entries]
    assert line.num == len(plain.entries)
    assert line.work == pytest.approx(sum(work for _, work in plain.entries))


@settings(max_examples=80, deadline=None)
@given(block_size=st.integers(1, 5), data=st.data())
def test_line_equals_a_sorted_list_with_sums(block_size: int, data: st.DataObject) -> None:
    line: WorkLine[Order] = WorkLine(block_size)
    plain = PlainLine()
    for number in range(data.draw(st.integers(0, 60))):
        if plain.entries and data.draw(st.integers(0, 2)) == 0:
            entry = data.draw(st.sampled_from(plain.entries))
            line.remove(entry[0])
            plain.entries.remove(entry)
        else:
            order = (data.draw(st.integers(-1, 1)), float(data.draw(st.integers(0, 4))), number)
            work = float(data.draw(st.integers(1, 9)))
            line.add(order, order, work)
            insort(plain.entries, (order, work))
        check(line, plain)
        place = (data.draw(st.integers(-2, 2)), data.draw(st.floats(-1, 5)), data.draw(st.integers(0, 60)))
        assert line.work_before(place) == pytest.approx(plain.work_before(place))
        assert not plain.entries or line.first() == plain.entries[0][0]


@pytest.mark.parametrize("is_backwards", [False, True])
def test_removals_leave_few_blocks(is_backwards: bool) -> None:
    """The rest of a long line costs as much as a short line."""
    line: WorkLine[int] = WorkLine(8)
    numbers: Any = range(2000)
    for number in numbers:
        line.add((0, float(number % 50), number), number, 1.0)
    gone = [number for number in numbers if number % 100]
    for number in reversed(gone) if is_backwards else gone:
        line.remove((0, float(number % 50), number))
    line.check_integrity()
    assert line.num == 20 and len(line._blocks) <= 20 // 2 + 1
