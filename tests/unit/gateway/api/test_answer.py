import asyncio
from typing import Any

import pytest

from baton.errors import IntegrityError, Overloaded, WorkerLost
from baton.gateway.api.answer import OPEN_AT_ONCE, Answer
from baton.gateway.text.answer_parsing import choice_reader
from baton.gateway.text.answer_reader import AnswerParsing, Delta, ToolCallDelta
from baton.request import FinishReason
from tests.event_loop import on_loop
from tests.scripted_service import WORKER_ID, ScriptedService, answer_at_once, events
from tests.unit.gateway import calls
from tests.unit.gateway.calls import Heard


def started(service: ScriptedService, **fields: Any) -> tuple[Answer, Heard]:
    answer, heard = calls.answer(service, **fields), Heard()
    answer.start(heard)
    return answer, heard


def test_tokens_become_text_until_the_end() -> None:
    service = ScriptedService()
    answer, heard = started(service)
    (request,) = service.requests
    assert request.token_ids == calls.PROMPT.token_ids and request.sampling.n == 1
    assert (request.tenant, request.cache_salt) == ("acme", calls.TENANT.cache_salt)
    service.emit(request.request_id, events(request, calls.ids("1 2"), end=None, num_cached_tokens=16))
    assert not heard.ends and heard.text() == "1 2"
    service.emit(request.request_id, events(request, calls.ids(" 3"), start=3))
    assert len(heard.ends) == 1 and heard.text() == "1 2 3" and answer.is_over
    assert answer.usage[1:] == (5, 16, 0)
    assert answer.choices[0].finish_reason is FinishReason.LENGTH
    assert not service.cancelled


def test_later_choices_wait_for_the_first_token_of_the_first_choice() -> None:
    service = ScriptedService()
    _, heard = started(service, num_choices=3, sampling={"prompt_logprobs": 1})
    (first,) = service.requests
    service.emit(first.request_id, events(first, calls.ids("1"), end=None))
    assert [request.choice for request in service.requests] == [0, 1, 2]
    assert service.besides == ["", WORKER_ID, WORKER_ID]
    assert [request.sampling.prompt_logprobs for request in service.requests] == [1, None, None]
    assert {request.sampling.seed for request in service.requests} == {7}
    service.emit(first.request_id, events(first, calls.ids("2"), start=1))
    assert len(service.requests) == 3 and not heard.ends
    for request in service.requests[1:]:
        service.emit(request.request_id, events(request, calls.ids("4")))
    assert len(heard.ends) == 1 and [heard.text(index) for index in range(3)] == ["12", "4", "4"]


def test_choices_share_the_parameters_of_the_call() -> None:
    service = ScriptedService(answer_at_once(calls.ids("1")))
    parsing = AnswerParsing(tool_call_parser="qwen3_coder", text_arguments={"f": frozenset({"x"})})
    answer, _ = started(service, num_choices=3, sampling={"stop": ("x",)}, parsing=parsing)
    assert len({id(request.sampling) for request in service.requests}) == 1
    reader = choice_reader(answer.call.parsing, iter(()))
    assert reader is not None and reader.options.text_arguments is parsing.text_arguments


def test_every_prompt_has_its_choices() -> None:
    service = ScriptedService(answer_at_once(calls.ids("1")))
    answer, heard = started(service, prompts=(calls.PROMPT, calls.PROMPT), num_choices=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.number for choice in answer.choices] == [0, 1, 0, 1]
    assert len(heard.ends) == 1 and len({request.request_id for request in service.requests}) == 4
    assert answer.usage.prompt == 2 * len(calls.PROMPT.token_ids)


def test_stop_string_cancels_the_request() -> None:
    service = ScriptedService()
    answer, heard = started(service, sampling={"stop": "2"})
    (request,) = service.requests
    service.emit(request.request_id, events(request, calls.ids("1 2 3"), end=None))
    assert heard.text() == "1 " and len(heard.ends) == 1
    assert service.cancelled == [request.request_id]
    assert answer.choices[0].stop_reason == "2"
    assert answer.usage.completion == 3  # tokens after the match do not count


def test_failure_of_one_choice_ends_all_choices() -> None:
    service = ScriptedService()
    answer, heard = started(service, num_choices=2)
    first = service.requests[0]
    service.emit(first.request_id, events(first, calls.ids("1"), end=None))
    error = WorkerLost("twice")
    service.fail(service.requests[1].request_id, error)
    assert heard.error is error and answer.is_over and not heard.ends
    assert service.cancelled == [first.request_id]


