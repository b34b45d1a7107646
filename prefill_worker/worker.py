"""Computes prompts for decode workers: admit -> step -> hand off. The life of a prompt:

1. The router's Prefill starts a `PrefillJob`, and the prompt is computed at once. The decode worker grants
   pages for it before the Prefill arrives or at any time after; no page leaves earlier.
2. PULLING: a prefix comes from another worker that holds it. Most prompts skip this stage.
3. COMPUTING: the engine has the sequence. After each step, full pages leave if pages are granted, while the
   rest of the prompt is computed.
4. COMPUTED: the first token has gone to the gateway and to the decode worker at once; the pages wait for the
   grant. A prompt without a grant is given up after a time, or at once when other prompts cannot run without
   its pages. The decode worker then computes the prompt itself.
5. TRANSFERRING: all pages are offered to the transfer, which lasts until the decode worker ends it.

The loss of the decode worker, or a failed transfer, ends the job. The engine keeps the KV as a cached prefix,
so that a second attempt is cheap.

A sequence computes [0, num_tokens) and samples one token. The decode worker holds [0, position) of the grant;
the transfer counts units of `unit_tokens` from there on.

All calls come from one thread, and none of them waits. `step` is the body of the loop.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from baton.clock import Clock
from baton.engine.replica import Replica, SoughtPrefix
from baton.engine.scheduler.sequence import ScheduledChunk, Sequence
from baton.errors import InvalidRequest, ProtocolError
from baton.kvtransfer.endpoint import PageEndpoint
from baton.kvtransfer.links import KvLinks
from baton.kvtransfer.prefixes import PulledPrefixes
from baton.kvtransfer.protocol.handoff import GrantedTransfer, HandoffOutcome, TransferEnded
from baton.messages.bounds import MAX_REASON_CHARS
from baton.messages.codec import TOO_LARGE, AnyMessage, fits
from baton.messages.control import Cancel, Failure, Prefill, Prefilled, PrefillFailed, with_arrival
from baton.messages.workers import MAX_DESTINATIONS, Load, PrefillTimes
from baton.request import AttemptKey, FilledPages, FinishReason, Request, StepOutput, TokenEvent
from baton.rpc.peers import Peer, PeerRegistry
from baton.rpc.worker_node import (
    EndedAttempts,
    PromptTimer,
    WorkerNode,
    WorkerReports,
    check_one_choice,
    failure_of,
)


class PrefillStage(Enum):
    """The stages of a job; see the top of this module."""

    PULLING = "pulling"
    COMPUTING = "computing"
    COMPUTED = "computed"
    TRANSFERRING = "transferring"


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A prompt to compute, and the state of its pages."""

    prefill: Prefill
    page_size: int  # of the pages here
    timer: PromptTimer
    stage: PrefillStage = PrefillStage.COMPUTING
    granted: GrantedTransfer | None = None
    sequence: Sequence | None = None  # once the engine has the sequence
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

    def take_offer(self, *, is_last: bool = False) -> tuple[tuple[int, ...], int] | None:
        """Return the pages that can leave now and were not taken before, and the units computed with them.

        None: there are no such pages, or no grant. is_last: take all pages, as the running step computes the
        rest. Otherwise only whole pages leave before the prompt is computed: a preempted sequence is computed
        again into other pages, so a page that left in part would never get its rest.
        """
        granted = self.granted
        if granted is None or self.sequence is None:
            return None
        num_held, num_computed = granted.position, self.sequence.num_computed_tokens
        num_tokens = self.request.num_tokens
        if num_computed < num_tokens and not is_last:
            num_pages = (num_computed - num_held) // self.page_size
            num_units = num_pages * (self.page_size // granted.unit_tokens)
        else:
            num_pages, num_units = -(-(num_tokens - num_held) // self.page_size), granted.num_units
        if num_pages <= self._num_taken_pages:
            return None
        first = num_held // self.page_size
        pages = self.sequence.page_table[first + self._num_taken_pages : first + num_pages]
        self._num_taken_pages = num_pages
        return tuple(pages), num_units


class LayerwiseSend:
    """A LayerWatch that sends the pages of a prompt's last chunk by groups of layers, while it is computed.

    When the first token is there, about one group's share of the last chunk is still to be sent. Earlier
    chunks leave whole, while the next chunk is computed.
    """

    def __init__(self, endpoint: PageEndpoint, job_of: Callable[[str], PrefillJob | None]) -> None:
        """job_of: a job by its engine id; None for other sequences."""
        self._endpoint = endpoint
        self._job_of = job_of
        self._offers: list[tuple[bytes, tuple[int, ...], int]] = []  # transfer, pages, units
        self._group = 0  # the next to send

    def begin(self, chunks: Ordered[ScheduledChunk]) -> int:
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
                self._offers.append((job.transfer, *offer))
        return num_groups

    def layers_written(self, first: int, stop: int) -> None:
        for transfer, pages, num_units in self._offers:
            self._endpoint.offer(transfer, () if self._group else pages, num_units, group=self._group)
        self._group += 1


MAX_GRANT_WAIT_S: Final = 30.0  # longest wait of a computed prompt for the grant of its decode worker
# Longest wait of a grant for the router's order, which never comes when the router has died.
MAX_ORDER_WAIT_S: Final = 5.0


class PrefillWorker(WorkerNode):
    """A worker that computes prompts; a decode worker answers the rest."""

    _engine: Replica
    _links: KvLinks

    def __init__(
        self,
        engine: Replica,
        endpoint: PageEndpoint,
        peer_registry: PeerRegistry,
        clock: Clock,
        links: KvLinks,
    ) -> None:
        self._clock = clock
        super().__init__(engine, peer_registry, links, WorkerReports(peer_registry, clock))
        self._endpoint = endpoint
        self._prefixes = PulledPrefixes[PrefillJob](engine, endpoint, links, clock)
        self._jobs: dict[bytes, PrefillJob] = {}  # by transfer, until that has ended
        self._by_engine_id: dict[str, PrefillJob] = {}  # jobs with pages in the engine
        # transfer -> (grant, arrival) before the router's order
        self._early_grants: dict[bytes, tuple[GrantedTransfer, float]] = {}
        self._over = EndedAttempts()
        self._layerwise_send = LayerwiseSend(endpoint, self._by_engine_id.get)
        self._num_tokens = self._kv_bytes = 0
        self._kv_bytes_to: Counter[str] = Counter()  # by decode worker, the latest last

    @property
    def is_idle(self) -> bool:
        return not self._jobs and not self._endpoint.num_open  # no peer pulls pages, either

    @property
    def attempts(self) -> tuple[AttemptKey, ...]:
        return tuple(job.key for job in self._jobs.values())

    def load(self) -> Load:
        load = self._reports.with_times(self._engine.load())
        return msgspec.structs.replace(
            load,
            pairs=self._endpoint.pairs(self._links, self._peer_registry.members),
            num_outgoing=self._endpoint.num_open,
            num_tokens=self._num_tokens,
            kv_bytes=self._kv_bytes,
            kv_bytes_to=dict(self._kv_bytes_to),
            counters={**load.counters, **self._endpoint.counts(), **self._prefixes.counters},
        )

    # The loop.

    def step(self) -> None:
        """Take grants and ended transfers, run one step of the engine, and send what it has computed."""
        all_ended = self._endpoint.poll()
        for granted in self._endpoint.take_granted():
            self._granted(granted)
        for ended in all_ended:
            self._pulled(ended)
            self._transfer_ended(ended)
        self._reports.heartbeat(self)
        if self._engine.has_work():
            outputs = self._engine.step(self._layerwise_send)
            continuing = [job for output in outputs if (job := self._send_first_token(output)) is not None]
            self._peer_registry.flush()  # at once: clients wait, and sending pages takes the processor
            for job in continuing:
                self._hand_off(job)
            self._offer_what_is_computed()
            self._reports.step_ended(self._engine)
            self._unblock()
        self._peer_registry.flush()
        self._reports.tell(self._engine)

    def tick(self) -> None:
        self._give_up_overdue()
        super().tick()

    # Peers.

    def _reachable(self) -> list[str]:
        return self._links.reachable()

    def _lost(self, peer: Peer) -> None:
        self._lost_workers([peer.hello.id])

    def _heard(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Prefill() if self._peer_registry.is_router(peer):
                self._begin(message)
            case Cancel():
                self._cancel(peer, message)
            case _:
                raise ProtocolError(f"a prefill worker takes no {type(message).__name__}")

    def _lost_workers(self, ids: list[str]) -> None:
        for job in list(self._jobs.values()):
            if job.prefill.decode in ids:  # the router removed it, but its connection may be up
                self._give_up(job, "its decode worker is gone")
                self._refuse(job.prefill, Failure.BUSY, "the router removed this worker")

    def _cancel(self, peer: Peer, cancel: Cancel) -> None:
        if peer.hello.worker is None:
            return  # a gateway cancels at the decode worker
        self._over.add(cancel.request_id, cancel.attempt)
        for job in list(self._jobs.values()):
            if job.key == cancel.key and job.prefill.decode == peer.hello.id:
                self._give_up(job, "the attempt is cancelled")

    # A prompt arrives.

    def _begin(self, prefill: Prefill) -> None:
        now_s = self._clock.now_s()
        prefill = with_arrival(prefill, now_s)
        job = PrefillJob(prefill, self._engine.pages.page_size, PromptTimer(prefill.request, now_s))
        if job.key in self._over or job.transfer in self._jobs:
            return
        if self.is_draining:
            self._refuse(prefill, Failure.BUSY, "the worker is about to end")
            return
        try:
            check_one_choice(job.request)
            self._engine.check(job.request)
        except InvalidRequest as error:
            self._refuse(prefill, Failure.INVALID, str(error))
            return
        self._jobs[job.transfer] = job
        granted, _ = self._early_grants.pop(job.transfer, (None, 0.0))
        if granted is not None:
            self._granted(granted)
        self._compute(job)

    def _granted(self, granted: GrantedTransfer) -> None:
        job = self._jobs.get(granted.transfer)
        if job is None:
            self._early_grants[granted.transfer] = granted, self._clock.now_s()
        elif not job.accepts(granted):
            self._endpoint.abort(granted.transfer, "the grant is not for this prompt")
        else:
            job.granted = granted
            if job.stage is PrefillStage.COMPUTED:
                self._hand_off(job)
            elif job.stage is PrefillStage.COMPUTING:
                self._offer(job)

    def _compute(self, job: PrefillJob) -> None:
        """Pull a prefix first, if the router named a peer that holds one."""
        prefix = SoughtPrefix(self._engine, job.request, job.engine_id)
        if self._prefixes.begin(job, job.prefill.source, prefix):
            job.stage = PrefillStage.PULLING
        else:
            self._start(job, None)

    def _pulled(self, ended: TransferEnded) -> None:
        """Continue with the prefix that has come, or without."""
        pulled = self._prefixes.take(ended)
        if pulled is not None:
            job = pulled.waiter
            job.timer.pulled(pulled.num_bytes, pulled.seconds)
            self._start(job, pulled.filled)

    def _start(self, job: PrefillJob, filled: FilledPages | None) -> None:
        try:
            (job.sequence,) = self._engine.add(job.engine_request, filled, keeps_pages=True)
        except InvalidRequest as error:  # the decode worker may have more room
            if filled is not None:
                self._engine.release(filled)
            self._fail(job, Failure.BUSY, str(error))
            return
        job.timer.run(job.sequence)
        job.stage = PrefillStage.COMPUTING
        self._by_engine_id[job.engine_id] = job

    # It leaves.

    def _offer_what_is_computed(self) -> None:
        for job in self._by_engine_id.values():
            if job.stage is PrefillStage.COMPUTING:
                self._offer(job)

    def _offer(self, job: PrefillJob) -> None:
        offer = job.take_offer()
        if offer is not None:
            self._endpoint.offer(job.transfer, *offer)

    def _send_first_token(self, output: StepOutput) -> PrefillJob | None:
        """Send the first token of a job to the gateway and to the decode worker.

        Returns the job if the answer goes on after this token.
        """
        job = self._by_engine_id[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            self._fail(job, *failure_of(output))
            return None
        reason = job.finish_reason(output.finish_reason, self._engine.max_model_len)
        self._reports.computed(job.timer.computed(output, self._clock.now_s()))
        times = job.timer.phases(hidden_s=self._endpoint.moving_s(job.transfer))
        event = TokenEvent.of(job.request, output, reason, times)
        if not fits(event):
            self._fail(job, Failure.INVALID, TOO_LARGE)
            return None
        self._num_tokens += output.token_id is not None
        self._peer_registry.emit(job.prefill.gateway, event)
        self._peer_registry.tell(job.prefill.decode, Prefilled(event=event))
        if job.granted is None and self._peer_registry.peer(job.prefill.decode) is None:
            self._give_up(job, "its decode worker is not connected")  # and has not got the first token
            return None
        if reason is not None:
            self._finish_compute(job)
            return None
        return job

    def _hand_off(self, job: PrefillJob) -> None:
        """Offer the rest of the pages if the decode worker has granted them."""
        if job.granted is None:
            job.stage = PrefillStage.COMPUTED
        else:
            self._offer(job)
            self._finish_compute(job)

    def _finish_compute(self, job: PrefillJob) -> None:
        """The transfer has all pages, or needs none: the decode worker ends it.

        An end from here could arrive before the first token, over another connection, and the decode worker
        would compute the prompt once more.
        """
        self._release_engine(job)
        if job.granted is None:
            self._jobs.pop(job.transfer, None)
        else:
            job.stage = PrefillStage.TRANSFERRING

    def _transfer_ended(self, ended: TransferEnded) -> None:
        if ended.times is not None:
            self._kv_bytes += ended.times.num_bytes
            if ended.outcome is HandoffOutcome.HANDED_OVER:
                self._reports.times["transfer"].observe(ended.times.total_s)
                self._reports.times["exposed_transfer"].observe(ended.times.exposed_s)
        self._early_grants.pop(ended.transfer, None)
        job = self._jobs.pop(ended.transfer, None)
        if job is None:
            return
        if ended.times is not None:
            add_sent(self._kv_bytes_to, job.prefill.decode, ended.times.num_bytes)
        if (times := job.times(ended)) is not None:
            self._reports.prefilled(times)
        if job.stage is not PrefillStage.TRANSFERRING:
            self._release_engine(job)
            self._refuse(job.prefill, Failure.BUSY, ended.reason)

    # It ends otherwise.

    def _give_up_overdue(self) -> None:
        """End computed prompts without a grant, and grants without a prompt."""
        now_s = self._clock.now_s()
        for job in list(self._jobs.values()):
            if job.stage is PrefillStage.COMPUTED and now_s - job.timer.first_token_s > MAX_GRANT_WAIT_S:
                self._fail(job, Failure.BUSY, f"no pages were granted for {MAX_GRANT_WAIT_S:.0f} s")
        for transfer, (_, since_s) in list(self._early_grants.items()):
            if now_s - since_s > MAX_ORDER_WAIT_S:
                del self._early_grants[transfer]
                self._endpoint.abort(transfer, "the router's order has not come")

    def _unblock(self) -> None:
        """Give up the latest computed prompt without a grant when nothing else can run for want of pages.

        The decode worker may wait for a prompt that this engine has no pages to compute.
        """
        waiting = [each for each in self._by_engine_id.values() if each.stage is PrefillStage.COMPUTED]
        if waiting and self._engine.is_blocked:
            self._fail(waiting[-1], Failure.BUSY, "other prompts needed its pages")

    def _fail(self, job: PrefillJob, failure: Failure, reason: str) -> None:
        self._finish_compute(job)
        self._refuse(job.prefill, failure, reason)

    def _refuse(self, prefill: Prefill, failure: Failure, reason: str) -> None:
        refused = PrefillFailed(
            request_id=prefill.request.request_id,
            attempt=prefill.request.attempt,
            failure=failure,
            reason=reason[:MAX_REASON_CHARS],
        )
        self._peer_registry.tell(prefill.decode, refused)

    def _give_up(self, job: PrefillJob, reason: str) -> None:
        """Release everything that the job holds here."""
        self._endpoint.abort(job.transfer, reason)
        self._release_engine(job)
        self._jobs.pop(job.transfer, None)

    def _release_engine(self, job: PrefillJob) -> None:
        self._prefixes.drop(job)
        if self._by_engine_id.pop(job.engine_id, None) is None:
            return
        if not self._engine.abort(job.engine_id):  # the sequence has ended, and its pages are kept
            self._engine.release_kept(job.engine_id, job.request.choice)


def add_sent(sent: Counter[str], decode: str, num_bytes: int) -> None:
    """Add bytes to a decode worker's count; the worker that got none for longest makes room."""
    sent[decode] = sent.pop(decode, 0) + num_bytes
    if len(sent) > MAX_DESTINATIONS:
        del sent[next(iter(sent))]
