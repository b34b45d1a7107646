"""The wire formats of `/v1/responses` and `/v1/messages`: an answer in one piece, or as typed events.

An answer has parts, one after another: reasoning, text, and calls of tools. Each part begins, grows and ends,
and each of these moments is an event of its own:

    begun -> part 0 begins, grows ..., ends -> part 1 begins, grows ..., ends -> ended | failed

`TypedFormat` follows the parts. `ResponsesFormat` (OpenAI) and `MessageFormat` (Anthropic) write the events
of each moment, and the answer in one piece. Answers of this kind have one choice.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from io import StringIO
from typing import Any, Final, TypeAlias

import msgspec
import orjson

from baton.gateway.api.answer import Answer, AnswerChoice
from baton.gateway.api.dialects.messages import error_body
from baton.gateway.api.dialects.response_store import ID_PREFIX, ResponseStore, StoredResponse
from baton.gateway.api.errors import ApiError
from baton.gateway.text.answer_reader import Delta, ToolCallDelta
from baton.request import FinishReason

Json: TypeAlias = dict[str, Any]


class PartKind(StrEnum):
    """The kinds of parts."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


ITEM_PREFIX: Final = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.CALL: "fc"}
# The names of OpenAI's events of a part.
EVENTS: Final = {
    PartKind.REASONING: "response.reasoning_text",
    PartKind.TEXT: "response.output_text",
    PartKind.CALL: "response.function_call_arguments",
}


class ContentPart:
    """One part of an answer."""

    def __init__(self, kind: PartKind, index: int, call: ToolCallDelta | None = None) -> None:
        """call: the beginning of a call."""
        self.kind = kind
        self.index = index
        self.call_id = "" if call is None else call.id
        self.name = "" if call is None else call.name
        self._text = StringIO()

    def append(self, text: str) -> None:
        """Add text, or a piece of a call's arguments."""
        self._text.write(text)

    @property
    def text(self) -> str:
        """The text so far; of a call, its arguments."""
        return self._text.getvalue()


def event(content: Json) -> bytes:
    """Return a server-sent event; its name is the `type` of the content."""
    return b"event: %s\ndata: %s\n\n" % (content["type"].encode(), orjson.dumps(content))


