"""Wires: order, ends, cuts, stalls and partitions."""

from random import Random

from baton.sim.network import MAX_DEATH_DELAY_S, End, Network
from baton.sim.process import Events, SimProcess

LONG_S = 1.0


class Two:
    """Processes a and b with a wire between them; what each hears."""

    def __init__(self, seed: int = 0) -> None:
        self.events = Events()
        self.network = Network(self.events, Random(seed))
        self.a, self.b = SimProcess("a", self.events), SimProcess("b", self.events)
        self.heard: dict[str, list[str]] = {"a": [], "b": []}
        self.at_a, self.at_b = self.network.connect(self.a, self.b)
        self._listen("a", self.at_a)
        self._listen("b", self.at_b)

    def _listen(self, name: str, end: End) -> None:
        end.on_body = lambda body: self.heard[name].append(body.decode())
        end.on_end = lambda: self.heard[name].append("end")

    def run(self, seconds: float = LONG_S) -> None:
        self.events.run_until(self.events.now_s + seconds)


def test_bodies_arrive_in_order_and_later() -> None:
    two = Two()
    for number in range(50):
        two.at_a.send(str(number).encode())
    two.run(0.0)
    assert two.heard["b"] == []
    two.run()
    assert two.heard == {"a": [], "b": [str(number) for number in range(50)]}


def test_both_ways_are_one_wire_and_two_orders() -> None:
    two = Two()
    two.at_a.send(b"ping")
    two.at_b.send(b"pong")
    two.run()
    assert two.heard == {"a": ["pong"], "b": ["ping"]}


def test_closed_end_delivers_first_what_was_sent() -> None:
    two = Two()
    two.at_a.send(b"last")
    two.at_a.close()
    two.at_a.send(b"too late")
    two.run()
    assert two.heard == {"a": ["end"], "b": ["last", "end"]}
    assert not two.network.wires


def test_cut_wire_loses_what_comes_after_its_end_and_tells_each_end_once() -> None:
    lost = 0
    for seed in range(20):
        two = Two(seed)
        for number in range(5):
            two.at_a.send(str(number).encode())
        assert two.at_a.wire is not None
        two.at_a.wire.cut()
        two.at_a.wire.cut()
        two.run()
        assert two.heard["a"] == ["end"]
        *bodies, end = two.heard["b"]
        assert end == "end" and bodies == [str(number) for number in range(len(bodies))]
        lost += 5 - len(bodies)
    assert 0 < lost < 100


def test_death_is_heard_by_the_other_end_alone() -> None:
    two = Two()
    two.a.die()
    two.run(MAX_DEATH_DELAY_S)
    assert two.heard == {"a": [], "b": ["end"]}


def test_stalled_wire_delivers_late_and_in_order() -> None:
    two = Two()
    assert two.at_a.wire is not None
    two.at_a.wire.stalled_until_s = 3.0
    two.at_a.send(b"1")
    two.at_a.send(b"2")
    two.run(2.9)
    assert two.heard["b"] == []
    two.run()
    assert two.heard["b"] == ["1", "2"]


def test_parted_processes_lose_their_wires_and_may_meet_again() -> None:
    two = Two()
    two.network.part("a", "b", 2.0)
    assert two.network.is_parted(two.a, two.b) and two.network.is_parted(two.b, two.a)
    two.run(2.0)
    assert two.heard == {"a": ["end"], "b": ["end"]}
    assert not two.network.is_parted(two.a, two.b)


def test_process_that_ends_in_order_closes_its_wires() -> None:
    two = Two()
    two.at_a.send(b"last")
    two.network.close_all(two.a)
    two.a.die()
    two.run()
    assert two.heard["b"] == ["last", "end"]
