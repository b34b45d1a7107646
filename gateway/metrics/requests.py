"""The ended requests of one gateway: the latest ones, and the slowest of the last minutes.

An `EndedRequest` keeps what is known at the end of a call. Its timeline is assembled when an operator asks
and when the request is traced. The metrics count the parts of one call in COUNT_S, so a busy gateway counts a
sample.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappush, heappushpop
from itertools import count, islice
from typing import Final

from baton.clock import Clock
from baton.gateway.api.answer import Answer, AnswerChoice
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.metrics.tracing import Tracer, Value
from baton.gateway.streams.timeline import EndedRequest, PartList, RequestMarks
from baton.messages.operations import FindRequests, RequestTimeline

MAX_LATEST: Final = 1024
SLOWEST_S: Final = 900.0  # the slowest requests of so long are kept
INTERVAL_S: Final = 60.0
MAX_SLOWEST: Final = 100  # of each interval
COUNT_S: Final = 0.01  # between two timelines for the metrics: they take 0.2 % of a processor


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
        self._slowest: deque[_Interval] = deque(maxlen=round(SLOWEST_S / INTERVAL_S))
        self._counted_s = -COUNT_S

    def finished(self, answer: Answer, outcome: str) -> None:
        """Take a call that has just ended. outcome: a key of TenantCounts.calls."""
        marks = _last_marks(answer.choices)
        if marks is None:
            return  # it was refused before it could begin
        call, usage, now_s = answer.call, answer.usage, self._clock.now_s()
        received_s = call.received_s or call.arrival_s
        total_s = now_s - received_s
        known = RequestTimeline(
            request_id=answer.choices[0].request_id,
            tenant=call.tenant.name,
            outcome=outcome,
            gateway=self._name,
            began_s=self._calendar_s() - total_s,
            total_s=total_s,
            num_choices=len(answer.choices),
            num_prompt_tokens=usage.prompt,
            num_cached_tokens=usage.cached,
            num_tokens=usage.completion,
            is_streamed=call.is_streamed,
        )
        ended = EndedRequest(
            known=known,
            marks=marks,
            received_s=received_s,
            read_s=call.arrival_s,
            tokenised_s=call.tokenised_s,
            ended_s=now_s,
        )
        self._latest.append(ended)
        if not self._slowest or now_s - self._slowest[-1].began_s >= INTERVAL_S:
            self._slowest.append(_Interval(now_s))
        self._slowest[-1].add(ended)
        if now_s - self._counted_s >= COUNT_S:
            self._counted_s = now_s
            self._count(ended.parts())
        if self._tracer is not None:
            context = call.trace or self._tracer.context(None, None)  # None: over a WebSocket
            rule = self._tracer.rule(context, outcome, total_s)
            if rule is not None:
                self._tracer.export(context, ended.timeline(), _asked(answer), rule)

    def find(self, query: FindRequests) -> Sequence[RequestTimeline]:
        """Return the requests that a query asks for, the latest or the slowest first."""
        if query.request_id is not None:
            known = (*reversed(self._latest), *self._recent_slowest())
            of_id = (each for each in known if each.known.request_id == query.request_id)
            return [each.timeline() for each in islice(of_id, 1)]
        found: Iterable[EndedRequest] = reversed(self._latest)
        if query.order == "slowest":
            found = self._recent_slowest()
        of_tenant = (each for each in found if query.tenant in (None, each.known.tenant))
        return [each.timeline() for each in islice(of_tenant, query.limit)]

    def _count(self, parts: PartList) -> None:
        self._metrics.unaccounted.observe(parts.unaccounted_s)
        for part in parts.added:
            self._metrics.parts_us[part.name] += round(part.seconds * 1e6)

    def _recent_slowest(self) -> list[EndedRequest]:
        since_s = self._clock.now_s() - SLOWEST_S
        recent = [each for each in self._slowest if each.began_s >= since_s]
        requests = (request for each in recent for request in each.requests())
        return sorted(requests, key=lambda request: -request.known.total_s)


def _asked(answer: Answer) -> Mapping[str, Value | None]:
    """Return the attributes of a traced call that its timeline lacks."""
    call, sampling = answer.call, answer.call.sampling
    reasons = tuple(str(choice.finish_reason) for choice in answer.choices if choice.finish_reason)
    return {
        "gen_ai.operation.name": "chat" if call.is_chat else "text_completion",
        "gen_ai.request.model": call.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": call.num_choices if call.num_choices > 1 else None,
        "gen_ai.response.finish_reasons": reasons or None,
    }


def _last_marks(choices: Iterable[AnswerChoice]) -> RequestMarks | None:
    """Return the marks of the choice that ended last; None when no choice was opened."""
    last: RequestMarks | None = None
    for choice in choices:
        marks = choice.marks
        if marks is not None and (last is None or marks.last_token_s > last.last_token_s):
            last = marks
    return last


class _Interval:
    """The slowest requests that ended within INTERVAL_S."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self._heap: list[tuple[float, int, EndedRequest]] = []
        self._serials = count()

    def add(self, request: EndedRequest) -> None:
        """Keep a request if it is one of the slowest."""
        total_s, heap = request.known.total_s, self._heap
        if len(heap) < MAX_SLOWEST:
            heappush(heap, (total_s, next(self._serials), request))
        elif total_s > heap[0][0]:
            heappushpop(heap, (total_s, next(self._serials), request))

    def requests(self) -> Iterator[EndedRequest]:
        return (request for _, _, request in self._heap)
