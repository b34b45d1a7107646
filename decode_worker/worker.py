"""Receives the KV of prompts that prefill workers compute, and decodes: receive -> step -> emit.

`decode_worker/attempt.py` has the life of an attempt. The rules between its stages:

- Attempts get pages in their order: while one finds no free pages, later attempts wait.
- When the prefill worker lives but its pages do not come, this worker computes the prompt: the tokens are the
  same.
- When the prefill worker may have died, this worker does not compute the prompt: a prompt that kills its
  worker must not kill a second one.
- A transfer that ends before the first token may mean that the prefill worker died of this prompt: the
  attempt waits for that worker's message, or for the router to remove the worker. If the source itself
  refuses to send the pages, the prompt is computed here at once.
- A prefill worker that routers list, with a link that is silent for `prefill_patience_s`, is behind a broken
  link: its prompts are computed here.
- The loss of a prefill worker, or of the link to it, ends its attempts that are incomplete, as that worker
  drops them too; the gateway retries elsewhere.
- The loss of a gateway ends its attempts.
- An attempt that migrates here runs on at its former worker until the gateway has this one take over. It
  fails when its pages do not come, so that the former attempt just runs on.

All calls come from one thread, and none of them waits. `step` is the body of the loop.
"""

import logging
from collections import Counter
from collections.abc import Collection
from typing import Final, TypeAlias

import msgspec

from baton.clock import Clock
from baton.decode_worker.attempt import Attempt, AttemptStage, DecodeAdmission, IncomingPages
from baton.engine.replica import Replica
from baton.errors import InvalidRequest, ProtocolError
from baton.kvtransfer.endpoint import PageEndpoint
from baton.kvtransfer.links import KvLinks
from baton.kvtransfer.prefixes import PulledPrefixes
from baton.kvtransfer.protocol.handoff import HandoffOutcome, TransferEnded
from baton.messages.bounds import LINK_TIMEOUT_S, Kind
from baton.messages.codec import TOO_LARGE, AnyMessage, fits
from baton.messages.control import (
    AttemptFailed,
    Cancel,
    Dispatch,
    Failure,
    Prefilled,
    PrefillFailed,
    Prepared,
    PullSource,
    TakeOver,
    with_arrival,
)
from baton.messages.workers import REMOTE_PREFILLS, Load
from baton.request import AttemptKey, FinishReason, StepOutput, TokenEvent
from baton.rpc.peers import Peer, PeerRegistry
from baton.rpc.worker_node import EndedAttempts, WorkerNode, WorkerReports, failure_of

PrefillResult: TypeAlias = Prefilled | PrefillFailed
# Longest wait of a result for its Dispatch; by then routers have given up a silent link.
MAX_EARLY_S: Final = 10.0
MAX_PREPARED_S: Final = 10.0  # longest wait of a prepared attempt for its TakeOver
MIN_PREFILL_PATIENCE_S: Final = 4.0  # longer than routers wait for a worker's sign of life
logger = logging.getLogger(__name__)


class EarlyResults:
    """Results of prefill workers that arrived before the Dispatch of their attempt.

    A prompt without a Dispatch is cancelled at its prefill worker, where it holds pages.
    """

    def __init__(self, clock: Clock, peer_registry: PeerRegistry) -> None:
        self._clock = clock
        self._peer_registry = peer_registry
        self._results: dict[AttemptKey, tuple[float, Peer, PrefillResult]] = {}  # oldest first

    def keep(self, key: AttemptKey, peer: Peer, result: PrefillResult) -> None:
        self._results.setdefault(key, (self._clock.now_s(), peer, result))

    def take(self, key: AttemptKey) -> tuple[Peer, PrefillResult] | None:
        """Return the result of this attempt and the prefill worker that sent it."""
        kept = self._results.pop(key, None)
        return kept[1:] if kept is not None else None

    def tick(self) -> None:
        """Cancel prompts after MAX_EARLY_S without their Dispatch."""
        now_s = self._clock.now_s()
        while self._results and now_s - next(iter(self._results.values()))[0] > MAX_EARLY_S:
            self.cancel(next(iter(self._results)))

    def cancel(self, key: AttemptKey) -> None:
        """Forget the result of this attempt, if there is one, and cancel its prompt."""
        if (kept := self.take(key)) is not None:
            self._peer_registry.tell(kept[0].hello.id, Cancel(request_id=key[0], attempt=key[1]))


