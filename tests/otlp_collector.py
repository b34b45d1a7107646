"""A collector of OpenTelemetry traces, as a process: it takes OTLP over HTTP, and prints spans as JSON lines.

Run as a program: the first line is the port. `Collector` runs it and reads the lines.
"""

import gzip
import json
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any, Final, Self

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.http_answers import Answering

TIMEOUT_S = 20.0


class CollectedSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A span as the collector received it. Ids are hex; times are nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begin_ns: int
    end_ns: int
    status: int
    trace_state: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    events: list[str]


SERVER: Final = 2  # the kind of span that a gateway has for a call


class Collector:
    """The process, and the spans that it has received."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        command = (sys.executable, "-m", "tests.otlp_collector")
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        """Return the spans of a trace so far."""
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def wait_for(self, trace_id: str) -> list[CollectedSpan]:
        """Return a trace once the gateway's span is there and no span has come for a moment."""
        until_s, seen = time.monotonic() + TIMEOUT_S, -1
        while time.monotonic() < until_s:
            found = self.trace(trace_id)
            if len(found) == seen and any(span.kind == SERVER for span in found):
                return found
            seen = len(found)
            time.sleep(0.2)
        raise AssertionError(f"no trace {trace_id}; of {[span.name for span in self.spans]}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.spans.append(msgspec.json.decode(line, type=CollectedSpan))


def _values(attributes: Any) -> dict[str, Any]:
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        is_list = kind == "array_value"
        found[each.key] = [entry.string_value for entry in value.values] if is_list else value
    return found


class _Handler(Answering):
    def post(self) -> None:
        """Take an export."""
        body = self.body()
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path != "/v1/traces" or self.headers["content-type"] != "application/x-protobuf":
            self.send_error(404)
            return
        request = ExportTraceServiceRequest.FromString(body)
        for group in request.resource_spans:
            resource = _values(group.resource.attributes)
            for span in (span for scope in group.scope_spans for span in scope.spans):
                line = CollectedSpan(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=span.kind,
                    begin_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    status=span.status.code,
                    trace_state=span.trace_state,
                    attributes=_values(span.attributes),
                    resource=resource,
                    events=[event.name for event in span.events],
                )
                print(json.dumps(msgspec.to_builtins(line)), flush=True)
        body = ExportTraceServiceResponse().SerializeToString()
        self.answer(200, body, {"content-type": "application/x-protobuf"})


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
