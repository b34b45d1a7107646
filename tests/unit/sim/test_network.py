"""Simulated wires, the hosts that carry messages over them, and the stream between routers."""

from random import Random

from baton.errors import ProtocolError
from baton.messages.bounds import LINK_TIMEOUT_S, Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import Ended, Hello
from baton.messages.operations import StatusQuery
from baton.messages.workers import Address
from baton.router.redis.messages import AnyShared
from baton.rpc.peers import TICK_S, Peer
from baton.sim.deployment import SharedStream
from baton.sim.network import MAX_DEATH_DELAY_S, NOTICE_S, End, Host, Network, Recorder
from baton.sim.process import Events, SimProcess
from tests.node_peers import id_of

HERE = Address("sim", 1)


class Wired:
    """Processes a and b with a wire between them; `heard` has the bodies and ends at each."""

    def __init__(self, seed: int = 0) -> None:
        self.events = Events()
        self.network = Network(self.events, Random(seed))
        self.a, self.b = SimProcess("a", self.events), SimProcess("b", self.events)
        self.heard: dict[str, list[str]] = {"a": [], "b": []}
        self.at_a, self.at_b = self.network.connect(self.a, self.b)
        self._listen("a", self.at_a)
        self._listen("b", self.at_b)
        (self.wire,) = self.network.wires

    def _listen(self, name: str, end: End) -> None:
        end.on_body = lambda body: self.heard[name].append(body.decode())
        end.on_end = lambda: self.heard[name].append("end")

    def run(self, seconds: float = 1.0) -> None:
        self.events.run_until(self.events.now_s + seconds)


def test_bodies_arrive_later_in_order_both_ways() -> None:
    wired = Wired()
    for number in range(50):
        wired.at_a.send(str(number).encode())
    wired.at_b.send(b"pong")
    wired.run(0.0)
    assert wired.heard == {"a": [], "b": []}
    wired.run()
    assert wired.heard == {"a": ["pong"], "b": [str(number) for number in range(50)]}


def test_closed_wire_delivers_the_bodies_sent_before() -> None:
    wired = Wired()
    wired.at_a.send(b"last")
    wired.at_a.close()
    wired.at_a.send(b"too late")
    wired.run()
    assert wired.heard == {"a": ["end"], "b": ["last", "end"]}
    assert not wired.network.wires


def test_cut_wire_loses_a_suffix_of_its_bodies_and_ends_once_at_each_end() -> None:
    num_lost = 0
    for seed in range(20):
        wired = Wired(seed)
        for number in range(5):
            wired.at_a.send(str(number).encode())
        wired.wire.cut()
        wired.wire.cut()
        wired.run()
        assert wired.heard["a"] == ["end"]
        *bodies, end = wired.heard["b"]
        assert end == "end" and bodies == [str(number) for number in range(len(bodies))]
        num_lost += 5 - len(bodies)
    assert 0 < num_lost < 100


def test_death_ends_the_wire_at_the_other_end() -> None:
    wired = Wired()
    wired.a.die()
    wired.run(MAX_DEATH_DELAY_S)
    assert wired.heard == {"a": [], "b": ["end"]}


def test_stalled_wire_delivers_late_and_in_order() -> None:
    wired = Wired()
    wired.wire.stalled_until_s = 3.0
    wired.at_a.send(b"1")
    wired.at_a.send(b"2")
    wired.run(2.9)
    assert wired.heard["b"] == []
    wired.run()
    assert wired.heard["b"] == ["1", "2"]


def quiet(wired: Wired, seconds: float) -> tuple[float, float]:
    """Return `quiet_s` and `silence_s` at end b after some seconds."""
    wired.run(seconds)
    return wired.at_b.quiet_s, wired.at_b.silence_s


def test_peer_is_silent_while_its_pings_are_swallowed_or_it_is_paused() -> None:
    wired = Wired()
    assert quiet(wired, 1.0) == (0.0, 0.0)
    wired.network.swallow("a", "b", 5.0)
    assert quiet(wired, 4.0) == (4.0, 4.0)
    wired.network.stands_still(wired.a, wired.events.now_s + 3.0)
    assert quiet(wired, 2.0) == (2.0, 2.0)  # the hole has closed, the pause lasts
    assert quiet(wired, 2.0) == (0.0, 0.0)


def test_peer_tells_of_silence_that_it_hears() -> None:
    wired = Wired()
    wired.network.swallow("b", "a", 5.0)
    assert quiet(wired, 4.0) == (0.0, 4.0)
    wired.network.swallow("a", "b", 5.0)
    assert quiet(wired, 0.5) == (0.5, 4.0)  # its last ping told of four seconds


def test_silence_that_is_extended_ends_the_wire_as_a_long_one() -> None:
    wired = Wired()
    wired.network.swallow("a", "b", 5.0)
    wired.run(4.0)
    wired.network.swallow("a", "b", 10.0)
    wired.run(LINK_TIMEOUT_S - 4.0 + NOTICE_S)
    assert wired.heard == {"a": ["end"], "b": ["end"]}


