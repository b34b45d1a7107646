"""LangChain: `with_structured_output` by each method, a loop of `bind_tools`, and an agent."""

from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from questions import FRUIT_QUESTION, SUM_QUESTION, WEATHER_QUESTION, Fruit, add, run, weather

TOOLS = [tool(add), tool(weather)]


def answers(url: str) -> dict[str, object]:
    model = ChatOpenAI(model="tiny", base_url=url, api_key="none", temperature=0, max_retries=0)
    forms: dict[str, object] = {}
    for method in ("json_schema", "function_calling", "json_mode"):
        answer = model.with_structured_output(Fruit, method=method).invoke(FRUIT_QUESTION)
        forms[method] = answer.model_dump()
    raw = model.with_structured_output(Fruit, include_raw=True, strict=True).invoke(FRUIT_QUESTION)
    streamed = list(model.with_structured_output(Fruit).stream(FRUIT_QUESTION))
    return {
        **forms,
        "raw": [raw["parsed"].model_dump(), raw["parsing_error"]],
        "streamed": streamed[-1].model_dump(),
        "sum": loop(model, SUM_QUESTION),
        "weather": loop(model, WEATHER_QUESTION),
        "streamed_call": streamed_call(model),
        "any_call": [
            [call["name"], call["args"]]
            for call in model.bind_tools(TOOLS, tool_choice="any").invoke(SUM_QUESTION).tool_calls
        ],
        "agent": agent(model),
        "agent_form": agent_form(model),
    }


def loop(model: ChatOpenAI, question: str) -> list[object]:
    """Return the calls of the model and, last, its answer."""
    bound = model.bind_tools(TOOLS)
    functions = {each.name: each for each in TOOLS}
    messages: list[Any] = [HumanMessage(question)]
    found: list[object] = []
    while True:
        message = bound.invoke(messages)
        if not message.tool_calls:
            return [*found, message.content]
        messages.append(message)
        for call in message.tool_calls:
            found.append([call["name"], call["args"]])
            messages.append(functions[call["name"]].invoke(call))


def streamed_call(model: ChatOpenAI) -> list[object]:
    whole: Any = None
    for chunk in model.bind_tools(TOOLS, tool_choice="add").stream(SUM_QUESTION):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    return [call["name"], call["args"]]


def agent(model: ChatOpenAI) -> list[str]:
    """Return the kinds of an agent's messages and, last, the text of the last one."""
    given: Any = {"messages": [{"role": "user", "content": WEATHER_QUESTION}]}
    messages = create_agent(model, TOOLS, system_prompt="Be brief.").invoke(given)["messages"]
    return [*(message.type for message in messages), messages[-1].content]


def agent_form(model: ChatOpenAI) -> object:
    given: Any = {"messages": [{"role": "user", "content": FRUIT_QUESTION}]}
    return create_agent(model, [], response_format=Fruit).invoke(given)["structured_response"].model_dump()


if __name__ == "__main__":
    run(answers)
