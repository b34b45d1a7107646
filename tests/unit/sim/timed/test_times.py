"""Time models: fits of measured steps, their ranges, and the slowdown of workers that share a machine."""

from pathlib import Path
from random import Random

import msgspec
import pytest

from baton.bench.sim.suite import usual_times
from baton.errors import ConfigError
from baton.sim.timed.times import (
    Contention,
    Cost,
    Curve,
    FittedTimes,
    Overheads,
    StepSample,
    StepWork,
    TimeModel,
    TransferSample,
    Validity,
    fit_steps,
    fit_transfers,
)

TRUE_ROWS = Curve((1e-5, 8e-5), (200.0,))


def true_s(work: StepWork) -> float:
    """A machine that computes 200 rows almost for free."""
    rows = work.num_sequences + work.num_new
    return 2e-3 + TRUE_ROWS.at(rows) + 4e-8 * work.num_context + 3e-9 * work.num_pairs


def measured(noise: float = 0.05) -> list[StepSample]:
    random, works = Random(0), []
    for number in (1, 2, 4, 8, 16, 32, 64):
        works += [StepWork(number, number * context, 0, 0.0) for context in (32, 512, 2048)]
        works += [StepWork(number + 1, number * 256, new, new * new / 2) for new in (64, 512)]
    works += [StepWork(1, 0, new, new * new / 2) for new in (16, 64, 128, 256, 512, 1024, 2048)]
    return [
        StepSample(work, true_s(work) * random.uniform(1 - noise, 1 + noise))
        for work in works
        for _ in range(9)
    ]


def test_fit_finds_the_bend_and_predicts_within_its_error() -> None:
    steps = fit_steps(measured())
    assert steps.curves["rows"].knots
    for work in (
        StepWork(10, 5000, 0, 0.0),
        StepWork(1, 0, 300, 45_000.0),
        StepWork(1, 0, 1500, 1_125_000.0),
    ):
        assert steps.seconds(work) == pytest.approx(true_s(work), rel=0.08)
    assert 0.9 < steps.errors[1] <= steps.errors[-2] < 1.1


def test_coefficients_are_never_negative() -> None:
    steps = fit_steps(measured(noise=0.6))
    assert steps.fixed_s >= 0 and all(min(curve.slopes) >= 0 for curve in steps.curves.values())


def test_one_long_pause_changes_no_mean() -> None:
    samples = measured()
    paused = samples[40]._replace(seconds=50.0)
    steps = fit_steps([*samples[:40], paused, *samples[41:]])
    assert steps.seconds(paused.work) == pytest.approx(true_s(paused.work), rel=0.1)


def test_transfers_at_once_take_longer() -> None:
    samples = [
        TransferSample(num_bytes, number, number * (1e-3 + 1e-9 * num_bytes))
        for num_bytes in (2**16, 2**18, 2**20, 2**22, 2**24)
        for number in (1, 2, 4)
    ]
    transfers = fit_transfers(samples)
    assert transfers.curve.at(2**20) + transfers.fixed_s == pytest.approx(1e-3 + 1e-9 * 2**20, rel=0.05)
    assert transfers.streams == pytest.approx((1.0, 2.0, 2.0, 4.0), rel=0.05)


def test_too_few_shapes_are_an_error() -> None:
    with pytest.raises(ConfigError, match="2 shapes"):
        fit_steps([StepSample(StepWork(1, 8, 0, 0.0), 1.0), StepSample(StepWork(2, 8, 0, 0.0), 1.0)])


def test_saved_model_is_read_back_and_other_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    usual_times().save(path)
    assert TimeModel.read(path) == usual_times()
    msgspec.structs.replace(usual_times(), version=99).save(path)
    with pytest.raises(ConfigError, match="version 99"):
        TimeModel.read(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="baton calibrate"):
        TimeModel.read(path)


def test_time_outside_of_the_ranges_is_complained_about() -> None:
    validity = Validity()
    times = FittedTimes(usual_times(), validity=validity)
    for _ in range(1000):
        times.step_s(StepWork(8, 1000, 0, 0.0))
    assert not validity.complaints
    for _ in range(100):
        times.step_s(StepWork(4000, 1000, 0, 0.0))
    (complaint,) = validity.complaints
    assert complaint.startswith("sequences: up to 4,000, calibrated to 256")


