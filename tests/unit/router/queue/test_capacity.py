import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.messages.bounds import MAX_EVENTS
from baton.messages.control import Heartbeat
from baton.messages.workers import Load
from baton.router.in_flight import InFlightAttempt, NewPrompt, SchedulingClass
from baton.router.queue.admission import AHEAD_S, MAX_ASKED, MIN_COMPUTING, OVERCOMMIT, STEP_TOKENS, Capacity
from tests.node_peers import id_of
from tests.unit.router.queue_cases import Fleet

A, NOISY = SchedulingClass("a"), SchedulingClass("noisy")
ANY = NewPrompt(A, 10_000)


class SmallWorkers(Fleet):
    """Workers of ten pages and four sequences."""

    def __init__(self, *names: str, decoders_compute: bool = False) -> None:
        super().__init__()
        self.capacity = Capacity(self.members, self.in_flight, decoders_compute=decoders_compute)
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        self.join(name, max_num_seqs=4, num_pages=10, page_size=16)

    def drain(self, name: str) -> None:
        self.beat(name, is_draining=True)

    def dispatch(
        self,
        name: str,
        scheduling_class: SchedulingClass = A,
        *,
        work: int = 100,
        answer: int = 0,
        at: str = "p0",
    ) -> None:
        """work: hundreds of tokens to compute; a hundred takes a second."""
        decode, prefill = (id_of(at), "") if at.startswith("d") else (id_of("d0"), id_of(at))
        entry = InFlightAttempt(
            "g", decode, prefill, work * 100, 10, float(work), scheduling_class, charged=work * 100 + answer
        )
        self.in_flight.enter((id_of(name), 0), entry)

    def fill(self, *names: str) -> None:
        """Take all slots of these workers."""
        for name in names:
            for number in range(MIN_COMPUTING):
                self.dispatch(f"{name}-{number}", at=name)

    def start(self, name: str) -> None:
        self.in_flight.started((id_of(name), 0))

    def can_compute(self, claim: NewPrompt | None = None) -> bool:
        return self.capacity.can_compute(claim or ANY)

    def prefills_are_full(self) -> bool:
        return self.capacity.prefills_are_full(ANY)

    def can_decode(self, num_tokens: int) -> bool:
        member = self.members.get(id_of("d0"))
        assert member is not None
        return self.capacity.can_decode(member, num_tokens)


def test_decode_worker_takes_a_quarter_more_than_it_runs() -> None:
    fleet = SmallWorkers("p0", "d0")
    for number in range(int(4 * OVERCOMMIT)):
        assert fleet.can_decode(10)
        fleet.dispatch(str(number))
    assert not fleet.can_decode(10)


def test_decode_worker_takes_no_more_attempts_than_a_heartbeat_names() -> None:
    fleet = SmallWorkers("p0")
    fleet.join("d0", max_num_seqs=2**16, num_pages=2**20)
    member = fleet.members.get(id_of("d0"))
    assert member is not None
    attempts = tuple((id_of(f"a{number}"), 0) for number in range(MAX_EVENTS))
    fleet.in_flight.beat(member.worker, Heartbeat(load=Load(), attempts=attempts[1:]))
    assert fleet.can_decode(1)
    fleet.in_flight.beat(member.worker, Heartbeat(load=Load(), attempts=attempts))
    assert not fleet.can_decode(1)


def test_decode_worker_takes_as_many_tokens_as_its_pages_hold() -> None:
    fleet = SmallWorkers("p0", "d0")
    fleet.dispatch("first")
    assert fleet.can_decode(int(160 * OVERCOMMIT) - 10)
    assert not fleet.can_decode(int(160 * OVERCOMMIT) - 9)


def test_idle_worker_takes_anything() -> None:
    assert SmallWorkers("p0", "d0").can_decode(10**9)


def test_prompts_wait_when_workers_have_two_each() -> None:
    fleet = SmallWorkers("p0", "p1", "d0")
    for number in range(2 * MIN_COMPUTING):
        assert fleet.can_compute()
        fleet.dispatch(str(number), at=f"p{number % 2}")
    assert not fleet.can_compute()
    fleet.start("0")
    assert fleet.can_compute()


