"""The ended requests of one gateway: the latest ones, and the slowest of the last minutes, with their
timelines.

An `EndedRequest` has the figures of a call at its end: the marks of the choice that ended last
(gateway/streams/request_stream.py), and the times of routers and workers, with the offsets of their clocks.
Its timeline is assembled, by the gateway's clock, when an operator asks and when the request is traced. The
metrics count the parts of one call in COUNT_S, so a busy gateway counts a sample.

A timeline goes from the first byte of the request to the last byte of the answer: each part begins where the
part before ended, so no time is counted twice. Time that no process accounts for becomes no part. A failed
attempt is one part, `replayed`, from its dispatch to the submission of the next attempt. An attempt that
another worker took over has parts as the last one has. Computing and waiting alternate within a worker; they
are shown one after the other in the interval that they share.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Final

import msgspec

from baton.clock import Clock
from baton.gateway.api.answer import Answer, AnswerChoice, Usage
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.metrics.tracing import Tracer, Value
from baton.gateway.streams.request_stream import (
    CANCELLED,
    FINISHED,
    MIGRATED,
    AttemptMarks,
    RequestMarks,
    WorkerMarks,
)
from baton.messages.bounds import MAX_SECONDS, short_id
from baton.messages.operations import FindRequests
from baton.messages.timeline import RequestTimeline, TimelineAttempt, TimelinePart
from baton.rpc.peer_clock import ClockOffset

MAX_LATEST: Final = 1024
SLOWEST_S: Final = 900.0  # the slowest requests of so long are kept
INTERVAL_S: Final = 60.0
MAX_SLOWEST: Final = 100  # of each interval
COUNT_S: Final = 0.2  # between two timelines for the metrics


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A call that has ended, by the gateway's clock."""

    request_id: str = ""
    answer_id: bytes = b""  # of a resumed answer: the id of its first request
    tenant: str = ""
    outcome: str = ""
    gateway: str = ""
    num_choices: int = 1
    usage: Usage = Usage(0, 0, 0, 0)
    is_streamed: bool = False
    marks: RequestMarks  # of the choice that ended last
    received_s: float  # the first byte of its head
    read_s: float  # the last byte of its body
    tokenised_s: float = 0.0  # seconds of tokenising, after read_s
    ended_s: float  # the last byte of the answer was handed to the connection
    calendar_s: float = 0.0  # ended_s, in seconds since 1970

    @property
    def total_s(self) -> float:
        """Seconds from received_s to ended_s."""
        return self.ended_s - self.received_s

    def timeline(self) -> RequestTimeline:
        """Assemble the timeline."""
        parts, attempts = self.parts(), self.marks.attempts
        began_s = parts.began_s
        first_token_s = next(
            (each.first_token_s for each in attempts if each.first_token_s is not None), None
        )
        shown = [*(each for each in attempts[:-1] if each.routed is not None), *attempts[-1:]]
        clocks = [
            clock for each in shown for clock in (each.router_clock, *(told.clock for told in each.workers))
        ]
        routed = next((each.routed for each in reversed(attempts) if each.routed), None)
        worker_times = [told.times for each in attempts for told in each.workers]
        hidden_s = [told.times.hidden_s for each in attempts[-1:] for told in each.workers]
        return RequestTimeline(
            request_id=self.request_id,
            tenant=self.tenant,
            outcome=self.outcome,
            gateway=self.gateway,
            began_s=self.calendar_s - self.total_s,
            total_s=_seconds(self.total_s),
            num_choices=self.num_choices,
            num_prompt_tokens=self.usage.prompt,
            num_cached_tokens=self.usage.cached,
            num_tokens=self.usage.completion,
            is_streamed=self.is_streamed,
            num_draft_tokens=sum(times.num_draft_tokens for times in worker_times),
            num_accepted_tokens=sum(times.num_accepted_tokens for times in worker_times),
            first_token_s=None if first_token_s is None else _seconds(first_token_s - began_s),
            num_ahead=0 if routed is None else routed.num_ahead,
            ahead_tenant="" if routed is None else routed.ahead_tenant,
            hidden_transfer_s=max(hidden_s, default=0.0),
            clock_error_s=max((clock.error_s for clock in clocks if clock is not None), default=0.0),
            unaccounted_s=parts.unaccounted_s,
            parts=tuple(parts.added),
            attempts=tuple(_attempt(each, began_s, parts.ended_s) for each in attempts),
        )

    def parts(self) -> "PartList":
        """Return the parts of the call's time."""
        marks, gateway = self.marks, self.gateway
        parts = PartList(self.received_s, self.received_s + _seconds(self.total_s))
        parts.add_until(self.read_s, "received", gateway)
        parts.split_until(marks.opened_s, {"tokenised": self.tokenised_s}, "parsed", gateway)
        for index, attempt in enumerate(marks.attempts):
            is_last = index == len(marks.attempts) - 1
            if attempt.routed is None and not is_last:
                continue  # no worker had the attempt: its time belongs to the queue of the next one
            _add_queue(parts, attempt)
            if is_last:
                _add_attempt(parts, attempt, marks.last_token_s, gateway)
            elif attempt.end == MIGRATED:
                _add_attempt(parts, attempt, attempt.ended_s, gateway)
            else:
                parts.add_until(marks.attempts[index + 1].submitted_s, "replayed", attempt.decode)
        has_answered = any(attempt.first_token_s is not None for attempt in marks.attempts)
        parts.add_until(parts.ended_s, "written" if has_answered else "refused", gateway)
        return parts


