import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.control import Beat
from baton.router.books import Books, Entry
from baton.router.capacity import MIN_COMPUTING, OVERCOMMIT, STEP_TOKENS, Capacity
from baton.router.membership import Membership
from baton.worker import Load
from tests.node_peers import TestPeer, a_worker, id_of
from tests.unit.router.router_cluster import cluster


class Fleet:
    def __init__(self, *names: str, decoders_compute: bool = False) -> None:
        self.clock = ManualClock()
        self.members = Membership(self.clock)
        self.books = Books(self.clock)
        self.capacity = Capacity(self.members, self.books, decoders_compute=decoders_compute)
        for name in names:
            self.join(name)

    def join(self, name: str) -> None:
        worker = a_worker(name, max_num_seqs=4, num_pages=10, page_size=16)
        self.members.join(worker, TestPeer.worker(cluster().router, worker))

    def drain(self, name: str) -> None:
        member = self.members.get(id_of(name))
        assert member is not None
        self.members.beat(member, Beat(load=Load(), is_draining=True))

    def dispatch(self, name: str, tenant: str = "a", *, work: int = 100, at: str = "p0") -> None:
        key, is_local = (id_of(name), 0), at.startswith("d")
        decode, prefill = (id_of(at), "") if is_local else (id_of("d0"), id_of(at))
        self.capacity.dispatched(key, tenant, work, id_of(at))
        entry = Entry("g", decode, prefill, work * 100, 10, compute_s=work * 1e-2)
        self.books.enter(key, entry)

    def fill(self, *names: str) -> None:
        """All places of these workers are taken."""
        for name in names:
            for number in range(MIN_COMPUTING):
                self.dispatch(f"{name}-{number}", at=name)

    def start(self, name: str) -> None:
        self.books.started((id_of(name), 0))
        self.capacity.started((id_of(name), 0))

    def can_decode(self, num_tokens: int) -> bool:
        member = self.members.get(id_of("d0"))
        assert member is not None
        return self.capacity.can_decode(member, num_tokens)


def test_decode_worker_takes_a_quarter_more_than_it_runs() -> None:
    fleet = Fleet("p0", "d0")
    for number in range(int(4 * OVERCOMMIT)):
        assert fleet.can_decode(10)
        fleet.dispatch(str(number))
    assert not fleet.can_decode(10)


def test_decode_worker_takes_what_its_pages_hold() -> None:
    fleet = Fleet("p0", "d0")
    fleet.dispatch("first")
    assert fleet.can_decode(int(160 * OVERCOMMIT) - 10)
    assert not fleet.can_decode(int(160 * OVERCOMMIT) - 9)


def test_idle_worker_takes_anything() -> None:
    assert Fleet("p0", "d0").can_decode(10**9)


def test_prompts_wait_when_workers_have_two_each() -> None:
    fleet = Fleet("p0", "p1", "d0")
    for number in range(2 * MIN_COMPUTING):
        assert fleet.capacity.can_compute("a", is_owed=False)
        fleet.dispatch(str(number), at=f"p{number % 2}")
    assert not fleet.capacity.can_compute("a", is_owed=False)
    fleet.start("0")
    assert fleet.capacity.can_compute("a", is_owed=False)
    fleet.capacity.check_integrity()


def test_prompts_that_are_done_in_a_moment_are_no_reason_to_wait() -> None:
    fleet = Fleet("p0", "d0")
    for number in range(9):
        fleet.dispatch(str(number), work=1)
    assert fleet.capacity.can_compute("a", is_owed=True)


