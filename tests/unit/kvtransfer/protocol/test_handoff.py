import pytest

from baton.clock import ManualClock
from baton.kvtransfer.protocol.handoff import LeaseTimer, Timing, answer_to_unknown
from baton.kvtransfer.protocol.messages import (
    Abort,
    AnyMessage,
    Commit,
    Corrupt,
    Extend,
    PullRefused,
    Released,
    Verified,
    Wrote,
)

ID = b"t" * 16


def test_lease_runs_from_the_last_extension_up_to_the_limit() -> None:
    clock = ManualClock(100.0)
    timer = LeaseTimer(clock, Timing(lease_s=30, heartbeat_s=5), limit_s=50)
    clock.advance(29)
    assert not timer.is_over
    timer.extend()
    assert timer.deadline_s == 150.0
    clock.advance(21)
    assert timer.is_over


def test_heartbeat_is_due_once_in_its_time() -> None:
    clock = ManualClock()
    timer = LeaseTimer(clock, Timing(lease_s=30, heartbeat_s=5), limit_s=50)
    clock.advance(4.9)
    assert not timer.takes_heartbeat()
    clock.advance(0.1)
    assert timer.takes_heartbeat() and not timer.takes_heartbeat()
    clock.advance(100)
    assert timer.takes_heartbeat() and not timer.takes_heartbeat()


@pytest.mark.parametrize(
    ("message", "epoch"),
    [
        # To a destination: nothing is written for this transfer.
        (Corrupt(transfer=ID, epoch=3, units=(0,)), 0),
        (Abort(transfer=ID, epoch=3, reason="expired"), 0),
        # To whoever goes on: stop.
        (Wrote(transfer=ID, epoch=3, first=0, stop=1), 3),
        (Commit(transfer=ID, epoch=3, digests=bytes(8)), 3),
        (Extend(transfer=ID, epoch=3), 3),
    ],
)
def test_who_speaks_of_an_unknown_transfer_is_told_to_stop(message: AnyMessage, epoch: int) -> None:
    assert answer_to_unknown(message) == Abort(transfer=ID, epoch=epoch, reason="unknown transfer")


@pytest.mark.parametrize(
    "message",
    [
        Abort(transfer=ID, epoch=0, reason="unknown transfer"),  # or two would answer each other for ever
        PullRefused(transfer=ID, epoch=3, reason="gone"),
        Verified(transfer=ID, epoch=3),
        Released(transfer=ID, epoch=3),
    ],
)
def test_last_words_need_no_answer(message: AnyMessage) -> None:
    assert answer_to_unknown(message) is None
