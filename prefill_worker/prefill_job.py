"""One prompt that this worker computes for a decode worker.

1. The router's Prefill starts the job. The prompt is computed at once; no page leaves before the decode
   worker has granted pages, which it may do before the Prefill arrives or at any time after.
2. PULLING: a prefix comes from another worker that holds it. Most prompts skip this stage.
3. COMPUTING: the engine has the sequence. After each step, full pages leave if pages are granted.
4. COMPUTED: the first token is sent; the pages wait for the grant.
5. TRANSFERRING: all pages are offered to the transfer, which lasts until the decode worker ends it.

A sequence computes [0, num_tokens) and samples one token. The decode worker holds [0, position) of the grant;
the transfer counts units of `unit_tokens` from there on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import msgspec

from baton.engine.scheduler.sequence import ScheduledChunk, SequenceProgress
from baton.kvtransfer.endpoint import PageEndpoint
from baton.kvtransfer.protocol.handoff import GrantedTransfer, HandoffOutcome, TransferEnded
from baton.messages.control import Prefill
from baton.messages.workers import PrefillTimes
from baton.request import AttemptKey, FinishReason, Request
from baton.rpc.worker_node import PromptTimer


class PrefillStage(Enum):
    """The stages of a job; see the top of this module."""

    PULLING = "pulling"
    COMPUTING = "computing"
    COMPUTED = "computed"
    TRANSFERRING = "transferring"


class Offer(NamedTuple):
    """The next pages of a transfer, and how many of its units are computed with them."""

    pages: tuple[int, ...]
    num_units: int


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A prompt to compute, and the state of its pages."""

    prefill: Prefill
    page_size: int  # of the pages here
    timer: PromptTimer
    stage: PrefillStage = PrefillStage.COMPUTING
    granted: GrantedTransfer | None = None
    progress: SequenceProgress | None = None  # once the engine has the sequence
    _num_taken_pages: int = 0

    @property
    def request(self) -> Request:
        return self.prefill.request

    @property
    def key(self) -> AttemptKey:
        return self.request.key

    @property
    def transfer(self) -> bytes:
        return self.prefill.transfer

    @property
    def engine_id(self) -> str:
        """The job's name in the engine: an attempt that two routers dispatched has two jobs."""
        return f"{self.request.request_id}.{self.request.attempt}.{self.transfer.hex()}"

    def accepts(self, granted: GrantedTransfer) -> bool:
        """Return whether the grant is for the rest of this prompt, from a page border on."""
        num_missing = self.request.num_tokens - granted.position
        is_rest = num_missing > 0 and granted.num_units == -(-num_missing // granted.unit_tokens)
        return is_rest and not granted.position % self.page_size

    @property
    def engine_request(self) -> Request:
        """The request for one token only: the engine ends there."""
        sampling, num_generated = self.request.sampling, len(self.request.generated_token_ids)
        one_more = num_generated + 1
        # Stop ids are not sampled before `min_tokens`: for the one token, the lesser bound says the same.
        sampling = msgspec.structs.replace(
            sampling, max_tokens=one_more, min_tokens=min(sampling.min_tokens, one_more)
        )
        return msgspec.structs.replace(self.request, request_id=self.engine_id, sampling=sampling)

    def finish_reason(self, reason: FinishReason | None, max_model_len: int) -> FinishReason | None:
        """Return the finish reason of the whole answer, when the first token ended the sequence here."""
        if reason is not FinishReason.LENGTH:
            return reason
        num_answered = len(self.request.generated_token_ids) + 1
        most = self.request.sampling.max_tokens
        is_last = most == num_answered or len(self.request.token_ids) + num_answered >= max_model_len
        return FinishReason.LENGTH if is_last else None

    def times(self, ended: TransferEnded) -> PrefillTimes | None:
        """Return the prompt's times when the decode worker has verified the pages; None otherwise."""
        if self.timer.times is None or ended.outcome is not HandoffOutcome.HANDED_OVER:
            return None
        moved = ended.times
        return msgspec.structs.replace(
            self.timer.times,
            moved_bytes=moved.num_bytes if moved is not None else 0,
            exposed_s=moved.exposed_s if moved is not None else 0.0,
        )

    def take_offer(self, *, is_last: bool = False) -> Offer | None:
        """Return the pages that can leave now and were not taken before; None: there are none, or no grant.

        is_last: take all pages, as the running step computes the rest. Otherwise only whole pages leave
        before the prompt is computed: a preempted sequence is computed again into other pages, so a page that
        left in part would never get its rest.
        """
        granted = self.granted
        if granted is None or self.progress is None:
            return None
        num_held, num_computed = granted.position, self.progress.num_computed_tokens
        num_tokens = self.request.num_tokens
        if num_computed < num_tokens and not is_last:
            num_pages = (num_computed - num_held) // self.page_size
            num_units = num_pages * (self.page_size // granted.unit_tokens)
        else:
            num_pages, num_units = -(-(num_tokens - num_held) // self.page_size), granted.num_units
        if num_pages <= self._num_taken_pages:
            return None
        first = num_held // self.page_size
        pages = self.progress.page_table[first + self._num_taken_pages : first + num_pages]
        self._num_taken_pages = num_pages
        return Offer(tuple(pages), num_units)


class LayerwiseSend:
    """A LayerWatch that sends the pages of a prompt's last chunk by groups of layers, while it is computed.

    When the first token is there, about one group's share of the last chunk is still to be sent. Earlier
    chunks leave whole, while the next chunk is computed.
    """

    def __init__(self, endpoint: PageEndpoint, job_of: Callable[[str], PrefillJob | None]) -> None:
        """job_of: a job by its engine id; None for other sequences."""
        self._endpoint = endpoint
        self._job_of = job_of
        self._offers: list[tuple[PrefillJob, Offer]] = []
        self._group = 0  # the next to send

    def begin(self, chunks: Sequence[ScheduledChunk]) -> int:
        """Take the offers of prompts that this step completes; return the number of groups, 0 for none."""
        self._offers.clear()
        self._group = num_groups = 0
        for chunk in chunks:
            job = self._job_of(chunk.sequence.request_id) if chunk.samples else None
            granted = job.granted if job is not None else None
            if job is None or granted is None or granted.num_layer_groups == 1:
                continue
            if num_groups not in (0, granted.num_layer_groups):
                continue  # sent whole after the step
            offer = job.take_offer(is_last=True)
            if offer is not None:
                num_groups = granted.num_layer_groups
                self._offers.append((job, offer))
        return num_groups

    def layers_written(self, first: int, stop: int) -> None:
        for job, offer in self._offers:
            pages = () if self._group else offer.pages
            self._endpoint.offer(job.transfer, pages, offer.num_units, group=self._group)
        self._group += 1
