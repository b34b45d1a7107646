"""Computes prompts for decode workers: admit -> step -> hand off.

The life of a prompt is in prefill_worker/prefill_job.py. What comes in between:

- Its pages leave while the rest is computed; whoever waits for them has made room before.
- The first token goes to the gateway at once, and to the decode worker, which goes on from there.
- A decode worker or a gateway that is gone, or a transfer that failed, ends it. The engine keeps what it has
  computed as a known prefix, so that a second try is cheap.

All calls come from one thread, and nothing here waits. `step` is the loop's body.
"""

from typing import Final

import msgspec

from baton.clock import Clock
from baton.engine.replica import Replica, SoughtPrefix
from baton.errors import InvalidRequest, ProtocolError
from baton.kvtransfer.links import KvLinks
from baton.kvtransfer.page_endpoint import PageEndpoint
from baton.kvtransfer.prefixes import PulledPrefixes
from baton.kvtransfer.protocol.handoff import TransferEnded
from baton.messages.bounds import Kind
from baton.messages.codec import TOO_LARGE, AnyMessage, fits
from baton.messages.control import Cancel, Failure, Prefill, Prefilled, with_arrival
from baton.messages.status import OverloadLevel
from baton.messages.workers import Load
from baton.prefill_worker.prefill_job import LayerwiseSend, PrefillJob, PrefillStage, refusal
from baton.prefill_worker.reports import PrefillReports
from baton.request import FilledPages, FinishReason, StepOutput, TokenEvent
from baton.rpc.peers import Peer, PeerRegistry
from baton.rpc.reports import load_of
from baton.rpc.worker_node import WorkerNode

TRANSFER_TIMEOUT_S: Final = 600.0  # from the reservation on, time in the queue included


