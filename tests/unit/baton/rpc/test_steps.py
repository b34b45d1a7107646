"""How long a worker's step may take, by what its steps took before."""

import pytest

from baton.clock import ManualClock
from baton.rpc.liveness import FACTOR, FIRST_STEP_S, StepWatchdog


def make_steps(timeout_s: float = 30.0) -> tuple[StepWatchdog, ManualClock]:
    clock = ManualClock(100.0)
    return StepWatchdog(clock, timeout_s), clock


def run_step(steps: StepWatchdog, clock: ManualClock, num_tokens: int, seconds: float) -> None:
    steps.begin()
    steps.sized(num_tokens)
    clock.advance(seconds)
    steps.begin()


def test_step_that_runs_has_its_age_size_and_bound() -> None:
    steps, clock = make_steps()
    run_step(steps, clock, 16, 0.0)
    steps.sized(2048)
    clock.advance(29.0)
    was_overdue = steps.present.is_overdue
    assert (steps.present.age_s, steps.present.num_tokens, steps.present.bound_s) == (29.0, 2048, 30.0)
    clock.advance(12.0)
    assert (was_overdue, steps.present.is_overdue) == (False, True)
    assert steps.present.complaint == "a step of 2048 tokens takes 41 s, its bound is 30 s"


def test_first_step_of_a_process_may_compile() -> None:
    steps, clock = make_steps()
    steps.begin()
    steps.sized(2048)
    assert steps.present.bound_s == FIRST_STEP_S
    clock.advance(100.0)
    assert not steps.present.is_overdue
    steps.begin()
    assert steps.bound_s(2048) == 100.0 * FACTOR


def test_bound_follows_what_steps_of_that_size_take() -> None:
    steps, clock = make_steps()
    run_step(steps, clock, 1, 0.5)
    run_step(steps, clock, 2048, 40.0)
    assert steps.bound_s(2048) == pytest.approx(40.0 * FACTOR)
    assert steps.bound_s(1) == 30.0
    for _ in range(500):
        run_step(steps, clock, 2048, 1.0)
    assert steps.bound_s(2048) == 30.0


def test_size_that_was_not_measured_is_scaled_up_from_a_smaller_one() -> None:
    steps, clock = make_steps()
    run_step(steps, clock, 128, 5.0)
    assert steps.bound_s(2048) == pytest.approx(16 * 5.0 * FACTOR)
    assert steps.bound_s(1) == pytest.approx(5.0 * FACTOR)
    run_step(steps, clock, 4096, 6.0)
    assert steps.bound_s(2048) == pytest.approx(6.0 * FACTOR)


def test_turn_without_a_batch_teaches_nothing() -> None:
    steps, clock = make_steps()
    steps.begin()
    clock.advance(20.0)
    steps.begin()
    assert steps.present.bound_s == FIRST_STEP_S
    run_step(steps, clock, 8, 0.1)
    clock.advance(31.0)
    assert steps.present.is_overdue


def test_slow_steps_that_move_are_never_overdue() -> None:
    steps, clock = make_steps()
    for num_tokens in (2048, 2048, 64, 1, 1, 2048, 700, 1, 1, 1):
        steps.begin()
        steps.sized(num_tokens)
        for _ in range(12):
            clock.advance(0.5)
            assert not steps.present.is_overdue
