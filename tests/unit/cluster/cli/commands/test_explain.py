import msgspec
import pytest

from baton.cluster.cli import output
from baton.cluster.cli.commands.explain import BAR_WIDTH, parts_of, waterfall
from baton.messages.bounds import request_id_in
from baton.messages.control import Decision, Weighed
from baton.messages.timeline import RequestTimeline, TimelinePart
from baton.messages.workers import PrefillTimes
from tests.node_peers import id_of
from tests.unit.cluster.conftest import Baton

NAMES = {id_of("p0"): "prefill-0", id_of("p1"): "prefill-1", id_of("d0"): "decode-0"}
CHOSEN = Weighed(
    decode=id_of("d0"),
    prefill=id_of("p0"),
    source=id_of("p1"),
    num_held_tokens=64,
    terms={"queue_s": 0.1, "pull_s": 0.0, "compute_s": 0.2, "join_s": 0.01},
)
OTHER = Weighed(decode=id_of("d0"), terms={"queue_s": 0.0, "pull_s": 0.0, "compute_s": 0.25, "join_s": 0.5})


def decision(**changes: object) -> Decision:
    fields: dict[str, object] = {
        "request_id": id_of("r"),
        "attempt": 0,
        "age_s": 3.0,
        "reason": "cost",
        "num_tokens": 100,
        "chosen": CHOSEN,
        "weighed": (OTHER, CHOSEN),
    }
    return Decision(**{**fields, **changes})  # type: ignore[arg-type]


def lines_of(decision: Decision) -> list[str]:
    return output.rendered(*parts_of(decision, NAMES)).splitlines()


def test_chosen_pair_is_marked_and_the_cheapest_is_first() -> None:
    head, columns, first, second = lines_of(decision())
    assert "100 tokens" in head and "decode-0 < prefill-0 pulls from prefill-1" in head
    assert columns.split() == ["pair", "held", "queue", "pull", "compute", "join", "total", "s"]
    assert first.startswith("*") and "0.3100" in first
    assert "decode-0 < itself" in second and "0.7500" in second


def test_truth_and_regret_are_told_when_they_are_known() -> None:
    measured = PrefillTimes(id_of("r"), 0, 0.1, 0.3, 36, 100, 4096, 0.02, 1000, 0.001)
    lines = lines_of(decision(first_token_s=0.45, measured=measured))
    assert lines[-3] == "first token after 0.4500 s, 0.3000 s expected"
    assert lines[-2].startswith("regret -0.3390 s")  # 0.1 + 0.3 + 0.001 measured, 0.01 of joining; 0.75
    assert "computed 36 of 100 tokens in 0.3000 s" in lines[-1]


def test_without_another_pair_or_measured_times_there_is_no_regret() -> None:
    measured = PrefillTimes(id_of("r"), 0, 0.1, 0.3, 36, 100)
    assert decision().regret_s is None
    assert decision(measured=measured, weighed=(CHOSEN,)).regret_s is None


def test_accepted_draft_tokens_are_told_where_there_were_drafts() -> None:
    timeline = RequestTimeline(request_id=id_of("r"), outcome="answered", began_s=0.0, total_s=1.0)
    assert "draft" not in output.rendered(*waterfall(timeline))
    drafted = msgspec.structs.replace(timeline, num_draft_tokens=60, num_accepted_tokens=41)
    assert output.rendered(*waterfall(drafted)).endswith("; 41 of 60 draft tokens accepted\n")


def test_waterfall_has_a_bar_for_each_part_and_sums_to_the_whole() -> None:
    timeline = RequestTimeline(
        request_id=id_of("r"),
        tenant="acme",
        outcome="answered",
        began_s=0.0,
        total_s=10.0,
        first_token_s=6.0,
        num_ahead=3,
        ahead_tenant="bulk",
        hidden_transfer_s=0.5,
        clock_error_s=0.0001,
        unaccounted_s=1.0,
        parts=(
            TimelinePart("queued", 0.0, 4.0, "router 1"),
            TimelinePart("first_token", 4.0, 0.001, "prefill-0"),
            TimelinePart("decode_computing", 4.001, 4.999, "decode-0"),
        ),
    )
    head, _, queued, first, decode, unaccounted, total, note = output.rendered(
        *waterfall(timeline)
    ).splitlines()
    assert head == (
        "answered in 10.0000 s, first token after 6.0000 s, tenant acme, behind 3 in the queue, most of bulk"
    )
    assert queued.split()[:5] == ["queued", "router", "1", "4.0000", "40.0%"]
    column = queued.index("█")
    assert queued.count("█") == 0.4 * BAR_WIDTH
    assert (first.index("█") - column, first.count("█")) == (0.4 * BAR_WIDTH, 1)
    assert (decode.index("█") - column, decode.count("█")) == (0.4 * BAR_WIDTH, 0.5 * BAR_WIDTH)
    assert unaccounted.split() == ["unaccounted", "1.0000", "10.0%"]
    assert total.split() == ["sum", "10.0000", "100.0%"]
    assert note == "pages sent while computing: 0.5000 s; clocks agree within 100 us"


def test_worker_that_is_gone_is_named_by_its_id() -> None:
    assert id_of("p0")[:8] in output.rendered(*parts_of(decision(), {}))


def test_wrong_id_is_refused(baton: Baton) -> None:
    status, _, err = baton("explain", "chatcmpl-7")
    assert status == 2 and "expected 32 hex digits, got 'chatcmpl-7'" in err


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-", "msg_", "resp_"])
def test_id_of_any_answer_names_its_request(prefix: str) -> None:
    assert request_id_in(prefix + id_of("r")) == id_of("r")


def test_number_of_plans_that_shows_none_is_refused(baton: Baton) -> None:
    result = baton("explain", "plan", "--log", "plans.jsonl", "--last", "0")
    assert (result.status, result.out) == (2, "")
    assert "--last: expected a number of plans, 1 or more, got 0" in result.err
