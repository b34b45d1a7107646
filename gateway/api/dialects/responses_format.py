"""The wire format of `/v1/responses`: OpenAI's response, whole or as its typed events.

An item of the output is one part of the answer: `reasoning`, `message` or `function_call`. A response that is
to be stored is stored before the client hears of its end: the next turn may follow at once.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Final

import orjson

from baton.gateway.api.answer import Answer, AnswerChoice
from baton.gateway.api.dialects.response_store import ID_PREFIX, ResponseStore, StoredResponse
from baton.gateway.api.dialects.typed_events import ContentPart, Json, PartKind, TypedFormat, event
from baton.gateway.api.errors import ApiError
from baton.request import FinishReason

ITEM_PREFIX: Final = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.CALL: "fc"}


class ResponsesFormat(TypedFormat):
    """An AnswerFormat for `/v1/responses`."""

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
        if part.kind is PartKind.TEXT:
            yield {"type": "response.output_text.delta", **self._place(part), "delta": text, "logprobs": []}
        elif part.kind is PartKind.REASONING:
            yield {"type": "response.reasoning_text.delta", **self._place(part), "delta": text}
        else:
            place = self._place(part)
            yield {"type": "response.function_call_arguments.delta", **place, "delta": text}

    def _part_ended(self, part: ContentPart, *, is_cut_off: bool) -> Iterator[Json]:
        place, text = self._place(part), part.text
        if part.kind is PartKind.TEXT:
            yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
        elif part.kind is PartKind.REASONING:
            yield {"type": "response.reasoning_text.done", **place, "text": text}
        else:
            done = {"name": part.name, "arguments": text}
            yield {"type": "response.function_call_arguments.done", **place, **done}
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
        is_cut_off = choice.finish_reason is FinishReason.LENGTH
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
        """Store a response that is to be stored; one above the tenant's bound says that it is not."""
        asked = self._call.response
        if asked is None or not asked.is_stored:
            return
        stored = StoredResponse(orjson.dumps(response), asked.items, orjson.dumps(response["output"]))
        response["store"] = self._store.put(self._call.tenant.name, self._id, stored)

    def _response(self, status: str, output: list[Json]) -> Json:
        sampling = self._call.sampling
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
            **self._echoed,
        }

    @cached_property
    def _echoed(self) -> Json:
        asked = self._call.response
        echoed: Json = {} if asked is None else orjson.loads(asked.echoed)
        return echoed

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
