"""pydantic-ai: each kind of output, and an agent with tools, whole and streamed."""

import asyncio
from typing import Any

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from questions import FRUIT_QUESTION, SUM_QUESTION, WEATHER_QUESTION, Fruit, add, run, weather


def answers(url: str) -> dict[str, object]:
    return asyncio.run(all_answers(url))


async def all_answers(url: str) -> dict[str, object]:
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
    settings: Any = {"temperature": 0}
    found: dict[str, object] = {}
    for output in (ToolOutput, NativeOutput):
        agent = Agent(model, output_type=output(Fruit), model_settings=settings, retries=0)
        found[output.__name__] = (await agent.run(FRUIT_QUESTION)).output.model_dump()
        async with agent.run_stream(FRUIT_QUESTION) as stream:
            found[f"{output.__name__} streamed"] = (await stream.get_output()).model_dump()
    agent = Agent(model, tools=[add, weather], model_settings=settings, retries=0)
    found["sum"] = loop(await agent.run(SUM_QUESTION))
    found["weather"] = loop(await agent.run(WEATHER_QUESTION))
    async with agent.run_stream(SUM_QUESTION) as stream:
        found["streamed_sum"] = await stream.get_output()
    return found


def loop(result: Any) -> list[object]:
    """Return the calls of the model and, last, its answer."""
    parts = [part for message in result.all_messages() for part in message.parts]
    calls = [[part.tool_name, part.args_as_dict()] for part in parts if part.part_kind == "tool-call"]
    return [*calls, result.output]


if __name__ == "__main__":
    run(answers)
