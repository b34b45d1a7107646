"""The prefix suite: costs of decisions, shares, and answers that differ."""

import asyncio

import pytest

from baton.bench.prefix.suite import AnswerSink, Pull, pull_rows, workload_rows
from baton.bench.report import Row
from baton.messages.control import Decision, Weighed
from baton.messages.workers import PrefillTimes
from baton.request import Request, SamplingParams
from baton.token_ids import TokenIds

NAME = "0" * 32


def decision(expected_s: float, measured_s: float, *, pulled_bytes: int = 0) -> Decision:
    """A pull takes no time to compute, and a computed prompt is not pulled."""
    terms = {"queue_s": 9.0, "pull_s": 0.0, "compute_s": 0.0}
    terms["pull_s" if pulled_bytes else "compute_s"] = expected_s
    pulled_s = measured_s if pulled_bytes else 0.0
    times = PrefillTimes(
        NAME, 0, 9.0, measured_s - pulled_s, 24, 1560, pulled_bytes=pulled_bytes, pulled_s=pulled_s
    )
    return Decision(
        request_id=NAME,
        attempt=0,
        age_s=1.0,
        reason="cost",
        num_tokens=1560,
        chosen=Weighed(decode=NAME, terms=terms),
        measured=times,
    )


def a_pull(expected_s: float = 0.5, *, is_from_busy_worker: bool = True, pulled_bytes: int = 10**8) -> Pull:
    """Return a pull that takes 0.1 s, as expected; computing takes 0.5 s."""

    async def answer() -> AnswerSink:
        return AnswerSink(Request(request_id=NAME, token_ids=TokenIds.of((1,)), sampling=SamplingParams()))

    pulled, computed = decision(0.1, 0.1, pulled_bytes=pulled_bytes), decision(expected_s, 0.5)
    return Pull(pulled, computed, 0.7, is_from_busy_worker, asyncio.run(answer()))


def verdicts(rows: list[Row]) -> dict[str, bool | None]:
    return {row.name: row.met for row in rows}


def test_the_share_is_of_the_medians_and_has_a_bar() -> None:
    rows = workload_rows("documents", [0.1, 0.2, 9.0], [0.4, 0.5, 0.6], 0)
    assert [row.value for row in rows] == pytest.approx([200, 500, 0.4, 0])
    assert all(row.met is not False for row in rows)
    assert verdicts(workload_rows("x", [0.3], [0.5], 0))["x: with / without"] is False


def test_one_answer_that_differs_is_a_miss() -> None:
    assert verdicts(workload_rows("x", [0.1], [0.5], 1))["x: answers that differ"] is False
    assert verdicts(pull_rows([a_pull()], 1))["pull: answers that differ from one engine's"] is False
    assert verdicts(pull_rows([a_pull()], 0))["pull: answers that differ from one engine's"] is True


@pytest.mark.parametrize(
    ("expected_s", "is_met"), [(0.5, True), (0.61, True), (0.63, False), (0.39, True), (0.37, False)]
)
def test_expected_margin_may_be_wrong_by_three_tenths(expected_s: float, is_met: bool) -> None:
    rows = pull_rows([a_pull(expected_s)] * 3, 0)
    assert rows[-1].value == pytest.approx((expected_s - 0.1) / 0.4)
    assert verdicts(rows)["pull: expected / measured"] is is_met
    assert [row.value for row in rows if row.name == "pull: rate p50"] == pytest.approx([1.0])


def test_pull_from_another_worker_or_none_at_all_is_a_miss() -> None:
    rows = pull_rows([a_pull(), a_pull(is_from_busy_worker=False)], 0)
    assert verdicts(rows)["pull: from the busy worker"] is False
    assert verdicts(pull_rows([a_pull(pulled_bytes=0)], 0))["pull: rate p50"] is False
