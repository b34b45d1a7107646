"""Advice: the cheapest layout that keeps the objectives, and the reason."""

from itertools import pairwise

import msgspec
import pytest

from baton.bench.sim.suite import usual_times
from baton.errors import ConfigError
from baton.sim.advice import MAX_LAYOUTS, Search, advise, layouts
from baton.sim.rehearsal import Layout, RehearsalSettings
from baton.sim.timed.times import TimeModel
from baton.sim.timed.workload import Lengths, synthetic
from baton.tenants import Sla

TIMES = usual_times()


def search(rate: float, ttft_ms: float, tpot_ms: float) -> Search:
    trace = synthetic(rate, 4.0, Lengths(100, 300, 20, 60))
    return Search(trace, TIMES, RehearsalSettings(sla=Sla(ttft_ms=ttft_ms, tpot_ms=tpot_ms)), 0.95)


def with_stages(num_stages: int) -> TimeModel:
    return msgspec.structs.replace(
        TIMES, replicas={1: msgspec.structs.replace(TIMES.replicas[1], num_stages=num_stages)}
    )


def workers(*names: str) -> list[Layout]:
    return [Layout.parse(name) for name in names]


def test_one_worker_is_enough_for_a_small_load() -> None:
    advice = advise(search(4.0, 500.0, 20.0), workers("1P1D", "2M", "1M"))
    assert advice.chosen is not None and advice.chosen.layout.name == "1M"
    assert advice.chosen.full is not None and advice.chosen.headroom >= 2
    assert any(reason.startswith("do not disaggregate") for reason in advice.reasons)
    assert any(reason.startswith("it may miss them") for reason in advice.reasons)  # few requests
    assert advice.runner_up is not None and "takes 1 more device" in advice.reasons[-1]


def test_answers_of_one_token_have_no_time_per_token() -> None:
    usual = search(4.0, 500.0, 20.0)
    trace = [msgspec.structs.replace(each, output_tokens=1) for each in usual.trace]
    advice = advise(usual._replace(trace=trace), workers("1P1D", "1M"))
    assert advice.chosen is not None and advice.chosen.best_known.figures["tpot_p90_ms"].value == 0.0
    assert "TPOT p90 0.0 ms" in advice.reasons[0]


def test_impossible_objectives_are_an_outcome() -> None:
    advice = advise(search(4.0, 500.0, 0.5), workers("1M", "1P1D"))
    assert advice.chosen is None
    assert advice.reasons[0].startswith("infeasible")


def test_objectives_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="--slo"):
        advise(search(4.0, 1.0, 1.0)._replace(settings=RehearsalSettings()), workers("1M"))


def test_candidates_of_workers_with_stages_have_a_device_for_each_stage() -> None:
    times = with_stages(2)
    found = layouts(times, 5)
    assert {each.num_workers for each in found} == {1, 2}
    assert all(each.num_ranks == 2 * each.num_workers for each in found)
    advice = advise(search(4.0, 500.0, 20.0)._replace(times=times), found[:2])
    assert advice.chosen is not None and advice.chosen.layout.name == "1M, PP 2, step of 8192"
    assert {option.fast.mode for option in advice.options} == {"full"}


def test_workers_of_two_ranks_alone_are_advised() -> None:
    times = msgspec.structs.replace(TIMES, replicas={2: TIMES.replicas[1]})
    advice = advise(search(4.0, 500.0, 20.0)._replace(times=times), layouts(times, 4)[:2])
    assert advice.chosen is not None and advice.chosen.layout.name == "1M, TP 2, step of 8192"
    with pytest.raises(ConfigError, match="--devices"):
        advise(search(4.0, 500.0, 20.0)._replace(times=times), layouts(times, 1))


@pytest.mark.parametrize("num_devices", [12, 16, 64])
def test_candidates_have_few_and_many_devices(num_devices: int) -> None:
    found = layouts(TIMES, num_devices)[:MAX_LAYOUTS]
    for kind in (False, True):
        counts = sorted(each.num_ranks for each in found if bool(each.num_prefill) is kind)
        assert counts[0] == 1 + kind and counts[-1] == num_devices
        assert all(after <= 1.5 * before + 1 for before, after in pairwise(counts))


def test_layouts_and_requests_that_were_left_out_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.sim.advice.MAX_LAYOUTS", 2)
    monkeypatch.setattr("baton.sim.advice.MOST_FULL", 5)
    given = search(4.0, 500.0, 0.5)
    advice = advise(given, workers("1M", "1P1D", "2M", "3M"))
    assert len(advice.options) == 2 and advice.reasons[0].startswith("infeasible: no rehearsed layout")
    assert advice.reasons[1:] == (
        "2 other layouts were not rehearsed",
        f"full rehearsals have the first 5 of {len(given.trace)} requests",
    )


def test_candidates_are_distinct_and_within_the_devices() -> None:
    found = layouts(TIMES, 5)[:MAX_LAYOUTS]
    assert len(found) == MAX_LAYOUTS == len({each.name for each in found})
    assert all(1 <= each.num_ranks <= 5 for each in found)
    assert {each.name.partition(",")[0] for each in found} >= {"1M", "5M", "1P1D", "2P3D", "4P1D"}
