"""The timeline of a request: the marks that a gateway keeps while the request runs, and the parts they give.

1. `RequestMarks` belong to one choice of a call. The frontend notes when each attempt was submitted,
   dispatched and answered, and keeps the times that routers and workers send with messages of the attempt
   (`Routed`, the first and the last `TokenEvent`), with the offset of the sender's clock at that moment.
2. `EndedRequest.timeline` turns the marks of an ended call into its timeline, by the gateway's clock. It
   walks from the first byte of the request to the last byte of the answer: each part begins where the part
   before ended, so no time is counted twice. Time that no process accounts for becomes no part.

A failed attempt is one part, `replayed`, from its dispatch to the submission of the next attempt. An attempt
that another worker took over has parts as the last one has. Computing
and waiting alternate within a worker; they are shown one after the other in the interval that they share.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from baton.messages.bounds import MAX_SECONDS, short_id
from baton.messages.control import Routed
from baton.messages.operations import MAX_ATTEMPTS, RequestTimeline, TimelineAttempt, TimelinePart
from baton.messages.workers import WorkerTimes
from baton.rpc.liveness import ClockOffset

FINISHED: Final = "finished"
CANCELLED: Final = "cancelled"  # by the client, or at a stop string
MIGRATED: Final = "migrated"  # to the worker of the next attempt


# The garbage collector visits no marks: a busy gateway keeps thousands, and they are in no reference cycle.


class WorkerMarks(msgspec.Struct, frozen=True, gc=False):
    """The times of one worker, and its clock."""

    name: str
    times: WorkerTimes
    clock: ClockOffset | None  # None: not measured


class AttemptMarks(msgspec.Struct, eq=False, gc=False):
    """One attempt, by the gateway's clock."""

    number: int
    submitted_s: float
    router: str = ""  # its id
    routed: Routed | None = None
    router_clock: ClockOffset | None = None
    decode: str = ""  # names of workers
    prefill: str = ""
    workers: list[WorkerMarks] = []
    first_token_s: float | None = None
    num_tokens: int = 0
    ended_s: float = 0.0
    end: str = ""


class RequestMarks(msgspec.Struct, eq=False, gc=False):
    """One choice of a call, from `opened_s` on. `last_token_s` is the arrival of the last token."""

    opened_s: float
    last_token_s: float = 0.0
    attempts: list[AttemptMarks] = []  # the latest MAX_ATTEMPTS

    def submitted(self, number: int, router: str, now_s: float) -> None:
        """Note that a router was asked. router: its id."""
        if len(self.attempts) >= MAX_ATTEMPTS:
            del self.attempts[0]
        self.attempts.append(AttemptMarks(number, now_s, router))

    def ended(self, end: str, num_tokens: int, now_s: float) -> None:
        """Note that the present attempt has ended; an attempt ends once."""
        if self.attempts and not self.attempts[-1].end:
            attempt = self.attempts[-1]
            attempt.end, attempt.num_tokens, attempt.ended_s = end, num_tokens, now_s


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A call that has ended, by the gateway's clock."""

    known: RequestTimeline  # without its parts and the figures that follow from the marks
    marks: RequestMarks  # of the choice that ended last
    received_s: float  # the first byte of its head
    read_s: float  # the last byte of its body
    tokenised_s: float = 0.0  # seconds of tokenising, after read_s
    ended_s: float  # the last byte of the answer was handed to the connection

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
        return msgspec.structs.replace(
            self.known,
            num_draft_tokens=sum(times.num_draft_tokens for times in worker_times),
            num_accepted_tokens=sum(times.num_accepted_tokens for times in worker_times),
            total_s=_seconds(parts.ended_s - began_s),
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
        marks, gateway = self.marks, self.known.gateway
        parts = PartList(self.received_s, self.received_s + _seconds(self.ended_s - self.received_s))
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
