"""What several routers tell each other of the attempts that they have sent out.

1. A router tells what it dispatches; the others enter it in their books as another's (`OTHERS`), and expect
   the prompt's pages where it went.
2. Its first token and its end are told likewise.
3. Who told it may die before the end: a worker that beats without naming the attempt does not work on it any
   more, and frees it here (books.py).

Nothing waits for it: what is not heard weighs by the worker's own count.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from baton.control import PageEvents
from baton.router.books import OTHERS, Books, Entry, Key
from baton.router.cost_model import CostModel
from baton.router.prefix_index import PrefixIndex
from baton.router.redis_messages import AnyShared, SharedDispatch, SharedEnded, SharedStarted
from baton.router.short_keys import first_halves, with_zeros
from baton.worker import Worker

EXPECTED_FOR_S: Final = 2.0  # after the prompt should be there
MAX_OTHERS: Final = 2**16  # attempts of other routers in the books; more weigh by the workers' own count


class Link(Protocol):
    """To what outlives this process; see redis_link.py. None of it waits."""

    def joined(self, worker: Worker) -> None: ...
    def left(self, worker_id: str) -> None: ...
    def pages(self, worker_id: str, events: PageEvents) -> None: ...
    def share(self, message: AnyShared) -> None: ...


class Sharing:
    def __init__(
        self, link: Link, books: Books, index: PrefixIndex, model: CostModel, counters: Counter[str]
    ) -> None:
        self.link = link
        self._counters = counters
        self._books = books
        self._index = index
        self._model = model

    def dispatched(self, key: Key, entry: Entry, keys: bytes) -> None:
        """keys: of the prompt's pages, as the worker that computes it names them."""
        shared = SharedDispatch(
            request_id=key[0],
            attempt=key[1],
            decode=entry.decode,
            prefill=entry.prefill,
            num_prompt_tokens=entry.num_prompt_tokens,
            num_tokens=entry.num_tokens,
            num_output_tokens=entry.num_output_tokens,
            keys=first_halves(keys),
        )
        self.link.share(shared)

    def started(self, attempts: Sequence[Key]) -> None:
        self.link.share(SharedStarted(attempts=tuple(attempts)))

    def ended(self, attempts: Sequence[Key]) -> None:
        self.link.share(SharedEnded(attempts=tuple(attempts)))

    def heard(self, message: AnyShared) -> None:
        """From another router. What this one knows at first hand stays as it is."""
        match message:
            case SharedDispatch():
                self._enter(message)
            case SharedStarted():
                for key in filter(self._books.is_anothers, message.attempts):
                    self._books.started(key)
            case SharedEnded():
                for key in filter(self._books.is_anothers, message.attempts):
                    self._books.ended(key)

    def _enter(self, shared: SharedDispatch) -> None:
        key = (shared.request_id, shared.attempt)
        if key in self._books:
            return
        if self._books.num_others >= MAX_OTHERS:
            self._counters["others_left_out"] += 1
            return
        computer = shared.prefill or shared.decode
        num_new = shared.num_prompt_tokens
        compute_s = self._model.of(computer).compute_s(num_new, num_new)
        entry = Entry(
            OTHERS,
            shared.decode,
            shared.prefill,
            num_new,
            shared.num_tokens,
            compute_s,
            num_output_tokens=shared.num_output_tokens,
        )
        self._books.enter(key, entry)
        wait_s = self._books.wait_s(computer)
        self._index.expect(computer, with_zeros(shared.keys), wait_s + EXPECTED_FOR_S)
