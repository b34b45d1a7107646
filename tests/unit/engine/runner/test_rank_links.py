"""Links between ranks on several nodes: order, loss, silence, strangers, and a replica over them."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from queue import Queue

import msgspec
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from baton.engine.runner import rank_links
from baton.engine.runner.rank_links import (
    HEAD_BYTES,
    SCHEMA,
    RankHello,
    RankLinks,
    RankListener,
    connect_ranks,
)
from baton.engine.runner.replica_rank import ReplicaRank
from baton.errors import BatonError, ModelError, PeerGone, WorkerLost
from baton.messages.bounds import MAX_BODY_BYTES, Kind
from baton.messages.workers import RankZero
from baton.rpc import connection as rpc_connection
from baton.rpc.auth import RANKS, KeyRing, LinkKeys, Role
from baton.rpc.connection import Connection, RankNetwork
from tests.tensor_parallel_peer import CPU, values
from tests.transfer_ends import RING
from tests.waiting import wait_for

HOST = "127.0.0.1"
REPLICA = b"this replica"
MODEL = "the fingerprint of the model"
STRANGERS = KeyRing.of(b"the key of another cluster", Kind.WORKER)
Connect = Callable[..., list[RankLinks]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connects the ranks of a replica, which are in this process."""
    with ExitStack() as ends:

        def connected(tp_size: int = 1, pp_size: int = 2) -> list[RankLinks]:
            size, listener = tp_size * pp_size, RankListener(HOST, RING, REPLICA)
            network = network_at(listener)
            with ThreadPoolExecutor(size) as threads:

                def join(rank: int) -> RankLinks:
                    own = None if rank else listener
                    return connect_ranks(rank, network, own, model=MODEL, tp_size=tp_size, pp_size=pp_size)

                found = list(threads.map(join, range(size)))
            for links in found:
                ends.callback(links.close)
            return found

        yield connected


def join(rank: int, network: RankNetwork, listener: RankListener | None, model: str = MODEL) -> RankLinks:
    """As one of two ranks."""
    return connect_ranks(rank, network, listener, model=model, tp_size=1, pp_size=2)


def network_at(listener: RankListener, ring: KeyRing = RING, replica: bytes = REPLICA) -> RankNetwork:
    return RankNetwork(
        rank_zero=RankZero(address=listener.address, replica=replica), own_host=HOST, keys=ring.generations
    )


def received(links: RankLinks, rank: int, tensor: Tensor, timeout_s: float = 10.0) -> Tensor:
    filled = torch.empty_like(tensor)
    links.receive(rank, filled).wait(timeout_s)
    return filled


def test_tensors_come_in_the_order_in_which_they_were_sent(connect: Connect) -> None:
    first, second = connect()
    tensors = [
        values(seed, 3 + seed, 5, dtype=dtype) for seed, dtype in enumerate(("float32", "bfloat16") * 3)
    ]
    for tensor in tensors:
        first.send(1, tensor)
        second.send(0, tensor[::2])  # a tensor with gaps
    for tensor in tensors:
        assert torch.equal(received(second, 0, tensor), tensor)
        assert torch.equal(received(first, 1, tensor[::2].contiguous()), tensor[::2])


def test_tensors_are_filled_in_the_order_in_which_they_began_to_be_received(connect: Connect) -> None:
    first, second = connect()
    sent, filled = [values(seed, 2 + seed, dtype="float32") for seed in range(3)], list[Tensor]()
    for tensor in sent:
        first.send(1, tensor)
        filled.append(torch.zeros_like(tensor))
    arrivals = [second.receive(0, tensor) for tensor in filled]
    for chosen in (1, 0, 2):
        arrivals[chosen].wait(10.0)
        assert torch.equal(filled[chosen], sent[chosen])


def test_large_tensors_pass_each_other_though_none_is_received_yet(connect: Connect) -> None:
    """Both ranks send more than sockets hold before either receives."""
    first, second = connect()
    large = torch.randint(0, 255, (20 * MAX_BODY_BYTES + 7,), dtype=torch.uint8)
    first.send(1, large)
    second.send(0, large)
    assert torch.equal(received(first, 1, large), large) and torch.equal(received(second, 0, large), large)


