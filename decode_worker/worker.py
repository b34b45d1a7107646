"""Receives prompts whose KV another worker computes, and answers them: receive -> step -> emit.

The life of an attempt is in decode_worker/attempt.py. What comes in between:

- Admission is in the order of decode_worker/attempt.py: the first that finds no room holds up those behind
  it, so that a long prompt is not starved by short ones.
- Where all of a prompt but `local_prefill_tokens` is known here, or where its pages did not come although
  its prefill worker lives, it is computed here: the tokens are the same.
- Pages that do not come before the first token may be a dead worker's, who died of the very prompt: that
  worker's own word is waited for, or its end.
- A prefill worker that routers list, and of which nothing comes here, lives behind a link that is broken:
  after `prefill_patience_s` its prompts are computed here.
- A prefill worker that is gone before everything came ends the attempt: the gateway tries again elsewhere.
- A gateway that is gone wants nothing any more.

All calls come from one thread, and nothing here waits. `step` is the loop's body.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

import msgspec

from baton.clock import Clock
from baton.decode_worker.attempt import Attempt, AttemptStage, DecodeAdmission
from baton.decode_worker.remote_prompts import RemotePrompts
from baton.decode_worker.reports import DecodeReports
from baton.engine.replica import Replica
from baton.errors import InvalidRequest, ProtocolError
from baton.kvtransfer.links import KvLinks
from baton.kvtransfer.page_endpoint import PageEndpoint
from baton.kvtransfer.prefixes import PulledPrefixes
from baton.messages.bounds import LINK_TIMEOUT_S, Kind
from baton.messages.codec import TOO_LARGE, AnyMessage, fits
from baton.messages.control import Cancel, Dispatch, Failure, Prefilled, PrefillFailed, with_arrival
from baton.messages.status import OverloadLevel
from baton.messages.workers import REMOTE_PREFILLS, Load
from baton.request import FinishReason, Request, StepOutput, TokenEvent
from baton.rpc.peers import Peer, PeerRegistry
from baton.rpc.reports import load_of
from baton.rpc.worker_node import WorkerNode


class LostGateways:
    """Gateways that attempts name and that are not there. A Dispatch may come a moment before its gateway."""

    def __init__(self, peer_registry: PeerRegistry) -> None:
        self._peer_registry = peer_registry
        self._missing: set[str] = set()  # at the last tick

    def tick(self, named: Iterable[str]) -> Collection[str]:
        """Of those that attempts name now, the ones that were missing at the last tick, and still are."""
        missing = {id_ for id_ in named if self._peer_registry.peer(id_) is None}
        lost = missing & self._missing
        self._missing = missing
        return lost


# Attempts that have been cancelled: their Dispatch may come later, since it travels by another way.

MAX_REMEMBERED: Final = 4096  # requests; for most of them no Dispatch will come


class CancelledAttempts:
    """A cancel is of earlier attempts of the request, too: a router that stood still may send one late."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()  # request id -> attempt, oldest cancel first

    def add(self, cancel: Cancel) -> None:
        self._last[cancel.request_id] = max(cancel.attempt, self._last.pop(cancel.request_id, 0))
        if len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)

    def __contains__(self, request: Request) -> bool:
        return request.attempt <= self._last.get(request.request_id, -1)


# Attempts that the engine works on: what it makes for them is said to their gateways.


class Ending(NamedTuple):
    """An attempt that has had its last token, or has failed: then nobody has been told yet."""

    attempt: Attempt
    failure: Failure | None = None
    reason: str = ""


