"""Computes prompts for decode workers: admit -> step -> hand off.

The life of a prompt is in departure.py. What comes in between:

- Its pages leave while the rest is computed; whoever waits for them has made room before.
- The first token goes to the gateway at once, and to the decode worker, which goes on from there.
- A decode worker or a gateway that is gone, or a transfer that failed, ends it. The engine keeps what it has
  computed as a known prefix, so that a second try is cheap.

All calls come from one thread, and nothing here waits. `step` is the loop's body.
"""

from typing import Final

import msgspec

from baton.beats import Beats, load_of
from baton.colleagues import Colleagues
from baton.control import Cancel, Failure, Prefill, Prefilled, with_arrival
from baton.control_wire import TOO_LARGE, AnyMessage, fits
from baton.engine.relief import relief_on
from baton.engine.replica import Replica
from baton.engine.sought_prefix import SoughtPrefix
from baton.errors import InvalidRequest, ProtocolError
from baton.filled_pages import FilledPages
from baton.kvtransfer.ended import Ended
from baton.kvtransfer.kv_links import KvLinks
from baton.kvtransfer.page_endpoint import PageEndpoint
from baton.kvtransfer.pulled_prefixes import PulledPrefixes
from baton.node import Peer
from baton.prefill_worker.departure import Departure, Stage, refusal
from baton.prefill_worker.last_chunks import LastChunks
from baton.prefill_worker.reports import Reports
from baton.pressure import Rung
from baton.request import FinishReason, StepOutput
from baton.token_event import TokenEvent
from baton.wire_types import Kind
from baton.worker import Load
from baton.worker_node import WorkerNode

TRANSFER_TIMEOUT_S: Final = 600.0  # from the reservation on, time in the queue included


