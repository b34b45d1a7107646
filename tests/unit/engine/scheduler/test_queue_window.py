import pytest

from baton.engine.scheduler.policies import QueueWindow
from baton.engine.scheduler.sequence import Sequence
from baton.request import Request
from baton.tenants import SchedulingKey


def waiting(*enqueued_s: float) -> list[Sequence]:
    sequences = []
    for number, now_s in enumerate(enqueued_s):
        request = Request(request_id=str(number), token_ids=(1, 2))
        sequences.append(Sequence.from_request(request, 0, max_model_len=100))
        sequences[-1].enqueued_s = now_s
    return sequences


def released(window: QueueWindow, sequences: list[Sequence], now_s: float, num_seats: int = 8) -> int:
    return len(list(window.released(sequences, window.look(sequences, num_seats, now_s))))


def test_no_delay_holds_nothing() -> None:
    assert released(QueueWindow(0.0, ()), waiting(0.0, 0.0), now_s=0.0) == 2


def test_new_sequences_are_held_until_the_oldest_has_waited() -> None:
    window, sequences = QueueWindow(0.5, (4,)), waiting(1.0, 1.3)
    opening = window.look(sequences, 8, now_s=1.2)
    assert opening.num_released == 0 and opening.wait_s == pytest.approx(0.3)
    assert released(window, sequences, now_s=1.2) == 0
    assert released(window, sequences, now_s=1.5) == 2


@pytest.mark.parametrize(("num_waiting", "expected"), [(1, 0), (2, 2), (3, 2), (4, 4), (7, 4)])
def test_largest_preferred_size_that_has_gathered_goes_at_once(num_waiting: int, expected: int) -> None:
    assert released(QueueWindow(0.5, (4, 2)), waiting(*[0.0] * num_waiting), now_s=0.1) == expected


def test_without_preferred_sizes_a_full_house_goes_at_once() -> None:
    window, sequences = QueueWindow(0.5, ()), waiting(0.0, 0.0, 0.0)
    assert released(window, sequences, now_s=0.1, num_seats=3) == 3
    assert released(window, sequences, now_s=0.1, num_seats=4) == 0


def test_sequence_that_ran_before_is_not_held() -> None:
    window, sequences = QueueWindow(0.5, (4,)), waiting(0.0, 0.0)
    sequences[1].num_preemptions = 1
    opening = window.look(sequences, 8, now_s=0.1)
    assert list(window.released(sequences, opening)) == [sequences[1]]


def test_who_may_wait_less_opens_the_window_sooner_and_nobody_waits_longer() -> None:
    window, sequences = QueueWindow(0.5, (4,)), waiting(0.0, 0.1)
    sequences[1].scheduling_key = SchedulingKey(max_queue_delay_ms=150.0)
    assert window.look(sequences, 8, now_s=0.2).wait_s == pytest.approx(0.05)
    assert released(window, sequences, now_s=0.25) == 2
    sequences[1].scheduling_key = SchedulingKey(max_queue_delay_ms=9e3)
    assert window.look(sequences, 8, now_s=0.2).wait_s == pytest.approx(0.3)
