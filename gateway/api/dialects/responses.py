"""The body of `/v1/responses`, OpenAI's newer API, as the body of a chat.

The items of `input` become the messages of a chat:

| item | message |
|---|---|
| `message`, or a role and a content | a message |
| `reasoning` | `reasoning_content` of the assistant's next message |
| `function_call` | a call of the assistant's message, together with the text and the calls before it |
| `function_call_output` | a message of the role `tool` |

`instructions` become a system message before all others, of this turn alone. `previous_response_id` puts the
conversation of a stored response before `input`. Items and tools that only OpenAI's servers can act on are
refused by name, and so is every unknown key, as OpenAI does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.gateway.api.body import (
    MAX_MESSAGES,
    TEXT_KEYS,
    AnswerTokens,
    AskedResponse,
    ChatBody,
    ModelName,
    SamplingKeys,
    TemplateKwargs,
    Unsupported,
    sampling_fields,
    text_content,
    text_of,
)
from baton.gateway.api.errors import invalid, unsupported

Item: TypeAlias = dict[str, object]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]

ROLES: Final = ("developer", "system", "user", "assistant")
MAX_ID_CHARS: Final = 256
# Patterns of a chat's keys, as errors name them -> the keys here.
KEYS: Final = {
    r"response_format\b": "text.format",
    r"max_(completion_)?tokens\b": "max_output_tokens",
    r"reasoning_effort\b": "reasoning.effort",
    r"(tools\[\d+\])\.function\b": r"\1",
}
# Keys that only OpenAI's servers act on -> values that ask for nothing.
UNSUPPORTED: Final[Unsupported] = {
    **dict.fromkeys(("background", "background_options", "conversation", "prompt"), frozenset()),
    **dict.fromkeys(("max_tool_calls", "moderation", "context_management", "include"), frozenset()),
    **dict.fromkeys(("image", "access_programs", "top_logprobs"), frozenset()),
    "truncation": frozenset({b'"disabled"'}),
}


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, object] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`text`. A verbosity other than the usual one is refused."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reasoning`. The answer has the reasoning itself; no summary is written, which "auto" allows."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`stream_options`: events are never padded."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(SamplingKeys, frozen=True, kw_only=True):
    """The body of `/v1/responses`: OpenAI's keys, and vLLM's sampling parameters."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED
    refuses_unknown: ClassVar[bool] = True

    model: ModelName | None = None
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=MAX_ID_CHARS)] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: AnswerTokens | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None
    chat_template_kwargs: TemplateKwargs | None = None  # vLLM's


def as_chat(body: ResponsesBody, history: bytes, *, may_store: bool) -> tuple[ChatBody, AskedResponse]:
    """Return the chat that a body asks for, and the other fields of the response.

    history: JSON, the items of the conversation before this turn. may_store: responses are stored at all.
    Raises ApiError that names the key.
    """
    earlier: list[Item] = msgspec.json.decode(history, type=list[Item]) if history else []
    own: list[Item] = [_message_item(body.input)] if isinstance(body.input, str) else body.input
    messages: list[Item] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    for index, item in enumerate(earlier + own):
        _add(messages, item, f"input[{index - len(earlier)}]")
    messages = _joined(messages)
    if not messages:
        raise invalid("input", "there is no message")
    if len(messages) > MAX_MESSAGES:
        raise invalid("input", f"at most {MAX_MESSAGES} messages, got {len(messages)}")
    fields = sampling_fields(body)
    if body.text is not None and body.text.format is not None and body.text.format.type != "text":
        if "response_format" in fields:
            raise invalid("response_format", "the body has a text.format already")
        fields["response_format"] = _response_format(body.text.format)
    reasoning = body.reasoning or Reasoning()
    chat = {
        **fields,
        "model": body.model,
        "stream": body.stream,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "reasoning_effort": reasoning.effort,
        "tools": None if body.tools is None else [_tool(tool, i) for i, tool in enumerate(body.tools)],
        "tool_choice": _tool_choice(body.tool_choice, has_tools=bool(body.tools)),
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    is_stored = may_store and body.store is not False
    if body.store and not may_store:
        raise invalid("store", "this gateway stores no responses (gateway.max_stored_responses is 0)")
    echoed = _echoed(body, is_stored=is_stored)
    asked = AskedResponse(
        echoed={name: msgspec.json.encode(value) for name, value in echoed.items()},
        items=msgspec.json.encode(earlier + own) if is_stored else b"[]",
        is_stored=is_stored,
    )
    return msgspec.convert(chat, ChatBody), asked


def _echoed(body: ResponsesBody, *, is_stored: bool) -> dict[str, object]:
    """Return the fields that the response repeats, with the defaults of those that were not given."""
    reasoning = body.reasoning or Reasoning()
    given = None if body.text is None else body.text.format
    form = {"type": "text"} if given is None else msgspec.to_builtins(given)
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "store": is_stored,
        "text": {"format": {name: value for name, value in form.items() if value is not None}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or ()],
        "top_logprobs": 0,
        "truncation": "disabled",
    }