class PartList:
    """The parts up to a cursor, which starts at `began_s` and never goes back or beyond `ended_s`."""

    def __init__(self, began_s: float, ended_s: float) -> None:
        self.added: list[TimelinePart] = []
        self.began_s = self.cursor_s = began_s
        self.ended_s = ended_s

    @property
    def unaccounted_s(self) -> float:
        """Seconds that no part explains."""
        return max(0.0, self.ended_s - self.began_s - sum([part.seconds for part in self.added]))

    def add_until(self, at_s: float, name: str, process: str) -> None:
        """Add a part from the cursor to a time; add none if the cursor is there already."""
        self.split_until(at_s, {}, name, process)

    def split_until(self, at_s: float, known: Mapping[str, float], rest: str, process: str) -> None:
        """Add parts of known seconds from the cursor on, then a part for the rest until a time."""
        at_s = min(at_s, self.ended_s)
        for name, seconds in known.items():
            self._add(name, min(seconds, at_s - self.cursor_s), process)
        self._add(rest, at_s - self.cursor_s, process)

    def skip_to(self, at_s: float) -> None:
        """Move the cursor to a time; the skipped interval is unaccounted."""
        self.cursor_s = max(self.cursor_s, min(at_s, self.ended_s))

    def _add(self, name: str, seconds: float, process: str) -> None:
        if seconds > 0.0:
            self.added.append(TimelinePart(name, self.cursor_s - self.began_s, seconds, process))
            self.cursor_s += seconds


def _router_name(id: str) -> str:
    """Return the name of a router in a timeline."""
    return f"router {short_id(id)}"


def _add_queue(parts: PartList, attempt: AttemptMarks) -> None:
    """Add the wait until a router dispatched the attempt."""
    routed, clock, router = attempt.routed, attempt.router_clock, _router_name(attempt.router)
    if routed is None:
        return
    if clock is not None and routed.dispatched_s:
        parts.add_until(clock.ours(routed.dispatched_s), "queued", router)
    else:  # the wait itself is known, the way to the router is not
        waited_s = routed.dispatched_s - routed.received_s
        parts.add_until(attempt.submitted_s + waited_s, "queued", router)


