"""Clients of resumable streams: they read server-sent events with their ids, and join their texts."""

import http.client
import json
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, Final, NamedTuple

from tests.waiting import wait_for

# A stream of a hundred tokens, whatever the model says.
BODY: Final[dict[str, Any]] = {
    "model": "tiny",
    "prompt": "the sun and the moon and a star; " * 6,
    "max_tokens": 100,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
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
) -> Generator[Event, None, None]:
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
    """Return all events of a POST."""
    return list(stream(port, body, last_id, headers=headers))


def joined(events: Sequence[Event]) -> dict[str, Any]:
    """Return the content of all chunks, independent of batches."""
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
    seen.setdefault("reasoning", "")
    seen["reasoning"] += delta.get("reasoning_content") or ""
    for part in delta.get("tool_calls") or []:
        _join_call(seen.setdefault("tool_calls", []), part)
    seen.setdefault("roles", []).extend([delta["role"]] if "role" in delta else [])
    for name, entries in (choice.get("logprobs") or {}).items():
        seen.setdefault(name, []).extend(entries or [])
    if choice["finish_reason"] is not None:
        seen["ends"].append((choice["finish_reason"], choice.get("stop_reason")))


def _join_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    if "id" in part:
        assert part["index"] == len(calls) and part["function"]["arguments"] == ""
        calls.append({**part, "function": dict(part["function"])})
    else:
        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


NUM_CLIENTS: Final = 3
PAUSE_S: Final = 0.6  # between an answer and the next request: workers start meanwhile
MORE_S: Final = 120.0


class SteadyClients:
    """Clients that send one request again and again, to several ports in turn, and compare the answers."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.num_answers = 0
        self._body = body
        self._ports = [port]
        self._choosing = threading.Lock()
        self._is_over = threading.Event()
        self.expected = joined(list(stream(port, body)))["choices"]

    def add(self, port: int) -> None:
        with self._choosing:
            self._ports.append(port)

    def remove(self, port: int) -> None:
        """Send no further request there; those that have begun go on."""
        with self._choosing:
            self._ports.remove(port)

    def until_more(self) -> None:
        """Wait until each client has been answered, and more."""
        wanted = self.num_answers + 2 * NUM_CLIENTS
        wait_for(lambda: self.num_answers >= wanted or self._is_over.is_set(), MORE_S)

    @contextmanager
    def asking(self) -> Iterator[None]:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [pool.submit(self._ask) for _ in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                self._is_over.set()
            for client in clients:
                client.result()

    def _ask(self) -> None:
        try:
            while not self._is_over.wait(PAUSE_S):
                with self._choosing:
                    self._ports.append(self._ports.pop(0))
                    events = stream(self._ports[-1], self._body)
                    first = next(events)
                assert joined([first, *events])["choices"] == self.expected
                self.num_answers += 1
        except BaseException:
            self._is_over.set()
            raise
