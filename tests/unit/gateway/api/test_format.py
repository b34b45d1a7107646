import json
import tracemalloc
from typing import Any

from baton.gateway.api.answer import Answer, AnswerFormat
from baton.gateway.api.call import Prompt
from baton.gateway.api.format import LogprobsFormat, answer_format
from baton.gateway.text.answer_reader import Delta
from baton.request import FinishReason, TokenEvent, TokenIds, TokenLogprobs
from tests.scripted_service import ScriptedService
from tests.unit.gateway import calls

PROMPT_IDS = list(calls.PROMPT.token_ids)


def logprobs(token_id: int, logprob: float = -0.5) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=logprob, rank=1, top=((token_id, logprob), (0, -7.0)))


def answered(text: str, **fields: Any) -> tuple[Answer, AnswerFormat, list[Delta]]:
    """Return an answer, its format and its deltas; every choice got this text in one batch."""
    service = ScriptedService()
    answer = calls.answer(service, **fields)
    heard = calls.Heard()
    answer.start(heard)
    has_logprobs, token_ids = answer.call.sampling.logprobs is not None, calls.ids(text)
    for index in range(len(answer.choices)):  # the first choice of a prompt opens the other choices
        request = service.requests[index]
        prompt = (None, *(logprobs(token_id, -1.5) for token_id in request.token_ids[1:]))
        batch = [
            TokenEvent(
                request.request_id,
                0,
                at,
                token_id,
                FinishReason.LENGTH if at == len(token_ids) - 1 else None,
                16,
                logprobs(token_id) if has_logprobs else None,
                prompt if at == 0 and request.sampling.prompt_logprobs is not None else None,
            )
            for at, token_id in enumerate(token_ids)
        ]
        service.emit(request.request_id, batch)
    form = answer_format(answer, 1_700_000_000)
    assert heard.error is None
    return answer, form, [heard.joined(choice.index) for choice in answer.choices]


def whole(text: str, **fields: Any) -> dict[str, Any]:
    _, form, deltas = answered(text, **fields)
    found: dict[str, Any] = json.loads(b"".join(form.whole(deltas)))
    return found


