"""Computes prompts for decode workers: admit -> step -> hand off.

`prefill_worker/prefill_job.py` has the life of a prompt. The rules between its stages:

- The router orders a prompt, and the decode worker grants pages for it, in either order.
- Full pages leave while the rest of the prompt is computed.
- The first token goes to the gateway and to the decode worker at once.
- A computed prompt without a grant is given up after a time, or at once when other prompts cannot run without
  its pages. The decode worker then computes the prompt itself.
- The loss of the decode worker, or a failed transfer, ends the job. The engine keeps the KV as a cached
  prefix, so that a second attempt is cheap.

All calls come from one thread, and none of them waits. `step` is the body of the loop.
"""

from collections import Counter
from typing import Final

import msgspec

from baton.clock import Clock
from baton.engine.replica import Replica, SoughtPrefix
from baton.errors import InvalidRequest, ProtocolError
from baton.kvtransfer.endpoint import PageEndpoint
from baton.kvtransfer.links import KvLinks
from baton.kvtransfer.prefixes import PulledPrefixes
from baton.kvtransfer.protocol.handoff import GrantedTransfer, HandoffOutcome, TransferEnded
from baton.messages.bounds import MAX_REASON_CHARS
from baton.messages.codec import TOO_LARGE, AnyMessage, fits
from baton.messages.control import Cancel, Failure, Prefill, Prefilled, PrefillFailed, with_arrival
from baton.messages.workers import MAX_DESTINATIONS, Load
from baton.prefill_worker.prefill_job import LayerwiseSend, PrefillJob, PrefillStage
from baton.request import AttemptKey, FilledPages, FinishReason, StepOutput, TokenEvent
from baton.rpc.peers import Peer, PeerRegistry
from baton.rpc.worker_node import (
    EndedAttempts,
    PromptTimer,
    WorkerNode,
    WorkerReports,
    check_one_choice,
    failure_of,
)

MAX_GRANT_WAIT_S: Final = 30.0  # of a computed prompt, for its decode worker to have free pages
# Of a grant, for the router's order: the router may have died before sending it.
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
        if self._engine.has_work():
            self._reports.step_begins()
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
            (job.progress,) = self._engine.add(job.engine_request, filled, keeps_pages=True)
        except InvalidRequest as error:  # the decode worker may have more room
            if filled is not None:
                self._engine.release(filled)
            self._fail(job, Failure.BUSY, str(error))
            return
        job.timer.run(job.progress)
        job.stage = PrefillStage.COMPUTING
        self._by_engine_id[job.engine_id] = job

    # It leaves.

    def _offer_what_is_computed(self) -> None:
        for job in self._by_engine_id.values():
            if job.stage is PrefillStage.COMPUTING:
                self._offer(job)
                job.timer.step_ended(self._reports.step_began_s)

    def _offer(self, job: PrefillJob) -> None:
        offer = job.take_offer()
        if offer is not None:
            self._endpoint.offer(job.transfer, offer.pages, offer.num_units)

    def _send_first_token(self, output: StepOutput) -> PrefillJob | None:
        """Send the first token of a job to the gateway and to the decode worker.

        Returns the job if the answer goes on after this token.
        """
        job = self._by_engine_id[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            self._fail(job, *failure_of(output))
            return None
        reason = job.finish_reason(output.finish_reason, self._engine.max_model_len)
        computed = job.timer.computed(output, self._clock.now_s(), self._reports.step_began_s)
        self._reports.computed(computed)
        times = job.timer.phases(hidden_s=self._endpoint.active_s(job.transfer))
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
        if waiting:
            load = self._engine.load()
            if load.num_waiting and not load.num_running:
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