def test_sent_tensor_may_be_overwritten_at_once(connect: Connect) -> None:
    first, second = connect()
    tensor = torch.ones(5 * MAX_BODY_BYTES, dtype=torch.uint8)
    first.send(1, tensor)
    tensor.zero_()
    assert received(second, 0, tensor).all()


def test_rank_that_is_silent_is_reported_after_the_timeout(connect: Connect) -> None:
    first, _ = connect()
    with pytest.raises(WorkerLost, match="rank 1: it was silent for 0.05 s"):
        received(first, 1, torch.zeros(1), timeout_s=0.05)


def test_rank_that_is_gone_is_reported_once_its_tensors_have_been_received(connect: Connect) -> None:
    first, second = connect()
    tensor = values(0, 3, 4, dtype="float32")
    second.send(0, tensor)
    second.close()
    assert torch.equal(received(first, 1, tensor), tensor)
    for _ in range(2):
        with pytest.raises(WorkerLost, match="rank 1: the peer is gone"):
            received(first, 1, tensor)
    with pytest.raises(WorkerLost, match="rank 1: the connection is closed"):
        first.send(1, tensor)


@pytest.mark.parametrize("num_sent", [3, 5])
def test_tensor_of_another_size_ends_the_link(connect: Connect, num_sent: int) -> None:
    first, second = connect()
    for _ in range(2):
        first.send(1, torch.zeros(num_sent))
    for _ in range(2):
        with pytest.raises(WorkerLost, match=f"rank 0: expected a tensor of 16 bytes, got {4 * num_sent}"):
            received(second, 0, torch.zeros(4))


@pytest.mark.parametrize("size", [0, MAX_BODY_BYTES - HEAD_BYTES, 2 * MAX_BODY_BYTES - HEAD_BYTES + 1])
def test_tensor_of_any_size_is_followed_by_the_next_one(connect: Connect, size: int) -> None:
    first, second = connect()
    sent = [torch.full((size,), 7, dtype=torch.uint8), torch.arange(5)]
    for tensor in sent:
        first.send(1, tensor)
    for tensor in sent:
        assert torch.equal(received(second, 0, tensor), tensor)


def test_tensors_that_no_step_takes_end_the_link(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = connect()
    monkeypatch.setattr(rank_links, "MAX_WAITING_BYTES", 3 * MAX_BODY_BYTES)
    large = torch.ones(4 * MAX_BODY_BYTES, dtype=torch.uint8)
    first.send(1, large)
    with pytest.raises(WorkerLost, match="rank 1: the peer is gone"):
        received(first, 1, large)  # no rank 1 sends any
    with pytest.raises(WorkerLost, match=r"rank 0: \d+ bytes wait for the steps of this rank"):
        received(second, 0, large)


@pytest.mark.parametrize(
    ("ring", "replica", "complaint"),
    [
        (STRANGERS, REPLICA, "it may hold another key"),
        (RING, b"an earlier one", "it is a rank of another replica"),
    ],
)
def test_strangers_and_ranks_of_other_replicas_are_refused(
    ring: KeyRing,
    replica: bytes,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rank_links, "START_TIMEOUT_S", 1.0)
    listener = RankListener(HOST, RING, REPLICA)
    with ThreadPoolExecutor(1) as threads:
        network = network_at(listener, ring, replica)
        joining = threads.submit(join, 1, network, None)
        with pytest.raises(WorkerLost, match="rank 1 did not connect within 1 s"):
            join(0, network, listener)
        with pytest.raises(WorkerLost):
            joining.result()
    assert complaint in caplog.text


def test_newcomers_that_prove_nothing_do_not_hold_up_the_ranks(connect: Connect) -> None:
    listener = RankListener(HOST, RING, REPLICA)
    silent = [socket.create_connection((listener.address.host, listener.address.port)) for _ in range(3)]
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, 1, network_at(listener), None)
        zero, one = join(0, network_at(listener), listener), joining.result()
        zero.send(1, torch.arange(3))
        assert received(one, 0, torch.arange(3)).tolist() == [0, 1, 2]
        for links in (zero, one):
            links.close()
    for sock in silent:
        sock.close()