def test_whole_chat() -> None:
    answer, form, deltas = answered('1 "2" \u00e9', is_chat=True)
    found = json.loads(b"".join(form.whole(deltas)))
    assert found == {
        "id": f"chatcmpl-{answer.choices[0].request_id}",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": '1 "2" \u00e9'},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(PROMPT_IDS),
            "completion_tokens": len(deltas[0].token_ids),
            "total_tokens": len(PROMPT_IDS) + len(deltas[0].token_ids),
            "prompt_tokens_details": {"cached_tokens": 16},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_plain_deltas_equal_deltas_written_field_by_field() -> None:
    for is_chat in (True, False):
        plain_answer, plain, (delta,) = answered('a "b" \u00e9\n', is_chat=is_chat, model="100% tiny")
        _, slow, _ = answered('a "b" \u00e9\n', is_chat=is_chat, model="100% tiny", returns_token_ids=True)
        quick = json.loads(plain.delta(plain_answer.choices[0], delta))
        other = json.loads(slow.delta(plain_answer.choices[0], delta))
        del other["choices"][0]["token_ids"]
        assert quick | {"id": ""} == other | {"id": ""}
        assert quick["model"] == "100% tiny"


def test_echo_comes_first_and_counts_for_offsets() -> None:
    fields: dict[str, Any] = {"has_echo": True, "sampling": {"logprobs": 1, "prompt_logprobs": 1}}
    answer, form, (delta,) = answered("1 2", **fields)
    (choice,) = answer.choices
    first, text = (
        json.loads(chunk)["choices"][0] for chunk in (form.first(choice), form.delta(choice, delta))
    )
    assert first["text"] == calls.PROMPT.text and text["text"] == "1 2"
    assert first["logprobs"]["token_logprobs"] == [None, *[-1.5] * (len(PROMPT_IDS) - 1)]
    length = len(calls.PROMPT.text or "")
    assert text["logprobs"]["text_offset"] == [length, length + 1, length + 2]
    found = whole("1 2", **fields)["choices"][0]
    assert found["logprobs"]["text_offset"] == [
        *first["logprobs"]["text_offset"],
        *text["logprobs"]["text_offset"],
    ]
    assert found["text"] == f"{calls.PROMPT.text}1 2"


def test_token_ids_are_returned_on_request() -> None:
    chat = whole("1 2", is_chat=True, returns_token_ids=True)
    assert chat["prompt_token_ids"] == PROMPT_IDS and chat["choices"][0]["token_ids"] == calls.ids("1 2")
    choice = whole("1 2", returns_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == PROMPT_IDS and choice["token_ids"] == calls.ids("1 2")


def test_impossible_token_has_a_finite_logprob() -> None:
    entry = TokenLogprobs(token_id=5, logprob=float("-inf"), rank=9, top=((5, float("-inf")),))
    answer, form, _ = answered("1", is_chat=True, sampling={"logprobs": 1})
    chunk = form.delta(answer.choices[0], Delta("a", [5], [entry]))
    assert b"-9999.0" in chunk and b"null" in chunk  # the finish reason is all that is null
    assert json.loads(chunk)["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


LONG = Prompt(" ".join(["12"] * 700), TokenIds.of(calls.ids(" ".join(["12"] * 700))))


def test_long_logprobs_of_a_completion_are_written_in_slices() -> None:
    fields: dict[str, Any] = {"has_echo": True, "sampling": {"logprobs": 1, "prompt_logprobs": 1}}
    text = " ".join(["7"] * 700)
    answer, form, deltas = answered(text, prompts=(LONG,), **fields)
    (choice,), parts = answer.choices, list(form.whole(deltas))
    assert max(map(len, parts)) < 64 * 1024 < sum(map(len, parts))
    found = json.loads(b"".join(parts))["choices"][0]
    entries = [*(choice.prompt_logprobs or ()), *deltas[0].logprobs]
    token_ids = [*LONG.token_ids, *deltas[0].token_ids]
    assert found["logprobs"] == LogprobsFormat(calls.TOKENIZER).completion(entries, token_ids, 0)
    assert found["text"] == f"{LONG.text}{text}"


def test_long_logprobs_of_a_chat_are_written_in_slices() -> None:
    _, form, deltas = answered(" ".join(["7"] * 700), is_chat=True, sampling={"logprobs": 2})
    parts = list(form.whole(deltas))
    assert max(map(len, parts)) < 128 * 1024 < sum(map(len, parts))
    found = json.loads(b"".join(parts))["choices"][0]["logprobs"]
    assert found == {"content": LogprobsFormat(calls.TOKENIZER).chat(deltas[0].logprobs), "refusal": None}


def test_long_logprobs_of_a_completion_are_not_kept_while_they_are_written() -> None:
    fields: dict[str, Any] = {"has_echo": True, "sampling": {"logprobs": 1, "prompt_logprobs": 1}}
    _, form, deltas = answered(" ".join(["7"] * 5000), prompts=(LONG,), **fields)
    tracemalloc.start()
    num_bytes = sum(map(len, form.whole(deltas)))
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < num_bytes / 2


def test_streamed_echoes_of_a_prompt_are_equal() -> None:
    fields: dict[str, Any] = {"num_choices": 2, "sampling": {"logprobs": 1, "prompt_logprobs": 1}}
    answer, form, deltas = answered("1", prompts=(LONG,), has_echo=True, **fields)
    firsts = [json.loads(form.first(choice))["choices"][0] for choice in answer.choices]
    texts = [json.loads(form.delta(*each))["choices"][0] for each in zip(answer.choices, deltas, strict=True)]
    assert firsts[0]["logprobs"] == firsts[1]["logprobs"] and firsts[1]["index"] == 1
    num_chars = len(LONG.text or "")
    assert [text["logprobs"]["text_offset"] for text in texts] == [[num_chars]] * 2
