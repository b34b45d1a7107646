"""Rehearsals: both modes agree, figures have intervals, and none is given beyond the calibrated ranges."""

from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.bench.sim.suite import usual_times
from baton.config.engine import CacheConfig, EngineSettings, SchedulerConfig
from baton.errors import ConfigError
from baton.sim.rehearsal import Course, Layout, Mode, Rehearsal, RehearsalSettings, rehearse, rehearse_each
from baton.sim.timed.times import TimeModel
from baton.sim.timed.workload import Lengths, TraceRequest, synthetic
from baton.tenants import Sla

TIMES = usual_times()
CHAT = Lengths(100, 300, 20, 60, 0.2)
SECONDS = 30.0  # of load: routers break ties by chance, which counts in medians of few requests


@cache
def rehearsed(workers: str, mode: Mode, rate: float = 30.0, shared: float = 0.0) -> Rehearsal:
    trace = synthetic(rate, SECONDS, CHAT._replace(shared=shared))
    return rehearse(trace, Layout.parse(workers), TIMES, RehearsalSettings(mode=mode, has_intervals=False))


@pytest.mark.parametrize("workers", ["2P2D", pytest.param("2M", marks=pytest.mark.slow)])
def test_fast_mode_agrees_with_the_full_mode(workers: str) -> None:
    fast, full = (rehearsed(workers, mode) for mode in ("fast", "full"))
    for name in ("ttft_p50_ms", "ttft_p90_ms", "tpot_p50_ms", "e2el_p50_ms", "output_tokens_per_s"):
        assert fast.figures[name].value == pytest.approx(full.figures[name].value, rel=0.03), name
    assert fast.num_refused == full.num_refused == 0


def test_fast_mode_routes_by_the_policy_that_was_asked_for() -> None:
    """Prompts of one beginning, at one worker by cost, at each worker in turn by round-robin."""
    trace = synthetic(10.0, 20.0, Lengths(800, 900, 4, 6, 0.0, shared=0.9))

    def ttft_ms(mode: Mode, policy: str) -> float:
        settings = RehearsalSettings(mode=mode, policy=policy, has_intervals=False)
        return rehearse(trace, Layout.parse("4M"), TIMES, settings).figures["ttft_p90_ms"].value

    in_turn = ttft_ms("fast", "round-robin")
    assert in_turn == pytest.approx(ttft_ms("full", "round-robin"), rel=0.05)
    assert in_turn > 1.2 * ttft_ms("fast", "cost")


@pytest.mark.parametrize("mode", ["fast", "full"])
def test_parts_of_the_time_add_up_to_the_latency(mode: Mode) -> None:
    result = rehearsed("2P2D", mode)
    assert {"queued", "prefill_computing", "transfer_exposed", "decode_computing"} <= result.parts.keys()
    p50_s, p90_s = (result.figures[f"e2el_p{at}_ms"].value / 1e3 for at in (50, 90))
    assert p50_s < sum(result.parts.values()) < p90_s  # a mean
    assert 0 < result.busy["decode"] < 1


def test_same_arguments_give_the_same_figures() -> None:
    again = rehearse(
        synthetic(30.0, SECONDS, CHAT), Layout.parse("2M"), TIMES, RehearsalSettings(has_intervals=False)
    )
    assert again == rehearsed("2M", "fast")


def test_shared_prompts_are_computed_once() -> None:
    alone, shared = rehearsed("1M", "fast"), rehearsed("1M", "fast", shared=0.9)
    assert shared.figures["ttft_p50_ms"].value < 0.6 * alone.figures["ttft_p50_ms"].value


def with_engine(**settings: Any) -> TimeModel:
    return msgspec.structs.replace(TIMES, engine=EngineSettings(**settings))


@pytest.mark.parametrize("mode", ["fast", "full"])
def test_workers_have_the_settings_of_the_calibrated_ones(mode: Mode) -> None:
    settings = RehearsalSettings(mode=mode, has_intervals=False)

    def course(times: TimeModel, shared: float = 0.0) -> Course:
        trace = synthetic(30.0, 2.0, CHAT._replace(shared=shared))
        return rehearse_each(trace, Layout.parse("1P1D"), times, settings)

    usual = course(TIMES)
    narrow = course(with_engine(scheduler=SchedulerConfig(max_num_seqs=1)))
    assert narrow.e2el_ms.mean() > 1.5 * usual.e2el_ms.mean()
    chunked = course(with_engine(scheduler=SchedulerConfig(max_num_batched_tokens=16)))
    assert np.median(chunked.ttft_ms) > 1.5 * np.median(usual.ttft_ms)
    uncached = course(with_engine(cache=CacheConfig(enable_prefix_caching=False)), shared=0.9)
    assert np.median(uncached.ttft_ms) > 1.5 * np.median(course(TIMES, shared=0.9).ttft_ms)


def test_handoffs_at_once_take_longer() -> None:
    def longest_ms(multiple: float) -> float:
        transfer = msgspec.structs.replace(TIMES.transfer, fixed_s=1.0, streams=(1.0, multiple))
        times = msgspec.structs.replace(TIMES, transfer=transfer)
        settings = RehearsalSettings(mode="full", has_intervals=False, policy="round-robin")
        trace = [TraceRequest(arrival_s=0.1 * at, input_tokens=64, output_tokens=8) for at in range(2)]
        return float(rehearse_each(trace, Layout.parse("1P1D"), times, settings).e2el_ms.max())

    assert longest_ms(3.0) - longest_ms(1.0) == pytest.approx(2000, rel=0.05)


