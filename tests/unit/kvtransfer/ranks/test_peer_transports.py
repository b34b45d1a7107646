"""Which transport carries a piece when transports do not open, or break: every piece ends once."""

from queue import SimpleQueue

import pytest

from baton.errors import TransferFailed
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks.transports import PeerTransports
from baton.kvtransfer.transports.base import OnEnd, OutgoingTransfer, Piece, TransferProgress, TransferStatus
from baton.kvtransfer.transports.message_stream import Call
from baton.kvtransfer.transports.registry import TransportCounters, TransportName
from baton.pages import PageLayout
from tests.fakes import refuse_threads

LAYOUT = PageLayout(tp_size=1, page_size=16, num_layers=1, num_kv_heads=1, head_dim=16, dtype="bfloat16")
TRANSFER = OutgoingTransfer(
    id=b"t" * 16,
    epoch=1,
    plan=plan_transfer(LAYOUT, LAYOUT, 0, 0),
    source_pages=(0,),
    destination_pages=(0,),
    destination_generations=(1,),
)
PIECE = Piece(TRANSFER, 0, 1)
DONE, FAILED = TransferProgress(TransferStatus.DONE), TransferProgress(TransferStatus.FAILED, reason="broken")


class ScriptedTransport:
    """Opens or not, and ends each piece when the test says how."""

    def __init__(self, name: str, on_end: OnEnd, *, opens: bool) -> None:
        self.name = name
        self.is_broken = False
        self.is_closed = False
        self.num_pushed = 0
        self._opens = opens
        self._on_end = on_end
        self._progress: dict[int, TransferProgress] = {}

    def open(self) -> None:
        if not self._opens:
            raise TransferFailed(self.name)

    def push(self, piece: Piece) -> int:
        self.num_pushed += 1
        return self.num_pushed - 1

    def end(self, handle: int, progress: TransferProgress) -> None:
        self._progress[handle] = progress
        self._on_end(handle)

    def poll(self, handle: int) -> TransferProgress:
        return self._progress[handle]

    def forget(self, handle: int) -> None:
        del self._progress[handle]

    def abort(self, transfer: bytes) -> None:
        """Nobody is inside."""

    def close(self) -> None:
        self.is_closed = True


class Bench:
    def __init__(self, *names: TransportName) -> None:
        self.opens = set(names)
        self.made: list[ScriptedTransport] = []
        self.ended: list[TransferProgress] = []
        self.num_settled = 0
        self.counters = TransportCounters()
        self._inbox: SimpleQueue[Call] = SimpleQueue()
        self.transports = PeerTransports(names, self._make, self._inbox.put, self.counters)

    def _make(self, name: TransportName, on_end: OnEnd) -> ScriptedTransport:
        self.made.append(ScriptedTransport(name, on_end, opens=name in self.opens))
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


def test_the_first_that_opens_carries_all() -> None:
    bench = Bench("shm", "tcp")
    bench.opens = {"tcp"}
    bench.settle()
    assert bench.transports.name == "tcp" and bench.made[0].is_closed
    bench.push()
    bench.made[1].end(0, DONE)
    bench.poll()
    assert bench.ended == [DONE]
    assert (bench.counters.num_failed["shm"], bench.counters.num_opened["tcp"]) == (1, 1)


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


def test_a_transport_that_breaks_hands_its_pieces_on() -> None:
    bench = Bench("shm", "tcp")
    bench.settle()
    bench.push()
    bench.push()
    first = bench.made[0]
    first.is_broken = True
    first.end(0, FAILED)
    first.end(1, FAILED)
    while len(bench.made) < 2 or not bench.made[1].num_pushed:
        bench.poll()
    assert first.is_closed and not bench.ended
    for handle in range(2):
        bench.made[1].end(handle, DONE)
        bench.poll()
    assert bench.ended == [DONE, DONE]


def test_a_piece_has_as_many_tries_as_there_are_transports() -> None:
    bench = Bench("shm", "tcp")
    bench.settle()
    bench.push()
    for handle in range(2):
        assert not bench.ended
        bench.made[0].end(handle, FAILED)
        bench.poll()
    assert bench.ended == [FAILED] and bench.transports.name == "shm"


@pytest.mark.parametrize("opens_again", [False, True])
def test_when_none_is_left_the_next_transfer_tries_them_all_again(opens_again: bool) -> None:
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
    assert bench.counters.num_recomputes == 2 + (not opens_again)


def test_what_an_old_transport_tells_late_is_not_taken_for_the_news_of_another() -> None:
    bench = Bench("tcp")
    bench.settle()
    bench.push()
    first = bench.made[0]
    first.is_broken = True
    first.end(0, FAILED)
    bench.poll()
    assert [each.status for each in bench.ended] == [TransferStatus.FAILED]
    bench.settle()
    bench.push()
    first.end(0, DONE)
    bench.poll()
    assert len(bench.ended) == 1  # the new piece, whose ticket has the same number, is still on its way
    bench.made[1].end(0, DONE)
    bench.poll()
    assert bench.ended[1:] == [DONE]


def test_what_was_aborted_is_told_of_no_more() -> None:
    bench = Bench("shm", "tcp")
    bench.settle()
    bench.push()
    bench.transports.abort(TRANSFER.id)
    bench.made[0].end(0, FAILED)
    bench.poll()
    assert not bench.ended and bench.made[0].num_pushed == 1


def test_nothing_opens_once_it_is_closed() -> None:
    bench = Bench("tcp")
    bench.transports.close()
    bench.settle()
    bench.push()
    bench.poll()
    assert not bench.made and bench.ended[0].status is TransferStatus.FAILED
