"""The choice of a transport when transports do not open, or break: every piece ends once."""

from collections import Counter
from queue import SimpleQueue

import pytest

from baton.errors import TransferFailed
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks.executor import BackgroundThreads
from baton.kvtransfer.ranks.peer_transports import PeerTransports, Start
from baton.kvtransfer.transports.base import (
    LocalRank,
    OnEnd,
    Piece,
    PieceOutcome,
    Sender,
    Transport,
)
from baton.rpc.connection import Call
from tests.fakes import refuse_threads
from tests.layouts import a_layout
from tests.transfer_ends import piece_of

LAYOUT = a_layout(num_layers=1, num_kv_heads=1, head_dim=16, dtype="bfloat16")
PIECE = piece_of(plan_transfer(LAYOUT, LAYOUT, 0, 0), (0,))
DONE, FAILED = PieceOutcome(is_done=True), PieceOutcome(is_done=False, reason="broken")


class ScriptedSender:
    """Opens or not, and ends each piece as the test says."""

    def __init__(self, name: str, *, opens: bool) -> None:
        self.name = name
        self.is_broken = False
        self.is_closed = False
        self.pushed: list[OnEnd] = []
        self._opens = opens

    def open(self) -> None:
        if not self._opens:
            raise TransferFailed(self.name)

    def push(self, piece: Piece, on_end: OnEnd) -> None:
        self.pushed.append(on_end)

    def abort(self, transfer: bytes) -> None:
        """No thread is inside the pages."""

    def close(self) -> None:
        self.is_closed = True


class NamedTransport:
    is_automatic = True

    def __init__(self, name: str) -> None:
        self.name = name

    def can_serve(self, source: RankListenerAddresses, destination: RankListenerAddresses) -> bool:
        return True

    def listen(self, rank: LocalRank) -> None:
        return None

    def connect(self, rank: LocalRank, peer: PeerRank) -> Sender:
        raise NotImplementedError


class Bench:
    def __init__(self, *names: str) -> None:
        self.opens = set(names)
        self.cannot_connect: set[str] = set()
        self.made: list[ScriptedSender] = []
        self.ended: list[PieceOutcome] = []
        self.num_settled = 0
        self.counts: Counter[str] = Counter()
        self.start: Start = BackgroundThreads().start
        self._inbox: SimpleQueue[Call] = SimpleQueue()
        transports = [NamedTransport(name) for name in names]
        self.transports = PeerTransports(
            transports, self._connect, self._inbox.put, lambda call: self.start(call), self.counts
        )

    def _connect(self, transport: Transport) -> ScriptedSender:
        if transport.name in self.cannot_connect:
            raise TransferFailed("the address is none")
        self.made.append(ScriptedSender(transport.name, opens=transport.name in self.opens))
        return self.made[-1]

    def settle(self) -> None:
        before = self.num_settled
        self.transports.when_settled(self._settled)
        while self.num_settled == before:
            self.poll()

    def push(self) -> None:
        self.transports.push(PIECE, self.ended.append)

    def poll(self) -> None:
        self._inbox.get(timeout=5.0)()

    def _settled(self) -> None:
        self.num_settled += 1


def test_pieces_fail_when_no_thread_can_open_a_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("shm", "tcp")
    with monkeypatch.context() as patch:
        refuse_threads(patch, "kv-open")
        bench.push()
        bench.poll()
        assert [each.reason for each in bench.ended] == ["no transport is left"]
        assert [each.is_closed for each in bench.made] == [True, True]
    bench.settle()
    assert bench.transports.name == "shm"
    bench.transports.close()


def test_pieces_of_a_broken_transport_go_over_the_next() -> None:
    bench = Bench("shm", "tcp")
    bench.settle()
    bench.push()
    bench.push()
    first = bench.made[0]
    first.is_broken = True
    first.pushed[0](FAILED)
    first.pushed[1](FAILED)
    while len(bench.made) < 2 or not bench.made[1].pushed:
        bench.poll()
    assert first.is_closed and not bench.ended
    for handle in range(2):
        bench.made[1].pushed[handle](DONE)
        bench.poll()
    assert bench.ended == [DONE, DONE]


def test_piece_that_is_refused_fails_and_its_transport_stays() -> None:
    bench = Bench("shm", "tcp")
    bench.settle()
    bench.push()
    bench.made[0].pushed[0](FAILED)
    bench.poll()
    assert bench.ended == [FAILED] and bench.transports.name == "shm"


@pytest.mark.parametrize("opens_again", [False, True])
def test_next_transfer_tries_all_transports_again(opens_again: bool) -> None:
    bench = Bench("shm", "tcp")
    bench.opens = set()
    bench.settle()
    assert bench.transports.name is None
    bench.push()
    bench.poll()
    assert [each.reason for each in bench.ended] == ["no transport is left"]
    assert len(bench.made) == 2  # a piece alone tries nothing again
    bench.opens = {"tcp"} if opens_again else set()
    bench.settle()
    assert [each.name for each in bench.made] == ["shm", "tcp"] * 2
    assert bench.transports.name == ("tcp" if opens_again else None)
    assert bench.counts["recomputes"] == 2 + (not opens_again)


def test_late_outcome_of_an_old_transport_is_ignored() -> None:
    bench = Bench("tcp")
    bench.settle()
    bench.push()
    first = bench.made[0]
    first.is_broken = True
    first.pushed[0](FAILED)
    while not bench.ended:
        bench.poll()
    assert [each.is_done for each in bench.ended] == [False]
    bench.settle()
    bench.push()
    first.pushed[0](DONE)
    bench.poll()
    assert len(bench.ended) == 1  # the new piece is still on its way
    bench.made[1].pushed[0](DONE)
    bench.poll()
    assert bench.ended[1:] == [DONE]


def test_aborted_pieces_are_not_reported() -> None:
    bench = Bench("shm", "tcp")
    bench.settle()
    bench.push()
    bench.transports.abort(PIECE.transfer)
    bench.made[0].pushed[0](FAILED)
    bench.poll()
    assert not bench.ended and len(bench.made[0].pushed) == 1


def test_nothing_opens_after_close() -> None:
    bench = Bench("tcp")
    bench.transports.close()
    bench.settle()
    bench.push()
    bench.poll()
    assert not bench.made and not bench.ended[0].is_done


def test_close_while_the_opening_thread_starts_closes_the_transport() -> None:
    bench = Bench("shm")

    def open_and_close(call: Call) -> None:
        call()
        bench.transports.close()

    bench.start = open_and_close
    bench.push()
    bench.poll()
    assert [each.is_closed for each in bench.made] == [True]


def test_piece_that_is_pushed_when_a_transport_opens_goes_once() -> None:
    bench = Bench("shm")
    bench.push()
    bench.transports.when_settled(bench.push)
    bench.poll()
    assert len(bench.made[0].pushed) == 2
