"""The prefix suite: costs of decisions, shares, and answers that differ."""

from pathlib import Path

import pytest

from baton.bench.prefix.suite import Compared, Costs, Trial, median_ratio, plot_prefix, rows_of, rows_of_pulls
from baton.bench.report import Row
from baton.messages.control import Decision, Weighed
from baton.messages.workers import PrefillTimes

NAME = "0" * 32


def a_trial(expected_s: float = 0.5, *, is_from_busy_worker: bool = True) -> Trial:
    """The pull takes a tenth of a second as was expected, computing half of one."""
    pulled = Costs(0.1, 0.1, 10**8, 0.08)
    return Trial(pulled, Costs(expected_s, 0.5, 0, 0.0), 0.7, is_from_busy_worker, [1], [2])


def verdicts(rows: list[Row]) -> dict[str, bool | None]:
    return {row.name: row.met for row in rows}


def test_costs_are_of_the_decision_and_of_the_workers_times() -> None:
    times = PrefillTimes(NAME, 0, 9.0, 0.25, 24, 1560, pulled_bytes=7, pulled_s=0.5)
    decision = Decision(
        request_id=NAME,
        attempt=0,
        age_s=1.0,
        reason="cost",
        num_tokens=1560,
        chosen=Weighed(decode=NAME, terms={"queue_s": 9.0, "pull_s": 0.375, "compute_s": 0.125}),
        measured=times,
    )
    assert Costs.of(decision) == Costs(0.5, 0.75, 7, 0.5)


def test_the_share_is_of_the_medians_and_has_a_bar() -> None:
    rows = rows_of(Compared("documents", [0.1, 0.2, 9.0], [0.4, 0.5, 0.6], 0))
    assert [row.value for row in rows] == pytest.approx([200, 500, 0.4, 0])
    assert all(row.met is not False for row in rows)
    assert verdicts(rows_of(Compared("x", [0.3], [0.5], 0)))["x: with / without"] is False


def test_one_answer_that_differs_is_a_miss() -> None:
    assert verdicts(rows_of(Compared("x", [0.1], [0.5], 1)))["x: answers that differ"] is False
    assert verdicts(rows_of_pulls([a_trial()], 1))["pull: answers that differ from one engine's"] is False
    assert verdicts(rows_of_pulls([a_trial()], 0))["pull: answers that differ from one engine's"] is True


@pytest.mark.parametrize(
    ("expected_s", "is_met"), [(0.5, True), (0.61, True), (0.63, False), (0.39, True), (0.37, False)]
)
def test_what_was_expected_may_be_wrong_by_three_tenths(expected_s: float, is_met: bool) -> None:
    trials = [a_trial(expected_s)] * 3
    assert median_ratio(trials) == pytest.approx((expected_s - 0.1) / 0.4)
    assert verdicts(rows_of_pulls(trials, 0))["pull: expected / measured"] is is_met


def test_a_pull_from_elsewhere_or_none_at_all_is_a_miss() -> None:
    rows = rows_of_pulls([a_trial(), a_trial(is_from_busy_worker=False)], 0)
    assert verdicts(rows)["pull: from the busy worker"] is False
    nothing = a_trial()._replace(pulled=Costs(0.5, 0.5, 0, 0.0))
    assert verdicts(rows_of_pulls([nothing], 0))["pull: rate p50"] is False


def test_picture_is_drawn(tmp_path: Path) -> None:
    plot_prefix({"documents": ([0.1, 0.2], [0.5, 0.6])}, [a_trial()], tmp_path / "prefix.png")
    assert (tmp_path / "prefix.png").stat().st_size > 1000