class TypedFormat(ABC):
    """An AnswerFormat of typed events."""

    def __init__(self, answer: Answer, created_s: int) -> None:
        """created_s: in seconds since 1970."""
        self._answer = answer
        self._call = answer.call
        self._created_s = created_s
        self._parts: list[ContentPart] = []
        self._open: ContentPart | None = None

    # The moments of an answer, for subclasses.

    @abstractmethod
    def _begun(self) -> Iterator[Json]:
        """Yield the events before the first part."""

    @abstractmethod
    def _part_begun(self, part: ContentPart) -> Iterator[Json]:
        """Yield the events of a new part, which has no text."""

    @abstractmethod
    def _part_grown(self, part: ContentPart, text: str) -> Iterator[Json]:
        """Yield the events of more text, which the part has already."""

    @abstractmethod
    def _part_ended(self, part: ContentPart, *, is_cut_off: bool) -> Iterator[Json]:
        """Yield the events of the end of a part. is_cut_off: the limit of tokens has ended it."""

    @abstractmethod
    def _ended(self, choice: AnswerChoice) -> Iterator[Json]:
        """Yield the events after the last part."""

    @abstractmethod
    def _failed(self, error: ApiError) -> Iterator[Json]:
        """Yield the events of a failure."""

    @abstractmethod
    def _whole(self, choice: AnswerChoice) -> Json:
        """Return the answer in one piece; it has ended, and has all its parts."""

    # What AnswerStream and Inference call: see AnswerFormat.

    def first(self, choice: AnswerChoice) -> bytes:
        return self._written(self._begun())

    def delta(self, choice: AnswerChoice, delta: Delta) -> bytes:
        return self._written(self._grow(delta))

    def tool_call(self, choice: AnswerChoice, part: ToolCallDelta) -> bytes:
        return self._written(self._grow_call(part))

    def last(self, choice: AnswerChoice) -> bytes:
        return self._written([*self._close(is_cut_off=_is_cut_off(choice)), *self._ended(choice)])

    def usage(self) -> bytes:
        """See AnswerFormat: the last event has the usage."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        return self._written(self._failed(error))

    def end(self) -> bytes:
        """See AnswerFormat: the last event is the end."""
        return b""

    def whole(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        (delta,), (choice,) = deltas, self._answer.choices
        for _ in self._grow(delta):
            pass
        for part in delta.tool_calls:
            for _ in self._grow_call(part):
                pass
        for _ in self._close(is_cut_off=_is_cut_off(choice)):
            pass
        yield orjson.dumps(self._whole(choice))

    def _written(self, events: Iterable[Json]) -> bytes:
        return b"".join([event(each) for each in events])

    def _grow(self, delta: Delta) -> Iterator[Json]:
        for kind, text in ((PartKind.REASONING, delta.reasoning), (PartKind.TEXT, delta.text)):
            if text:
                if self._open is None or self._open.kind is not kind:
                    yield from self._begin(ContentPart(kind, len(self._parts)))
                yield from self._add(text)

    def _grow_call(self, part: ToolCallDelta) -> Iterator[Json]:
        if part.is_first:
            yield from self._begin(ContentPart(PartKind.CALL, len(self._parts), part))
        if part.arguments:
            yield from self._add(part.arguments)

    def _begin(self, part: ContentPart) -> Iterator[Json]:
        yield from self._close(is_cut_off=False)
        self._open = part
        self._parts.append(part)
        yield from self._part_begun(part)

    def _add(self, text: str) -> Iterator[Json]:
        part = self._open
        assert part is not None
        part.append(text)
        yield from self._part_grown(part, text)

    def _close(self, *, is_cut_off: bool) -> Iterator[Json]:
        part, self._open = self._open, None
        if part is not None:
            yield from self._part_ended(part, is_cut_off=is_cut_off)


def _is_cut_off(choice: AnswerChoice) -> bool:
    return choice.finish_reason is FinishReason.LENGTH


class ResponsesFormat(TypedFormat):
    """An AnswerFormat for `/v1/responses`.

    An item of the output is one part of the answer: `reasoning`, `message` or `function_call`. A response
    that is to be stored is stored before the client hears of its end: the next turn may follow at once.
    """

    def __init__(
        self, answer: Answer, created_s: int, store: ResponseStore, calendar_s: Callable[[], float]
    ) -> None:
        """store: keeps responses that are to be stored. calendar_s: seconds since 1970."""
        super().__init__(answer, created_s)
        self._store = store
        self._calendar_s = calendar_s
        self._num_events = 0
        self._id = f"{ID_PREFIX}{answer.name.hex()}"

    def _written(self, events: Iterable[Json]) -> bytes:
        written = []
        for each in events:
            written.append(event({**each, "sequence_number": self._num_events}))
            self._num_events += 1
        return b"".join(written)

    def _begun(self) -> Iterator[Json]:
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response("in_progress", [])}

    def _part_begun(self, part: ContentPart) -> Iterator[Json]:
        item = self._item(part, "in_progress")
        if part.kind is not PartKind.CALL:
            item["content"] = []
        yield {"type": "response.output_item.added", "output_index": part.index, "item": item}
        if part.kind is not PartKind.CALL:
            yield {"type": "response.content_part.added", **self._place(part), "part": _content(part)}

    def _part_grown(self, part: ContentPart, text: str) -> Iterator[Json]:
        logprobs: Json = {"logprobs": []} if part.kind is PartKind.TEXT else {}
        yield {"type": f"{EVENTS[part.kind]}.delta", **self._place(part), "delta": text, **logprobs}

    def _part_ended(self, part: ContentPart, *, is_cut_off: bool) -> Iterator[Json]:
        place = self._place(part)
        done: Json = {"text": part.text}
        if part.kind is PartKind.TEXT:
            done["logprobs"] = []
        elif part.kind is PartKind.CALL:
            done = {"name": part.name, "arguments": part.text}
        yield {"type": f"{EVENTS[part.kind]}.done", **place, **done}
        if part.kind is not PartKind.CALL:
            yield {"type": "response.content_part.done", **place, "part": _content(part)}
        item = self._item(part, "incomplete" if is_cut_off else "completed")
        yield {"type": "response.output_item.done", "output_index": part.index, "item": item}

    def _ended(self, choice: AnswerChoice) -> Iterator[Json]:
        response = self._whole(choice)
        yield {"type": f"response.{response['status']}", "response": response}

    def _failed(self, error: ApiError) -> Iterator[Json]:
        response = self._response("failed", [self._item(part, "incomplete") for part in self._parts])
        is_limit = error.status == 429
        code = "rate_limit_exceeded" if is_limit else "server_error"
        yield {
            "type": "response.failed",
            "response": response | {"error": {"code": code, "message": str(error)}},
        }

    def _whole(self, choice: AnswerChoice) -> Json:
        is_cut_off = _is_cut_off(choice)
        output = [self._item(part, "completed") for part in self._parts]
        if is_cut_off and output:
            output[-1]["status"] = "incomplete"
        response = self._response("incomplete" if is_cut_off else "completed", output)
        response["usage"] = self._usage()
        if is_cut_off:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(self._calendar_s())
        self._keep(response)
        return response

    def _keep(self, response: Json) -> None:
        """Store the response if the call asks for it; `store` is False if it exceeds the tenant's bound."""
        asked = self._call.response
        if asked is None or not asked.is_stored:
            return
        stored = StoredResponse(orjson.dumps(response), asked.items, orjson.dumps(response["output"]))
        response["store"] = self._store.put(self._call.tenant.name, self._id, stored)

    def _response(self, status: str, output: list[Json]) -> Json:
        sampling, asked = self._call.sampling, self._call.response
        echoed = {} if asked is None else asked.echoed
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._call.model,
            "output": output,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "usage": None,
            **{name: orjson.Fragment(value) for name, value in echoed.items()},
        }

    def _usage(self) -> Json:
        num_prompt, num_completion, num_cached, num_reasoning = self._answer.usage
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": num_completion,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_prompt + num_completion,
        }

    def _place(self, part: ContentPart) -> Json:
        place = {"item_id": self._item_id(part), "output_index": part.index}
        return place if part.kind is PartKind.CALL else {**place, "content_index": 0}

    def _item_id(self, part: ContentPart) -> str:
        return f"{ITEM_PREFIX[part.kind]}_{self._answer.name.hex()}{part.index:02x}"

    def _item(self, part: ContentPart, status: str) -> Json:
        item: Json = {"id": self._item_id(part), "status": status}
        if part.kind is PartKind.TEXT:
            return {**item, "type": "message", "role": "assistant", "content": [_content(part)]}
        if part.kind is PartKind.REASONING:
            return {**item, "type": "reasoning", "summary": [], "content": [_content(part)]}
        called = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
        return {**item, "type": "function_call", **called}


