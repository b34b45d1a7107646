"""The body of `/v1/messages`, Anthropic's API, as the body of a chat.

`system` becomes a system message. The blocks of a message's content become:

| block | chat |
|---|---|
| `text` | text |
| `thinking` | `reasoning_content` of the assistant's message |
| `tool_use` | a call of the assistant's message |
| `tool_result` | a message of the role `tool` |

A last message of the assistant is continued, as in Anthropic's API. Blocks and tools that Baton cannot act on
are refused by name, and so is every unknown key, as Anthropic does. `cache_control` is a hint: pages are
found by their content here.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import msgspec
import orjson
from msgspec import Meta

from baton.gateway.api.body import (
    MAX_MESSAGES,
    MAX_STOPS,
    ChatBody,
    ModelName,
    SamplingKeys,
    StopString,
    TemplateKwargs,
    Unsupported,
    sampling_fields,
    text_content,
    text_of,
)
from baton.gateway.api.errors import ApiError, invalid, unsupported

Json: TypeAlias = dict[str, object]

PATH: Final = "/v1/messages"
ROLES: Final = frozenset({"user", "assistant", "system"})
# Patterns of a chat's keys, as errors name them -> the keys here.
KEYS: Final = {
    r"response_format\b": "output_config.format",
    r"reasoning_effort\b": "output_config.effort",
    r"stop\b": "stop_sequences",
    r"(tools\[\d+\])\.function\.parameters\b": r"\1.input_schema",
    r"(tools\[\d+\])\.function\b": r"\1",
}
BLOCK_TEXT_KEYS: Final = {"text": "text"}  # type of a block -> the key of its text
TOOL_KEYS: Final = frozenset({"type", "name", "description", "input_schema", "strict"})
# Keys of a tool that change no answer here: hints about caching and about the pace of a stream.
TOOL_HINTS: Final = frozenset({"cache_control", "eager_input_streaming"})
UNSUPPORTED: Final[Unsupported] = {
    **dict.fromkeys(("container", "mcp_servers", "context_management", "inference_geo"), frozenset()),
    **dict.fromkeys(("diagnostics", "user_profile_id", "workspace_id", "output_format"), frozenset()),
    "speed": frozenset({b'"standard"'}),
}
KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError, request_id: str | None = None) -> bytes:
    """Return the JSON of an error in Anthropic's shape."""
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body: Json = {"type": "error", "error": {"type": kind, "message": str(error)}}
    return orjson.dumps(body | ({"request_id": request_id} if request_id else {}))


def body_of_error(path: str, error: ApiError, request_id: str) -> bytes:
    """Return the JSON of an error in the shape of the API that has the path."""
    return error_body(error, request_id) if path.startswith(PATH) else error.body()


class Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`thinking`: whether the model reasons before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema: dict[str, object]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class PromptBody(SamplingKeys, frozen=True, kw_only=True):
    """Fields of a body that decide about the prompt."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED
    refuses_unknown: ClassVar[bool] = True
    without_meaning: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    model: ModelName | None = None
    messages: Annotated[list[Json], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateKwargs | None = None  # vLLM's


class CountBody(PromptBody, frozen=True, kw_only=True):
    """The body of `/v1/messages/count_tokens`."""


class MessageBody(PromptBody, frozen=True, kw_only=True):
    """The body of `/v1/messages`: Anthropic's keys, and vLLM's sampling parameters."""

    max_tokens: int
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None


def as_chat(body: PromptBody, *, has_thinking_switch: bool, has_reasoning: bool) -> ChatBody:
    """Return the chat that a body asks for. Raises ApiError that names the key.

    has_thinking_switch: the chat template reads `enable_thinking`. has_reasoning: the model reasons.
    """
    messages: list[Json] = []
    if body.system is not None:
        messages.append({"role": "system", "content": text_content(body.system, "system", BLOCK_TEXT_KEYS)})
    for index, message in enumerate(body.messages):
        _add(messages, message, f"messages[{index}]")
    fields = sampling_fields(body)
    config, choice = body.output_config or OutputConfig(), body.tool_choice
    kwargs = dict(body.chat_template_kwargs or {})
    kwargs.update(
        _thinking_switch(body.thinking, has_switch=has_thinking_switch, has_reasoning=has_reasoning)
    )
    if config.format is not None:
        schema = {"name": "answer", "schema": config.format.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    continues = messages[-1]["role"] == "assistant"
    chat: dict[str, Any] = {
        **fields,
        "model": body.model,
        "messages": messages,
        "tools": None if body.tools is None else [_tool(tool, i) for i, tool in enumerate(body.tools)],
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "reasoning_effort": config.effort,
        "chat_template_kwargs": kwargs or None,
        "include_reasoning": _shows_thinking(body.thinking),
        "continue_final_message": continues,
        "add_generation_prompt": not continues,
    }
    if isinstance(body, MessageBody):
        if body.stop_sequences is not None and body.stop is not None:
            raise invalid("stop", "the body has stop_sequences already")
        chat |= {"max_tokens": body.max_tokens, "stream": body.stream}
        chat["stop"] = body.stop if body.stop_sequences is None else body.stop_sequences
    return msgspec.convert(chat, ChatBody)


def _thinking_switch(thinking: Thinking | None, *, has_switch: bool, has_reasoning: bool) -> Json:
    """Return the variable of the chat template that turns reasoning on or off."""
    if thinking is None:
        return {}
    if thinking.budget_tokens is not None:
        raise unsupported("thinking.budget_tokens", str(thinking.budget_tokens))
    is_on = thinking.type != "disabled"
    if has_switch:
        return {"enable_thinking": is_on}
    if not is_on and has_reasoning:
        raise unsupported("thinking.type", "'disabled' with this model's chat template")
    if thinking.type == "enabled" and not has_reasoning:
        raise unsupported("thinking.type", "'enabled' with this model")
    return {}


def _shows_thinking(thinking: Thinking | None) -> bool | None:
    if thinking is None or thinking.display is None:
        return None
    if thinking.display == "summarized":
        raise unsupported("thinking.display", "'summarized'")
    return False


def _tool(tool: Mapping[str, object], index: int) -> Json:
    """Return a tool in the form of chats."""
    name = f"tools[{index}]"
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"{name}.type", repr(str(tool["type"])[:40]))
    for key in sorted(tool.keys() - TOOL_KEYS - TOOL_HINTS):
        if tool[key] not in (None, False, []):
            raise unsupported(f"{name}.{key[:40]}")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise invalid(f"{name}.input_schema", "expected a JSON schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Choice) -> object:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _add(messages: list[Json], message: Json, name: str) -> None:
    """Append the messages of one message: the results of tools, then the rest."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{name}.role", f"expected one of {', '.join(sorted(ROLES))}")
    if unknown := sorted(message.keys() - {"role", "content", "cache_control"}):
        raise invalid(f"{name}.{unknown[0][:40]}", "the key is not known")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise invalid(f"{name}.content", "expected text or a list of blocks")
    texts, thoughts, calls = list[Json](), list[str](), list[Json]()
    for index, block in enumerate(content):
        where, kind = f"{name}.content[{index}]", block.get("type")
        if kind == "text":
            texts.append({"type": "text", "text": text_of(block, "text", where)})
        elif kind == "thinking" and role == "assistant":
            thoughts.append(text_of(block, "thinking", where))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, where))
        elif kind == "tool_result" and role == "user":
            messages.append(_result(block, where))
        else:
            raise unsupported(f"{where}.type", f"{str(kind)[:40]!r} in a message of the role {role}")
    if not texts and not calls and not thoughts:
        if not content:
            raise invalid(f"{name}.content", "expected at least one block")
        return  # results of tools alone
    added: Json = {"role": role, "content": texts or (None if calls else "")}
    if thoughts:
        added["reasoning_content"] = "\n".join(thoughts)
    messages.append(added | ({"tool_calls": calls} if calls else {}))


def _call(block: Mapping[str, object], name: str) -> Json:
    if not isinstance(block.get("input"), Mapping):
        raise invalid(f"{name}.input", "expected a JSON object")
    function = {
        "name": text_of(block, "name", name),
        "arguments": msgspec.json.encode(block["input"]).decode(),
    }
    return {"id": text_of(block, "id", name), "type": "function", "function": function}


def _result(block: Mapping[str, object], name: str) -> Json:
    content = text_content(block.get("content") or "", f"{name}.content", BLOCK_TEXT_KEYS)
    if block.get("is_error"):  # chat templates have no place for it
        texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        content = [{"type": "text", "text": "Error:"}, *texts]
    return {"role": "tool", "tool_call_id": text_of(block, "tool_use_id", name), "content": content}