def test_ranks_that_were_not_calibrated_are_an_error() -> None:
    with pytest.raises(ConfigError, match="size 8 was not calibrated, only 1 was"):
        FittedTimes(usual_times(), size=8)


def test_busy_neighbours_and_other_processes_slow_steps_down() -> None:
    over = Overheads(others=Cost(message_s=1e-3, token_s=2e-3))
    model = msgspec.structs.replace(usual_times(), neighbours=(1.0, 1.5, 3.0), overheads=over)
    contention = Contention(model)
    assert [contention.slowdown(number, 0.0) for number in range(4)] == [1.0, 1.5, 3.0, 3.0]
    contention.add_steps(50, 100, 0, 0.0)  # half a processor, over half a second
    assert contention.slowdown(0, 0.0) == pytest.approx(1.25)
    assert contention.slowdown(0, 60.0) == pytest.approx(1.0)
    assert Contention().slowdown(5, 0.0) == Contention(model, shares_machine=False).slowdown(5, 0.0) == 1.0


def test_more_busy_processes_than_were_calibrated_are_complained_about() -> None:
    over = Overheads(others=Cost(message_s=1e-2))
    model = msgspec.structs.replace(usual_times(), neighbours=(1.0, 1.5, 3.0), overheads=over)
    validity = Validity()
    validity.inside_s = 100.0
    contention = Contention(model, validity=validity)
    assert contention.stretched_s(2.0, 2, 0.0) == pytest.approx(6.0)
    assert not validity.complaints
    contention.add_steps(25, 0, 0, 0.0)  # half a processor, over half a second
    contention.stretched_s(2.0, 2, 0.0)
    assert not validity.complaints, "it is left out"
    contention.add_steps(50, 0, 0, 0.0)
    contention.stretched_s(2.0, 2, 0.0)
    assert validity.complaints == ["busy processes: up to 4, calibrated to 3, in 2.0 % of the time"]
    apart = Contention(model, shares_machine=False, validity=Validity())
    assert apart.stretched_s(2.0, 9, 0.0) == 2.0


def test_more_transfers_at_once_than_were_calibrated_are_complained_about() -> None:
    transfer = msgspec.structs.replace(usual_times().transfer, streams=(1.0, 2.0))
    validity = Validity()
    times = FittedTimes(msgspec.structs.replace(usual_times(), transfer=transfer), validity=validity)
    validity.inside_s = 1.0
    for _ in range(50):
        times.transfer_s(2**20, 2)
    assert not validity.complaints
    for _ in range(50):
        times.transfer_s(2**20, 3)
    (complaint,) = validity.complaints
    assert complaint.startswith("transfers at once: up to 3, calibrated to 2")


def test_requests_and_tokens_wait_for_the_work_that_the_gateway_has() -> None:
    over = Overheads(first_token_s=2e-3, gateway=Cost(request_s=0.25, message_s=0.5))
    contention = Contention(msgspec.structs.replace(usual_times(), overheads=over))
    assert contention.ask(3, 1.0) == pytest.approx(2e-3)
    assert contention.ask(3, 1.0) == pytest.approx(0.25 + 2e-3)
    contention.add_steps(2, 7, 0, 1.25)
    assert contention.wait_s(1.25) == pytest.approx(0.25 + 1.0)
    assert contention.wait_s(2.0) == pytest.approx(0.5) and contention.wait_s(9.0) == 0.0
    assert Contention().ask(3, 1.0) == 0.0


def test_loop_of_a_worker_is_a_part_of_every_step() -> None:
    model = msgspec.structs.replace(usual_times(), overheads=Overheads(step_s=5e-4))
    work = StepWork(4, 1000, 0, 0.0)
    assert FittedTimes(model).step_s(work) == pytest.approx(FittedTimes(usual_times()).step_s(work) + 5e-4)
    twice_s = FittedTimes(model, scale=2.0).step_s(work)
    assert twice_s == pytest.approx(2 * FittedTimes(model).step_s(work))
