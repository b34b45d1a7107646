"""Chat messages as clients write them, checked and in the one form that chat templates read.

`content` is text, or parts such as `{"type": "text", "text": "Hi"}` whose texts become lines, as in vLLM.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from baton.errors import InvalidRequest, shown
from baton.gateway.api_types import check_depth
from baton.gateway.chat_template import Message

EXAMPLE: Final = '{"role": "user", "content": "Hi"}'


def read_messages(messages: object) -> list[Message]:
    """One conversation; raises InvalidRequest that names the message and its key."""
    if isinstance(messages, Mapping):
        raise InvalidRequest(f"messages: expected a list of messages such as [{EXAMPLE}], got one message")
    if isinstance(messages, str | bytes) or not isinstance(messages, Iterable):
        raise InvalidRequest(f"messages: expected a list such as [{EXAMPLE}], got {shown(messages)}")
    read = [_read(message, f"message {index}") for index, message in enumerate(messages)]
    if not read:
        raise InvalidRequest("messages: expected at least one message, got none")
    return read


def _read(message: object, name: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{name}: expected a dict such as {EXAMPLE}, got {shown(message)}")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{name}: role: expected text such as 'user', got {_value(message, 'role')}")
    message = _with_read_calls(message, name)
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            f"{name}: content: expected text or a list of text parts, got {_value(message, 'content')}"
        )
    texts = [_text(part, f"{name}: content[{index}]") for index, part in enumerate(content)]
    return {**message, "content": "\n".join(texts)}


def _with_read_calls(message: Message, name: str) -> Message:
    """Templates write arguments as JSON; clients send them as text, which would come out in quotes."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {
        **message,
        "tool_calls": [_read_call(call, f"{name}: tool_calls[{at}]") for at, call in enumerate(calls)],
    }


def _read_call(call: object, name: str) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        read = msgspec.json.decode(arguments or "{}", type=dict[str, object])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise InvalidRequest(
            f"{name}: arguments: expected the JSON of an object, got {shown(arguments)}"
        ) from None
    check_depth(arguments.encode("utf-8", "replace"), f"{name}: arguments: the JSON")
    return {**call, "function": {**function, "arguments": read}}


def _text(part: object, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequest(f'{name}: expected {{"type": "text", "text": "..."}}, got {shown(part)}')
    return str(part["text"])


def _value(message: Mapping[str, object], key: str) -> str:
    return shown(message[key]) if key in message else "nothing"
