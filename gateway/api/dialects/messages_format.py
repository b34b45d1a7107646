"""The wire format of `/v1/messages`: Anthropic's message, whole or as its typed events."""

from collections.abc import Iterator
from typing import Final

import msgspec
import orjson

from baton.gateway.api.answer import AnswerChoice
from baton.gateway.api.dialects.messages import error_body
from baton.gateway.api.dialects.typed_events import ContentPart, Json, PartKind, TypedFormat
from baton.gateway.api.errors import ApiError
from baton.request import FinishReason

EMPTY: Final = {
    PartKind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
    PartKind.TEXT: {"type": "text", "text": ""},
}


class MessageFormat(TypedFormat):
    """An AnswerFormat for `/v1/messages`. Thinking has an empty signature: no server checks it."""

    def _begun(self) -> Iterator[Json]:
        message = self._message() | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": message | {"usage": self._usage(num_output=0)}}

    def _part_begun(self, part: ContentPart) -> Iterator[Json]:
        block: Json = EMPTY.get(part.kind) or _tool_use(part, {})
        yield {"type": "content_block_start", "index": part.index, "content_block": block}

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
        if choice.finish_reason is FinishReason.LENGTH:
            most = self._call.sampling.max_tokens
            is_full = most is not None and choice.num_tokens < most
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if _stop_sequence(choice) is not None:
            return "stop_sequence"
        return "tool_use" if choice.num_tool_calls else "end_turn"

    def _usage(self, *, num_output: int) -> Json:
        """Anthropic's count of the input has no cached tokens."""
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
    return _tool_use(part, _read(part.text))


def _tool_use(part: ContentPart, arguments: object) -> Json:
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments}


def _read(arguments: str) -> object:
    """Return the arguments of a call; {} for arguments that were cut off, or that the model broke."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, object])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
