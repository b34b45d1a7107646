"""OpenTelemetry: the spans of a request, made from its timeline when the request has ended.

1. `Tracer.context` takes the W3C `traceparent` of a call, or begins a trace, and decides by its id whether
   the trace is sampled (head sampling). A caller's decision holds for the gateway too, as with
   OpenTelemetry's parent-based sampler.
2. `Tracer.rule` decides at the end of a call: a sampled trace is exported, and so is every call that failed
   or was slow (tail sampling). No span is made before, so a call that is not exported costs nothing else.
3. The SDK's batch processor sends spans in a thread of its own, over OTLP/HTTP.

The root is a span of kind SERVER with the attributes of OpenTelemetry's conventions for generative AI; each
attempt is a child, and each part of the timeline a child of its attempt. A part has the resource of its
process: `service.name` is the kind of process, `service.instance.id` the process. No span has text of a
prompt or of an answer.

The packages of the extra `otel` are imported when a tracer is made.
"""

import secrets
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import baton
from baton.config.environment import otel_service_name
from baton.config.gateway import GatewaySettings
from baton.errors import ConfigError, how_to_install
from baton.gateway.streams.request_stream import CANCELLED, FINISHED
from baton.messages.timeline import RequestTimeline, TimelineAttempt, TimelinePart

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

TRACE: Final = "trace"  # the key of a call's TraceContext in the state of its ASGI scope
TRACES_PATH: Final = "/v1/traces"
CLOSE_S: Final = 3.0  # for the last spans to be sent
SUCCESSES: Final = frozenset({"answered", "gone"})  # outcomes; gone: the client left
_NS: Final = 1_000_000_000
Value: TypeAlias = str | int | float | bool | tuple[str, ...]
Attributes: TypeAlias = Mapping[str, Value]


class TraceContext(NamedTuple):
    """The trace of one call, and the call's root span in the trace."""

    trace_id: int
    span_id: int
    is_sampled: bool  # by the caller or by head sampling
    parent: "SpanContext | None" = None  # the caller's span; None: the call began the trace

    @property
    def header(self) -> str:
        """The `traceparent` that names the root span."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"


def new_span_id() -> int:
    """Return a random id of a span; 0 is none."""
    return secrets.randbits(64) or 1


class Tracer:
    """Decides which calls are exported, and exports them. `close` it in the end."""

    def __init__(self, settings: GatewaySettings, model: str) -> None:
        """model: the name of the model that answers calls which name none. ConfigError: the extra is not
        installed.
        """
        assert settings.otlp_traces_endpoint is not None
        self._model = model
        self._slow_s = settings.trace_slow_s
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
        except ImportError as error:
            raise ConfigError(
                f"gateway.otlp_traces_endpoint: traces need {how_to_install('otel')}: {error}"
            ) from error
        self._exporter = OTLPSpanExporter(traces_url(settings.otlp_traces_endpoint))
        self._processor = BatchSpanProcessor(self._exporter)
        self._sampler = TraceIdRatioBased(settings.trace_sample_ratio)

    def context(self, traceparent: str | None, tracestate: str | None) -> TraceContext:
        """Return the trace of a call with these headers; a header that is not valid counts as none."""
        from opentelemetry.trace import get_current_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {"traceparent": traceparent or "", "tracestate": tracestate or ""}
        parent = get_current_span(TraceContextTextMapPropagator().extract(headers)).get_span_context()
        if parent.is_valid:
            return TraceContext(parent.trace_id, new_span_id(), parent.trace_flags.sampled, parent)
        trace_id = secrets.randbits(128) or 1
        sampling = self._sampler.should_sample(None, trace_id, "")
        return TraceContext(trace_id, new_span_id(), bool(sampling.decision.value))

    def rule(self, context: TraceContext, outcome: str, total_s: float) -> str | None:
        """Return the rule that samples a call that has just ended; None: the call is not exported.

        outcome, total_s: see RequestTimeline.
        """
        if context.is_sampled:
            return "head"
        if outcome not in SUCCESSES:
            return "failed"
        return "slow" if self._slow_s is not None and total_s >= self._slow_s else None

    def export(
        self, context: TraceContext, timeline: RequestTimeline, asked: Mapping[str, Value | None], rule: str
    ) -> None:
        """Export a call that a rule samples.

        asked: the attributes of the root that the timeline lacks; those that are None are left out. In a
        cluster of several models it has `gen_ai.response.model`.
        """
        found = {**asked, **_attributes(timeline), "baton.sampled_by": rule}
        found["gen_ai.response.model"] = asked.get("gen_ai.response.model") or self._model
        attributes = {name: value for name, value in found.items() if value is not None}
        for span in _spans(timeline, context, attributes):
            self._processor.on_end(span)

    def close(self) -> None:
        """Send the last spans, for CLOSE_S at most: a collector may not answer.

        An export that is under way then is not tried again.
        """
        closing = threading.Thread(target=self._processor.shutdown, name="tracer", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]


def traces_url(endpoint: str) -> str:
    """Return the URL that spans are sent to; an endpoint without a path gets the standard one."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES_PATH