def test_rank_with_another_model_is_an_error_that_names_its_node() -> None:
    listener = RankListener(HOST, RING, REPLICA)
    network = msgspec.structs.replace(network_at(listener), own_host="127.0.0.9")
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, 1, network, None, "of another model")
        with pytest.raises(ModelError, match=r"rank 1: the model's files on node 127\.0\.0\.9 differ"):
            join(0, network_at(listener), listener)
        with pytest.raises(WorkerLost):
            joining.result()


def test_silence_is_noticed_after_the_link_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts_s: list[float] = []
    monkeypatch.setattr(rpc_connection, "keep_alive", lambda sock, timeout_s: timeouts_s.append(timeout_s))
    listener = RankListener(HOST, RING, REPLICA, link_timeout_s=3.0)
    network = msgspec.structs.replace(network_at(listener), link_timeout_s=3.0)
    with ThreadPoolExecutor(3) as threads:

        def join(rank: int) -> RankLinks:
            own = None if rank else listener
            return connect_ranks(rank, network, own, model=MODEL, tp_size=1, pp_size=3)

        for links in list(threads.map(join, range(3))):
            links.close()
    assert timeouts_s == 6 * [3.0]  # both ends of three links


def test_early_rank_waits_for_ranks_that_start_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """JOIN_S counts from the welcome, which comes when the last rank has started."""
    monkeypatch.setattr(rank_links, "JOIN_S", 0.2)
    listener = RankListener(HOST, RING, REPLICA)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, 1, network_at(listener), None)
        assert not wait([joining], timeout=1.0).done
        for links in (join(0, network_at(listener), listener), joining.result()):
            links.close()


def test_wait_for_a_rank_ends_when_it_will_not_come() -> None:
    first = threading.Event()

    def check() -> None:
        if first.is_set():
            raise WorkerLost("rank 2 ended with status 1")

    listener = RankListener(HOST, RING, REPLICA, check)
    with ThreadPoolExecutor(1) as threads:
        admitting = threads.submit(listener.admit, (1, 2), 60.0)
        came = says_hello(listener, 1)
        first.set()
        with pytest.raises(WorkerLost, match="rank 2 ended with status 1"):
            admitting.result(10.0)  # of 60 s
    with pytest.raises(BatonError):
        came.recv(5.0)


def test_rank_that_comes_while_the_listener_closes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    has_come, may_go_on = threading.Event(), threading.Event()

    class Slow(Queue[object]):
        def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
            has_come.set()
            assert may_go_on.wait(10.0)
            super().put(item, block, timeout)

    monkeypatch.setattr(rank_links, "Queue", Slow)
    listener = RankListener(HOST, RING, REPLICA)
    came = says_hello(listener, 1)
    assert has_come.wait(10.0)
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(listener.close)
        wait([closing], timeout=0.3)
        may_go_on.set()
        closing.result()
    with pytest.raises(PeerGone):
        came.recv(5.0)


def test_flush_waits_until_the_peer_has_all_that_was_sent(connect: Connect) -> None:
    first, second = connect()
    large = torch.ones(20 * MAX_BODY_BYTES, dtype=torch.uint8)
    first.send(1, large)
    first.flush()
    first.close()
    assert received(second, 0, large).all()


def test_rank_that_comes_twice_is_refused() -> None:
    listener = RankListener(HOST, RING, REPLICA)
    first, second = (says_hello(listener, 1) for _ in range(2))
    third = says_hello(listener, 2)
    came = listener.admit((1, 2), 20.0)
    assert [hello.rank for hello, _ in came.values()] == [1, 2]
    wait_for(lambda: is_refused(first) or is_refused(second))  # their hellos may arrive in any order
    assert not (is_refused(first) and is_refused(second)) and not is_refused(third)
    for connection in (first, second, third, *(mine for _, mine in came.values())):
        connection.close()