class RunningAttempts:
    """The attempts that the engine runs; their tokens go to their gateways.

    Reports the times of prompts that are computed here: the arrival, the first step, and the first token.
    """

    def __init__(self, engine: Replica, peer_registry: PeerRegistry, reports: WorkerReports) -> None:
        self.num_tokens = 0  # sent in all
        self._engine = engine
        self._peer_registry = peer_registry
        self._reports = reports
        self._attempts: dict[str, Attempt] = {}  # by engine id

    def begin(self, attempt: Attempt) -> None:
        """Continue with all the KV that the attempt has. On InvalidRequest the attempt keeps its pages."""
        (attempt.sequence,) = self._engine.add(attempt.engine_request, attempt.filled)
        if attempt.first is None:
            attempt.timer.run(attempt.sequence)
        attempt.stage, attempt.filled = AttemptStage.RUNNING, None
        self._attempts[attempt.engine_id] = attempt

    def abort(self, attempt: Attempt) -> None:
        self._engine.abort(attempt.engine_id)
        self._attempts.pop(attempt.engine_id, None)

    def step(self) -> list[tuple[Attempt, AttemptFailed | None]]:
        """Run one step of the engine, if there is work; return the attempts that it ends.

        AttemptFailed: not sent yet. None: the gateway has the last token.
        """
        if not self._engine.has_work():
            return []
        endings = [self._emit(output) for output in self._engine.step()]
        self._reports.step_ended(self._engine)
        return [ending for ending in endings if ending is not None]

    def _emit(self, output: StepOutput) -> tuple[Attempt, AttemptFailed | None] | None:
        attempt = self._attempts[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            return attempt, attempt.failed(*failure_of(output))
        times = None
        if attempt.timer.is_running:
            now_s = self._reports.clock.now_s()
            self._reports.prefilled(self._reports.computed(attempt.timer.computed(output, now_s)))
            times = attempt.timer.phases()
        if output.finish_reason is not None:
            times = attempt.times(self._reports.clock.now_s())
        event = TokenEvent.of(attempt.request, output, output.finish_reason, times)
        if not fits(event):
            return attempt, attempt.failed(Failure.INVALID, TOO_LARGE)
        self.num_tokens += output.token_id is not None
        self._peer_registry.emit(attempt.gateway, event)
        return None if output.finish_reason is None else (attempt, None)


class DecodeWorker(WorkerNode):
    """A worker that answers requests: it receives or computes their prompts, and decodes."""

    _engine: Replica
    _links: KvLinks

    def __init__(
        self,
        engine: Replica,
        endpoint: PageEndpoint,
        peer_registry: PeerRegistry,
        clock: Clock,
        links: KvLinks,
        *,
        prefill_patience_s: float = LINK_TIMEOUT_S / 2,
    ) -> None:
        """prefill_patience_s: silence of the link to a prefill worker after which its prompts are computed
        here; at least MIN_PREFILL_PATIENCE_S, so that routers have removed a dead worker before.
        """
        self.counters: Counter[str] = Counter()
        self._clock = clock
        super().__init__(engine, peer_registry, links, WorkerReports(peer_registry, clock))
        self._endpoint = endpoint
        self._prefill_patience_s = max(prefill_patience_s, MIN_PREFILL_PATIENCE_S)
        self._admission = DecodeAdmission(engine)
        self._prefixes = PulledPrefixes[Attempt](engine, endpoint, links, clock)
        self._incoming = IncomingPages(engine, endpoint, self._admission, self._prefixes)
        self._running = RunningAttempts(engine, peer_registry, self._reports)
        self._attempts: dict[str, Attempt] = {}  # request_id -> its latest attempt here
        self._early = EarlyResults(clock, peer_registry)
        self._over = EndedAttempts()
        self._missing_gateways: set[str] = set()  # at the last tick; a Dispatch may precede its gateway

    @property
    def is_idle(self) -> bool:
        return not self._attempts and not self._endpoint.num_open

    @property
    def attempts(self) -> tuple[AttemptKey, ...]:
        return tuple(attempt.key for attempt in self._attempts.values())

    def load(self) -> Load:
        load = self._reports.with_times(self._engine.load())
        return msgspec.structs.replace(
            load,
            pairs=self._endpoint.pairs(self._links, self._peer_registry.members),
            num_waiting=load.num_waiting + len(self._admission),
            num_incoming=self._endpoint.num_open,
            num_tokens=self._running.num_tokens,
            counters={
                **load.counters,
                **self._endpoint.counts(),
                **self._prefixes.counters,
                **self.counters,
            },
        )

    # The loop.

    def step(self) -> None:
        """Receive pages, start attempts, run one step of the engine, and emit its tokens."""
        for attempt, ended in self._incoming.poll():
            self._transfer_ended(attempt, ended)
        self._reports.heartbeat(self)
        self._admit()
        for attempt, failed in self._running.step():
            self._end(attempt, failed)
        self._peer_registry.flush()
        self._reports.tell(self._engine)

    # Peers.

    def tick(self) -> None:
        gateways = {each.gateway for each in self._attempts.values()}
        missing = {id_ for id_ in gateways if self._peer_registry.peer(id_) is None}
        self._lose_gateways(missing & self._missing_gateways)
        self._missing_gateways = missing
        self._give_up_silent_links()
        self._give_up_prepared()
        self._early.tick()
        super().tick()

    def _reachable(self) -> list[str]:
        return [id_ for id_ in self._peer_registry.connected() if self._links.to(id_) is not None]

    def _lost(self, peer: Peer) -> None:
        if peer.hello.process is Kind.GATEWAY:
            self._lose_gateways([peer.hello.id])
        self._lost_workers([peer.hello.id])

    def _heard(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Dispatch() if self._peer_registry.is_router(peer):
                self._dispatch(message)
            case Prefilled() | PrefillFailed():
                self._prefill_ended(peer, message)
            case Cancel():
                self._cancel(peer, message)
            case TakeOver():
                self._take_over(peer, message)
            case _:
                raise ProtocolError(f"a decode worker takes no {type(message).__name__}")

    def _lose_gateways(self, ids: Collection[str]) -> None:
        for attempt in [each for each in self._attempts.values() if each.gateway in ids]:
            self._drop(attempt)

    def _lost_workers(self, ids: list[str]) -> None:
        for attempt in list(self._attempts.values()):
            is_waiting = attempt.stage in (AttemptStage.WAITING, AttemptStage.PREFILLING)
            if is_waiting and attempt.prefill in ids and not attempt.is_complete:
                self._fail(attempt, Failure.LOST, "its prefill worker is gone", worker=attempt.prefill)

    def _give_up_silent_links(self) -> None:
        """Compute prompts here when routers list their prefill worker and the link to it is silent."""
        waiting = [each for each in self._attempts.values() if each.stage is AttemptStage.PREFILLING]
        for attempt in waiting:
            peer = self._peer_registry.peer(attempt.prefill)
            silence_s = peer.silence_s if peer is not None else 0.0
            is_listed = attempt.prefill in self._peer_registry.members
            if silence_s > self._prefill_patience_s and is_listed and not attempt.is_complete:
                self.counters["silent_prefill_links"] += 1
                self._recompute(attempt, f"the link to its prefill worker was silent for {silence_s:.1f} s")

    # An attempt starts.

    def _dispatch(self, dispatch: Dispatch) -> None:
        now_s = self._clock.now_s()
        attempt = Attempt.of(with_arrival(dispatch, now_s), now_s)
        current = self._attempts.get(attempt.request_id)
        if current is not None and current.number == attempt.number:
            return  # ordered twice
        is_late = current is not None and current.number > attempt.number
        if is_late or attempt.key in self._over:
            self._peer_registry.tell(attempt.prefill, attempt.cancel)
            return
        if current is not None:
            self._drop(current)
        early = self._early.take(attempt.key)
        self._attempts[attempt.request_id] = attempt
        if self.is_draining:
            self._fail(attempt, Failure.BUSY, "the worker is about to end")
            return
        try:
            attempt.check(self._engine)
        except InvalidRequest as error:
            self._fail(attempt, Failure.INVALID, str(error))
            return
        self._admission.wait(attempt)
        if early is not None:
            self._prefill_ended(*early)

    def _admit(self) -> None:
        while (attempt := self._admission.first()) is not None:
            if self._begin(attempt):
                self._admission.leave(attempt)
            elif self._admission.first() is attempt:
                return  # there is no room, and later attempts wait behind this one

    def _begin(self, attempt: Attempt) -> bool:
        """Have the prompt's KV computed, here or elsewhere; False while there is no room for it."""
        if not attempt.prefill:
            if attempt.request.is_probe:
                self._fail(attempt, Failure.ERROR, "a probe needs a prefill worker")
            elif attempt.migrates_from:
                self._prepare(attempt)
            elif not self._incoming.pull(attempt):
                self._answer(attempt)
            return True
        prefill, link = self._peer_registry.members.get(attempt.prefill), self._links.to(attempt.prefill)
        if prefill is None or self._peer_registry.peer(attempt.prefill) is None or link is None:
            # The worker had the order too, and may have died of this prompt.
            self._fail(attempt, Failure.LOST, "its prefill worker is gone", worker=attempt.prefill)
            return True
        claim = self._admission.claim(attempt, max(prefill.page_size, self._engine.pages.page_size))
        if claim is None:
            return False
        attempt.granted_s = self._clock.now_s()
        try:
            self._incoming.grant(attempt, link, claim)
        except ValueError as error:
            self._recompute(attempt, str(error))
        return True

    # It migrates here.

    def _prepare(self, attempt: Attempt) -> None:
        """Fetch the pages of the running attempt. KV of its last token may not be there yet."""
        attempt.source = PullSource(attempt.migrates_from, attempt.request.num_tokens - 1)
        if not self._incoming.pull(attempt):
            self._incoming.claim(attempt)
            self._prepared(attempt)

    def _prepared(self, attempt: Attempt) -> None:
        """Tell the gateway that it may have this worker take over, or that the pages have not come."""
        if not attempt.is_prepared:
            self._fail(attempt, Failure.BUSY, "its pages have not come from its former worker")
            return
        attempt.stage, attempt.prepared_s = AttemptStage.PREPARED, self._clock.now_s()
        prepared = Prepared(request_id=attempt.request_id, attempt=attempt.number)
        self._peer_registry.tell(attempt.gateway, prepared)

    def _take_over(self, peer: Peer, order: TakeOver) -> None:
        """Answer from here on. Without the attempt its gateway hears, or has heard, that it has failed."""
        attempt = self._attempts.get(order.request_id)
        is_ours = attempt is not None and attempt.key == order.key
        if attempt is None or not is_ours or attempt.gateway != peer.hello.id:
            return
        if attempt.stage is not AttemptStage.PREPARED:
            raise ProtocolError(f"attempt {attempt.engine_id} is {attempt.stage.value}, not prepared")
        try:
            attempt.take_over(order.token_ids, self._clock.now_s())
        except InvalidRequest as error:
            self._fail(attempt, Failure.INVALID, str(error))
            return
        self.counters["migrations"] += 1
        self._answer(attempt)

    def _give_up_prepared(self) -> None:
        """End prepared attempts that their gateway leaves waiting: they hold pages."""
        now_s = self._clock.now_s()
        prepared = [each for each in self._attempts.values() if each.stage is AttemptStage.PREPARED]
        for attempt in prepared:
            if now_s - attempt.prepared_s > MAX_PREPARED_S:
                self._fail(attempt, Failure.BUSY, f"no TakeOver came in {MAX_PREPARED_S:.0f} s")

    # Its prompt is computed.

    def _transfer_ended(self, attempt: Attempt, ended: TransferEnded) -> None:
        """Go on with the pages of an ended transfer, or without."""
        has_come = ended.outcome is HandoffOutcome.ADOPTED
        if has_come and attempt.stage is AttemptStage.PREFILLING:
            attempt.pages_s = self._clock.now_s()
        if attempt.migrates_from:
            self._prepared(attempt)
        elif attempt.is_complete or attempt.stage is AttemptStage.PULLING:
            self._answer(attempt)
        elif not has_come and (attempt.first is not None or ended.outcome is HandoffOutcome.REFUSED):
            self._recompute(attempt, ended.reason)

    def _prefill_ended(self, peer: Peer, result: PrefillResult) -> None:
        """Take the first token from the prefill worker, or the reason why there is none."""
        about = result.event if isinstance(result, Prefilled) else result
        attempt = self._attempts.get(about.request_id)
        key = about.request_id, about.attempt
        if attempt is None or attempt.number < about.attempt:
            self._early.keep(key, peer, result)
            if key in self._over:
                self._early.cancel(key)
        elif attempt.key != key or attempt.prefill != peer.hello.id:
            return  # of an attempt that is over
        elif attempt.stage in (AttemptStage.WAITING, AttemptStage.PREFILLING):
            if isinstance(result, Prefilled):
                self._prefilled(attempt, result.event)
            elif result.failure in (Failure.INVALID, Failure.ERROR):
                self._fail(attempt, result.failure, result.reason, worker=attempt.prefill)
            else:
                self._recompute(attempt, result.reason)

    def _prefilled(self, attempt: Attempt, event: TokenEvent) -> None:
        attempt.first = event
        if event.finish_reason is not None:
            self._drop(attempt)
        elif attempt.is_complete:
            self._answer(attempt)
        elif attempt.stage is AttemptStage.PREFILLING and not attempt.is_receiving:
            self._recompute(attempt, "its pages have not come")

    def _recompute(self, attempt: Attempt, reason: str) -> None:
        """Compute the prompt here: its pages do not come, and their worker lives.

        A probe fails instead: it asks whether pages come.
        """
        if attempt.request.is_probe:
            self._fail(attempt, Failure.ERROR, reason, worker=attempt.prefill)
            return
        logger.info("request %s: its prompt is computed here: %s", attempt.engine_id, reason)
        self.counters["recomputed_prefills"] += 1
        self._peer_registry.tell(attempt.prefill, attempt.cancel)
        self._admission.leave(attempt)
        self._incoming.drop(attempt)
        self._answer(attempt)

    def _answer(self, attempt: Attempt) -> None:
        """Continue here, with the KV that the attempt has."""
        self.counters[REMOTE_PREFILLS] += attempt.is_complete
        try:
            self._running.begin(attempt)
        except InvalidRequest as error:
            self._fail(attempt, Failure.INVALID, str(error))

    # It ends.

    def _cancel(self, peer: Peer, cancel: Cancel) -> None:
        attempt = self._attempts.get(cancel.request_id)
        if attempt is not None and attempt.gateway != peer.hello.id:
            return
        self._over.add(cancel.request_id, cancel.attempt)
        self._early.cancel(cancel.key)
        if attempt is not None and attempt.number <= cancel.attempt:
            if attempt.stage is AttemptStage.RUNNING:
                self._peer_registry.emit(attempt.gateway, attempt.aborted(self._clock.now_s()))
            self._drop(attempt)

    def _fail(self, attempt: Attempt, failure: Failure, reason: str, *, worker: str = "") -> None:
        self._end(attempt, attempt.failed(failure, reason, worker))

    def _end(self, attempt: Attempt, failed: AttemptFailed | None) -> None:
        self._drop(attempt)
        if failed is not None:
            self._peer_registry.fail(attempt.gateway, failed)

    def _drop(self, attempt: Attempt) -> None:
        """Release everything that the attempt holds, here and at its prefill worker."""
        if attempt.stage is AttemptStage.RUNNING:
            self._running.abort(attempt)
        else:
            self._admission.leave(attempt)
            self._peer_registry.tell(attempt.prefill, attempt.cancel)
            self._incoming.drop(attempt)
        self._over.add(*attempt.key)
        del self._attempts[attempt.request_id]