class Answers:
    def __init__(self, engine: Replica, peer_registry: PeerRegistry, reports: DecodeReports) -> None:
        self.num_tokens = 0  # said in all
        self._engine = engine
        self._peer_registry = peer_registry
        self._reports = reports
        self._attempts: dict[str, Attempt] = {}  # by their names in the engine

    def begin(self, attempt: Attempt) -> None:
        """Go on with all the KV that it has. InvalidRequest, and it keeps what it has, when it cannot run."""
        (progress,) = self._engine.add(attempt.engine_request, attempt.filled)
        self._reports.begun(attempt, progress)
        attempt.stage, attempt.filled = AttemptStage.RUNNING, None
        self._attempts[attempt.engine_id] = attempt

    def abort(self, attempt: Attempt) -> None:
        self._engine.abort(attempt.engine_id)
        self._attempts.pop(attempt.engine_id, None)

    def step(self) -> list[Ending]:
        """Have the engine make a step, if there is work; those that it ends."""
        if not self._engine.has_work():
            return []
        self._reports.step_begins()
        endings = [self._say(output) for output in self._engine.step()]
        self._reports.step_ended(self._engine)
        return [ending for ending in endings if ending is not None]

    def _say(self, output: StepOutput) -> Ending | None:
        attempt = self._attempts[output.request_id]
        event = TokenEvent.of(attempt.request, output, output.finish_reason)
        if output.finish_reason is FinishReason.ERROR:
            return Ending(attempt, Failure.ERROR, "the model's output for it could not be sampled")
        if not fits(event):
            return Ending(attempt, Failure.INVALID, TOO_LARGE)
        self.num_tokens += output.token_id is not None
        self._reports.said(attempt, output)
        self._peer_registry.emit(attempt.gateway, event)
        return None if output.finish_reason is None else Ending(attempt)


MIN_PREFILL_PATIENCE_S: Final = 4.0  # longer than routers wait for a worker's sign of life
logger = logging.getLogger(__name__)


