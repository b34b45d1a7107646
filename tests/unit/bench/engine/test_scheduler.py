from baton.bench.engine.scheduler import HOST_LIMITS_US, StepTimes, decode_steps, host_times_us, step_rows


def test_every_part_of_every_step_is_timed() -> None:
    times = decode_steps(32, 5)
    assert [len(part) for part in times] == [5, 5, 5]
    assert all(value > 0 for part in times for value in part)


def test_the_host_time_of_each_batch_size_is_taken_while_all_sequences_decode() -> None:
    times = dict(host_times_us(5))
    assert [len(times_us) for times_us in times.values()] == [5] * len(HOST_LIMITS_US)
    assert all(value > 0 for times_us in times.values() for value in times_us)


def test_the_bar_is_on_plan_and_apply_together() -> None:
    plan, apply, both, commit = step_rows(32, StepTimes([10.0] * 9, [45.0] * 9, [500.0] * 9))
    assert (plan.value, apply.value, commit.value) == (10.0, 45.0, 500.0)
    assert (plan.met, apply.met, commit.met) == (None, None, None)
    assert (both.value, both.limit, both.met) == (55.0, "<= 50", False)
    assert both.note == "p99 55.0 us"
