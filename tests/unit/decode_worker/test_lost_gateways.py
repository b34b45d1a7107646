from baton.colleagues import Colleagues
from baton.control import Hello
from baton.decode_worker.lost_gateways import LostGateways
from baton.wire_types import Kind
from baton.worker import Address
from tests.fakes import Post, PostedPeer

HERE, THERE, GONE = "1" * 32, "2" * 32, "3" * 32


def test_one_is_lost_that_is_missing_at_two_ticks_in_a_row() -> None:
    hello = Hello(process=Kind.WORKER, id="9" * 32)
    colleagues = Colleagues(hello, [Address("127.0.0.1", 1)], lambda address: None)
    gateways = LostGateways(colleagues)
    peers = {
        each: PostedPeer(hello.id, Hello(process=Kind.GATEWAY, id=each), Post()) for each in (HERE, THERE)
    }
    colleagues.joined(peers[HERE])
    assert not gateways.tick([HERE, THERE, GONE])
    colleagues.joined(peers[THERE])
    assert set(gateways.tick([HERE, THERE, GONE])) == {GONE}
    colleagues.left(peers[THERE])
    assert not gateways.tick([HERE, THERE])
    assert not gateways.tick([HERE])  # nobody names it now
    assert not gateways.tick([THERE])
    assert set(gateways.tick([THERE])) == {THERE}