@pytest.mark.parametrize(("num_tokens", "compute_s"), [(STEP_TOKENS, AHEAD_S / 10), (STEP_TOKENS // 10, 9.0)])
def test_prompts_of_little_work_or_of_one_step_take_no_slot(num_tokens: int, compute_s: float) -> None:
    fleet = SmallWorkers("p0", "d0")
    for number in range(9):
        entry = InFlightAttempt("g", id_of("d0"), id_of("p0"), num_tokens, 10, compute_s=compute_s)
        fleet.in_flight.enter((id_of(str(number)), 0), entry)
    assert fleet.can_compute()


def test_overtaken_prompts_take_no_slot() -> None:
    fleet = SmallWorkers("p0", "d0")
    fleet.dispatch("0", NOISY)
    fleet.dispatch("1", NOISY)
    deficit = NewPrompt(A, 10_000, 20_000.0, {NOISY: -20_000.0}.get)
    assert not fleet.can_compute(NewPrompt(NOISY, 10_000, -20_000.0))
    assert fleet.can_compute(deficit)
    fleet.dispatch("2")
    assert fleet.can_compute(deficit), "one prompt of its own comes first"
    fleet.dispatch("3")
    assert not fleet.can_compute(deficit), "and another"
    fleet.start("2")
    assert fleet.can_compute(deficit)


def test_equal_tenants_come_first_by_equal_shares() -> None:
    fleet = SmallWorkers("p0", "d0")
    fleet.dispatch("0", NOISY)
    fleet.dispatch("1", NOISY)
    assert not fleet.can_compute(NewPrompt(A, 11_000)), "one, and a part of the other"
    assert fleet.can_compute(NewPrompt(A, 10_000))


@pytest.mark.parametrize(("rank", "has_place"), [(0, True), (1, False), (2, False)])
def test_prompts_of_lower_ranks_take_no_slot(rank: int, has_place: bool) -> None:
    fleet = SmallWorkers("p0", "d0")
    for number in range(9):
        fleet.dispatch(str(number), SchedulingClass("a", 1.0, 1))
    assert fleet.can_compute(NewPrompt(SchedulingClass("b", 1.0, rank), 100_000)) is has_place


@given(
    works=st.lists(st.integers(21, 2000), min_size=20, max_size=60),
    answers=st.lists(st.integers(0, 20_000), min_size=60, max_size=60),
)
def test_worker_gets_few_prompts_ahead_though_many_tenants_have_equal_deficits(
    works: list[int], answers: list[int]
) -> None:
    """The tenant that has had least comes first, as in the queue."""
    fleet = SmallWorkers("p0", "d0")
    lags = dict.fromkeys([SchedulingClass(str(number)) for number in range(10)], 0.0)
    num_dispatched = 0
    for number, work in enumerate(works):
        scheduling_class = max(lags, key=lags.__getitem__)
        if fleet.can_compute(NewPrompt(scheduling_class, work * 100, lags[scheduling_class], lags.get)):
            fleet.dispatch(str(number), scheduling_class, work=work, answer=answers[number])
            lags[scheduling_class] -= work * 100 + answers[number]
            num_dispatched += 1
    assert MIN_COMPUTING <= num_dispatched <= 3 * MIN_COMPUTING


def test_worker_has_a_slot_until_it_has_enough_prompts() -> None:
    fleet = SmallWorkers("p0", "d0")
    for number in range(MIN_COMPUTING):
        assert fleet.capacity.has_slot(ANY, id_of("p0"))
        fleet.dispatch(str(number))
    assert not fleet.capacity.has_slot(ANY, id_of("p0"))
    assert fleet.capacity.has_slot(ANY, id_of("d0"))  # to compute a prompt itself


@pytest.mark.parametrize("decoders_compute", [False, True])
def test_slots_of_decode_workers_count_if_they_compute_prompts(decoders_compute: bool) -> None:
    fleet = SmallWorkers("p0", "d0", "d1", decoders_compute=decoders_compute)
    fleet.fill("p0", "d0")
    assert fleet.can_compute() is decoders_compute
    fleet.fill("d1")
    assert not fleet.can_compute()
    fleet.start("d1-0")
    assert fleet.can_compute() is decoders_compute
    fleet.drain("d1")
    assert not fleet.can_compute()
    fleet.start("p0-0")
    assert fleet.can_compute()


def test_slots_of_prefill_and_decode_workers_are_apart() -> None:
    fleet = SmallWorkers("p0", "p1", "d0", decoders_compute=True)
    fleet.fill("d0", "p0")
    assert not fleet.prefills_are_full()
    fleet.fill("p1")
    fleet.start("d0-0")
    assert fleet.prefills_are_full()
    fleet.add("p2")
    assert not fleet.prefills_are_full()
    fleet.drain("p2")
    assert fleet.prefills_are_full()


def test_decode_workers_have_slots_where_there_are_no_prefill_workers() -> None:
    fleet = SmallWorkers("p0", "d0")
    fleet.fill("d0")
    assert not fleet.prefills_are_full()
    fleet.drain("p0")
    assert fleet.prefills_are_full()
    fleet.start("d0-0")
    assert not fleet.prefills_are_full()
    assert not SmallWorkers().prefills_are_full(), "an empty cluster has no full worker"


def test_draining_worker_is_never_the_roomiest() -> None:
    fleet = SmallWorkers("p0", "d0", "d1")
    reached = frozenset((id_of("d0"), id_of("d1")))
    fleet.dispatch("first")  # at d0
    assert fleet.capacity.roomiest(reached) == id_of("d1")
    fleet.drain("d1")
    assert fleet.capacity.roomiest(reached) == id_of("d0")
    assert fleet.capacity.roomiest(frozenset()) == ""


def test_roomiest_worker_is_reached_and_not_avoided() -> None:
    fleet = SmallWorkers("p0", "d0", "d1")
    reached = frozenset((id_of("d0"), id_of("d1")))
    fleet.dispatch("first")  # at d0
    assert fleet.capacity.roomiest(reached, avoid=(id_of("d1"),)) == id_of("d0")
    assert fleet.capacity.roomiest(frozenset((id_of("d1"),)), avoid=(id_of("d1"),)) == id_of("d1")
    assert fleet.capacity.takes(id_of("d1")) and not fleet.capacity.takes(id_of("p0"))
    fleet.drain("d1")
    assert not fleet.capacity.takes(id_of("d1"))


def test_full_workers_are_looked_at_in_turn() -> None:
    names = [f"{role}{number}" for role in "pd" for number in range(2 * MAX_ASKED)]
    fleet = SmallWorkers(*names, decoders_compute=True)
    for name in names:
        scheduling_class = NOISY if name in ("p40", "d20") else A
        for number in range(MIN_COMPUTING):
            fleet.dispatch(f"{name}-{number}", scheduling_class, at=name)
    deficit = NewPrompt(A, 10_000, 20_000.0, {NOISY: -20_000.0}.get)
    for only in ("p40", "d20"):
        looks = [fleet.can_compute(deficit) for _ in range(4)]
        assert any(looks[:2]) and any(looks[2:]), only
        fleet.dispatch(f"{only}-a", at=only)
        fleet.dispatch(f"{only}-b", at=only)
    assert not any(fleet.can_compute(deficit) for _ in range(4))
