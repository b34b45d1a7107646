import threading
from queue import SimpleQueue

import pytest

from baton.clock import ManualClock, SystemClock
from baton.errors import WireError
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import Alive, Hello
from baton.rpc.liveness import BEAT_S, FACTOR, FIRST_STEP_S, PING_S, LinkLife, StepWatchdog
from baton.rpc.peers import Peer
from baton.rpc.server import RpcThread, SignsOfLife
from tests.node_peers import ListeningPeer
from tests.unit.baton.rpc.rpc_peers import KEY, Recorder

TICK_S = 0.25


def run(life: LinkLife, from_s: float, seconds: float) -> list[bytes]:
    """Return the pings of some seconds of ticks, beginning a tick after `from_s`."""
    ticks = [from_s + TICK_S * number for number in range(1, round(seconds / TICK_S) + 1)]
    return [ping for now_s in ticks if (ping := life.tick(now_s)) is not None]


def test_any_byte_counts_as_life() -> None:
    life = LinkLife(8.0, 100.0)
    run(life, 100.0, 7.5)
    life.heard(107.5)
    run(life, 107.5, 8.0)
    assert life.silence_s(108.5) == pytest.approx(1.0)


def test_pings_leave_regularly_and_say_for_how_long_nothing_came() -> None:
    life, peer = LinkLife(8.0, 100.0), LinkLife(8.0, 500.0)
    pings = run(life, 100.0, 4.0)
    assert len(pings) == 4.0 / PING_S
    assert peer.take_ping(pings[-1], 500.0)
    assert peer.silence_s(500.0) == pytest.approx(4.0)


def test_end_whose_frames_do_not_arrive_drops_the_link() -> None:
    life, peer = LinkLife(60.0, 100.0), LinkLife(8.0, 100.0)
    dropped_s = None
    for step in range(1, 100):
        now_s = 100.0 + TICK_S * step
        ping = life.tick(now_s)
        if ping is not None:
            peer.heard(now_s)
            assert peer.take_ping(ping, now_s)
        try:
            peer.tick(now_s)
        except WireError as error:
            assert error.reason == "unheard"
            dropped_s = now_s
            break
    assert dropped_s == pytest.approx(108.0 + PING_S)


def test_time_in_which_the_process_stood_still_is_no_silence() -> None:
    life = LinkLife(8.0, 100.0)
    run(life, 100.0, 2.0)
    life.tick(160.0)
    assert life.silence_s(160.0) == pytest.approx(2.0)
    with pytest.raises(WireError):
        run(life, 160.0, 6.5)


def test_silence_in_short_pauses_of_the_process_still_adds_up() -> None:
    life = LinkLife(8.0, 100.0)
    with pytest.raises(WireError):
        for number in range(1, 12):
            life.tick(100.0 + 0.9 * number)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\xc1\0\0\0\0\0", b"\x81\0\0\0\0"])
def test_other_bodies_are_no_pings(body: bytes) -> None:
    life = LinkLife(8.0, 100.0)
    assert not life.take_ping(body, 100.0)
    assert life.silence_s(100.0) == 0.0


def make_steps(timeout_s: float = 30.0) -> tuple[StepWatchdog, ManualClock]:
    clock = ManualClock(100.0)
    return StepWatchdog(clock, timeout_s), clock


def run_step(steps: StepWatchdog, clock: ManualClock, num_tokens: int, seconds: float) -> None:
    steps.begin()
    steps.sized(num_tokens)
    clock.advance(seconds)
    steps.begin()


def test_running_step_has_age_size_and_bound() -> None:
    steps, clock = make_steps()
    run_step(steps, clock, 16, 0.0)
    steps.sized(2048)
    clock.advance(29.0)
    was_overdue = steps.present.is_overdue
    assert (steps.present.age_s, steps.present.num_tokens, steps.present.bound_s) == (29.0, 2048, 30.0)
    clock.advance(12.0)
    assert (was_overdue, steps.present.is_overdue) == (False, True)
    assert steps.present.complaint == "a step of 2048 tokens takes 41 s, its bound is 30 s"


def test_first_step_of_a_process_may_compile() -> None:
    steps, clock = make_steps()
    steps.begin()
    steps.sized(2048)
    assert steps.present.bound_s == FIRST_STEP_S
    clock.advance(100.0)
    assert not steps.present.is_overdue
    steps.begin()
    assert steps.bound_s(2048) == 100.0 * FACTOR


def test_unmeasured_size_is_scaled_up_from_a_smaller_one() -> None:
    steps, clock = make_steps()
    run_step(steps, clock, 128, 5.0)
    assert steps.bound_s(2048) == pytest.approx(16 * 5.0 * FACTOR)
    assert steps.bound_s(1) == pytest.approx(5.0 * FACTOR)
    run_step(steps, clock, 4096, 6.0)
    assert steps.bound_s(2048) == pytest.approx(6.0 * FACTOR)


def test_turn_without_a_batch_teaches_nothing() -> None:
    steps, clock = make_steps()
    steps.begin()
    clock.advance(20.0)
    steps.begin()
    assert steps.present.bound_s == FIRST_STEP_S
    run_step(steps, clock, 8, 0.1)
    clock.advance(31.0)
    assert steps.present.is_overdue


def test_slow_steps_that_end_are_never_overdue() -> None:
    steps, clock = make_steps()
    for num_tokens in (2048, 2048, 64, 1, 1, 2048, 700, 1, 1, 1):
        steps.begin()
        steps.sized(num_tokens)
        for _ in range(12):
            clock.advance(0.5)
            assert not steps.present.is_overdue


def test_signs_of_life_leave_every_second_and_at_once_for_an_overdue_step(
    capfd: pytest.CaptureFixture[str],
) -> None:
    clock, router = ManualClock(100.0), ListeningPeer(Hello(process=Kind.ROUTER, id="a" * 32))
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
    assert "test_liveness.py" in capfd.readouterr().err


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
