"""Hostile bodies: those that a review has found, and any number of generated ones."""

import json
import random
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MAX_BYTES: Final = 4 * 2**20
CALL: Final = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


class Hostile(NamedTuple):
    name: str
    path: str
    body: bytes


def reviewed() -> Iterator[Hostile]:
    """Bodies that held the loop for 0.16 to 3.3 s."""
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL] * 25_000}
    yield _chat("1.8 MiB of tool calls", [calls])
    empty = {"role": "assistant", "content": "", "tool_calls": [{}] * 50_000}
    yield _chat("50,000 empty tool calls", [empty])
    yield _completion("128 prompts of 4 KB", prompt=["the sun " * 500] * 128, max_tokens=1)
    yield _completion("2 M token ids", prompt=[1] * 2_000_000, max_tokens=1)
    yield _completion("128 prompts of 16,000 token ids", prompt=[[1] * 16_000] * 128, max_tokens=1)
    yield _completion("1,024 choices", prompt=["a"] * 128, n=8, max_tokens=1)


def others() -> Iterator[Hostile]:
    """Bodies that a reader of the code would try next."""
    yield _completion("500,000 biases", prompt="a", logit_bias={str(index): 1 for index in range(300_000)})
    unknown = {f"k{index}": 1 for index in range(300_000)}
    yield _completion("300,000 unknown keys", prompt="a", **unknown)
    yield _chat("a long name", [{"role": "user", "content": "a", "name": "n" * 4_000_000}])
    yield _chat("2,048 messages", [{"role": "user", "content": "the sun " * 200}] * 2048)
    deep = b'{"messages": [{"role": "user", "content": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}]}"
    yield Hostile("900 deep", CHAT, deep)
    brackets = b'{"prompt": "' + b"[{" * 2_000_000 + b'"}'
    yield Hostile("brackets in text", COMPLETIONS, brackets)
    yield Hostile("quotes without an end", COMPLETIONS, b'{"prompt": ' + b'\\"' * 2_000_000)
    nested = json.dumps({"a": "\\" * 1_000_000})
    arguments = {"type": "function", "function": {"name": "f", "arguments": nested}}
    yield _chat("large arguments", [{"role": "assistant", "content": "", "tool_calls": [arguments]}])
    yield _body("tokenize 2 MB", "/tokenize", {"prompt": "a " * 1_000_000, "return_token_strs": True})
    yield _body("detokenize 130,000", "/detokenize", {"tokens": [7] * 130_000})
    yield _body("detokenize 2 M", "/detokenize", {"tokens": [7] * 2_000_000})
    yield _completion("echo of 120,000", prompt=[7] * 120_000, echo=True, max_tokens=1)
    yield _completion("a stream of the same", prompt=[7] * 120_000, echo=True, max_tokens=1, stream=True)
    yield _chat("numbers", [{"role": "user", "content": "a", "x": [1.5] * 800_000}])


def generated(num: int, seed: int) -> Iterator[Hostile]:
    """Drawn by shape and size; one seed gives one list."""
    draw = random.Random(seed)
    for index in range(num):
        size = int(2 ** draw.uniform(10, 21.5))
        path, fields = draw.choice(SHAPES)(draw, size)
        fields |= draw.choice(({}, {"stream": True}, {"n": draw.randint(1, 8)}, {"max_tokens": 1}))
        data = json.dumps(fields).encode()[:MAX_BYTES]
        if draw.random() < 0.1:  # damaged
            data = data[: draw.randrange(len(data))]
        yield Hostile(f"generated {index}", path, data)


def _messages(draw: random.Random, size: int) -> tuple[str, dict[str, Any]]:
    num = draw.randint(1, min(2048, 1 + size // 40))
    content = "x " * max(1, (size // num - 30) // 2)
    return CHAT, {"messages": [{"role": "user", "content": content}] * num, "max_tokens": 4}


def _tool_calls(draw: random.Random, size: int) -> tuple[str, dict[str, Any]]:
    call = draw.choice(
        ({}, CALL, {"function": {"name": "f", "arguments": {"a": [[]] * draw.randint(1, 50)}}})
    )
    num = max(1, size // len(json.dumps(call)))
    message = {"role": "assistant", "content": "", "tool_calls": [call] * num}
    return CHAT, {"messages": [message], "max_tokens": 4}


def _other_keys(draw: random.Random, size: int) -> tuple[str, dict[str, Any]]:
    key = draw.choice(("role", "name", "x", "tool_call_id"))
    value = draw.choice(("y" * size, list(range(size // 8)), {str(each): each for each in range(size // 16)}))
    return CHAT, {"messages": [{"role": "user", "content": "a", key: value}], "max_tokens": 4}


def _texts(draw: random.Random, size: int) -> tuple[str, dict[str, Any]]:
    num = draw.randint(1, 128)
    return COMPLETIONS, {"prompt": [draw.choice("abc ") * max(1, size // num)] * num, "max_tokens": 4}


def _token_ids(draw: random.Random, size: int) -> tuple[str, dict[str, Any]]:
    num = draw.randint(1, 64)
    return COMPLETIONS, {"prompt": [[draw.randrange(60)] * max(1, size // 4 // num)] * num, "max_tokens": 4}


def _tools(draw: random.Random, size: int) -> tuple[str, dict[str, Any]]:
    function = {"name": "f", "description": "z" * min(60_000, size // 8)}
    tools = [{"type": "function", "function": function}] * draw.randint(1, 128)
    return CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": tools, "max_tokens": 4}


def _text_routes(draw: random.Random, size: int) -> tuple[str, dict[str, Any]]:
    if draw.random() < 0.5:
        return "/tokenize", {"prompt": "b " * (size // 2), "return_token_strs": draw.random() < 0.5}
    return "/detokenize", {"tokens": [draw.randrange(60)] * (size // 4)}


SHAPES: Final = (_messages, _tool_calls, _other_keys, _texts, _token_ids, _tools, _text_routes)


def _chat(name: str, messages: list[Any]) -> Hostile:
    return _body(name, CHAT, {"messages": messages, "max_tokens": 4})


def _completion(name: str, **fields: Any) -> Hostile:
    return _body(name, COMPLETIONS, fields)


def _body(name: str, path: str, fields: dict[str, Any]) -> Hostile:
    return Hostile(name, path, json.dumps(fields).encode())
