from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.clock import ManualClock
from baton.messages.control import Heartbeat
from baton.messages.workers import Load
from baton.request import AttemptKey, Request, SamplingParams
from baton.router.in_flight import (
    EXPECTED_OUTPUT_TOKENS,
    OTHERS,
    SILENCE_S,
    InFlight,
    InFlightAttempt,
    NewPrompt,
    SchedulingClass,
    WaitingPrompts,
    num_kv_tokens,
)
from tests.node_peers import a_request, a_worker, id_of

WORKERS = st.sampled_from(["p0", "p1", "d0", "d1"])
GATEWAYS = st.sampled_from("gh")
KEYS = st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.integers(0, 1))


class InFlightMachine(RuleBasedStateMachine):
    """The load, compared with sums over a list of all open attempts."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight = InFlight(ManualClock())
        self.open: dict[AttemptKey, InFlightAttempt] = {}
        self.waiting: set[AttemptKey] = set()

    @rule(key=KEYS, gateway=GATEWAYS | st.just(OTHERS), decode=WORKERS, prefill=WORKERS | st.just(""))
    def enter(self, key: AttemptKey, gateway: str, decode: str, prefill: str) -> None:
        if key not in self.open:
            entry = InFlightAttempt(gateway, decode, prefill, 10 + len(self.open), 100 + len(self.open))
            self.in_flight.enter(key, entry)
            self.open[key] = entry
            self.waiting.add(key)

    @rule(key=KEYS)
    def start(self, key: AttemptKey) -> None:
        self.in_flight.started(key)
        self.waiting.discard(key)

    @rule(key=KEYS)
    def end(self, key: AttemptKey) -> None:
        self.in_flight.ended(key)
        self._forget(key)

    @rule(worker=WORKERS)
    def forget_worker(self, worker: str) -> None:
        self.in_flight.forget([worker])
        for key in [key for key, entry in self.open.items() if entry[:2] == (OTHERS, worker)]:
            self._forget(key)

    def _forget(self, key: AttemptKey) -> None:
        self.open.pop(key, None)
        self.waiting.discard(key)

    @invariant()
    def accounts_are_the_sums_of_what_is_open(self) -> None:
        self.in_flight.check_integrity()
        assert len(self.in_flight) == len(self.open)
        for worker in ("p0", "p1", "d0", "d1"):
            account = self.in_flight.account(worker)
            filling = [self.open[key] for key in self.waiting if self.open[key].prefill == worker]
            assert [key for key, _ in self.in_flight.decoded_at(worker)] == sorted(
                key for key, entry in self.open.items() if entry.decode == worker
            )
            decoding = [entry for entry in self.open.values() if entry.decode == worker]
            begun = [key for key in self.open.keys() - self.waiting if self.open[key].decode == worker]
            assert sum(each.num for each in account.decoding.values()) == len(begun)
            computing = [self.open[key] for key in self.waiting if self.open[key].computed_by == worker]
            assert account.prompts.total == sum(entry.num_prompt_tokens for entry in computing)
            assert account.num_tokens == sum(entry.num_tokens for entry in decoding)
            assert account.num_attempts == len(filling) + len(decoding)


TestInFlight: Any = InFlightMachine.TestCase
TestInFlight.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_share_is_of_the_scarcer_resource() -> None:
    in_flight, worker = InFlight(ManualClock()), a_worker("d0", num_pages=10, page_size=16, max_num_seqs=4)
    in_flight.enter((id_of("a"), 0), InFlightAttempt("g", worker.id, "", 10, 80))
    assert in_flight.account(worker.id).share_of(worker) == 0.5
    in_flight.enter((id_of("b"), 0), InFlightAttempt("g", worker.id, "", 1, 1))
    in_flight.enter((id_of("c"), 0), InFlightAttempt("g", worker.id, "", 1, 1))
    assert in_flight.account(worker.id).share_of(worker) == 0.75


def test_unknown_attempts_count_by_the_pages_of_the_worker() -> None:
    in_flight, worker = (
        InFlight(ManualClock()),
        a_worker("d0", num_pages=100, page_size=16, max_num_seqs=1000),
    )
    in_flight.enter((id_of("a"), 0), InFlightAttempt("g", worker.id, "", 10, 0))
    beat = Heartbeat(load=Load(pages={"active": 20}), attempts=((id_of("a"), 0), (id_of("b"), 0)))
    in_flight.beat(worker, beat)
    assert in_flight.account(worker.id).share_of(worker) == 0.1
    in_flight.beat(worker, Heartbeat(load=Load(pages={"active": 20}), attempts=((id_of("a"), 0),)))
    assert in_flight.account(worker.id).share_of(worker) == 0.001


def test_attempt_that_its_worker_stops_reporting_has_ended() -> None:
    clock = ManualClock()
    in_flight, worker = InFlight(clock), a_worker("d0")
    kept, lost = (id_of("a"), 0), (id_of("b"), 0)
    for key in (kept, lost):
        in_flight.enter(key, InFlightAttempt("g", worker.id, "", 10, 10))
    beat = Heartbeat(load=Load(), attempts=(kept,))
    clock.advance(SILENCE_S)
    assert in_flight.beat(worker, beat) == []
    clock.advance(0.1)
    assert [key for key, _ in in_flight.beat(worker, beat)] == [lost]
    in_flight.ended(lost)
    assert in_flight.beat(worker, beat) == []
    in_flight.check_integrity()


def test_gateway_may_report_an_end_after_the_worker() -> None:
    """A heartbeat without the attempt may arrive before the gateway's report of its tokens."""
    clock = ManualClock()
    in_flight, worker, key = InFlight(clock), a_worker("d0"), (id_of("a"), 0)
    in_flight.enter(key, InFlightAttempt("g", worker.id, "", 10, 10))
    working, idle = Heartbeat(load=Load(), attempts=(key,)), Heartbeat(load=Load())
    for _ in range(3):
        clock.advance(SILENCE_S)
        assert in_flight.beat(worker, working) == []
    clock.advance(1.0)
    assert in_flight.beat(worker, idle) == []
    clock.advance(SILENCE_S)
    assert [dropped for dropped, _ in in_flight.beat(worker, idle)] == [key]


