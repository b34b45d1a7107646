from baton.decode_worker.worker import MAX_REMEMBERED, CancelledAttempts
from baton.messages.control import Cancel
from tests.worker_pair_cases import a_request


def test_a_cancel_is_of_the_attempt_and_of_earlier_ones() -> None:
    cancelled = CancelledAttempts()
    for attempt in (1, 0):
        cancelled.add(Cancel(request_id=a_request().request_id, attempt=attempt))
    assert a_request(attempt=1) in cancelled and a_request(attempt=0) in cancelled
    assert a_request(attempt=2) not in cancelled and a_request(1, attempt=1) not in cancelled


def test_the_oldest_are_forgotten() -> None:
    cancelled = CancelledAttempts()
    for number in range(MAX_REMEMBERED + 1):
        cancelled.add(Cancel(request_id=a_request(number).request_id, attempt=0))
    assert a_request(0) not in cancelled
    assert a_request(1) in cancelled and a_request(MAX_REMEMBERED) in cancelled
