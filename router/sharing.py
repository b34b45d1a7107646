"""What several routers tell each other of the attempts that they have sent out.

1. A router tells what it dispatches; the others enter it in their books as another's (`OTHERS`), and expect
   the prompt's pages where it went.
2. Its first token and its end are told likewise.
3. Who told it may die before the end: a worker that beats without naming the attempt does not work on it any
   more, and frees it here (router/in_flight.py).

Nothing waits for it: what is not heard weighs by the worker's own count.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from baton.messages.control import KvEventBatch
from baton.messages.workers import Worker
from baton.router.in_flight import OTHERS, InFlight, InFlightAttempt, Key
from baton.router.index.prefix_index import PrefixIndex
from baton.router.index.prompt_keys import first_halves, with_zeros
from baton.router.policies.cost_model import CostModel
from baton.router.redis.messages import AnyShared, SharedDispatch, SharedEnded, SharedStarted

EXPECTED_FOR_S: Final = 2.0  # after the prompt should be there
MAX_OTHERS: Final = 2**16  # attempts of other routers in the books; more weigh by the workers' own count


class SharingLink(Protocol):
    """To what outlives this process; see router/redis/link.py. None of it waits."""

    def joined(self, worker: Worker) -> None: ...
    def left(self, worker_id: str) -> None: ...
    def pages(self, worker_id: str, events: KvEventBatch) -> None: ...
    def share(self, message: AnyShared) -> None: ...


class Sharing:
    def __init__(
        self,
        link: SharingLink,
        in_flight: InFlight,
        index: PrefixIndex,
        model: CostModel,
        counters: Counter[str],
    ) -> None:
        self.link = link
        self._counters = counters
        self._in_flight = in_flight
        self._index = index
        self._model = model

    def dispatched(self, key: Key, entry: InFlightAttempt, keys: bytes) -> None:
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
                for key in filter(self._in_flight.is_anothers, message.attempts):
                    self._in_flight.started(key)
            case SharedEnded():
                for key in filter(self._in_flight.is_anothers, message.attempts):
                    self._in_flight.ended(key)

    def _enter(self, shared: SharedDispatch) -> None:
        key = (shared.request_id, shared.attempt)
        if key in self._in_flight:
            return
        if self._in_flight.num_others >= MAX_OTHERS:
            self._counters["others_left_out"] += 1
            return
        computer = shared.prefill or shared.decode
        num_new = shared.num_prompt_tokens
        compute_s = self._model.of(computer).compute_s(num_new, num_new)
        entry = InFlightAttempt(
            OTHERS,
            shared.decode,
            shared.prefill,
            num_new,
            shared.num_tokens,
            compute_s,
            num_output_tokens=shared.num_output_tokens,
        )
        self._in_flight.enter(key, entry)
        wait_s = self._in_flight.wait_s(computer)
        self._index.expect(computer, with_zeros(shared.keys), wait_s + EXPECTED_FOR_S)
