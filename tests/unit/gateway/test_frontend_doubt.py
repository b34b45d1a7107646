"""A worker whose connection broke, and that is connected again, has not died of a request."""

from baton.control import Submit
from baton.gateway.replay import DOUBT_S
from tests.unit.gateway.frontend_peers import event, gateway


def test_worker_that_came_back_and_died_later_is_no_second_death() -> None:
    g = gateway("d0", "d1", "d2")
    sink = g.open()
    g.route("d0")
    g["d0"].leave()
    g.join("d0")
    g.route("d1")
    g.say("d1", event(0, attempt=1))
    g["d0"].leave()
    g["d1"].leave()
    g.tick(DOUBT_S)
    assert sink.error is None
    assert g.submitted().request.generated_token_ids == (100,)


def test_gateway_that_stood_still_gives_a_lost_worker_the_time_to_come_back() -> None:
    g = gateway("d0", "d1", "d2")
    sink = g.open()
    g.route("d0")
    g["d0"].leave()
    g.route("d1")
    g["d1"].leave()
    g.tick(DOUBT_S + 3.0)
    assert sink.error is None and g["router"].take(Submit) == []
    g.join("d1")
    g.tick(DOUBT_S / 2)
    g.tick(DOUBT_S / 2)
    for _ in range(4):
        g.tick(DOUBT_S)
    assert sink.error is None
    assert g.submitted().request.attempt == 2


def test_silence_while_the_gateway_stood_still_is_nobody_s() -> None:
    g = gateway("d0", max_silence_s=5.0)
    g.open()
    g.route("d0")
    g.tick(20.0)
    g.tick(1.0)
    assert g.frontend.counters["replays_error"] == 0
