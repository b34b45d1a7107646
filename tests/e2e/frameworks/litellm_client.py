"""LiteLLM: forms, a loop of tool calls, and streams, by its provider for servers of OpenAI's API."""

import json
from typing import Any

import litellm
from questions import FRUIT_QUESTION, FUNCTIONS, SUM_QUESTION, TOOLS, WEATHER_QUESTION, Fruit, run


def answers(url: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for provider in ("openai", "hosted_vllm"):
        asked: Any = {"model": f"{provider}/tiny", "api_base": url, "api_key": "none", "temperature": 0}
        found[f"{provider} form"] = form(asked)
        found[f"{provider} sum"] = loop(asked, SUM_QUESTION)
        found[f"{provider} weather"] = loop(asked, WEATHER_QUESTION)
        found[f"{provider} streamed_call"] = streamed_call(asked)
    return found


def form(asked: Any) -> object:
    messages = [{"role": "user", "content": FRUIT_QUESTION}]
    answer = litellm.completion(**asked, messages=messages, response_format=Fruit)
    return Fruit.model_validate_json(answer.choices[0].message.content).model_dump()


def loop(asked: Any, question: str) -> list[object]:
    """Return the calls of the model and, last, its answer."""
    messages: list[Any] = [{"role": "user", "content": question}]
    found: list[object] = []
    while True:
        message = litellm.completion(**asked, messages=messages, tools=TOOLS).choices[0].message
        if not message.tool_calls:
            return [*found, message.content]
        messages.append(message)
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            found.append([call.function.name, arguments])
            result = FUNCTIONS[call.function.name](**arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def streamed_call(asked: Any) -> list[object]:
    messages = [{"role": "user", "content": SUM_QUESTION}]
    named = {"type": "function", "function": {"name": "add"}}
    chunks = list(litellm.completion(**asked, messages=messages, tools=TOOLS, tool_choice=named, stream=True))
    (call,) = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message.tool_calls
    return [call.function.name, json.loads(call.function.arguments)]


if __name__ == "__main__":
    run(answers)