def test_prompts_that_fit_one_step_are_no_reason_to_wait() -> None:
    fleet = Fleet("p0", "d0")
    for number in range(9):
        key = (id_of(str(number)), 0)
        fleet.books.enter(key, Entry("g", id_of("d0"), id_of("p0"), STEP_TOKENS // 10, 10, compute_s=9.0))
    assert fleet.capacity.can_compute("a", is_owed=True)


def test_tenant_that_is_owed_work_need_not_wait_for_a_place() -> None:
    fleet = Fleet("p0", "d0")
    fleet.dispatch("0", "noisy")
    fleet.dispatch("1", "noisy")
    assert not fleet.capacity.can_compute("noisy", is_owed=False)
    assert fleet.capacity.can_compute("quiet", is_owed=False)  # it has nothing there
    fleet.dispatch("2", "quiet", work=150)
    assert not fleet.capacity.can_compute("quiet", is_owed=False)
    assert fleet.capacity.can_compute("quiet", is_owed=True)
    fleet.dispatch("3", "quiet", work=150)
    assert not fleet.capacity.can_compute("quiet", is_owed=True)  # as much again as has places
    fleet.start("2")
    assert fleet.capacity.can_compute("quiet", is_owed=True)
    fleet.capacity.check_integrity()


def test_what_is_let_out_besides_is_bounded() -> None:
    """However many tenants there are: no more than has places, and one prompt each."""
    fleet = Fleet("p0", "d0")
    fleet.dispatch("0", "t0")
    fleet.dispatch("1", "t0")
    num_let_out = 0
    for number in range(2000):
        tenant = f"t{number % 50}"
        if fleet.capacity.can_compute(tenant, is_owed=True):
            num_let_out += 1
            fleet.dispatch(f"n{number}", tenant, work=10)
    assert 200 <= num_let_out * 10 <= 200 + 50 * 10


def test_a_worker_has_a_place_until_it_has_enough_to_do() -> None:
    fleet = Fleet("p0", "d0")
    for number in range(MIN_COMPUTING):
        assert fleet.capacity.has_place_at(id_of("p0"))
        fleet.dispatch(str(number))
    assert not fleet.capacity.has_place_at(id_of("p0"))
    assert fleet.capacity.has_place_at(id_of("d0"))  # to compute a prompt itself


@pytest.mark.parametrize("decoders_compute", [False, True])
def test_a_place_at_a_decode_worker_counts_if_it_would_compute_the_prompt(decoders_compute: bool) -> None:
    fleet = Fleet("p0", "d0", "d1", decoders_compute=decoders_compute)
    fleet.fill("p0", "d0")
    assert fleet.capacity.can_compute("a", is_owed=False) is decoders_compute
    fleet.fill("d1")
    assert not fleet.capacity.can_compute("a", is_owed=False)
    fleet.start("d1-0")
    assert fleet.capacity.can_compute("a", is_owed=False) is decoders_compute
    fleet.drain("d1")
    assert not fleet.capacity.can_compute("a", is_owed=False)
    fleet.start("p0-0")
    assert fleet.capacity.can_compute("a", is_owed=False)


def test_places_of_prefill_workers_are_not_those_of_decode_workers() -> None:
    fleet = Fleet("p0", "p1", "d0", decoders_compute=True)
    fleet.fill("d0", "p0")
    assert not fleet.capacity.prefills_are_full()
    fleet.fill("p1")
    fleet.start("d0-0")
    assert fleet.capacity.prefills_are_full()
    fleet.join("p2")
    assert not fleet.capacity.prefills_are_full()
    fleet.drain("p2")
    assert fleet.capacity.prefills_are_full()


def test_decode_workers_are_asked_for_a_place_where_there_are_no_prefill_workers() -> None:
    fleet = Fleet("p0", "d0")
    fleet.fill("d0")
    assert not fleet.capacity.prefills_are_full()
    fleet.drain("p0")
    assert fleet.capacity.prefills_are_full()
    fleet.start("d0-0")
    assert not fleet.capacity.prefills_are_full()
    assert not Fleet().capacity.prefills_are_full(), "who is to compute it is found out later"


@pytest.mark.parametrize(
    ("full", "at", "is_besides"),
    [("p0 p1", "p0", True), ("p0 p1", "d0", False), ("p0", "p1", False), ("p0", "p0", False)],
)
def test_besides_is_what_goes_to_a_worker_without_a_place(full: str, at: str, is_besides: bool) -> None:
    """Not what went there though another prefill worker had one."""
    fleet = Fleet("p0", "p1", "d0", decoders_compute=True)
    fleet.fill(*full.split())
    fleet.dispatch("r", "quiet", work=500, at=at)
    assert fleet.capacity.may_overtake("quiet", is_owed=True) is not is_besides
    assert not fleet.capacity.may_overtake("quiet", is_owed=False)
    fleet.start("r")
    assert fleet.capacity.may_overtake("quiet", is_owed=False)
    fleet.capacity.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 500), st.booleans()), max_size=40))
def test_sums_stay_exact(steps: list[tuple[int, int, bool]]) -> None:
    fleet = Fleet("p0", "d0")
    for number, (tenant, work, is_done) in enumerate(steps):
        fleet.dispatch(str(number), str(tenant), work=work)
        if is_done:
            fleet.start(str(number // 2))
        fleet.capacity.check_integrity()


def test_a_worker_that_drains_is_not_kept_for_anybody() -> None:
    fleet = Fleet("p0", "d0", "d1")
    reached = frozenset((id_of("d0"), id_of("d1")))
    fleet.dispatch("first")  # at d0
    assert fleet.capacity.roomiest(reached) == id_of("d1")
    draining = fleet.members.get(id_of("d1"))
    assert draining is not None
    draining.beat(Beat(load=Load(), is_draining=True), fleet.clock.now_s())
    assert fleet.capacity.roomiest(reached) == id_of("d0")
    assert fleet.capacity.roomiest(frozenset()) == ""