def _response_format(given: TextFormat) -> dict[str, object]:
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.schema is None:
        raise invalid("text.format", "schema is needed for this type")
    schema = {"name": given.name, "schema": given.schema, "strict": given.strict}
    return {"type": "json_schema", "json_schema": schema}


def _tool(tool: Mapping[str, object], index: int) -> dict[str, object]:
    """Return a tool in the form of chats."""
    kind = tool.get("type")
    if kind != "function":
        raise unsupported(f"tools[{index}].type", repr(str(kind)[:40]))
    function = {name: value for name, value in tool.items() if name != "type"}
    unknown = function.keys() - {"name", "description", "parameters", "strict"}
    if asked := [name for name in sorted(unknown) if function[name] not in (None, False)]:
        raise unsupported(f"tools[{index}].{asked[0][:40]}")
    return {"type": "function", "function": {name: function[name] for name in function.keys() - unknown}}


def _tool_choice(choice: object, *, has_tools: bool) -> object:
    if choice == "auto" and not has_tools:
        return None
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": _allowed_tools(choice)}
    return choice


def _allowed_tools(choice: Mapping[str, Any]) -> object:
    """Return the allowed tools in the form of chats; a choice may have that form already."""
    if "allowed_tools" in choice:
        return choice["allowed_tools"]
    tools = choice.get("tools")
    if isinstance(tools, list):
        tools = [_tool_choice(each, has_tools=True) for each in tools]
    return {key: value for key, value in choice.items() if key != "type"} | {"tools": tools}


def _message_item(text: str) -> Item:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def _add(messages: list[Item], item: Item, name: str) -> None:
    """Append the message of one item; `_joined` puts the assistant's parts together."""
    kind = item.get("type") or "message"
    add = _ADDERS.get(str(kind))
    if add is None:
        raise unsupported(f"{name}.type", repr(str(kind)[:40]))
    add(messages, item, name)


def _add_message(messages: list[Item], item: Item, name: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise invalid(f"{name}.role", f"expected one of {', '.join(ROLES)}")
    content = text_content(item.get("content"), f"{name}.content", TEXT_KEYS)
    messages.append({"role": role, "content": content})


def _add_reasoning(messages: list[Item], item: Item, name: str) -> None:
    if item.get("encrypted_content"):
        raise unsupported(f"{name}.encrypted_content")
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise invalid(f"{name}.content", "expected a list of parts")
    text = "\n".join(str(part.get("text", "")) for part in parts)
    messages.append({"role": "assistant", "reasoning_content": text})


def _add_call(messages: list[Item], item: Item, name: str) -> None:
    function = {key: text_of(item, key, name) for key in ("name", "arguments")}
    call = {"id": text_of(item, "call_id", name), "type": "function", "function": function}
    messages.append({"role": "assistant", "tool_calls": [call]})


def _add_output(messages: list[Item], item: Item, name: str) -> None:
    call_id = text_of(item, "call_id", name)
    content = text_content(item.get("output"), f"{name}.output", TEXT_KEYS)
    messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


_ADDERS: Final[Mapping[str, Callable[[list[Item], Item, str], None]]] = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_output,
}


def _joined(messages: Sequence[Item]) -> list[Item]:
    """Return the messages with the reasoning, the text and the calls of one turn in one message."""
    joined: list[Item] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if message["role"] != "assistant" or last.get("role") != "assistant" or _begins(last, message):
            joined.append(dict(message))
            continue
        for key, value in message.items():
            calls = last.get("tool_calls")
            last[key] = [*calls, *value] if isinstance(calls, list) and isinstance(value, list) else value
    for message in joined:
        message.setdefault("content", None if message.get("tool_calls") else "")
    return joined


def _begins(last: Item, message: Item) -> bool:
    """Tell whether a part of the assistant begins another message: it has what the last one has already."""
    if "content" in message:
        return "content" in last or "tool_calls" in last
    return "reasoning_content" in message and last.keys() != {"role"}


def check_conversation(asked: AskedResponse, max_bytes: int) -> None:
    """Raise ApiError 400 for a conversation that cannot be stored."""
    if asked.is_stored and asked.num_bytes > max_bytes:
        raise invalid(
            "store",
            f"the conversation has {asked.num_bytes} bytes; at most {max_bytes} of a tenant are stored "
            "(gateway.max_stored_response_bytes): send store = false and the whole input each time",
        )
