import threading
from collections.abc import Callable, Generator

import pytest

from baton.cluster.offline.llm import OneThread, OneThreadStream
from baton.errors import InvalidRequest


def elsewhere(act: Callable[[], object]) -> BaseException | None:
    """What acting in another thread raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def enter(one_thread: OneThread) -> None:
    with one_thread:
        pass


def count() -> Generator[int, None, None]:
    yield from range(3)


def test_the_thread_inside_may_enter_again_and_another_may_not() -> None:
    one_thread = OneThread()
    with one_thread, one_thread:
        assert isinstance(elsewhere(lambda: enter(one_thread)), InvalidRequest)
    assert elsewhere(lambda: enter(one_thread)) is None


def test_what_can_wait_is_done_only_when_free() -> None:
    one_thread, done = OneThread(), list[str]()
    with one_thread:
        assert elsewhere(lambda: one_thread.try_to(lambda: done.append("beside"))) is None
    assert elsewhere(lambda: one_thread.try_to(lambda: done.append("after"))) is None
    assert done == ["after"]
    enter(one_thread)


def test_a_refused_reader_may_read_on_later() -> None:
    one_thread = OneThread()
    stream = OneThreadStream(count(), one_thread)
    assert next(stream) == 0
    with one_thread:
        assert isinstance(elsewhere(lambda: next(stream)), InvalidRequest)
        assert isinstance(elsewhere(stream.close), InvalidRequest)
    assert list(stream) == [1, 2]


def test_a_closed_stream_has_ended() -> None:
    stream = OneThreadStream(count(), OneThread())
    next(stream)
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)
