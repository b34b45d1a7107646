from baton.decode_worker.worker import LostGateways
from baton.messages.bounds import Kind
from baton.messages.control import Hello
from baton.messages.workers import Address
from baton.rpc.peers import PeerRegistry
from tests.fakes import Post, PostedPeer

HERE, THERE, GONE = "1" * 32, "2" * 32, "3" * 32


def test_one_is_lost_that_is_missing_at_two_ticks_in_a_row() -> None:
    hello = Hello(process=Kind.WORKER, id="9" * 32)
    peer_registry = PeerRegistry(hello, [Address("127.0.0.1", 1)], lambda address: None)
    gateways = LostGateways(peer_registry)
    peers = {
        each: PostedPeer(hello.id, Hello(process=Kind.GATEWAY, id=each), Post()) for each in (HERE, THERE)
    }
    peer_registry.joined(peers[HERE])
    assert not gateways.tick([HERE, THERE, GONE])
    peer_registry.joined(peers[THERE])
    assert set(gateways.tick([HERE, THERE, GONE])) == {GONE}
    peer_registry.left(peers[THERE])
    assert not gateways.tick([HERE, THERE])
    assert not gateways.tick([HERE])  # nobody names it now
    assert not gateways.tick([THERE])
    assert set(gateways.tick([THERE])) == {THERE}
