"""What workers do on the rungs of the ladder that are about them."""

from baton.engine.engine import Engine
from baton.engine.scheduler.step_planner import PressureMode
from baton.messages.control import Pressure
from baton.messages.status import OverloadLevel
from tests.worker_pair import ROUTER, WorkerPair
from tests.worker_pair_cases import PROMPT, MakePair, a_request, answer_alone, said


def press(pair: WorkerPair, level: OverloadLevel) -> None:
    for host in (pair.prefill, pair.decode):
        pair.tell(host, ROUTER, Pressure(level=level))
    pair.turn()


def reliefs(pair: WorkerPair) -> set[PressureMode]:
    return {host.engine.scheduler.pressure_mode for host in (pair.prefill, pair.decode)}


def test_both_workers_climb_and_come_down_with_the_router(make_pair: MakePair) -> None:
    pair = make_pair()
    press(pair, OverloadLevel.MAKE_ROOM)
    assert reliefs(pair) == {PressureMode(small_chunks=True, makes_room=True)}
    press(pair, OverloadLevel.SMALL_CHUNKS)
    assert reliefs(pair) == {PressureMode(small_chunks=True)}
    press(pair, OverloadLevel.QUEUE)
    assert reliefs(pair) == {PressureMode()}


def test_no_rung_changes_a_token(make_pair: MakePair, alone: Engine) -> None:
    """Prompts are computed where they are decoded, some of them while others decode."""
    pair = make_pair()
    press(pair, OverloadLevel.SHED)
    requests = [a_request(number, (number, *PROMPT[1:]), max_tokens=12) for number in range(4)]
    for number, request in enumerate(requests):
        pair.dispatch(request, is_local=bool(number % 2))
        pair.turn()
    pair.turns_until(lambda: all(pair.is_answered(request) for request in requests))
    for request in requests:
        assert said(pair.heard(request)) == answer_alone(alone, request)
