"""What nodes hear from a simulated host: the same as from a hub."""

from random import Random

from baton.errors import ProtocolError, WireError
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import Hello, Started
from baton.messages.operations import StatusQuery
from baton.messages.workers import Address
from baton.rpc.peers import TICK_S, Peer
from baton.sim.host import Directory, Host
from baton.sim.network import Network
from baton.sim.process import Events, SimProcess
from tests.node_peers import id_of

HERE = Address("sim", 1)


class Listener:
    """A node that keeps what it hears; it does not want to be asked for its status."""

    def __init__(self, name: str) -> None:
        self.hello = Hello(process=Kind.GATEWAY, id=id_of(name))
        self.heard: list[str] = []
        self.peers: list[Peer] = []
        self.num_ticks = 0

    def joined(self, peer: Peer) -> None:
        self.peers.append(peer)
        self.heard.append(f"joined {peer.hello.id == self.hello.id}")

    def received(self, peer: Peer, message: AnyMessage) -> None:
        if isinstance(message, StatusQuery):
            raise ProtocolError("not here")
        self.heard.append(type(message).__name__)

    def left(self, peer: Peer) -> None:
        self.heard.append("left")

    def tick(self) -> None:
        self.num_ticks += 1


class Pair:
    def __init__(self) -> None:
        self.events = Events()
        self.network = Network(self.events, Random(1))
        self.directory = Directory()
        self.drops: list[WireError] = []
        self.nodes = [Listener("caller"), Listener("callee")]
        self.processes = [SimProcess(name, self.events) for name in ("caller", "callee")]
        self.hosts = [Host(process, self.network, self.directory, self) for process in self.processes]
        self.hosts[0].serve(self.nodes[0])
        self.hosts[1].serve(self.nodes[1], HERE)

    def message(self, sender: str, receiver: str, message: AnyMessage) -> None:
        pass

    def died(self, name: str) -> None:
        pass

    def dropped(self, host: str, error: WireError) -> None:
        self.drops.append(error)

    def run(self, seconds: float = 1.0) -> None:
        self.events.run_until(self.events.now_s + seconds)

    def heard(self) -> list[list[str]]:
        return [node.heard for node in self.nodes]


def test_both_join_and_hear_each_other() -> None:
    pair = Pair()
    pair.hosts[0].dial(HERE)
    pair.hosts[0].dial(HERE)  # does nothing while the first one lasts
    pair.run()
    pair.nodes[1].peers[0].send(Started(attempts=()))
    pair.run()
    assert pair.heard() == [["joined False", "Started"], ["joined False"]]


def test_nobody_there_is_forgotten_and_asked_again() -> None:
    pair = Pair()
    pair.processes[1].die()
    pair.hosts[0].dial(HERE)
    pair.run()
    assert pair.heard() == [[], []]
    process, node = SimProcess("another", pair.events), Listener("another")
    Host(process, pair.network, pair.directory, pair).serve(node, HERE)
    pair.hosts[0].dial(HERE)
    pair.run()
    assert node.heard == ["joined False"]


def test_paused_callee_joins_when_it_wakes_up() -> None:
    pair = Pair()
    pair.processes[1].pause()
    pair.hosts[0].dial(HERE)
    pair.run()
    assert pair.heard() == [[], []]
    pair.processes[1].resume()
    pair.run()
    assert pair.heard() == [["joined False"], ["joined False"]]


def test_peer_that_breaks_a_rule_is_dropped_and_both_hear_it() -> None:
    pair = Pair()
    pair.hosts[0].dial(HERE)
    pair.run()
    pair.nodes[0].peers[0].send(StatusQuery())
    pair.run()
    assert pair.heard() == [["joined False", "left"], ["joined False", "left"]]
    assert [error.reason for error in pair.drops] == ["protocol"]


def test_connection_that_ended_may_be_asked_for_again() -> None:
    pair = Pair()
    pair.hosts[0].dial(HERE)
    pair.run()
    pair.nodes[1].peers[0].close()
    pair.run()
    pair.hosts[0].dial(HERE)
    pair.run()
    assert pair.heard()[0] == ["joined False", "left", "joined False"]


def test_parted_processes_do_not_meet() -> None:
    pair = Pair()
    pair.network.part("caller", "callee", 1.0)
    pair.hosts[0].dial(HERE)
    pair.run(0.5)
    assert pair.heard() == [[], []]
    pair.run()
    pair.hosts[0].dial(HERE)
    pair.run()
    assert pair.heard() == [["joined False"], ["joined False"]]


def test_ticks_come_regularly_and_once_after_a_pause() -> None:
    pair = Pair()
    pair.run(4 * TICK_S)
    before = pair.nodes[0].num_ticks
    pair.processes[0].pause()
    pair.run(4 * TICK_S)
    pair.processes[0].resume()
    pair.run(0.0)
    assert (before, pair.nodes[0].num_ticks) == (4, 5)
