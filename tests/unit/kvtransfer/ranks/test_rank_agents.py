"""The agents of a replica's other ranks connect to its rank 0."""

import gc
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
import torch

from baton.errors import PeerGone, WireError, WorkerLost
from baton.kvtransfer.endpoint import EndpointSettings
from baton.kvtransfer.ranks.agent import RankAgent
from baton.kvtransfer.ranks.agent_arguments import AgentArguments
from baton.kvtransfer.ranks.messages import RANK_SCHEMA, AgentHello, StopAll, encode
from baton.kvtransfer.ranks.ranks import RankAgents, RemoteRank, _Newcomer
from baton.rpc import connection as rpc_connection
from baton.rpc.auth import RANKS, LinkKeys, Role
from baton.rpc.connection import Connection, RankNetwork
from tests.layouts import a_layout
from tests.transfer_ends import RING, open_files
from tests.waiting import wait_for

NUM_RANKS = 3
NUM_PAGES = 4
LAYOUT = a_layout(tp_size=NUM_RANKS, page_size=4, num_layers=1, num_kv_heads=NUM_RANKS)
OTHER_SCHEMA = b"schema-2"
SETTINGS = EndpointSettings(keys=RING, fingerprint="model", layout=LAYOUT).for_rank(0)


@pytest.fixture
def agents() -> Iterator[RankAgents]:
    made = RankAgents(NUM_RANKS)
    yield made
    made.close()


def come(agents: RankAgents, rank: int) -> RankAgent:
    """An agent, whose process is the test's."""
    agent = RankAgent(agents.sidecar.arguments)
    pool = agent.zeros_on_cpu((NUM_PAGES, 1, 2, 1, 4, 8), torch.float32)
    agent.start(rank, pool)
    return agent


def connect(agents: RankAgents, secret: bytes | None = None, schema: bytes = RANK_SCHEMA) -> Connection:
    arguments = msgspec.json.decode(agents.sidecar.arguments, type=AgentArguments)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(arguments.address)
    except ConnectionRefusedError:
        sock.close()
        raise
    return Connection(sock, secret or arguments.secret, Role.CONNECTING, schema=schema)


def is_reachable(rank: RemoteRank) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(rank.listeners.addresses["tcp"])), timeout=5.0).close()
    except (ConnectionRefusedError, ConnectionResetError):  # reset: it was closed meanwhile
        return False
    return True


def test_every_rank_connects_and_listens(agents: RankAgents) -> None:
    come(agents, 2), come(agents, 1)
    ranks = agents.set_up(SETTINGS)
    assert [rank.rank for rank in ranks] == [1, 2]
    assert len({rank.listeners.incarnation for rank in ranks}) == 2
    assert len({address for rank in ranks for address in rank.listeners.addresses.values()}) == 4
    assert all(set(rank.listeners.addresses) == {"shm", "tcp"} and is_reachable(rank) for rank in ranks)
    with pytest.raises(ConnectionRefusedError):
        connect(agents)
    for rank in ranks:
        rank.close()
    wait_for(lambda: not any(is_reachable(rank) for rank in ranks))


