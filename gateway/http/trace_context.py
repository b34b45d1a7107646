"""W3C Trace Context: the headers `traceparent` and `tracestate`, which join a caller's spans and ours."""

import re
import secrets
from typing import Final, NamedTuple

TRACE: Final = "trace"  # the key of a call's TraceContext in the state of its ASGI scope
_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1


class TraceContext(NamedTuple):
    """The trace of one call, and the call's root span in the trace."""

    trace_id: int
    span_id: int
    is_sampled: bool  # by the caller or by head sampling
    parent_id: int = 0  # the caller's span; 0: the call began the trace
    state: str = ""  # the caller's tracestate

    @property
    def header(self) -> str:
        """The `traceparent` that names the root span."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"


def read_traceparent(text: str) -> tuple[int, int, bool] | None:
    """Return trace id, span id and whether the caller samples; None for a header that is not valid."""
    match = _PARENT.fullmatch(text.strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5] is not None):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    return (trace_id, span_id, bool(int(match[4], 16) & _SAMPLED)) if trace_id and span_id else None


def new_span_id() -> int:
    """Return a random id of a span; 0 is none."""
    return secrets.randbits(64) or 1