def test_expected_tokens_are_bounded_by_max_tokens() -> None:
    def expected(request: Request) -> int:
        return num_kv_tokens(request)

    few, many, any_number = (
        a_request(num_tokens=40, sampling=SamplingParams(max_tokens=limit)) for limit in (8, 10_000, None)
    )
    assert expected(few) == 48
    assert expected(many) == expected(any_number) == 40 + EXPECTED_OUTPUT_TOKENS
    begun = a_request(num_tokens=40, generated_token_ids=(1, 2, 3), attempt=1)
    assert expected(begun) == 48


A, B = SchedulingClass("a"), SchedulingClass("b")
CLASSES = st.builds(
    SchedulingClass, st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 4.0]), st.integers(0, 2)
)


def ahead(*prompts: tuple[SchedulingClass, int]) -> WaitingPrompts:
    found = WaitingPrompts()
    for scheduling_class, num_tokens in prompts:
        found.add(scheduling_class, num_tokens, num_tokens)
    return found


def test_prompts_of_another_tenant_come_first_up_to_its_share() -> None:
    assert ahead((B, 1000)).share_ahead_of(NewPrompt(A, 100)) == 0.1
    assert ahead((B, 1000), (A, 100)).share_ahead_of(NewPrompt(A, 100)) == 300 / 1100
    assert ahead((SchedulingClass("b", 3.0), 1000)).share_ahead_of(NewPrompt(A, 100)) == 0.3
    assert ahead((B, 50)).share_ahead_of(NewPrompt(A, 100)) == 1.0