def _add_attempt(parts: PartList, attempt: AttemptMarks, last_token_s: float, gateway: str) -> None:
    """Add the phases of the attempt that ended the request, to the arrival of its last token."""
    if attempt.routed is None and not attempt.workers:
        parts.add_until(attempt.ended_s, "queued", _router_name(attempt.router))
        return
    computed = next((each for each in attempt.workers if each.times.first_token_s), None)
    if computed is not None:
        _add_prompt(parts, attempt, computed)
    elif attempt.first_token_s is None:  # the request ended before its first token
        name = "cancelled" if attempt.end in (CANCELLED, FINISHED) else "lost"
        parts.add_until(attempt.ended_s, name, "")
        return
    parts.skip_to(attempt.first_token_s or 0.0)
    decoded = next((each for each in attempt.workers if each.times.ended_s), None)
    if decoded is not None:
        _add_decode(parts, decoded, last_token_s)
        parts.add_until(last_token_s, "delivered", gateway)
    else:
        parts.add_until(last_token_s, "streamed", attempt.decode)


def _add_prompt(parts: PartList, attempt: AttemptMarks, worker: WorkerMarks) -> None:
    name, times, clock = worker.name, worker.times, worker.clock
    if clock is None:  # as if the first token had taken no time to the gateway
        clock = ClockOffset(times.first_token_s - (attempt.first_token_s or parts.ended_s), 0.0)
    parts.add_until(clock.ours(times.arrived_s), "dispatched", name)
    parts.split_until(clock.ours(times.started_s), {"prefix_pulled": times.pulled_s}, "prefill_queued", name)
    known = {"prefill_computing": times.prompt_s, "prefill_preempted": times.prompt_preempted_s}
    parts.split_until(clock.ours(times.first_token_s), known, "prefill_waiting", name)
    if attempt.first_token_s is not None:
        parts.add_until(attempt.first_token_s, "first_token", name)


def _add_decode(parts: PartList, worker: WorkerMarks, last_token_s: float) -> None:
    """Add the phases until the last token; a cancelled attempt may have decoded on for a moment."""
    name, times, clock = worker.name, worker.times, worker.clock
    if clock is None:  # as if the last token had taken no time to the gateway
        clock = ClockOffset(times.ended_s - last_token_s, 0.0)
    if times.granted_s:
        parts.add_until(clock.ours(times.granted_s), "decode_queued", name)
    if times.pages_s:
        parts.add_until(clock.ours(times.pages_s), "transfer_exposed", name)
    known = {"decode_computing": times.decode_s, "decode_preempted": times.decode_preempted_s}
    parts.split_until(min(clock.ours(times.ended_s), last_token_s), known, "decode_waiting", name)


def _seconds(seconds: float) -> float:
    """Return the seconds within the bounds of messages: a timeline ends after a day."""
    return min(max(0.0, seconds), MAX_SECONDS)


def _attempt(marks: AttemptMarks, began_s: float, ended_s: float) -> TimelineAttempt:
    return TimelineAttempt(
        number=marks.number,
        begin_s=_seconds(marks.submitted_s - began_s),
        end_s=_seconds((marks.ended_s or ended_s) - began_s),
        decode=marks.decode,
        prefill=marks.prefill,
        num_tokens=marks.num_tokens,
        end=marks.end,
    )


