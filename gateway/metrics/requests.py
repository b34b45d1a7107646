"""The ended requests of one gateway: their timelines, the latest ones and the slowest of the last minutes."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappush, heappushpop
from itertools import count, islice
from typing import Final

from baton.clock import Clock
from baton.gateway.api.answer import Answer
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.metrics.tracing import Tracer
from baton.gateway.streams.timeline import CallMarks, assemble
from baton.messages.operations import FindRequests
from baton.messages.timeline import RequestTimeline

MAX_LATEST: Final = 1024
SLOWEST_S: Final = 900.0  # the slowest requests of so long are kept
INTERVAL_S: Final = 60.0
MAX_SLOWEST: Final = 100  # of each interval


class RequestHistory:
    """Takes each call at its end. `find` answers operators."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        calendar_s: Callable[[], float],
        tracer: Tracer | None = None,
    ) -> None:
        """metrics: counts the seconds of each part. calendar_s: seconds since 1970. tracer: exports."""
        self._tracer = tracer
        self._metrics = metrics
        self._clock = clock
        self._calendar_s = calendar_s
        self._latest: deque[RequestTimeline] = deque(maxlen=MAX_LATEST)
        self._slowest: deque[_Interval] = deque(maxlen=round(SLOWEST_S / INTERVAL_S))
        self._name = f"gateway {metrics.gateway}".rstrip()

    def finished(self, answer: Answer, outcome: str) -> None:
        """Take a call that has just ended. outcome: a key of TenantCounts.calls."""
        timeline = self._timeline(answer, outcome)
        if timeline is None:
            return
        self._latest.append(timeline)
        now_s = self._clock.now_s()
        if not self._slowest or now_s - self._slowest[-1].began_s >= INTERVAL_S:
            self._slowest.append(_Interval(now_s))
        self._slowest[-1].add(timeline)
        self._metrics.unaccounted.observe(timeline.unaccounted_s)
        for part in timeline.parts:
            self._metrics.parts_us[part.name] += round(part.seconds * 1e6)
        if self._tracer is not None:
            self._tracer.ended(timeline, answer)

    def find(self, query: FindRequests) -> Sequence[RequestTimeline]:
        """Return the requests that a query asks for, the latest or the slowest first."""
        if query.request_id is not None:
            wanted = query.request_id
            known = (*reversed(self._latest), *self._recent_slowest())
            return [each for each in known if each.request_id == wanted][:1]
        found: Iterator[RequestTimeline] | list[RequestTimeline] = reversed(self._latest)
        if query.order == "slowest":
            found = self._recent_slowest()
        of_tenant = (each for each in found if query.tenant in (None, each.tenant))
        return list(islice(of_tenant, query.limit))

    def _recent_slowest(self) -> list[RequestTimeline]:
        since_s = self._clock.now_s() - SLOWEST_S
        recent = [each for each in self._slowest if each.began_s >= since_s]
        timelines = (timeline for each in recent for timeline in each.timelines())
        return sorted(timelines, key=lambda timeline: -timeline.total_s)

    def _timeline(self, answer: Answer, outcome: str) -> RequestTimeline | None:
        call = answer.call
        opened = [choice for choice in answer.choices if choice.marks is not None]
        if not opened:
            return None
        last = max(opened, key=lambda choice: choice.marks.last_token_s if choice.marks else 0.0)
        marks = last.marks
        assert marks is not None
        now_s, usage = self._clock.now_s(), answer.usage
        return assemble(
            CallMarks(call.received_s or call.arrival_s, call.arrival_s, call.tokenised_s, now_s),
            marks,
            self._name,
            request_id=answer.choices[0].request_id,
            tenant=call.tenant.name,
            outcome=outcome,
            began_s=self._calendar_s() - (now_s - (call.received_s or call.arrival_s)),
            num_choices=len(answer.choices),
            num_prompt_tokens=usage.prompt,
            num_cached_tokens=usage.cached,
            num_tokens=usage.completion,
            is_streamed=call.is_streamed,
        )


class _Interval:
    """The slowest requests that ended within INTERVAL_S."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self._heap: list[tuple[float, int, RequestTimeline]] = []
        self._serials = count()

    def add(self, timeline: RequestTimeline) -> None:
        entry = timeline.total_s, next(self._serials), timeline
        if len(self._heap) < MAX_SLOWEST:
            heappush(self._heap, entry)
        elif entry > self._heap[0]:
            heappushpop(self._heap, entry)

    def timelines(self) -> Iterator[RequestTimeline]:
        return (timeline for _, _, timeline in self._heap)
