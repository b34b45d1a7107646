"""Who uses an LLM: one thread at a time, held by a lock that is tried and never waited for."""

import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TypeVar

from baton.errors import InvalidRequest

ItemT = TypeVar("ItemT")


class OneThread:
    """`with` it around a use. The thread that is inside may enter again; another is refused at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise InvalidRequest(
                "this LLM is in use by another thread: give the prompts to one call, or hold a lock around it"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def try_to(self, act: Callable[[], None]) -> None:
        """Act now, or not at all while another thread is inside."""
        if self._lock.acquire(blocking=False):
            try:
                act()
            finally:
                self._lock.release()


class OneThreadStream(Generator[ItemT, None, None]):
    """The same items; a thread that is refused changes nothing, and may read on later."""

    def __init__(self, items: Generator[ItemT, None, None], one_thread: OneThread) -> None:
        self._items = items
        self._one_thread = one_thread

    def send(self, value: None) -> ItemT:
        with self._one_thread:
            return self._items.send(value)

    def throw(  # type: ignore[override]  # as `close` calls it; the other forms are deprecated
        self, error: BaseException | type[BaseException]
    ) -> ItemT:
        with self._one_thread:
            return self._items.throw(error)
