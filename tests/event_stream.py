"""A client of resumable streams: it reads server-sent events with their ids, and joins what they say."""

import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}


class Event(NamedTuple):
    id: str  # "": it has none
    data: str


class Refused(Exception):
    """The status and the error of an answer that is no stream."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status}: {error}")
        self.status = status
        self.error = error


def stream(
    port: int,
    body: dict[str, Any],
    last_id: str = "",
    *,
    headers: dict[str, str] | None = None,
    timeout_s: float = 120.0,
) -> Iterator[Event]:
    """The events of one POST. Raises Refused, and OSError or HTTPException where the connection breaks."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    with closing(connection):
        sent = {"Content-Type": "application/json", **(headers or {})}
        if last_id:
            sent["Last-Event-ID"] = last_id
        connection.request("POST", PATHS["messages" in body], json.dumps(body), sent)
        answer = connection.getresponse()
        if answer.status != 200:
            raise Refused(answer.status, json.loads(answer.read())["error"])
        event_id, data = "", ""
        for raw in answer:
            line = raw.decode().rstrip("\n")
            if line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: "):
                data = line[6:]
            elif not line and data:
                yield Event(event_id, data)
                if data == "[DONE]":
                    return
                event_id = data = ""
    raise ConnectionError("the stream ended without its last event")


def read_all(port: int, body: dict[str, Any], last_id: str = "", **headers: str) -> list[Event]:
    """To its end."""
    return list(stream(port, body, last_id, headers=headers))


def joined(events: Sequence[Event]) -> dict[str, Any]:
    """What the chunks say together, however the tokens came in batches."""
    whole: dict[str, Any] = {"heads": set(), "choices": {}, "usage": None, "is_done": False}
    for event in events:
        if event.data == "[DONE]":
            whole["is_done"] = True
            continue
        chunk = json.loads(event.data)
        assert "error" not in chunk, chunk
        whole["heads"].add((chunk["id"], chunk["object"], chunk["created"], chunk["model"]))
        if not chunk["choices"]:
            whole["usage"] = chunk["usage"]
        for choice in chunk["choices"]:
            seen = whole["choices"].setdefault(choice["index"], {"text": "", "ends": []})
            _join(seen, choice)
    return whole


def _join(seen: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {})
    seen["text"] += choice.get("text") or delta.get("content") or ""
    seen.setdefault("token_ids", []).extend(choice.get("token_ids") or [])
    seen.setdefault("tool_calls", []).extend(delta.get("tool_calls") or [])
    seen.setdefault("roles", []).extend([delta["role"]] if "role" in delta else [])
    for name, entries in (choice.get("logprobs") or {}).items():
        seen.setdefault(name, []).extend(entries or [])
    if choice["finish_reason"] is not None:
        seen["ends"].append((choice["finish_reason"], choice.get("stop_reason")))
