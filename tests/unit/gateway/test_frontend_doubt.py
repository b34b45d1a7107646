"""A worker whose connection broke, and that is connected again, has not died of a request."""

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
