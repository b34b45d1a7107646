"""Both formats of typed events: the stream, put together, is the answer in one piece."""

import json
from itertools import pairwise
from typing import Any

import pytest

from baton.gateway.api.answer import Answer, AnswerChoice, AnswerFormat
from baton.gateway.api.body import AskedResponse
from baton.gateway.api.call import Dialect
from baton.gateway.api.dialects.response_store import ResponseQuery, ResponseStore
from baton.gateway.api.dialects.typed_events import MessageFormat, ResponsesFormat
from baton.gateway.api.errors import ApiError
from baton.gateway.text.answer_reader import Delta, ToolCallDelta
from baton.request import FinishReason
from tests.scripted_service import ScriptedService, events
from tests.unit.gateway import calls

CALL = [ToolCallDelta(0, "call_1", "weather"), ToolCallDelta(0, arguments='{"city":')]
REST = [ToolCallDelta(0, arguments='"Paris"}'), ToolCallDelta(1, "call_2", "weather")]
REST += [ToolCallDelta(1, arguments="{}")]
DELTAS = [
    Delta(reasoning="Is it "),
    Delta(reasoning="far?", text="I "),
    Delta(text="look."),
    Delta(text=" Now.", tool_calls=CALL),
    Delta(tool_calls=REST),
]
NOW_S = 1_700_000_005


class Made:
    """An answer that has ended, and its format."""

    def __init__(self, dialect: Dialect, end: FinishReason = FinishReason.STOP, **asked: Any) -> None:
        self.store = ResponseStore(max_entries=4, max_bytes=10_000)
        response = AskedResponse(**{"echoed": {"store": b"true", "tools": b"[]"}, "is_stored": True, **asked})
        service = ScriptedService()
        self.answer: Answer = calls.answer(service, is_chat=True, dialect=dialect, response=response)
        heard = calls.Heard()
        self.answer.start(heard)
        (request,) = service.requests
        service.emit(request.request_id, events(request, calls.ids("a b"), end=end))
        assert heard.ends and heard.error is None
        self.choice: AnswerChoice = self.answer.choices[0]
        self.form: AnswerFormat = (
            MessageFormat(self.answer, 1_700_000_000)
            if dialect == "messages"
            else ResponsesFormat(self.answer, 1_700_000_000, self.store, lambda: NOW_S + 0.5)
        )

    def stream(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        written = self.form.first(self.choice)
        for delta in deltas:
            if delta.text or delta.reasoning:
                written += self.form.delta(self.choice, delta)
            for part in delta.tool_calls:
                written += self.form.tool_call(self.choice, part)
        return read(written + self.form.last(self.choice) + self.form.usage() + self.form.end())

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(b"".join(self.form.whole([Delta.joined(deltas)])))
        return found


def read(written: bytes) -> list[dict[str, Any]]:
    found = []
    for block in written.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        found.append(content)
    return found


def without_ids(value: Any) -> Any:
    """Ids have the name of the answer, which differs between two answers."""
    if isinstance(value, dict):
        return {key: without_ids(each) for key, each in value.items() if key != "id"}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("end", [FinishReason.STOP, FinishReason.LENGTH])
def test_last_event_of_a_response_is_the_whole_one(end: FinishReason) -> None:
    seen, whole = Made("responses", end).stream(DELTAS), Made("responses", end).whole(DELTAS)
    assert without_ids(seen[-1]["response"]) == without_ids(whole)
    assert [each["sequence_number"] for each in seen] == list(range(len(seen)))
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    is_cut_off = end is FinishReason.LENGTH
    assert [item["status"] == "incomplete" for item in whole["output"]] == [False] * 3 + [is_cut_off]
    assert whole["completed_at"] == (None if is_cut_off else NOW_S)


def test_events_of_a_response_add_up_to_its_items() -> None:
    seen = Made("responses").stream(DELTAS)
    for item in seen[-1]["response"]["output"]:
        own = [each for each in seen if each.get("item_id") == item["id"]]
        text = "".join(each["delta"] for each in own if each["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        done = [each["item"] for each in seen if each["type"] == "response.output_item.done"]
        assert item in done


def test_response_is_stored_before_its_last_event_is_written() -> None:
    made = Made("responses", items=b'[{"role":"user"}]')
    final = made.stream(DELTAS)[-1]["response"]
    kept = made.store.tell(ResponseQuery(calls.TENANT.name, final["id"]))
    assert kept is not None
    assert json.loads(kept.response) == final
    assert json.loads(kept.conversation) == [{"role": "user"}, *final["output"]]


def test_response_that_is_too_large_to_be_stored_says_so() -> None:
    whole = Made("responses").whole([Delta(text="a" * 20_000)])
    assert whole["store"] is False and Made("responses").whole(DELTAS)["store"] is True


def test_failed_response_has_the_parts_so_far() -> None:
    made = Made("responses")
    made.form.first(made.choice)
    made.form.delta(made.choice, Delta(text="Half"))
    (failed,) = read(made.form.failed(ApiError(429, "too many")))
    assert failed["response"]["error"] == {"code": "rate_limit_exceeded", "message": "too many"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "Half"


def test_blocks_of_a_message_follow_each_other_and_add_up() -> None:
    seen, whole = Made("messages").stream(DELTAS), Made("messages").whole(DELTAS)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    places = [(each["type"], each["index"]) for each in seen if "index" in each]
    assert all(before[1] <= after[1] for before, after in pairwise(places))
    for index, block in enumerate(whole["content"]):
        own = [each for each in seen if each.get("index") == index]
        assert own[0]["type"] == "content_block_start" and own[-1]["type"] == "content_block_stop"
        deltas = [each["delta"] for each in own[1:-1]]
        keys = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
        text = "".join(delta.get(keys[block["type"]], "") for delta in deltas)
        found = json.loads(text) if block["type"] == "tool_use" else text
        assert found == block[{"tool_use": "input"}.get(block["type"], block["type"])]
    assert [each["type"] for each in seen[-2:]] == ["message_delta", "message_stop"]
    assert seen[-2]["usage"] == whole["usage"]


def test_text_after_a_call_is_a_part_of_its_own() -> None:
    deltas = [Delta(text="a"), Delta(tool_calls=CALL), Delta(text="b")]
    output = Made("responses").stream(deltas)[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]


def test_arguments_that_were_cut_off_are_an_empty_input() -> None:
    block = Made("messages", FinishReason.LENGTH).whole([Delta(tool_calls=CALL)])["content"][0]
    assert (block["name"], block["input"]) == ("weather", {})


def test_input_of_a_call_has_the_numbers_that_the_model_wrote() -> None:
    call = ToolCallDelta(0, "call_1", "count", f'{{"to":{10**30}}}')
    (block,) = Made("messages").whole([Delta(tool_calls=[call])])["content"]
    assert block["input"] == {"to": 10**30}