class DecodeWorker(WorkerNode):
    def __init__(
        self,
        engine: Replica,
        endpoint: PageEndpoint,
        peer_registry: PeerRegistry,
        clock: Clock,
        links: KvLinks,
        *,
        local_prefill_tokens: int,
        prefill_patience_s: float = LINK_TIMEOUT_S / 2,
    ) -> None:
        """The endpoint must ask `admit` for every reservation.

        local_prefill_tokens: a prompt of which no more than this is unknown here is computed here.
        prefill_patience_s: silence of the link to a prefill worker after which its prompts are computed here;
        no less than MIN_PREFILL_PATIENCE_S, so that routers have removed a dead worker before.
        """
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._reports = DecodeReports(peer_registry, clock)
        super().__init__(peer_registry, links, self._reports)
        self._engine = engine
        self._endpoint = endpoint
        self._local_prefill_tokens = local_prefill_tokens
        self._prefill_patience_s = max(prefill_patience_s, MIN_PREFILL_PATIENCE_S)
        self._admission = DecodeAdmission(engine)
        self._prefixes = PulledPrefixes[Attempt](engine, endpoint, links, clock)
        self._prompts = RemotePrompts(engine, endpoint, peer_registry, self._admission, self._prefixes, clock)
        self.admit = self._prompts.admit
        self._answers = Answers(engine, peer_registry, self._reports)
        self._attempts: dict[str, Attempt] = {}  # request_id -> the attempt at it that goes on here
        self._cancelled = CancelledAttempts()
        self._lost_gateways = LostGateways(peer_registry)

    @property
    def is_idle(self) -> bool:
        return not self._attempts and not self._endpoint.num_open

    @property
    def attempts(self) -> tuple[tuple[str, int], ...]:
        return tuple((attempt.request_id, attempt.number) for attempt in self._attempts.values())

    def load(self) -> Load:
        load = load_of(self._engine.stats())
        return msgspec.structs.replace(
            load,
            num_waiting=load.num_waiting + len(self._admission),
            num_incoming=self._endpoint.num_open,
            num_tokens=self._answers.num_tokens,
            counters={**self._endpoint.counts(), **self._prefixes.counters, **self.counters},
        )

    # The loop.

    def step(self) -> None:
        """Do what can be done now."""
        for attempt, reason in self._prompts.poll():
            if attempt.is_complete or attempt.stage is AttemptStage.PULLING:
                self._answer(attempt)
            elif attempt.first is not None and reason is not None:
                self._recompute(attempt, reason)
        self._admit()
        for attempt, failure, reason in self._answers.step():
            if failure is None:
                self._let_go(attempt)
            else:
                self._fail(attempt, failure, reason)
        self._peer_registry.flush()
        self._reports.tell(self._engine)

    # Colleagues.

    def tick(self) -> None:
        self._lose_gateways(self._lost_gateways.tick(each.gateway for each in self._attempts.values()))
        self._give_up_silent_links()
        super().tick()

    def _pressed(self, level: OverloadLevel) -> None:
        self._engine.set_pressure(small_chunks=level.small_chunks, makes_room=level.makes_room)

    def _reachable(self) -> list[str]:
        return self._peer_registry.connected()

    def _lost(self, peer: Peer) -> None:
        if peer.hello.process is Kind.GATEWAY:
            self._lose_gateways([peer.hello.id])
        self._lost_workers([peer.hello.id])

    def _heard(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Dispatch() if self._peer_registry.is_router(peer):
                self._dispatch(message)
            case Prefilled(event):
                self._prefilled(self._asked_of(peer, event.request_id, event.attempt), event)
            case PrefillFailed():
                self._prefill_failed(self._asked_of(peer, message.request_id, message.attempt), message)
            case Cancel():
                self._cancel(peer, message)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is nothing for a decode worker")

    def _asked_of(self, peer: Peer, request_id: str, number: int) -> Attempt | None:
        """The attempt that waits for this very prefill worker; None when it is over."""
        attempt = self._attempts.get(request_id)
        if attempt is None or attempt.number != number or attempt.prefill != peer.hello.id:
            return None
        return attempt if attempt.stage is AttemptStage.PREFILLING else None

    def _lose_gateways(self, ids: Collection[str]) -> None:
        for attempt in [each for each in self._attempts.values() if each.gateway in ids]:
            self._let_go(attempt)

    def _lost_workers(self, ids: list[str]) -> None:
        for attempt in list(self._attempts.values()):
            if (
                attempt.stage is AttemptStage.PREFILLING
                and attempt.prefill in ids
                and not attempt.is_complete
            ):
                self._fail(attempt, Failure.LOST, "its prefill worker is gone", worker=attempt.prefill)

    def _give_up_silent_links(self) -> None:
        """Compute prompts here whose prefill worker lives, as routers see it, and is not heard of."""
        waiting = [each for each in self._attempts.values() if each.stage is AttemptStage.PREFILLING]
        for attempt in waiting:
            peer = self._peer_registry.peer(attempt.prefill)
            silence_s = peer.silence_s if peer is not None else 0.0
            is_listed = attempt.prefill in self._peer_registry.members
            if silence_s > self._prefill_patience_s and is_listed and not attempt.is_complete:
                self.counters["silent_prefill_links"] += 1
                self._recompute(attempt, f"the link to its prefill worker was silent for {silence_s:.1f} s")

    # An attempt begins.

    def _dispatch(self, dispatch: Dispatch) -> None:
        older = self._attempts.get(dispatch.request.request_id)
        if older is not None:
            if older.number >= dispatch.request.attempt:
                return  # it has been overtaken on the way
            self._let_go(older)
        attempt = Attempt.of(with_arrival(dispatch, self._clock.now_s()))
        if attempt.request in self._cancelled:
            return
        if self.is_draining:
            self._peer_registry.fail(
                attempt.gateway, attempt.failed(Failure.BUSY, "the worker is about to end")
            )
            return
        try:
            attempt.check(self._engine)
        except InvalidRequest as error:
            self._peer_registry.fail(attempt.gateway, attempt.failed(Failure.INVALID, str(error)))
            return
        self._attempts[attempt.request_id] = attempt
        self._reports.arrived(attempt)
        self._admission.wait(attempt)

    def _admit(self) -> None:
        while (attempt := self._admission.first()) is not None:
            if self._begin(attempt):
                self._admission.leave(attempt)
            elif self._admission.first() is attempt:
                return  # there is no room, for it or anybody

    def _begin(self, attempt: Attempt) -> bool:
        """Have its prompt computed, here or elsewhere; False while there is no room for what would come."""
        if not attempt.prefill:
            if attempt.request.is_probe:
                self._fail(attempt, Failure.ERROR, "a probe needs a prefill worker")
                return True
            if not self._prompts.pull(attempt):
                self._answer(attempt)
            return True
        prefill = self._peer_registry.members.get(attempt.prefill)
        if prefill is None or self._peer_registry.peer(attempt.prefill) is None:
            self._fail(attempt, Failure.BUSY, "its prefill worker is gone")
            return True
        if not self._admission.may_have_room(attempt):
            return False
        self._engine.pages.accounts.book(attempt.engine_id, attempt.request.tenant)
        claim = self._engine.claim_prefix(
            attempt.token_ids,
            attempt.request.cache_salt,
            attempt.engine_id,
            multiple_of=max(prefill.page_size, self._engine.pages.page_size),
        )
        num_missing = len(attempt.token_ids) - claim.num_tokens
        num_pages = self._engine.pages.pages_for(num_missing)
        is_short = num_missing <= self._local_prefill_tokens and not attempt.request.is_probe
        if is_short or not self._admission.promise(attempt, num_pages):
            self._engine.release(claim)
            if is_short:
                self._answer(attempt)
            return is_short
        self._prompts.ask(attempt, claim)
        return True

    # Its prompt comes.

    def _prefilled(self, attempt: Attempt | None, event: TokenEvent) -> None:
        if attempt is None:
            return
        attempt.first = event
        if event.finish_reason is not None:
            self._let_go(attempt)
        elif attempt.is_complete:
            self._answer(attempt)
        elif not attempt.transfer:
            self._recompute(attempt, "its pages have not come")

    def _prefill_failed(self, attempt: Attempt | None, failed: PrefillFailed) -> None:
        if attempt is None:
            return
        if failed.failure in (Failure.INVALID, Failure.ERROR):
            self._fail(attempt, failed.failure, failed.reason, worker=attempt.prefill)
        else:
            self._recompute(attempt, failed.reason)

    def _recompute(self, attempt: Attempt, reason: str) -> None:
        """The pages do not come, and their worker lives: compute here what they would have held.

        A probe fails instead: it asks whether pages come.
        """
        if attempt.request.is_probe:
            self._fail(attempt, Failure.ERROR, reason, worker=attempt.prefill)
            return
        logger.info("request %s: its prompt is computed here: %s", attempt.engine_id, reason)
        self.counters["recomputed_prefills"] += 1
        self._peer_registry.tell(attempt.prefill, attempt.cancel)
        self._prompts.drop(attempt)
        self._answer(attempt)

    def _answer(self, attempt: Attempt) -> None:
        """Go on here, with whatever KV it has."""
        self.counters[REMOTE_PREFILLS] += attempt.is_complete
        try:
            self._answers.begin(attempt)
        except InvalidRequest as error:
            self._fail(attempt, Failure.INVALID, str(error))

    # It is answered, or it ends otherwise.

    def _cancel(self, peer: Peer, cancel: Cancel) -> None:
        attempt = self._attempts.get(cancel.request_id)
        if attempt is not None and attempt.gateway != peer.hello.id:
            return
        self._cancelled.add(cancel)
        if attempt is not None and attempt.number <= cancel.attempt:
            self._let_go(attempt)

    def _fail(self, attempt: Attempt, failure: Failure, reason: str, *, worker: str = "") -> None:
        self._let_go(attempt)
        self._peer_registry.fail(attempt.gateway, attempt.failed(failure, reason, worker))

    def _let_go(self, attempt: Attempt) -> None:
        """Of everything that it holds here, and elsewhere."""
        match attempt.stage:
            case AttemptStage.WAITING:
                self._admission.leave(attempt)
            case AttemptStage.PREFILLING | AttemptStage.PULLING:
                self._peer_registry.tell(attempt.prefill, attempt.cancel)
                self._prompts.drop(attempt)
            case AttemptStage.RUNNING:
                self._answers.abort(attempt)
        self._reports.forget(attempt)
        del self._attempts[attempt.request_id]
