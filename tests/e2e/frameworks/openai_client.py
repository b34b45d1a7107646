"""The `openai` client: its parse helpers, its stream helper and a loop of tool calls."""

import json
from typing import Any

import openai
from pydantic import BaseModel
from questions import FRUIT_QUESTION, FUNCTIONS, SUM_QUESTION, TOOLS, WEATHER_QUESTION, Fruit, run


def answers(url: str) -> dict[str, object]:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": FRUIT_QUESTION}]}
    parsed = client.chat.completions.parse(**asked, response_format=Fruit).choices[0].message.parsed
    with client.chat.completions.stream(**asked, response_format=Fruit) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert parsed is not None and streamed is not None
    return {
        "parsed": parsed.model_dump(),
        "streamed": streamed.model_dump(),
        "events": sorted(kinds),
        "sum": loop(client, SUM_QUESTION),
        "weather": loop(client, WEATHER_QUESTION),
        "streamed_call": streamed_call(client),
    }


def loop(client: openai.OpenAI, question: str) -> list[object]:
    """Return the calls of the model and, last, its answer."""
    messages: list[Any] = [{"role": "user", "content": question}]
    found: list[object] = []
    while True:
        message = (
            client.chat.completions.parse(model="tiny", messages=messages, tools=TOOLS).choices[0].message
        )
        if not message.tool_calls:
            return [*found, message.content]
        messages.append(message)
        for call in message.tool_calls:
            arguments = call.function.parsed_arguments
            assert isinstance(arguments, BaseModel)
            found.append([call.function.name, arguments.model_dump()])
            result = FUNCTIONS[call.function.name](**arguments.model_dump())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def streamed_call(client: openai.OpenAI) -> list[object]:
    messages: Any = [{"role": "user", "content": SUM_QUESTION}]
    with client.chat.completions.stream(
        model="tiny", messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    return [call.function.name, json.loads(call.function.arguments)]


if __name__ == "__main__":
    run(answers)
