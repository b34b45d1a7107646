"""Predictions of routing against what workers measured."""

from collections import Counter

import msgspec
import pytest

from baton.messages.control import Decision, Measured, Weighed
from baton.messages.workers import PrefillTimes
from baton.request import Request, TokenIds
from baton.router.decisions import MAX_PREFIXES, Hindsight
from tests.node_peers import a_request, id_of
from tests.unit.router.router_cluster import Cluster, cluster

TERMS = {"queue_s": 0.5, "pull_s": 0.25, "compute_s": 1.0, "handoff_s": 0.125, "join_s": 2.0}


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "big")


def keys(*numbers: int) -> bytes:
    return b"".join(map(key_of, numbers))


def decision(measured: PrefillTimes | None, **changes: object) -> Decision:
    chosen = Weighed(decode=id_of("d0"), prefill=id_of("p0"), num_held_tokens=48, terms=TERMS)
    made = Decision(
        request_id=id_of("a"),
        attempt=0,
        age_s=0.0,
        reason="cost",
        num_tokens=100,
        chosen=chosen,
        measured=measured,
    )
    return msgspec.structs.replace(made, **changes)


def test_terms_and_prefixes_are_compared() -> None:
    counters = Counter[str]()
    hindsight = Hindsight(counters)
    measured = PrefillTimes(id_of("a"), 0, 1.0, 3.0, 84, 100, exposed_s=0.5, own_s=2.0)
    hindsight.measured(decision(measured, first_token_s=4.5), ())
    sums = {name: each.sum for name, each in hindsight.times.items()}
    assert sums["predicted_queue"] == 0.75 and sums["measured_queue"] == 1.0 + 3.0 - 2.0
    assert sums["error_queue"] == 1.25 and sums["error_compute"] == 1.0 and sums["error_handoff"] == 0.375
    assert sums["predicted_ttft"] == 1.75 and sums["error_ttft"] == 2.75
    assert sums["regret"] == 0.0, "no other pair was compared"
    assert counters == {
        "measured_prompt_tokens": 100,
        "predicted_prefix_tokens": 48,
        "realised_prefix_tokens": 16,
    }


def test_decision_without_a_prediction_or_a_measurement_is_not_compared() -> None:
    counters = Counter[str]()
    hindsight = Hindsight(counters)
    hindsight.measured(decision(None), ())
    measured = PrefillTimes(id_of("a"), 0, 1.0, 3.0, 84, 100)
    hindsight.measured(decision(measured, chosen=Weighed(decode=id_of("d0"))), ())
    assert not counters and not hindsight.times


@pytest.mark.parametrize(("keys_of_next", "num_repeated"), [((1, 2, 3, 9), 2), ((9, 2, 3), 2), ((8, 9), 0)])
def test_longest_remembered_prefix_is_repeated(keys_of_next: tuple[int, ...], num_repeated: int) -> None:
    counters = Counter[str]()
    hindsight = Hindsight(counters)
    hindsight.dispatched(keys(1, 2, 3, 4, 5), 90, 16)
    assert counters["repeated_prompt_tokens"] == 0
    hindsight.dispatched(keys(*keys_of_next), 70, 16)
    assert counters == {"routed_prompt_tokens": 160, "repeated_prompt_tokens": 16 * num_repeated}


def test_least_recently_seen_prefixes_are_forgotten() -> None:
    counters = Counter[str]()
    hindsight = Hindsight(counters)
    for number in range(MAX_PREFIXES):
        hindsight.dispatched(key_of(number), 16, 16)
    hindsight.dispatched(key_of(0), 16, 16)
    hindsight.dispatched(key_of(MAX_PREFIXES), 16, 16)
    assert counters["repeated_prompt_tokens"] == 16
    hindsight.dispatched(key_of(1), 16, 16)  # forgotten for the last one
    hindsight.dispatched(key_of(0), 16, 16)
    assert counters["repeated_prompt_tokens"] == 32


def measure(c: Cluster, name: str, request: Request, compute_s: float) -> None:
    times = PrefillTimes(
        request.request_id, request.attempt, 0.0, compute_s, request.num_tokens, request.num_tokens
    )
    c[name].say(Measured(prefills=(times,)))


def test_choice_that_turns_out_worse_than_another_has_regret() -> None:
    c = cluster("p0", "p1", "d0", policy="cost")
    request = a_request("a", 4000)
    decode, prefill = c.pair(request)
    chosen = prefill or decode
    assert "regret" not in c.router.status().routers[0].times
    measure(c, chosen, request, 1000.0)
    (router,) = c.router.status().routers
    assert router.times["regret"].num == 1 and router.times["regret"].sum > 900
    measure(c, chosen, request, 1000.0)
    assert c.router.status().routers[0].times["regret"].num == 1, "another router's job of this attempt"


def test_choice_that_holds_what_it_promised_has_no_regret() -> None:
    c = cluster("p0", "p1", "d0", policy="cost")
    request = a_request("a", 4000)
    decode, prefill = c.pair(request)
    measure(c, prefill or decode, request, 0.001)
    assert c.router.status().routers[0].times["regret"].sum == 0.0


def test_prompts_that_begin_alike_are_counted_as_repeats() -> None:
    c = cluster("p0", "d0", policy="cost")
    for number in range(2):
        c.submit(a_request(f"a{number}", 100))
    c.submit(Request(request_id=id_of("b"), token_ids=TokenIds.of((9,) * 100)))
    counters = c.router.counters
    assert counters["routed_prompt_tokens"] == 300 and counters["repeated_prompt_tokens"] == 4 * 16
