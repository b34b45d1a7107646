"""One prompt that is computed here for a decode worker.

1. The decode worker, which has kept room for it, is asked for pages. Computing does not wait for its answer;
   no page leaves before it.
2. PULLING: a prefix of it comes from another worker that holds it; not all prompts have such a one.
3. COMPUTING: the engine has the sequence. After each step the pages that are full leave.
4. LEAVING: the first token has been said, or why there is none; pages may be on their way. It lasts until the
   decode worker has ended the transfer. One that refuses pages after all has to be told: it has no transfer.

A sequence computes [0, num_tokens) and samples one token. The decode worker holds [0, num_held_tokens); the
transfer counts units of `unit_tokens` from there on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from baton.engine.scheduler.plan import ScheduledChunk
from baton.engine.scheduler.sequence import SequenceProgress
from baton.errors import ProtocolError
from baton.kvtransfer.page_endpoint import PageEndpoint
from baton.messages.control import Failure, Prefill, PrefillFailed
from baton.pages import PageLayout
from baton.request import FinishReason, Request


class PrefillStage(Enum):
    PULLING = "pulling"
    COMPUTING = "computing"
    LEAVING = "leaving"


class Offer(NamedTuple):
    """The next pages of a transfer, and how many of its units are computed with them."""

    pages: tuple[int, ...]
    num_units: int


@dataclass(slots=True, eq=False)
class PrefillJob:
    prefill: Prefill
    decode: str  # the worker that asked
    page_size: int  # of the pages here
    unit_tokens: int
    stage: PrefillStage = PrefillStage.COMPUTING
    is_granted: bool = False  # the decode worker has given pages
    progress: SequenceProgress | None = None  # from COMPUTING on
    _num_taken_pages: int = 0

    def __post_init__(self) -> None:
        """ProtocolError for what no decode worker asks."""
        num_held = self.prefill.num_held_tokens
        if num_held % self.page_size or num_held >= self.num_tokens:
            message = f"{num_held} of {self.num_tokens} tokens are held, in pages of {self.page_size}"
            raise ProtocolError(message)

    @property
    def request(self) -> Request:
        return self.prefill.request

    @property
    def key(self) -> tuple[str, int]:
        """Which attempt at which request it is."""
        return self.request.request_id, self.request.attempt

    @property
    def transfer(self) -> bytes:
        return self.prefill.transfer

    @property
    def engine_id(self) -> str:
        """Its name in the engine: two decode workers may ask for one attempt that was given out twice."""
        return f"{self.request.request_id}.{self.request.attempt}.{self.transfer.hex()}"

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens

    @property
    def num_units(self) -> int:
        return -(-(self.num_tokens - self.prefill.num_held_tokens) // self.unit_tokens)

    @property
    def engine_request(self) -> Request:
        """The same request, but for one token: whatever that is, the engine ends there."""
        sampling, num_generated = self.request.sampling, len(self.request.generated_token_ids)
        one_more = num_generated + 1
        # Stop ids are not sampled before `min_tokens`: for the one token, the lesser bound says the same.
        sampling = msgspec.structs.replace(
            sampling, max_tokens=one_more, min_tokens=min(sampling.min_tokens, one_more)
        )
        return msgspec.structs.replace(self.request, request_id=self.engine_id, sampling=sampling)

    def finish_reason(self, reason: FinishReason | None, max_model_len: int) -> FinishReason | None:
        """Of the whole answer, when its first token ended the sequence here for this reason."""
        if reason is not FinishReason.LENGTH:
            return reason
        num_answered = len(self.request.generated_token_ids) + 1
        most = self.request.sampling.max_tokens
        is_last = most == num_answered or len(self.request.token_ids) + num_answered >= max_model_len
        return FinishReason.LENGTH if is_last else None

    def take_offer(self, *, is_last: bool = False) -> Offer | None:
        """What can leave now and was not taken before; is_last: all, as the step that runs computes the rest.

        Only whole pages leave before the end: a sequence that is preempted and computed again fills other
        pages, and one of which a part has left would never get its rest.
        """
        assert self.progress is not None, "nothing is computed yet"
        num_held, num_computed = self.prefill.num_held_tokens, self.progress.num_computed_tokens
        if num_computed < self.num_tokens and not is_last:
            num_pages = (num_computed - num_held) // self.page_size
            num_units = num_pages * (self.page_size // self.unit_tokens)
        else:
            num_pages, num_units = -(-(self.num_tokens - num_held) // self.page_size), self.num_units
        if num_pages <= self._num_taken_pages:
            return None
        first = num_held // self.page_size
        pages = self.progress.page_table[first + self._num_taken_pages : first + num_pages]
        self._num_taken_pages = num_pages
        return Offer(tuple(pages), num_units)


def refusal(request: Request, failure: Failure, reason: str) -> PrefillFailed:
    return PrefillFailed(
        request_id=request.request_id, attempt=request.attempt, failure=failure, reason=reason[:512]
    )


# Pages of prompts whose last chunk is being computed leave while it is: one group of layers after the other.
#
# So what is still to be sent when the first token is there is about one group's share of the last chunk. All
# earlier chunks leave whole, while the next is computed.

MAX_GROUPS: Final = 4
MIN_RUN_BYTES: Final = 256 << 10  # of a page's share of one group: shorter runs cost more than they hide


def num_layer_groups(layout: PageLayout) -> int:
    """In how many groups pages of this layout should leave."""
    return max(1, min(MAX_GROUPS, layout.num_layers, layout.page_bytes // MIN_RUN_BYTES))


class LayerwiseSend:
    """A LayerWatch of the engine's steps."""

    def __init__(
        self, endpoint: PageEndpoint, num_groups: int, departure_of: Callable[[str], PrefillJob | None]
    ) -> None:
        """departure_of: by its name in the engine; None for what is none."""
        self._endpoint = endpoint
        self._num_groups = num_groups
        self._departure_of = departure_of
        self._offers: list[tuple[PrefillJob, Offer]] = []
        self._group = 0  # the next to be told of

    def begin(self, chunks: Sequence[ScheduledChunk]) -> int:
        self._offers.clear()
        self._group = 0
        for chunk in chunks:
            prefill_job = self._departure_of(chunk.sequence.request_id) if chunk.samples else None
            offer = prefill_job.take_offer(is_last=True) if prefill_job is not None else None
            if prefill_job is not None and offer is not None:
                self._offers.append((prefill_job, offer))
        return self._num_groups if self._offers else 0

    def layers_written(self, first: int, stop: int) -> None:
        for prefill_job, offer in self._offers:
            pages = () if self._group else offer.pages
            self._endpoint.offer(prefill_job.transfer, pages, offer.num_units, group=self._group)
        self._group += 1
