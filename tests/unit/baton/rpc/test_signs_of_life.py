"""Signs of life during a step of a worker's engine."""

import threading
from queue import SimpleQueue

import pytest

from baton.clock import ManualClock, SystemClock
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import Alive, Hello
from baton.rpc.liveness import StepWatchdog
from baton.rpc.peers import Peer
from baton.rpc.reports import BEAT_S, SignsOfLife
from baton.rpc.server import RpcThread
from tests.unit.baton.rpc.rpc_peers import KEY, Recorder


class Listener:
    """A Peer that keeps what it is sent."""

    silence_s = 0.0
    hello = Hello(process=Kind.ROUTER, id="a" * 32)

    def __init__(self) -> None:
        self.received: list[AnyMessage] = []

    def send(self, message: AnyMessage) -> None:
        self.received.append(message)

    def close(self) -> None:
        raise AssertionError("unexpected close")


def test_signs_of_life_leave_every_second_and_at_once_for_an_overdue_step(
    capfd: pytest.CaptureFixture[str],
) -> None:
    clock, router = ManualClock(100.0), Listener()
    steps = StepWatchdog(clock, 30.0)
    steps.sized(1)
    steps.begin()
    steps.sized(2048)
    life = SignsOfLife(steps, clock)
    told_s = []
    for _ in range(122):
        num_told = len(router.received)
        life.give([router])
        if len(router.received) > num_told:
            told_s.append(clock.now_s() - 100.0)
        clock.advance(0.25)
    assert told_s == [*range(31), 30.25]
    last = router.received[-1]
    assert isinstance(last, Alive) and last.step.is_overdue and last.step.num_tokens == 2048
    assert "test_signs_of_life.py" in capfd.readouterr().err


class RouterNode(Recorder):
    """A router that keeps the signs of life."""

    def __init__(self) -> None:
        super().__init__("a")
        self.hello = Hello(process=Kind.ROUTER, id="a" * 32)
        self.told: list[Alive] = []
        self.has_enough = threading.Event()

    def received(self, peer: Peer, message: AnyMessage) -> None:
        if isinstance(message, Alive):
            self.told.append(message)
            if len(self.told) == 3:
                self.has_enough.set()


def test_worker_in_a_step_gives_signs_of_life_with_the_age_of_the_step() -> None:
    node, worker = RouterNode(), Recorder("b")
    inbox: SimpleQueue[object] = SimpleQueue()  # of a thread in a step, which takes nothing out
    routers = RpcThread(KEY, lambda call: call())
    held = RpcThread(KEY, inbox.put)
    try:
        address = routers.listen("127.0.0.1")
        routers.serve(node)
        steps = StepWatchdog(SystemClock())
        steps.begin()
        steps.sized(2048)
        held.serve(worker, steps)
        held.dial(address)
        assert node.has_enough.wait(30.0)
        ages_s = [alive.step.age_s for alive in node.told]
        assert ages_s == sorted(ages_s) and ages_s[-1] - ages_s[0] >= BEAT_S
        assert {alive.step.num_tokens for alive in node.told} == {2048}
        assert worker.num_joined == 0
    finally:
        held.close()
        routers.close()
