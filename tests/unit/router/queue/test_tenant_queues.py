from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.fair_queue import CREDIT_AGES
from baton.router.queue.tenant_queues import QueuedAttempt, TenantQueues
from tests.unit.router.queue_cases import PlainQueues, waits


def order_of(queues: TenantQueues) -> list[str]:
    """Names, as all are taken out."""
    names = []
    while (waiting := queues.first()) is not None:
        queues.take(waiting)
        names.append(bytes.fromhex(waiting.key[0]).decode().rstrip("\0"))
    return names


def queues_of(*waiting: QueuedAttempt) -> TenantQueues:
    queues = TenantQueues()
    for each in waiting:
        queues.add(each)
    return queues


def test_earliest_due_request_of_a_tenant_comes_first() -> None:
    queues = queues_of(waits("late", due_s=9), waits("early", due_s=1), waits("also early", due_s=1))
    assert order_of(queues) == ["early", "also early", "late"]


def test_priority_comes_before_the_due_time_within_a_tenant_and_not_between_tenants() -> None:
    queues = queues_of(waits("due", due_s=1), waits("urgent", due_s=9, priority=-1))
    assert order_of(queues) == ["urgent", "due"]
    queues = queues_of(waits("a0"), waits("a1"), waits("b0", "b", priority=-5), waits("b1", "b", priority=-5))
    assert order_of(queues) == ["a0", "b0", "a1", "b1"]


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
    assert (
        queues.work_before(waits("new", due_s=1.5)) == 2 * 5 + 2 * 5
    )  # two of its own, as much of the other's
    assert queues.work_before(waits("new", "c")) == 0
    assert queues.work_before(waits("new", "b", due_s=1)) == 500 + 20  # there is no more of the other's
    ranked = queues_of(*high, waits("l", "l", rank=1, work=3))
    assert ranked.work_before(waits("new", "new", rank=1)) == 7
    assert ranked.work_before(waits("new", "l", rank=1, due_s=1)) == 10


@given(dues=st.lists(st.integers(0, 1000), min_size=300, max_size=600))
def test_work_before_is_exact_among_many(dues: list[int]) -> None:
    queues = queues_of(*(waits(f"a{n}", due_s=due) for n, due in enumerate(dues)))
    assert queues.work_before(waits("new", due_s=500)) == 10 * sum(due <= 500 for due in dues)


TENANTS = st.sampled_from(["a", "b", "c"])


class QueueMachine(RuleBasedStateMachine):
    """Any sequence of what is done to the queues, against the plain ones."""

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
        assert self.queues.remove(waiting.key) is waiting
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
