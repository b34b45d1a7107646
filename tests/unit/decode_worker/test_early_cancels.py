from baton.control import Cancel
from baton.decode_worker.early_cancels import MAX_REMEMBERED, EarlyCancels
from tests.worker_pair_cases import a_request


def test_they_are_of_one_attempt() -> None:
    cancels = EarlyCancels()
    cancels.add(Cancel(request_id=a_request().request_id, attempt=1))
    assert cancels.has(a_request(attempt=1))
    assert not cancels.has(a_request(attempt=0)) and not cancels.has(a_request(1, attempt=1))


def test_the_oldest_are_forgotten() -> None:
    cancels = EarlyCancels()
    for attempt in range(MAX_REMEMBERED + 1):
        cancels.add(Cancel(request_id=a_request().request_id, attempt=attempt))
    assert not cancels.has(a_request(attempt=0))
    assert cancels.has(a_request(attempt=1)) and cancels.has(a_request(attempt=MAX_REMEMBERED))
