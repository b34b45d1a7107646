"""Who takes digests: the caller for a little, threads for more."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

INLINE_BYTES: Final = 2**21  # 0.1 ms: what it takes to wake a thread and hear of its end


class Hashing:
    def __init__(self, num_threads: int, *, may_inline: bool = True) -> None:
        """may_inline: pages are this CPU's own, so that the caller waits for nothing but the hash."""
        self.may_inline = may_inline
        self._inline_bytes = INLINE_BYTES if may_inline else -1
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-digest")

    def submit(
        self,
        num_bytes: int,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> "Future[Result]":
        """Call the function, which reads num_bytes; the future is done already where they are few.

        Functions that go to threads begin in the order in which they were submitted.
        """
        if num_bytes > self._inline_bytes:
            return self._threads.submit(function, *args, **kwargs)
        future: Future[Result] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Returns when no function runs any more; those that had not begun are cancelled."""
        self._threads.shutdown(cancel_futures=True)