def _attributes(timeline: RequestTimeline) -> Mapping[str, Value | None]:
    """Return the attributes of the root, by OpenTelemetry's names, vLLM's and Baton's own."""
    return {
        "gen_ai.provider.name": "baton",
        "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
        "gen_ai.usage.output_tokens": timeline.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": timeline.num_cached_tokens,
        "gen_ai.server.time_to_first_token": timeline.first_token_s,
        "gen_ai.latency.time_to_first_token": timeline.first_token_s,
        "gen_ai.latency.time_in_queue": timeline.seconds.get("queued", 0.0),
        "gen_ai.latency.e2e": timeline.total_s,
        "error.type": None if timeline.outcome in SUCCESSES else timeline.outcome,
        "baton.outcome": timeline.outcome,
        "baton.tenant": timeline.tenant or None,
        "baton.unaccounted_s": timeline.unaccounted_s,
        "baton.hidden_transfer_s": timeline.hidden_transfer_s,
        "baton.clock_error_s": timeline.clock_error_s,
        "baton.queue.num_ahead": timeline.num_ahead,
        "baton.queue.ahead_tenant": timeline.ahead_tenant or None,
    }


def _spans(
    timeline: RequestTimeline, trace: TraceContext, attributes: Attributes
) -> Iterator["ReadableSpan"]:
    """Yield the root, the attempts, and the parts, each under its attempt or under the root."""
    from opentelemetry.sdk.trace import Event
    from opentelemetry.trace import SpanKind

    began_s, first_s = timeline.began_s, timeline.first_token_s
    root = _context(trace, trace.span_id)
    yield _span(
        f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}",
        root,
        trace.parent,
        _resource("gateway", timeline.gateway),
        attributes,
        (began_s, began_s + timeline.total_s),
        error="" if timeline.outcome in SUCCESSES else timeline.outcome,
        kind=SpanKind.SERVER,
        events=() if first_s is None else (Event("first_token", timestamp=round((began_s + first_s) * _NS)),),
    )
    parents: list[tuple[TimelineAttempt, SpanContext]] = []
    for attempt in timeline.attempts:
        context = _context(trace, new_span_id())
        parents.append((attempt, context))
        yield _span(
            f"attempt {attempt.number}",
            context,
            root,
            _resource("gateway", timeline.gateway),
            {
                "baton.attempt": attempt.number,
                "baton.decode_worker": attempt.decode,
                "baton.prefill_worker": attempt.prefill or attempt.decode,
                "baton.num_tokens": attempt.num_tokens,
                "baton.end": attempt.end,
            },
            (began_s + attempt.begin_s, began_s + max(attempt.begin_s, attempt.end_s)),
            error="" if attempt.end in (FINISHED, CANCELLED) else attempt.end,
        )
    for part in timeline.parts:
        around = [context for attempt, context in parents if _is_within(part, attempt)]
        yield _span(
            part.name,
            _context(trace, new_span_id()),
            around[-1] if around else root,
            _resource(_kind(part.process, timeline), part.process),
            {},
            (began_s + part.begin_s, began_s + part.begin_s + part.seconds),
        )


def _span(
    name: str,
    context: "SpanContext",
    parent: "SpanContext | None",
    resource: "Resource",
    attributes: Attributes,
    interval_s: tuple[float, float],
    error: str = "",
    **fields: Any,
) -> "ReadableSpan":
    """Return a span that has ended. interval_s: in seconds since 1970."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Status, StatusCode

    begin_ns, end_ns = (round(each * _NS) for each in interval_s)
    return ReadableSpan(
        name,
        context=context,
        parent=parent,
        resource=resource,
        attributes=attributes,
        status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
        start_time=begin_ns,
        end_time=end_ns,
        instrumentation_scope=_scope(),
        **fields,
    )


def _is_within(part: TimelinePart, attempt: TimelineAttempt) -> bool:
    """Return whether a part belongs to an attempt: more than half of it passed within the attempt."""
    return attempt.begin_s <= part.begin_s + part.seconds / 2 < attempt.end_s


def _kind(process: str, timeline: RequestTimeline) -> str:
    """Return the kind of the process that a part names."""
    kind, _, identity = process.partition(" ")
    if not process or (kind in ("gateway", "router") and identity):
        return kind or "gateway"
    return "prefill" if any(process == attempt.prefill for attempt in timeline.attempts) else "decode"


def _context(trace: TraceContext, span_id: int) -> "SpanContext":
    from opentelemetry.trace import SpanContext, TraceFlags

    state = None if trace.parent is None else trace.parent.trace_state
    return SpanContext(trace.trace_id, span_id, False, TraceFlags(TraceFlags.SAMPLED), state)


@cache
def _scope() -> "InstrumentationScope":
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    return InstrumentationScope("baton", baton.__version__)


@cache
def _resource(kind: str, process: str) -> "Resource":
    """Return the resource of one process. OTEL_RESOURCE_ATTRIBUTES adds to each; workers keep their names."""
    from opentelemetry.sdk.resources import Resource

    return Resource.create(
        {
            "service.name": f"{otel_service_name()}-{kind}",
            "service.instance.id": process or kind,
            "service.version": baton.__version__,
        }
    )