class PrefillWorker(WorkerNode):
    def __init__(
        self,
        engine: Replica,
        endpoint: PageEndpoint,
        peer_registry: PeerRegistry,
        clock: Clock,
        links: KvLinks,
        *,
        num_layer_groups: int = 1,
    ) -> None:
        """num_layer_groups: in how many groups of layers the last pages of a prompt leave."""
        self._clock = clock
        self._reports = PrefillReports(peer_registry, clock)
        super().__init__(peer_registry, links, self._reports)
        self._engine = engine
        self._endpoint = endpoint
        self._links = links
        self._prefixes = PulledPrefixes[PrefillJob](engine, endpoint, links, clock)
        self._prefill_jobs: dict[bytes, PrefillJob] = {}  # by transfer, until that has ended
        self._by_engine_id: dict[str, PrefillJob] = {}  # those that are COMPUTING
        self._num_layer_groups = num_layer_groups
        self._last_chunks: LayerwiseSend | None = None
        if num_layer_groups > 1:
            self._last_chunks = LayerwiseSend(endpoint, num_layer_groups, self._by_engine_id.get)
        self._num_tokens = self._kv_bytes = 0

    @property
    def is_idle(self) -> bool:  # no page waits here to be fetched, either
        return not self._prefill_jobs and not self._endpoint.num_open

    @property
    def attempts(self) -> tuple[tuple[str, int], ...]:
        return tuple(prefill_job.key for prefill_job in self._prefill_jobs.values())

    def load(self) -> Load:
        return msgspec.structs.replace(
            load_of(self._engine.stats()),
            num_outgoing=self._endpoint.num_open,
            num_tokens=self._num_tokens,
            kv_bytes=self._kv_bytes,
            counters={**self._endpoint.counts(), **self._prefixes.counters},
        )

    # The loop.

    def step(self) -> None:
        """Do what can be done now."""
        all_ended = self._endpoint.poll()
        for transfer in self._endpoint.take_granted():
            self._granted(transfer)
        for ended in all_ended:
            self._pulled(ended)
            self._transfer_ended(ended)
        if self._engine.has_work():
            self._reports.step_begins()
            for output in self._engine.step(self._last_chunks):
                self._hand_off(output)
            self._offer_what_is_computed()
            self._reports.step_ended(self._engine)
        self._peer_registry.flush()
        self._reports.tell(self._engine)

    # Colleagues.

    def _pressed(self, level: OverloadLevel) -> None:
        self._engine.set_pressure(small_chunks=level.small_chunks, makes_room=level.makes_room)

    def _reachable(self) -> list[str]:
        return self._links.reachable()

    def _lost(self, peer: Peer) -> None:
        self._lost_workers([peer.hello.id])

    def _heard(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Prefill() if peer.hello.process is Kind.WORKER:
                self._begin(peer, message)
            case Cancel():
                self._cancel(peer, message)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is nothing for a prefill worker")

    def _lost_workers(self, ids: list[str]) -> None:
        for prefill_job in list(self._prefill_jobs.values()):
            if prefill_job.decode in ids:  # it may hear us yet: gone is what the router says it is
                self._give_up(prefill_job, "its decode worker is gone")
                self._refuse(prefill_job.decode, prefill_job.prefill, Failure.BUSY, "you were taken for dead")

    def _cancel(self, peer: Peer, cancel: Cancel) -> None:
        for prefill_job in list(self._prefill_jobs.values()):
            is_it = prefill_job.key == (cancel.request_id, cancel.attempt)
            if is_it and prefill_job.decode == peer.hello.id:
                self._give_up(prefill_job, "not wanted any more")

    # A prompt comes.

    def _begin(self, peer: Peer, prefill: Prefill) -> None:
        link = self._links.to(peer.hello.id)
        page_size = self._engine.pages.page_size
        if link is None or prefill.transfer in self._prefill_jobs:
            self._refuse(peer.hello.id, prefill, Failure.BUSY, "no pages can be sent to that worker now")
            return
        if self.is_draining:
            self._refuse(peer.hello.id, prefill, Failure.BUSY, "the worker is about to end")
            return
        unit_tokens = min(page_size, link.hello.layout.page_size)
        prefill = with_arrival(prefill, self._clock.now_s())
        prefill_job = PrefillJob(prefill, peer.hello.id, page_size, unit_tokens)
        try:
            self._engine.check(prefill_job.request)
            self._endpoint.start(
                link,
                prefill_job.num_units,
                deadline_s=TRANSFER_TIMEOUT_S,
                transfer=prefill.transfer,
                num_layer_groups=self._num_layer_groups,
            )
        except InvalidRequest as error:
            self._refuse(peer.hello.id, prefill, Failure.INVALID, str(error))
        except ValueError as error:  # no transfer can be like that: it has too many units
            self._refuse(peer.hello.id, prefill, Failure.BUSY, str(error))
        else:
            self._prefill_jobs[prefill.transfer] = prefill_job
            self._reports.arrived(prefill_job)
            self._compute(prefill_job)

    def _granted(self, transfer: bytes) -> None:
        prefill_job = self._prefill_jobs.get(transfer)
        if prefill_job is not None:
            prefill_job.is_granted = True

    def _compute(self, prefill_job: PrefillJob) -> None:
        """At once: the decode worker has kept the room that it is being asked for."""
        prefix = SoughtPrefix(self._engine, prefill_job.request, prefill_job.engine_id)
        if self._prefixes.begin(prefill_job, prefill_job.prefill.source, prefix):
            prefill_job.stage = PrefillStage.PULLING
        else:
            self._start(prefill_job, None)

    def _pulled(self, ended: TransferEnded) -> None:
        """Go on with the prefix that has come, or without."""
        pulled = self._prefixes.take(ended)
        if pulled is not None:
            self._reports.pulled(pulled.waiter, pulled.pull)
            self._start(pulled.waiter, pulled.filled)

    def _start(self, prefill_job: PrefillJob, filled: FilledPages | None) -> None:
        try:
            (prefill_job.progress,) = self._engine.add(prefill_job.engine_request, filled, keeps_pages=True)
        except InvalidRequest as error:  # it may well fit the decode worker
            if filled is not None:
                self._engine.release(filled)
            self._fail(prefill_job, Failure.BUSY, str(error))
            return
        prefill_job.stage = PrefillStage.COMPUTING
        self._by_engine_id[prefill_job.engine_id] = prefill_job

    # It leaves.

    def _offer_what_is_computed(self) -> None:
        for prefill_job in self._by_engine_id.values():
            self._offer(prefill_job)
            self._reports.computing(prefill_job)

    def _offer(self, prefill_job: PrefillJob) -> None:
        offer = prefill_job.take_offer()
        if offer is not None:
            self._endpoint.offer(prefill_job.transfer, offer.pages, offer.num_units)

    def _hand_off(self, output: StepOutput) -> None:
        """The first token, and with it all that is left of the pages."""
        prefill_job = self._by_engine_id[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            self._fail(prefill_job, Failure.ERROR, "the model's output for it could not be sampled")
            return
        reason = prefill_job.finish_reason(output.finish_reason, self._engine.max_model_len)
        event = TokenEvent.of(prefill_job.request, output, reason)
        if not fits(event):
            self._fail(prefill_job, Failure.INVALID, TOO_LARGE)
            return
        self._reports.computed(prefill_job, output)
        self._num_tokens += output.token_id is not None
        self._peer_registry.emit(prefill_job.prefill.gateway, event)
        self._peer_registry.tell(prefill_job.decode, Prefilled(event=event))
        if reason is None:
            self._offer(prefill_job)
        self._leave(prefill_job)

    def _leave(self, prefill_job: PrefillJob) -> None:
        """The rest is the decode worker's: it ends a transfer that it wants no more.

        If that end came from here it might be heard before what was said, over another connection, and the
        prompt would be computed once more.
        """
        self._let_engine_go(prefill_job)
        prefill_job.stage = PrefillStage.LEAVING

    def _transfer_ended(self, ended: TransferEnded) -> None:
        if ended.times is not None:
            self._kv_bytes += ended.times.num_bytes
        prefill_job = self._prefill_jobs.pop(ended.transfer, None)
        if prefill_job is None:
            return
        self._reports.ended(prefill_job, ended)
        if prefill_job.stage is not PrefillStage.LEAVING or not prefill_job.is_granted:
            self._let_engine_go(prefill_job)
            self._refuse(prefill_job.decode, prefill_job.prefill, Failure.BUSY, ended.reason)

    # It ends otherwise.

    def _fail(self, prefill_job: PrefillJob, failure: Failure, reason: str) -> None:
        self._leave(prefill_job)
        self._refuse(prefill_job.decode, prefill_job.prefill, failure, reason)

    def _refuse(self, decode: str, prefill: Prefill, failure: Failure, reason: str) -> None:
        self._peer_registry.tell(decode, refusal(prefill.request, failure, reason))

    def _give_up(self, prefill_job: PrefillJob, reason: str) -> None:
        """Let go of everything that it holds here."""
        self._endpoint.abort(prefill_job.transfer, reason)
        self._let_engine_go(prefill_job)
        self._prefill_jobs.pop(prefill_job.transfer, None)
        self._reports.forget(prefill_job)

    def _let_engine_go(self, prefill_job: PrefillJob) -> None:
        self._prefixes.drop(prefill_job)
        if self._by_engine_id.pop(prefill_job.engine_id, None) is None:
            return
        if not self._engine.abort(prefill_job.engine_id):  # it has ended already, and its pages are kept
            self._engine.release_kept(prefill_job.engine_id, prefill_job.request.choice)