def test_answer_that_cannot_be_opened_cancels_its_choices() -> None:
    service = ScriptedService()

    def refuse_the_second(service: ScriptedService, request: object) -> None:
        service.refusal = Overloaded("full", retry_after_s=1)

    service.play = refuse_the_second
    answer = calls.answer(service, prompts=(calls.PROMPT, calls.PROMPT))
    with pytest.raises(Overloaded):
        answer.start(Heard())
    assert service.cancelled == [service.requests[0].request_id] and not service.sinks


@on_loop
async def test_many_choices_are_opened_a_few_in_each_turn() -> None:
    service = ScriptedService()
    calls.answer(service, prompts=(calls.PROMPT,) * (2 * OPEN_AT_ONCE + 1)).start(Heard())
    num_opened = [len(service.requests)]
    for _ in range(3):
        await asyncio.sleep(0)
        num_opened.append(len(service.requests))
    assert num_opened == [OPEN_AT_ONCE, 2 * OPEN_AT_ONCE, *[2 * OPEN_AT_ONCE + 1] * 2]


@on_loop
async def test_choice_that_cannot_be_opened_in_a_later_turn_fails_the_answer() -> None:
    service, heard = ScriptedService(), Heard()
    calls.answer(service, prompts=(calls.PROMPT,) * (OPEN_AT_ONCE + 1)).start(heard)
    service.refusal = Overloaded("full", retry_after_s=1)
    await asyncio.sleep(0)
    assert heard.error is service.refusal and not service.sinks


@on_loop
async def test_cancelled_answer_opens_no_more_choices() -> None:
    service = ScriptedService()
    answer = calls.answer(service, prompts=(calls.PROMPT,) * (OPEN_AT_ONCE + 1))
    answer.start(Heard())
    answer.cancel()
    await asyncio.sleep(0)
    assert len(service.requests) == OPEN_AT_ONCE and not service.sinks


def test_later_choice_that_cannot_be_opened_fails_the_answer() -> None:
    service = ScriptedService()
    _, heard = started(service, num_choices=2)
    (first,) = service.requests
    service.refusal = Overloaded("full", retry_after_s=1)
    service.emit(first.request_id, events(first, calls.ids("1"), end=None))
    assert heard.error is service.refusal and not service.sinks and not heard.ends


def test_listener_hears_nothing_after_cancel() -> None:
    service = ScriptedService()
    answer, heard = started(service)
    (request,) = service.requests
    sink = service.sinks[request.request_id]
    answer.cancel()
    answer.cancel()
    sink.tokens(events(request, calls.ids("1")))
    sink.failed(WorkerLost("late"))
    assert service.cancelled == [request.request_id]
    assert not heard.deltas and heard.error is None and not heard.ends


def test_tokens_that_cannot_be_shown_fail_only_their_own_request(caplog: pytest.LogCaptureFixture) -> None:
    """The message has tokens of other requests too, so the choice raises no error."""
    service = ScriptedService()
    answer, heard = started(service)
    (request,) = service.requests

    def break_down(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    heard.advanced = break_down  # type: ignore[assignment]
    service.emit(request.request_id, events(request, calls.ids("1"), end=None))
    assert isinstance(heard.error, IntegrityError) and answer.is_over
    assert service.cancelled == [request.request_id]
    assert "a bug" in caplog.text


def test_joined_deltas_have_one_piece_of_each_call() -> None:
    def part(index: int, arguments: str) -> ToolCallDelta:
        return ToolCallDelta(index, arguments=arguments)

    first, second = (ToolCallDelta(index, id=f"id {index}", name="f") for index in (0, 1))
    deltas = [
        Delta("a", [1], reasoning="hm"),
        Delta("b", [2], [], [first]),
        Delta(token_ids=[3], tool_calls=[part(0, '{"a"'), part(0, ":")]),
        Delta(tool_calls=[part(0, "1}"), second], reasoning="?"),
        Delta(tool_calls=[part(1, "{"), part(1, "}")]),
    ]
    whole = Delta.joined(deltas)
    assert (whole.text, whole.token_ids, whole.reasoning) == ("ab", [1, 2, 3], "hm?")
    assert whole.tool_calls == [first, part(0, '{"a":1}'), second, part(1, "{}")]
    assert Delta.joined([Delta.joined(deltas[:3]), Delta.joined(deltas[3:])]) == whole