class PrefillWorker(WorkerNode):
    def __init__(
        self,
        engine: Replica,
        endpoint: PageEndpoint,
        colleagues: Colleagues,
        beats: Beats,
        links: KvLinks,
        *,
        num_layer_groups: int = 1,
    ) -> None:
        """num_layer_groups: in how many groups of layers the last pages of a prompt leave."""
        self._clock = beats.clock
        self._reports = Reports(colleagues, beats.clock)
        super().__init__(colleagues, links, beats, self._reports)
        self._engine = engine
        self._endpoint = endpoint
        self._links = links
        self._prefixes = PulledPrefixes[Departure](engine, endpoint, links, beats.clock)
        self._departures: dict[bytes, Departure] = {}  # by transfer, until that has ended
        self._by_engine_id: dict[str, Departure] = {}  # those that are COMPUTING
        self._num_layer_groups = num_layer_groups
        self._last_chunks: LastChunks | None = None
        if num_layer_groups > 1:
            self._last_chunks = LastChunks(endpoint, num_layer_groups, self._by_engine_id.get)
        self._num_tokens = self._kv_bytes = 0

    @property
    def is_idle(self) -> bool:  # no page waits here to be fetched, either
        return not self._departures and not self._endpoint.num_open

    @property
    def attempts(self) -> tuple[tuple[str, int], ...]:
        return tuple(departure.key for departure in self._departures.values())

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
        self._colleagues.flush()
        self._reports.tell(self._engine)

    # Colleagues.

    def _pressed(self, rung: Rung) -> None:
        self._engine.relieve(relief_on(rung))

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
        for departure in list(self._departures.values()):
            if departure.decode in ids:  # it may hear us yet: gone is what the router says it is
                self._give_up(departure, "its decode worker is gone")
                self._refuse(departure.decode, departure.prefill, Failure.BUSY, "you were taken for dead")

    def _cancel(self, peer: Peer, cancel: Cancel) -> None:
        for departure in list(self._departures.values()):
            is_it = departure.key == (cancel.request_id, cancel.attempt)
            if is_it and departure.decode == peer.hello.id:
                self._give_up(departure, "not wanted any more")

    # A prompt comes.

    def _begin(self, peer: Peer, prefill: Prefill) -> None:
        link = self._links.to(peer.hello.id)
        page_size = self._engine.pages.page_size
        if link is None or prefill.transfer in self._departures:
            self._refuse(peer.hello.id, prefill, Failure.BUSY, "no pages can be sent to that worker now")
            return
        if self.is_draining:
            self._refuse(peer.hello.id, prefill, Failure.BUSY, "the worker is about to end")
            return
        unit_tokens = min(page_size, link.hello.layout.page_size)
        prefill = with_arrival(prefill, self._clock.now_s())
        departure = Departure(prefill, peer.hello.id, page_size, unit_tokens)
        try:
            self._engine.check(departure.request)
            self._endpoint.start(
                link,
                departure.num_units,
                deadline_s=TRANSFER_TIMEOUT_S,
                transfer=prefill.transfer,
                num_layer_groups=self._num_layer_groups,
            )
        except InvalidRequest as error:
            self._refuse(peer.hello.id, prefill, Failure.INVALID, str(error))
        except ValueError as error:  # no transfer can be like that: it has too many units
            self._refuse(peer.hello.id, prefill, Failure.BUSY, str(error))
        else:
            self._departures[prefill.transfer] = departure
            self._reports.arrived(departure)
            self._compute(departure)

    def _granted(self, transfer: bytes) -> None:
        departure = self._departures.get(transfer)
        if departure is not None:
            departure.is_granted = True

    def _compute(self, departure: Departure) -> None:
        """At once: the decode worker has kept the room that it is being asked for."""
        prefix = SoughtPrefix(self._engine, departure.request, departure.engine_id)
        if self._prefixes.begin(departure, departure.prefill.source, prefix):
            departure.stage = Stage.PULLING
        else:
            self._start(departure, None)

    def _pulled(self, ended: Ended) -> None:
        """Go on with the prefix that has come, or without."""
        pulled = self._prefixes.take(ended)
        if pulled is not None:
            self._reports.pulled(pulled.waiter, pulled.pull)
            self._start(pulled.waiter, pulled.filled)

    def _start(self, departure: Departure, filled: FilledPages | None) -> None:
        try:
            (departure.progress,) = self._engine.add(departure.engine_request, filled, keeps_pages=True)
        except InvalidRequest as error:  # it may well fit the decode worker
            if filled is not None:
                self._engine.release(filled)
            self._fail(departure, Failure.BUSY, str(error))
            return
        departure.stage = Stage.COMPUTING
        self._by_engine_id[departure.engine_id] = departure

    # It leaves.

    def _offer_what_is_computed(self) -> None:
        for departure in self._by_engine_id.values():
            self._offer(departure)
            self._reports.computing(departure)

    def _offer(self, departure: Departure) -> None:
        offer = departure.take_offer()
        if offer is not None:
            self._endpoint.offer(departure.transfer, offer.pages, offer.num_units)

    def _hand_off(self, output: StepOutput) -> None:
        """The first token, and with it all that is left of the pages."""
        departure = self._by_engine_id[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            self._fail(departure, Failure.ERROR, "the model's output for it could not be sampled")
            return
        reason = departure.finish_reason(output.finish_reason, self._engine.max_model_len)
        event = TokenEvent.of(departure.request, output, reason)
        if not fits(event):
            self._fail(departure, Failure.INVALID, TOO_LARGE)
            return
        self._reports.computed(departure, output)
        self._num_tokens += output.token_id is not None
        self._colleagues.emit(departure.prefill.gateway, event)
        self._colleagues.tell(departure.decode, Prefilled(event=event))
        if reason is None:
            self._offer(departure)
        self._leave(departure)

    def _leave(self, departure: Departure) -> None:
        """The rest is the decode worker's: it ends a transfer that it wants no more.

        If that end came from here it might be heard before what was said, over another connection, and the
        prompt would be computed once more.
        """
        self._let_engine_go(departure)
        departure.stage = Stage.LEAVING

    def _transfer_ended(self, ended: Ended) -> None:
        if ended.times is not None:
            self._kv_bytes += ended.times.num_bytes
        departure = self._departures.pop(ended.transfer, None)
        if departure is None:
            return
        self._reports.ended(departure, ended)
        if departure.stage is not Stage.LEAVING or not departure.is_granted:
            self._let_engine_go(departure)
            self._refuse(departure.decode, departure.prefill, Failure.BUSY, ended.reason)

    # It ends otherwise.

    def _fail(self, departure: Departure, failure: Failure, reason: str) -> None:
        self._leave(departure)
        self._refuse(departure.decode, departure.prefill, failure, reason)

    def _refuse(self, decode: str, prefill: Prefill, failure: Failure, reason: str) -> None:
        self._colleagues.tell(decode, refusal(prefill.request, failure, reason))

    def _give_up(self, departure: Departure, reason: str) -> None:
        """Let go of everything that it holds here."""
        self._endpoint.abort(departure.transfer, reason)
        self._let_engine_go(departure)
        self._departures.pop(departure.transfer, None)
        self._reports.forget(departure)

    def _let_engine_go(self, departure: Departure) -> None:
        self._prefixes.drop(departure)
        if self._by_engine_id.pop(departure.engine_id, None) is None:
            return
        if not self._engine.abort(departure.engine_id):  # it has ended already, and its pages are kept
            self._engine.release_kept(departure.engine_id, departure.request.choice)