def is_refused(connection: Connection) -> bool:
    """Return whether rank 0 has closed the connection, over which it sends nothing otherwise."""
    try:
        connection.recv(0.01)
    except TimeoutError:
        return False
    except BatonError:
        return True
    raise AssertionError("rank 0 has sent a message")


def says_hello(listener: RankListener, rank: int) -> Connection:
    sock = socket.create_connection((listener.address.host, listener.address.port))
    connection = Connection(sock, LinkKeys(RING, RANKS), Role.CONNECTING, schema=SCHEMA).handshake()
    hello = RankHello(replica=REPLICA, rank=rank, node=HOST, model=MODEL, address=None)
    connection.send(msgspec.msgpack.encode(hello))
    return connection


# Ranks of a replica.


def replica(links: list[RankLinks], tp_size: int, folder: Path) -> list[ReplicaRank]:
    """The ranks, each stage on a node of its own."""
    pp_size = len(links) // tp_size
    with ThreadPoolExecutor(len(links)) as threads:

        def join(rank: int) -> ReplicaRank:
            store = FileStore(str(folder / f"node-{rank // tp_size}"), tp_size)
            return ReplicaRank.join(rank, store, CPU, links[rank], tp_size=tp_size, pp_size=pp_size)

        return list(threads.map(join, range(len(links))))


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 3), (2, 3)])
def test_ranks_follow_commands_and_agree_on_the_smallest(
    connect: Connect, tmp_path: Path, tp_size: int, pp_size: int
) -> None:
    ranks = replica(connect(tp_size=tp_size, pp_size=pp_size), tp_size, tmp_path)
    commands = [b"", b"go", b"go" * 10_000, b"go" * MAX_BODY_BYTES]
    with ThreadPoolExecutor(len(ranks)) as threads:
        least = [*threads.map(lambda rank: rank.smallest(3 - rank.index), ranks)]
        assert least == [4 - len(ranks)] * len(ranks)
        for command in commands:
            ranks[0].send_command(command)
        for command in commands:
            assert [*threads.map(ReplicaRank.receive_command, ranks[1:])] == [command] * (len(ranks) - 1)


def test_message_comes_after_tensors_that_began_to_be_received(connect: Connect) -> None:
    first, second = connect()
    sent = torch.arange(3)
    first.send(1, sent)
    first.send_bytes(1, b"after it")
    begun = second.receive(0, torch.zeros_like(sent))
    assert second.receive_bytes(0, 10.0) == b"after it"
    begun.wait(0.0)
    assert torch.equal(begun.tensor, sent)


def test_stages_pass_hidden_states_on_and_the_last_one_answers(connect: Connect, tmp_path: Path) -> None:
    ranks = replica(connect(tp_size=2, pp_size=3), 2, tmp_path)
    hidden = values(0, 5, 7, dtype="bfloat16")
    with ThreadPoolExecutor(len(ranks)) as threads:

        def step(rank: ReplicaRank) -> Tensor:
            x = hidden if rank.pp.is_first else rank.pp.receive(torch.empty_like(hidden))
            x = rank.tp.all_reduce(x.clone())
            if not rank.pp.is_last:
                rank.pp.send_on(x)
            elif rank.pp.answers:
                rank.pp.answer(x)
            return rank.pp.receive_answer(torch.empty_like(x)).wait() if rank.index == 0 else x

        results = list(threads.map(step, ranks))
    for rank, result in zip(ranks, results, strict=True):
        doubled = 3 if rank.index == 0 else rank.pp.stage + 1
        assert torch.equal(result, hidden * 2**doubled)


def test_lost_stage_is_worker_lost(connect: Connect, tmp_path: Path) -> None:
    links = connect()
    first, _ = replica(links, 1, tmp_path)
    links[1].close()
    with pytest.raises(WorkerLost, match="rank 1: the peer is gone"):
        first.pp.receive_answer(torch.empty(1)).wait()
    with pytest.raises(WorkerLost, match="rank 1: the peer is gone"):
        first.smallest(1)
