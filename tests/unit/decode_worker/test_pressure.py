"""Workers follow the highest overload level of their routers."""

from baton.engine.scheduler.step_planner import PressureMode
from baton.messages.control import Pressure
from baton.messages.status import OverloadLevel
from tests.worker_pair import ROUTER, WorkerPair
from tests.worker_pair_cases import MakePair


def set_level(pair: WorkerPair, level: OverloadLevel) -> None:
    for host in (pair.prefill, pair.decode):
        pair.tell(host, ROUTER, Pressure(level=level))
    pair.turn()


def pressure_modes(pair: WorkerPair) -> set[PressureMode]:
    return {host.engine.scheduler.pressure_mode for host in (pair.prefill, pair.decode)}


def test_both_workers_follow_the_level_of_the_router_up_and_down(make_pair: MakePair) -> None:
    pair = make_pair()
    set_level(pair, OverloadLevel.MAKE_ROOM)
    assert pressure_modes(pair) == {PressureMode(small_chunks=True, makes_room=True)}
    set_level(pair, OverloadLevel.SMALL_CHUNKS)
    assert pressure_modes(pair) == {PressureMode(small_chunks=True)}
    set_level(pair, OverloadLevel.QUEUE)
    assert pressure_modes(pair) == {PressureMode()}