def _content(part: ContentPart) -> Json:
    if part.kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


class MessageFormat(TypedFormat):
    """An AnswerFormat for `/v1/messages`. Thinking has an empty signature: no server checks it."""

    def _begun(self) -> Iterator[Json]:
        message = self._message() | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": message | {"usage": self._usage(num_output=0)}}

    def _part_begun(self, part: ContentPart) -> Iterator[Json]:
        yield {"type": "content_block_start", "index": part.index, "content_block": _block(part)}

    def _part_grown(self, part: ContentPart, text: str) -> Iterator[Json]:
        delta = {
            PartKind.REASONING: {"type": "thinking_delta", "thinking": text},
            PartKind.TEXT: {"type": "text_delta", "text": text},
            PartKind.CALL: {"type": "input_json_delta", "partial_json": text},
        }[part.kind]
        yield {"type": "content_block_delta", "index": part.index, "delta": delta}

    def _part_ended(self, part: ContentPart, *, is_cut_off: bool) -> Iterator[Json]:
        if part.kind is PartKind.REASONING:
            delta = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": part.index, "delta": delta}
        yield {"type": "content_block_stop", "index": part.index}

    def _ended(self, choice: AnswerChoice) -> Iterator[Json]:
        usage = self._usage(num_output=choice.num_tokens)
        yield {"type": "message_delta", "delta": self._end(choice), "usage": usage}
        yield {"type": "message_stop"}

    def _failed(self, error: ApiError) -> Iterator[Json]:
        yield orjson.loads(error_body(error))

    def _whole(self, choice: AnswerChoice) -> Json:
        content = [_block(part) for part in self._parts]
        usage = self._usage(num_output=choice.num_tokens)
        return {**self._message(), "content": content, **self._end(choice), "usage": usage}

    def _message(self) -> Json:
        return {
            "id": f"msg_{self._answer.name.hex()}",
            "type": "message",
            "role": "assistant",
            "model": self._call.model,
        }

    def _end(self, choice: AnswerChoice) -> Json:
        return {"stop_reason": self._stop_reason(choice), "stop_sequence": _stop_sequence(choice)}

    def _stop_reason(self, choice: AnswerChoice) -> str:
        if _is_cut_off(choice):
            most = self._call.sampling.max_tokens
            is_full = most is not None and choice.num_tokens < most
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if _stop_sequence(choice) is not None:
            return "stop_sequence"
        return "tool_use" if choice.num_tool_calls else "end_turn"

    def _usage(self, *, num_output: int) -> Json:
        """Return the usage; Anthropic does not count cached tokens as input."""
        num_prompt, _, num_cached, _ = self._answer.usage
        return {
            "input_tokens": num_prompt - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_output,
        }


def _stop_sequence(choice: AnswerChoice) -> str | None:
    return choice.stop_reason if isinstance(choice.stop_reason, str) else None


def _block(part: ContentPart) -> Json:
    if part.kind is PartKind.REASONING:
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.kind is PartKind.TEXT:
        return {"type": "text", "text": part.text}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _read(part.text)}


def _read(arguments: str) -> object:
    """Return the arguments of a call as written; {} for those that were cut off, or that are no object."""
    try:
        msgspec.json.decode(arguments, type=dict[str, object])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    return orjson.Fragment(arguments)