def test_death_behind_a_black_hole_leaves_the_peer_silent_from_the_beginning_of_the_hole() -> None:
    wired = Wired()
    wired.network.swallow("a", "b", 3.0)
    wired.run(2.0)
    wired.a.die()
    assert quiet(wired, 2.0 + NOTICE_S) == (4.0 + NOTICE_S, 4.0 + NOTICE_S)
    assert wired.heard["b"] == ["end"]


class Node:
    """Keeps what it hears; refuses a StatusQuery."""

    def __init__(self, name: str) -> None:
        self.hello = Hello(process=Kind.GATEWAY, id=id_of(name))
        self.heard: list[str] = []
        self.peers: list[Peer] = []
        self.num_ticks = 0

    def joined(self, peer: Peer) -> None:
        self.peers.append(peer)
        self.heard.append("joined")

    def received(self, peer: Peer, message: AnyMessage) -> None:
        if isinstance(message, StatusQuery):
            raise ProtocolError("not here")
        self.heard.append(type(message).__name__)

    def left(self, peer: Peer) -> None:
        self.heard.append("left")

    def tick(self) -> None:
        self.num_ticks += 1


class Hosted:
    """A node that dials and a node that listens."""

    def __init__(self) -> None:
        self.events = Events()
        self.network = Network(self.events, Random(1))
        self.recorder = Recorder(self.events)
        self.listeners: dict[Address, Host] = {}
        self.caller, self.caller_process = Node("caller"), SimProcess("caller", self.events)
        self.host = self.serve(self.caller, self.caller_process)
        self.callee, self.callee_process = Node("callee"), SimProcess("callee", self.events)
        self.serve(self.callee, self.callee_process, HERE)

    def serve(self, node: Node, process: SimProcess, address: Address | None = None) -> Host:
        host = Host(process, self.network, self.listeners, self.recorder)
        host.serve(node, address)
        return host

    def dial(self, seconds: float = 1.0) -> None:
        self.host.dial(HERE)
        self.run(seconds)

    def run(self, seconds: float = 1.0) -> None:
        self.events.run_until(self.events.now_s + seconds)

    def heard(self) -> list[list[str]]:
        return [self.caller.heard, self.callee.heard]


def test_paused_listener_joins_when_it_resumes() -> None:
    hosted = Hosted()
    hosted.callee_process.pause()
    hosted.dial()
    assert hosted.heard() == [[], []]
    hosted.callee_process.resume()
    hosted.run()
    assert hosted.heard() == [["joined"], ["joined"]]


def test_refused_peer_is_dropped_and_may_dial_again() -> None:
    hosted = Hosted()
    hosted.dial()
    hosted.caller.peers[0].send(StatusQuery())
    hosted.run()
    assert hosted.heard() == [["joined", "left"], ["joined", "left"]]
    assert [error.reason for _, error in hosted.recorder.drops] == ["protocol"]
    hosted.dial()
    assert hosted.caller.heard == ["joined", "left", "joined"]


def test_partition_cuts_wires_and_prevents_new_ones() -> None:
    hosted = Hosted()
    hosted.dial()
    hosted.network.part("caller", "callee", 2.0)
    hosted.run()
    hosted.dial(0.5)
    assert hosted.heard() == [["joined", "left"], ["joined", "left"]]
    hosted.run()
    hosted.dial()
    assert hosted.caller.heard == ["joined", "left", "joined"]


def test_ticks_come_regularly_and_once_after_a_pause() -> None:
    hosted = Hosted()
    hosted.run(4 * TICK_S)
    before = hosted.caller.num_ticks
    hosted.caller_process.pause()
    hosted.run(4 * TICK_S)
    hosted.caller_process.resume()
    hosted.run(0.0)
    assert (before, hosted.caller.num_ticks) == (4, 5)


class Streamed:
    """Three processes that share a stream."""

    def __init__(self, seed: int) -> None:
        self.events = Events()
        self.stream = SharedStream(Network(self.events, Random(seed)), Random(seed))
        self.processes = [SimProcess(f"router-{number}", self.events) for number in range(3)]
        self.heard: list[list[AnyShared]] = [[] for _ in self.processes]
        joined = zip(self.processes, self.heard, strict=True)
        self.links = [self.stream.join(process, heard.append) for process, heard in joined]

    def say(self, router: int, number: int) -> AnyShared:
        message = Ended(attempts=((id_of("r"), number),))
        self.links[router].share(message)
        return message

    def run(self) -> None:
        self.events.run_until(self.events.now_s + 1.0)


def test_stream_reaches_the_other_living_routers_in_order() -> None:
    streamed = next(each for each in map(Streamed, range(100)) if not each.stream.may_lose)
    said = [streamed.say(number % 2, number) for number in range(200)]
    streamed.run()
    assert streamed.heard == [said[1::2], said[::2], said]
    streamed.processes[1].die()
    last = streamed.say(2, 200)
    streamed.run()
    assert streamed.heard[0][-1] == last and last not in streamed.heard[1]


def test_streams_of_some_seeds_lose_some_messages_or_all() -> None:
    kinds = set()
    for seed in range(60):
        streamed = Streamed(seed)
        for number in range(200):
            streamed.say(0, number)
        streamed.run()
        num_heard = len(streamed.heard[1])
        kinds.add("none" if not num_heard else "all" if num_heard == 200 else "some")
    assert kinds == {"none", "some", "all"}
