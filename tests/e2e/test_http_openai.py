"""The real `openai` client against the real application on a socket, with the tiny model behind it.

Most of it twice: over one engine, and over a whole cluster with a prefill and a decode worker.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel, Field

from baton.cluster.offline.llm import LLM
from baton.request import SamplingParams
from tests.engine_frontend import EngineFrontend
from tests.served_gateway import ServedGateway

Served = ServedGateway[EngineFrontend]
QUESTION = "sort(3 1 2)="
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(autouse=True)
def nothing_runs_on(served: Served) -> Iterator[None]:
    yield
    served.until(lambda: not served.service.sinks)


def chat(client: openai.OpenAI, **settings: object) -> openai.types.chat.ChatCompletion:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, **settings)  # type: ignore[call-overload]
    assert isinstance(answer, openai.types.chat.ChatCompletion)
    return answer


def chunks(client: openai.OpenAI, **settings: object) -> list[ChatCompletionChunk]:
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=MESSAGES, temperature=0, stream=True, **settings
    )
    return list(stream)


def test_chat_is_answered(client: openai.OpenAI, llm: LLM) -> None:
    answer = chat(client, max_tokens=16)
    (expected,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=16))
    choice = answer.choices[0]
    assert choice.message.content == expected.outputs[0].text == "1 2 3"
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


class Fruit(BaseModel):
    """A form of answers."""

    name: Literal["fig", "plum"]
    count: int = Field(ge=0, le=99)


def test_answer_is_parsed_by_the_client(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "fig or plum"}]
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="tiny", messages=messages, temperature=1, seed=seed, response_format=Fruit
        )
        assert isinstance(answer.choices[0].message.parsed, Fruit)


def test_form_holds_in_a_stream(client: openai.OpenAI) -> None:
    found = chunks(client, extra_body={"structured_outputs": {"regex": "[0-9]{3}-[a-z]{4}"}})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in found)
    assert re.fullmatch("[0-9]{3}-[a-z]{4}", text) and found[-1].choices[0].finish_reason == "stop"


def test_keyword_that_cannot_be_honoured_is_named(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        chat(client, response_format=wanted)
    assert refused.value.param == "response_format"


def test_stream_has_role_text_finish_and_usage_in_this_order(client: openai.OpenAI) -> None:
    found = chunks(client, stream_options={"include_usage": True})
    first, *middle, last, usage = found
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == "1 2 3"
    assert all("role" not in chunk.choices[0].delta.model_fields_set for chunk in middle)
    assert last.choices[0].finish_reason == "stop" and not last.choices[0].delta.model_fields_set
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in found[:-1])
    assert len({chunk.id for chunk in found}) == 1


def test_usage_may_come_with_every_chunk(client: openai.OpenAI) -> None:
    found = chunks(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk.usage.completion_tokens for chunk in found if chunk.usage is not None]
    assert len(counts) == len(found) and counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 6)


def test_answer_that_ends_with_its_first_token_counts_one(client: openai.OpenAI, llm: LLM) -> None:
    (end,) = llm.tokenizer.encode("<|end|>")
    answer = chat(client, logit_bias={str(end): 100})
    assert answer.choices[0].message.content == "" and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 1
    first, last = chunks(client, logit_bias={str(end): 100})
    assert first.choices[0].delta.role == "assistant" and last.choices[0].finish_reason == "stop"


def test_choices_with_a_seed_equal_those_of_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    sampling = SamplingParams(n=3, seed=7, temperature=1.5, max_tokens=12)
    (expected,) = llm.generate("the sun", sampling)
    answer = client.completions.create(
        model="tiny", prompt="the sun", n=3, seed=7, temperature=1.5, max_tokens=12
    )
    assert [choice.text for choice in answer.choices] == [output.text for output in expected.outputs]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) > 1


def test_chat_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=3, logprobs=2))
    answer = chat(client, max_tokens=3, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    outputs = expected.outputs[0].logprobs
    assert content is not None and outputs is not None
    assert [entry.token for entry in content] == ["1", " ", "2"]
    assert [entry.logprob for entry in content] == pytest.approx([entry.logprob for entry in outputs])
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].bytes == [ord("1")]


def test_streamed_logprobs_equal_those_of_a_whole_answer(client: openai.OpenAI) -> None:
    whole = chat(client, logprobs=True, top_logprobs=1).choices[0].logprobs
    found = chunks(client, logprobs=True, top_logprobs=1)
    streamed = [
        entry
        for chunk in found
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert whole is not None and whole.content is not None
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.content]


def test_completion_echoes_its_prompt_with_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    """Log-likelihood tasks ask for no generated token."""
    answer = client.completions.create(model="tiny", prompt=QUESTION, echo=True, logprobs=1, max_tokens=0)
    (expected,) = llm.generate(QUESTION, SamplingParams(max_tokens=1, prompt_logprobs=1))
    choice = answer.choices[0]
    assert choice.text == QUESTION and choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert expected.prompt_logprobs is not None
    logprobs = [None if entry is None else entry.logprob for entry in expected.prompt_logprobs]
    first, *others = choice.logprobs.token_logprobs
    assert [first] == [None] and others == pytest.approx(logprobs[1:])
    assert "".join(choice.logprobs.tokens or ()) == QUESTION
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_every_form_of_prompt(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode(QUESTION)
    for prompt, num_answers in ((QUESTION, 1), ([QUESTION] * 2, 2), (ids, 1), ([ids, ids, ids], 3)):
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0)
        assert [choice.text for choice in answer.choices] == ["1 2 3"] * num_answers
        assert answer.usage is not None and answer.usage.prompt_tokens == num_answers * len(ids)


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    for _ in range(3):  # both workers of the cluster may compute the prompt for the first time
        answer = client.completions.create(model="tiny", prompt="the moon and the sun " * 8, max_tokens=1)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= 16


def test_extra_fields_of_vllm(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=9, extra_body={"ignore_eos": True, "min_tokens": 9, "top_k": -1})
    assert answer.usage is not None and answer.usage.completion_tokens == 9
    answer = chat(client, extra_body={"return_token_ids": True})
    extra = answer.choices[0].model_extra
    assert extra is not None and len(extra["token_ids"]) == 6
    assert answer.model_extra is not None and len(answer.model_extra["prompt_token_ids"]) == 12


def test_prompt_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2))
    answer = chat(client, max_tokens=3, extra_body={"prompt_logprobs": 2})
    assert answer.model_extra is not None and expected.prompt_logprobs is not None
    first, *shown = answer.model_extra["prompt_logprobs"]
    assert first is None and len(shown) == len(expected.prompt_token_ids) - 1
    for entry, known in zip(shown, expected.prompt_logprobs[1:], strict=True):
        assert known is not None
        own = entry[str(known.token_id)]
        assert (own["logprob"], own["rank"]) == (pytest.approx(known.logprob), known.rank)
        assert entry.keys() == {str(token_id) for token_id, _ in known.top} | {str(known.token_id)}
    completion = client.completions.create(
        model="tiny", prompt=QUESTION, max_tokens=1, n=2, extra_body={"prompt_logprobs": 0}
    )
    num_tokens = len(llm.tokenizer.encode(QUESTION))
    extras = [choice.model_extra or {} for choice in completion.choices]
    assert extras[0]["prompt_logprobs"] == extras[1]["prompt_logprobs"]
    assert [len(entry) for entry in extras[0]["prompt_logprobs"][1:]] == [1] * (num_tokens - 1)
    both = client.completions.create(
        model="tiny", prompt=QUESTION, max_tokens=1, echo=True, logprobs=2, extra_body={"prompt_logprobs": 0}
    ).choices[0]
    assert both.logprobs is not None and len((both.logprobs.top_logprobs or [])[3]) >= 2
    assert len((both.model_extra or {})["prompt_logprobs"][3]) == 1
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        chunks(client, extra_body={"prompt_logprobs": 1})


def test_words_and_tokens_that_are_banned_do_not_come(client: openai.OpenAI, llm: LLM) -> None:
    assert chat(client).choices[0].message.content == "1 2 3"
    assert "2 3" not in (chat(client, extra_body={"bad_words": ["2 3"]}).choices[0].message.content or "")
    allowed = llm.tokenizer.encode("13", add_special_tokens=False)
    answer = chat(client, max_tokens=5, extra_body={"allowed_token_ids": allowed, "ignore_eos": True})
    assert set(answer.choices[0].message.content or "") <= {"1", "3"}
    with pytest.raises(openai.BadRequestError, match="bad_words"):
        chat(client, extra_body={"bad_words": [" "]})
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
        chat(client, extra_body={"allowed_token_ids": [10**6]})
    with pytest.raises(
        openai.BadRequestError, match="vllm_xargs: no logits processor of this server takes even_only"
    ):
        chat(client, extra_body={"vllm_xargs": {"even_only": True}})


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.model_extra is not None and model.model_extra["max_model_len"] == 4096
    assert model.model_extra["vocab_size"] == 1001
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors_have_the_types_of_the_client_library(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(client, extra_body={"temperature": -1})
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.completions.create(model="tiny", prompt=[5] * 4096)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="tiny", prompt=[5000])
    with pytest.raises(openai.BadRequestError, match="tools") as tools:
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        chat(client, tools=[tool])
    assert tools.value.code == "unsupported"


def test_task_of_another_kind_of_model_is_refused_with_what_is_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server generates text.*/v1/chat/completions"):
        client.embeddings.create(model="tiny", input="sun")


def test_every_response_has_an_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=MESSAGES,  # type: ignore[arg-type]
        extra_headers={"x-request-id": "my-label"},
    )
    assert raw.headers["x-request-id"] == "my-label"
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, max_tokens=-1)
    assert error.value.request_id is not None and error.value.request_id.startswith("req-")
    assert error.value.response.headers["x-should-retry"] == "false"


def test_health_sends_a_request_through_the_engine(served: Served, engine_client: openai.OpenAI) -> None:
    num_opened = len(served.service.requests)
    assert engine_client.get(f"{served.url}/health", cast_to=object) == {
        "status": "ok",
        "model": "tiny",
    }
    canary = served.service.requests[num_opened]
    assert canary.sampling.max_tokens == 2 and len(canary.token_ids) > 16