def test_overload_makes_requests_wait_and_loses_none() -> None:
    calm, crowded = rehearsed("1P1D", "fast", 10.0), rehearsed("1P1D", "fast", 150.0)
    assert crowded.figures["ttft_p90_ms"].value > 5 * calm.figures["ttft_p90_ms"].value
    assert crowded.num_refused == 0


def test_interval_has_the_value_and_grows_with_the_error_of_the_model() -> None:
    trace, layout = synthetic(30.0, 5.0, CHAT), Layout.parse("1P1D")
    settings = RehearsalSettings(sla=Sla(ttft_ms=20.0, tpot_ms=5.0))
    sure, unsure = (
        rehearse(trace, layout, msgspec.structs.replace(TIMES, drift=drift), settings) for drift in (0.0, 0.3)
    )
    for name, figure in sure.figures.items():
        assert figure.low <= figure.value <= figure.high, name
    sizes = [each.figures["tpot_p50_ms"].high - each.figures["tpot_p50_ms"].low for each in (sure, unsure)]
    assert sizes[1] > 2 * sizes[0]
    assert 0 <= sure.figures["attainment"].value <= 1


@pytest.mark.parametrize(("num_requests", "low"), [(20, 0.881), (400, 0.993)])
def test_attainment_of_few_requests_is_not_certain(num_requests: int, low: float) -> None:
    trace = [TraceRequest(arrival_s=0.5 * at, input_tokens=64, output_tokens=4) for at in range(num_requests)]
    settings = RehearsalSettings(sla=Sla(ttft_ms=1000.0))
    figure = rehearse(trace, Layout.parse("1M"), TIMES, settings).figures["attainment"]
    assert (figure.value, figure.high) == (1.0, 1.0)
    assert figure.low == pytest.approx(low, abs=0.001)


def test_no_figure_outside_of_the_calibrated_ranges() -> None:
    trace = [TraceRequest(arrival_s=0.1 * at, input_tokens=12_000, output_tokens=3) for at in range(9)]
    steps = TIMES.replicas[1].steps
    most = steps.most | {"num_pairs": 1e5}
    narrow = {1: msgspec.structs.replace(TIMES.replicas[1], steps=msgspec.structs.replace(steps, most=most))}
    result = rehearse(trace, Layout.parse("1M"), msgspec.structs.replace(TIMES, replicas=narrow))
    assert not result.is_valid and not result.figures
    assert "pairs" in result.complaints[0]


def test_more_workers_on_a_machine_than_were_calibrated_give_no_figure() -> None:
    times = msgspec.structs.replace(TIMES, neighbours=(1.0, 1.4))
    trace = synthetic(5.0, 2.0, CHAT)
    assert rehearse(trace, Layout.parse("1P1D"), times).is_valid
    (complaint,) = rehearse(trace, Layout.parse("2P1D"), times).complaints
    assert complaint == "3 workers share the machine, calibrated to 2"
    assert rehearse(trace, Layout.parse("2P1D"), times, RehearsalSettings(shares_machine=False)).is_valid


def with_stages(num_stages: int) -> TimeModel:
    return msgspec.structs.replace(
        TIMES, replicas={1: msgspec.structs.replace(TIMES.replicas[1], num_stages=num_stages)}
    )


@pytest.mark.parametrize("num_stages", [2, 4])
def test_request_alone_is_no_faster_with_pipeline_stages(num_stages: int) -> None:
    trace = [TraceRequest(arrival_s=2.0 * at, input_tokens=200, output_tokens=40) for at in range(4)]
    settings = RehearsalSettings(mode="full", has_intervals=False)
    plain, staged = (rehearse(trace, Layout.parse("1P1D"), with_stages(n), settings) for n in (1, num_stages))
    for name in ("ttft_p50_ms", "tpot_p50_ms", "e2el_p90_ms"):
        assert staged.figures[name].value == pytest.approx(plain.figures[name].value, rel=0.01), name
    assert staged.busy["decode"] == pytest.approx(plain.busy["decode"] / num_stages, rel=0.05)


def test_stages_compute_steps_of_different_sequences_beside_each_other() -> None:
    trace = [TraceRequest(arrival_s=0.0, input_tokens=64, output_tokens=400) for _ in range(32)]
    settings = RehearsalSettings(mode="full", has_intervals=False)
    plain, staged = (rehearse(trace, Layout.parse("1M"), with_stages(n), settings) for n in (1, 2))
    alone = rehearse(trace[:16], Layout.parse("1M"), TIMES, settings)  # as many as one of two steps in flight
    assert staged.figures["tpot_p50_ms"].value == pytest.approx(alone.figures["tpot_p50_ms"].value, rel=0.03)
    assert staged.figures["tpot_p50_ms"].value < 0.8 * plain.figures["tpot_p50_ms"].value


def test_workers_with_stages_are_rehearsed_in_the_full_mode_and_take_more_devices() -> None:
    trace = synthetic(5.0, 2.0, CHAT)
    result = rehearse(trace, Layout.parse("1P2D"), with_stages(2), RehearsalSettings(mode="fast"))
    assert result.mode == "full" and result.is_valid
    assert result.layout.name == "1P2D, PP 2, prefill PP 2" and result.layout.num_ranks == 6
    figure = result.figures["ttft_p50_ms"]
    assert figure.low <= figure.value <= figure.high


def test_layouts_are_read_as_text() -> None:
    assert (Layout.parse("2P6D").num_prefill, Layout.parse("2p6d").num_decode) == (2, 6)
    assert Layout.parse("4M").name == "4M" and Layout.parse("4M").num_workers == 4
    for text in ("", "2P", "0M", "2P0D", "6D2P", "4"):
        with pytest.raises(ConfigError, match="2P6D"):
            Layout.parse(text)


def test_empty_trace_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no request"):
        rehearse([], Layout.parse("1M"), TIMES)