def test_last_agent_is_greeted_to_the_end(agents: RankAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    let_in = RankAgents._let_in

    def let_in_slowly(self: RankAgents, sock: socket.socket, newcomer: _Newcomer) -> None:
        let_in(self, sock, newcomer)
        threading.Event().wait(0.1)

    monkeypatch.setattr(RankAgents, "_let_in", let_in_slowly)
    come(agents, 1), come(agents, 2)
    assert len(agents.set_up(SETTINGS)) == 2


def test_closed_agents_leave_nothing() -> None:
    gc.collect()  # what other tests have left goes now, not meanwhile
    files, threads = Counter(open_files()), set(threading.enumerate())
    agents = RankAgents(NUM_RANKS)
    came = [come(agents, rank) for rank in (1, 2)]
    for rank in agents.set_up(SETTINGS):
        rank.start(lambda call: call(), lambda event: None, lambda rank, is_dead: None)
        rank.close()
    agents.close()
    agents.close()  # a second time is no error
    for agent in came:
        agent.close()
        agent.close()
    del came, agent, rank
    gc.collect()  # their pools: as long as somebody has one, it is mapped
    wait_for(lambda: set(threading.enumerate()) <= threads)
    wait_for(lambda: Counter(open_files()) <= files)


def test_replica_of_one_rank_waits_for_no_agent() -> None:
    threads = set(threading.enumerate())
    agents = RankAgents(1)
    assert agents.set_up(SETTINGS) == []
    assert set(threading.enumerate()) <= threads


def test_rank_that_does_not_connect_is_named(agents: RankAgents) -> None:
    agent = come(agents, 2)
    with pytest.raises(WorkerLost, match=r"ranks \[1\] did not connect within 0.1 s"):
        agents.set_up(SETTINGS, timeout_s=0.1)
    agents.close()
    agent.close()


@pytest.mark.parametrize("rank", [0, 1, NUM_RANKS])
def test_agent_of_an_impossible_or_known_rank_is_dropped(agents: RankAgents, rank: int) -> None:
    first = come(agents, 1)
    wait_for(lambda: 1 in agents._newcomers)
    connection = connect(agents).handshake()
    connection.send(encode(AgentHello(rank=rank)))
    with pytest.raises(PeerGone):
        connection.recv(5.0)
    come(agents, 2)
    assert len(agents.set_up(SETTINGS)) == 2
    first.close()


@pytest.mark.parametrize(
    ("rank", "is_of_replica", "is_let_in"), [(1, True, False), (2, False, False), (2, True, True)]
)
def test_agent_on_another_node_is_of_this_replica_and_of_that_node(
    rank: int, *, is_of_replica: bool, is_let_in: bool
) -> None:
    agents = RankAgents(NUM_RANKS, ranks_here=2, host="127.0.0.1", keys=RING)
    place = agents.node_place
    assert place is not None
    sock = socket.create_connection((place.address.host, place.address.port))
    connection = Connection(sock, LinkKeys(RING, RANKS), Role.CONNECTING, schema=RANK_SCHEMA).handshake()
    replica = place.replica if is_of_replica else b"another"
    connection.send(encode(AgentHello(rank=rank, replica=replica)))
    if is_let_in:
        wait_for(lambda: rank in agents._newcomers)
    else:
        with pytest.raises(PeerGone):
            connection.recv(5.0)
    connection.close()
    agents.close()


def test_agent_on_another_node_notices_silence_after_the_link_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeouts_s: list[float] = []
    monkeypatch.setattr(rpc_connection, "keep_alive", lambda sock, timeout_s: timeouts_s.append(timeout_s))
    agents = RankAgents(2, ranks_here=1, host="127.0.0.1", keys=RING, link_timeout_s=3.0)
    assert agents.node_place is not None
    network = RankNetwork(
        rank_zero=agents.node_place, own_host="127.0.0.1", keys=RING.generations, link_timeout_s=3.0
    )
    agent = RankAgent(AgentArguments(network=network).sidecar().arguments)
    agent.start(1, agent.zeros_on_cpu((NUM_PAGES, 1, 2, 1, 4, 8), torch.float32))
    wait_for(lambda: 1 in agents._newcomers)
    assert timeouts_s == [3.0, 3.0]  # of both ends
    agents.close()
    agent.close()


def test_agent_of_another_build_is_refused_and_both_are_named(
    agents: RankAgents, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(WireError, match=rf"mixed builds.*{RANK_SCHEMA.hex()}.*{OTHER_SCHEMA.hex()}"):
        connect(agents, schema=OTHER_SCHEMA).handshake()
    wait_for(lambda: bool(caplog.messages))
    (complaint,) = caplog.messages
    assert f"{OTHER_SCHEMA.hex()}, we are" in complaint and RANK_SCHEMA.hex() in complaint


def test_agent_without_the_secret_is_dropped(agents: RankAgents) -> None:
    with pytest.raises(WireError):
        connect(agents, b"k" * 32).handshake()
    come(agents, 1), come(agents, 2)
    assert len(agents.set_up(SETTINGS)) == 2


def test_agent_obeys_nothing_before_set_up(agents: RankAgents) -> None:
    agent = come(agents, 1)
    wait_for(lambda: 1 in agents._newcomers)
    connection = agents._newcomers[1].connection
    connection.send(encode(StopAll()))
    with pytest.raises(PeerGone):
        connection.recv(5.0)
    assert agent._executor is None


def test_agent_raises_when_rank_0_is_gone() -> None:
    agents = RankAgents(2)
    agents.close()
    with pytest.raises(WorkerLost, match="rank 0 cannot be reached"):
        come(agents, 1)
