from baton.clock import ManualClock
from baton.messages.control import Decision, Weighed
from baton.router.decisions import MAX_DECISIONS, DecisionHistory
from tests.node_peers import id_of


def a_decision(name: str, attempt: int = 0) -> Decision:
    return Decision(
        request_id=id_of(name),
        attempt=attempt,
        age_s=0.0,
        reason="cost",
        num_tokens=1,
        chosen=Weighed(decode=id_of("d")),
    )


def test_last_decisions_are_kept() -> None:
    decisions = DecisionHistory(ManualClock())
    for number in range(MAX_DECISIONS + 3):
        decisions.add(a_decision(str(number)))
    assert len(decisions) == MAX_DECISIONS
    assert list(decisions.of(id_of("2"))) == []
    assert [each.request_id for each in decisions.of(id_of("3"))] == [id_of("3")]


def test_decisions_of_a_request_have_their_ages() -> None:
    clock = ManualClock()
    decisions = DecisionHistory(clock)
    decisions.add(a_decision("r", 0))
    clock.advance(2.0)
    decisions.add(a_decision("r", 1))
    clock.advance(1.0)
    assert [(each.attempt, each.age_s) for each in decisions.of(id_of("r"))] == [(0, 3.0), (1, 1.0)]


def test_only_the_first_report_of_a_first_token_counts() -> None:
    clock = ManualClock()
    decisions = DecisionHistory(clock)
    decisions.add(a_decision("r"))
    for _ in range(2):
        clock.advance(0.25)
        decisions.started((id_of("r"), 0))
    decisions.started((id_of("unknown"), 0))
    assert next(decisions.of(id_of("r"))).first_token_s == 0.25
