from baton.bench.engine.scheduler import (
    HOST_LIMITS_US,
    StepTimes,
    Work,
    cache_rows,
    decode_steps,
    host_times_us,
    packing_times_us,
    schedule_unshared,
    step_rows,
)


def test_every_part_of_every_step_is_timed() -> None:
    times = decode_steps(32, 5)
    assert [len(part) for part in times] == [5, 5, 5]
    assert all(value > 0 for part in times for value in part)


def test_the_host_time_of_each_batch_size_is_taken_while_all_sequences_decode() -> None:
    times = dict(host_times_us(5))
    assert [len(times_us) for times_us in times.values()] == [5] * len(HOST_LIMITS_US)
    assert all(value > 0 for times_us in times.values() for value in times_us)


def test_packing_is_timed_for_the_same_batch_sizes() -> None:
    times = dict(packing_times_us(5))
    assert [len(times_us) for times_us in times.values()] == [5] * len(HOST_LIMITS_US)
    assert all(value > 0 for times_us in times.values() for value in times_us)


def test_the_same_tokens_are_computed_with_and_without_the_cache() -> None:
    on, off = (schedule_unshared(5, prefix_caching=caching) for caching in (True, False))
    assert on.num_tokens == off.num_tokens > 0


def test_the_bar_is_on_plan_and_apply_together() -> None:
    plan, apply, both, commit = step_rows(32, StepTimes([10.0] * 9, [45.0] * 9, [500.0] * 9))
    assert (plan.value, apply.value, commit.value) == (10.0, 45.0, 500.0)
    assert (plan.met, apply.met, commit.met) == (None, None, None)
    assert (both.value, both.limit, both.met) == (55.0, "<= 50", False)
    assert both.note == "p99 55.0 us"


def test_the_cache_is_charged_for_the_difference_of_the_best_runs() -> None:
    off = [Work(1.0, 1_000_000), Work(2.0, 1_000_000)]
    on = [Work(9.0, 1_000_000), Work(1.2, 1_000_000)]
    *raw, cost = cache_rows(off, on)
    assert [row.value for row in raw] == [1000.0, 1200.0]
    assert cost.value is not None and abs(cost.value - 0.8) < 1e-9 and cost.met  # 0.2 s of the model's 25
    assert cost.note == "0.200 us a token, of a model at 40,000 tok/s"