class RequestHistory:
    """Keeps calls that have ended, counts and traces them. `find` answers operators."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        calendar_s: Callable[[], float],
        tracer: Tracer | None = None,
    ) -> None:
        """metrics: counts the seconds of each part. calendar_s: returns the seconds since 1970."""
        self._metrics = metrics
        self._clock = clock
        self._calendar_s = calendar_s
        self._tracer = tracer
        self._name = f"gateway {metrics.gateway}".rstrip()
        self._latest: deque[EndedRequest] = deque(maxlen=MAX_LATEST)
        # The begin of each interval, and its slowest requests, the slowest last.
        self._slowest: deque[tuple[float, list[EndedRequest]]] = deque(maxlen=round(SLOWEST_S / INTERVAL_S))
        self._counted_s = -COUNT_S

    def finished(self, answer: Answer, outcome: str) -> None:
        """Take a call that has just ended. outcome: a key of TenantCounts.calls."""
        marks = _last_marks(answer.choices)
        if marks is None:
            return  # it was refused before it could begin
        call, now_s = answer.call, self._clock.now_s()
        ended = EndedRequest(
            request_id=answer.choices[0].request_id,
            answer_id=answer.name,
            tenant=call.tenant.name,
            outcome=outcome,
            gateway=self._name,
            num_choices=len(answer.choices),
            usage=answer.usage,
            is_streamed=call.is_streamed,
            marks=marks,
            received_s=call.received_s or call.arrival_s,
            read_s=call.arrival_s,
            tokenised_s=call.tokenised_s,
            ended_s=now_s,
            calendar_s=self._calendar_s(),
        )
        self._latest.append(ended)
        self._keep_slowest(ended)
        if now_s - self._counted_s >= COUNT_S:
            self._counted_s = now_s
            self._count(ended.parts())
        if self._tracer is not None:
            context = call.trace or self._tracer.context(None, None)  # None: over a WebSocket
            rule = self._tracer.rule(context, outcome, ended.total_s)
            if rule is not None:
                self._tracer.export(context, ended.timeline(), _asked(answer), rule)

    def find(self, query: FindRequests) -> Sequence[RequestTimeline]:
        """Return the requests that a query asks for, the latest or the slowest first."""
        if query.request_id is not None:
            known = (*reversed(self._latest), *self._recent_slowest())
            of_id = (each for each in known if query.request_id in (each.request_id, each.answer_id.hex()))
            return [each.timeline() for each in islice(of_id, 1)]
        found: Iterable[EndedRequest] = reversed(self._latest)
        if query.order == "slowest":
            found = self._recent_slowest()
        of_tenant = (each for each in found if query.tenant in (None, each.tenant))
        return [each.timeline() for each in islice(of_tenant, query.limit)]

    def _count(self, parts: PartList) -> None:
        self._metrics.unaccounted.observe(parts.unaccounted_s)
        for part in parts.added:
            self._metrics.parts_us[part.name] += round(part.seconds * 1e6)

    def _keep_slowest(self, ended: EndedRequest) -> None:
        """Keep a request if it is one of the slowest of its interval."""
        if not self._slowest or ended.ended_s - self._slowest[-1][0] >= INTERVAL_S:
            self._slowest.append((ended.ended_s, []))
        slowest = self._slowest[-1][1]
        if len(slowest) < MAX_SLOWEST or ended.total_s > slowest[0].total_s:
            insort(slowest, ended, key=attrgetter("total_s"))
            del slowest[:-MAX_SLOWEST]

    def _recent_slowest(self) -> list[EndedRequest]:
        since_s = self._clock.now_s() - SLOWEST_S
        requests = (each for began_s, slowest in self._slowest if began_s >= since_s for each in slowest)
        return sorted(requests, key=attrgetter("total_s"), reverse=True)


def _asked(answer: Answer) -> Mapping[str, Value | None]:
    """Return the attributes of a traced call that its timeline lacks."""
    call, sampling = answer.call, answer.call.sampling
    reasons = tuple(str(choice.finish_reason) for choice in answer.choices if choice.finish_reason)
    return {
        "gen_ai.operation.name": "chat" if call.is_chat else "text_completion",
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.served or None,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": call.num_choices if call.num_choices > 1 else None,
        "gen_ai.response.finish_reasons": reasons or None,
        "gen_ai.response.id": answer.name.hex(),
    }


def _last_marks(choices: Iterable[AnswerChoice]) -> RequestMarks | None:
    """Return the marks of the choice that ended last; None when no choice was opened."""
    last: RequestMarks | None = None
    for choice in choices:
        marks = choice.marks
        if marks is not None and (last is None or marks.last_token_s > last.last_token_s):
            last = marks
    return last