def test_lag_of_the_tenant_changes_the_share_of_others() -> None:
    assert ahead((B, 1000)).share_ahead_of(NewPrompt(A, 100, lag=40.0)) == 0.06
    assert ahead((B, 1000)).share_ahead_of(NewPrompt(A, 100, lag=400.0)) == 0.0
    assert ahead((B, 1000)).share_ahead_of(NewPrompt(A, 100, lag=-40.0)) == 0.14
    assert ahead((B, 1000)).share_ahead_of(NewPrompt(SchedulingClass("a", 4.0), 100, lag=-10.0)) == 0.035
    assert ahead((B, 1000), (A, 100)).share_ahead_of(NewPrompt(A, 100, lag=-100.0)) == 300 / 1100


def test_another_tenant_that_has_had_more_comes_later() -> None:
    """Prompts that wait here are charged already, so only what the tenant has had beyond them delays them."""

    def part(lag_of_b: float, lag: float = 0.0, weight: float = 1.0) -> float:
        other = SchedulingClass("b", weight)
        return ahead((other, 1000)).share_ahead_of(NewPrompt(A, 100, lag, {other: lag_of_b}.__getitem__))

    assert part(-1000.0) == ahead((B, 1000)).share_ahead_of(NewPrompt(A, 100, 0.0)) == 0.1
    assert part(-1040.0) == 0.06
    assert part(-500.0) == 0.6
    assert part(-2000.0) == 0.0
    assert part(0.0) == part(500.0) == 1.0
    assert part(-400.0, weight=2.0) == 0.4
    assert part(-500.0, lag=300.0) == 0.3
    assert part(-500.0, lag=700.0) == 0.0
    assert part(-1000.0, lag=-200.0) == 0.3


def test_lags_of_the_own_tenant_and_of_other_ranks_are_not_read() -> None:
    scheduling_class = SchedulingClass("m", 1.0, 1)
    found = ahead(
        (SchedulingClass("h", 1.0, 0), 100),
        (SchedulingClass("l", 1.0, 2), 300),
        (scheduling_class, 50),
        (SchedulingClass("b", 1.0, 1), 50),
    )
    asked: list[SchedulingClass] = []

    def lag_of(other: SchedulingClass) -> float:
        asked.append(other)
        return -9000.0

    assert found.share_ahead_of(NewPrompt(scheduling_class, 100, 0.0, lag_of)) == 150 / 500
    assert asked == [SchedulingClass("b", 1.0, 1)]


@given(prompts=st.lists(st.tuples(CLASSES, st.integers(0, 100)), max_size=20), lags=st.data())
def test_less_comes_first_the_smaller_the_lags_of_others(
    prompts: list[tuple[SchedulingClass, int]], lags: st.DataObject
) -> None:
    found, amounts = ahead(*prompts), st.floats(-1e3, 1e3)
    had = {scheduling_class: lags.draw(amounts) for scheduling_class, _ in prompts}
    more = {scheduling_class: lag - lags.draw(st.floats(0, 1e3)) for scheduling_class, lag in had.items()}
    lag = lags.draw(amounts)
    parts = [found.share_ahead_of(NewPrompt(A, 10, lag, each.__getitem__)) for each in (more, had)]
    assert 0.0 <= parts[0] <= parts[1] <= 1.0


@given(
    prompts=st.lists(st.tuples(CLASSES, st.integers(0, 100)), max_size=20),
    scheduling_class=CLASSES,
    lag=st.none() | st.floats(-1e6, 1e6),
)
def test_share_is_between_0_and_1_and_removed_prompts_leave_nothing(
    prompts: list[tuple[SchedulingClass, int]], scheduling_class: SchedulingClass, lag: float | None
) -> None:
    found = ahead(*prompts)
    assert 0.0 <= found.share_ahead_of(NewPrompt(scheduling_class, 10, lag)) <= 1.0
    for each, num_tokens in prompts:
        found.remove(each, num_tokens, num_tokens)
    assert found.share_ahead_of(NewPrompt(scheduling_class, 10)) == 1.0 and not found._by_class
