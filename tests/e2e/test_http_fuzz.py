"""Damaged bodies: each gets a status of the contract, and none breaks the gateway."""

import copy
import http.client
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from tests.engine_frontend import EngineFrontend, served_engine, tiny_engine
from tests.served_gateway import TIMEOUT_S, ServedGateway
from tests.tool_model import TOOL, tool_model

STATUSES: Final = {200, 400, 403, 404, 413}
MAX_MODEL_LEN: Final = 224  # no answer is longer, whatever a body asks for
MESSAGE: Final = {"role": "user", "content": "sort(3 1 2)="}
FUNCTION: Final = {"name": "weather", "arguments": '{"city": "Paris"}'}
CALLED: Final = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call_1", "type": "function", "function": FUNCTION}],
}
RESULT: Final = {"role": "tool", "tool_call_id": "call_1", "content": "dry"}
STRICT_TOOL: Final[Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"key": {"enum": ["k1", "k2"]}, "depth": {"$ref": "#/$defs/depth"}},
            "required": ["key"],
            "$defs": {"depth": {"type": "integer", "minimum": 1}},
        },
    },
}
# What clients do send.
TRAFFIC: Final[list[tuple[str, dict[str, Any]]]] = [
    ("/v1/chat/completions", {"model": "tiny", "messages": [MESSAGE], "max_tokens": 4}),
    (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "max_completion_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "stop": None,
            "logprobs": None,
            "ignore_eos": True,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "system", "content": "b"}, MESSAGE],
            "n": 2,
            "seed": 1,
            "logprobs": True,
            "top_logprobs": 2,
            "max_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "presence_penalty": 1,
            "logit_bias": {"5": 1.5},
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "response_format": {"type": "text"},
        },
    ),
    ("/v1/chat/completions", {"messages": [MESSAGE, CALLED, RESULT], "tools": [TOOL], "max_tokens": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": [MESSAGE],
            "tools": [STRICT_TOOL, TOOL],
            "tool_choice": {"type": "function", "function": {"name": "lookup"}},
            "reasoning_effort": None,
            "chat_template_kwargs": {},
            "include_reasoning": True,
            "max_tokens": 4,
        },
    ),
    ("/v1/completions", {"model": "tiny", "prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 2, "stream": True, "stop": ["x", "y"]}),
    ("/v1/completions", {"prompt": ["a", "b"], "min_tokens": 1, "stop_token_ids": [3], "top_k": 4}),
    (
        "/v1/responses",
        {
            "model": "tiny",
            "instructions": "b",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "dry"},
            ],
            "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
            "tool_choice": {"type": "function", "name": "weather"},
            "max_output_tokens": 4,
            "metadata": {"a": "b"},
            "store": True,
            "reasoning": {"effort": None},
        },
    ),
    (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_object"}}, "stream": True, "max_output_tokens": 4},
    ),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 4,
            "system": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "b", "signature": ""},
                        {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Paris"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "text", "text": "d"}],
                        }
                    ],
                },
            ],
            "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "adaptive"},
        },
    ),
    ("/v1/messages", {"max_tokens": 4, "messages": [MESSAGE], "stream": True, "stop_sequences": ["x"]}),
    ("/v1/messages/count_tokens", {"messages": [MESSAGE, {"role": "assistant", "content": "1 "}]}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
    ("/tokenize", {"messages": [MESSAGE]}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]
VALUES: Final[list[Any]] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30),
    *(0.5, -0.0, 1e308, 1e-320),
    *("", "a", "tiny", "\x00", "\ud83d\ude00", "\u202e", "<|end|>", "{{ x }}", "{% for %}", "a" * 5000),
    *([], {}, [[]], [None], [0], [-1], [1, "a"], ["a", 1], {"a": 1}, {"": None}, [[1]] * 40, [0.5], [True]),
    *({"type": "text"}, {"type": "image_url"}, {"role": "user"}, [{"role": 1}], "NaN", [2**40]),
]
# How the last event of a whole stream begins.
ENDS: Final = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: response.completed",
    b"event: response.incomplete",
)
BYTES: Final = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff\xfe",
    b"0" * 400,
    b"[" * 20_000,
    b'{"a":' * 5000,
    b'"\\ud800"',
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway[EngineFrontend]]:
    model = tool_model(tmp_path_factory.mktemp("model"))
    with served_engine(tiny_engine(MAX_MODEL_LEN), model=model) as gateway:
        yield gateway


def damaged_body(chance: random.Random) -> tuple[str, bytes]:
    path, body = chance.choice(TRAFFIC)
    body = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        damage(chance, body)
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    if chance.random() < 0.2:
        data = damage_bytes(chance, data)
    return path, data


def damage(chance: random.Random, body: dict[str, Any]) -> None:
    """Exchange, remove or add one value, at any depth."""
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        for key in list(node if isinstance(node, dict) else range(len(node))):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                visit(node[key])

    visit(body)
    kind = chance.random()
    if not places or kind < 0.2:
        known = [key for _, other in TRAFFIC for key in other]
        body[chance.choice([*known, "best_of", "suffix", "priority", "x"])] = chance.choice(VALUES)
        return
    node, key = chance.choice(places)
    if kind < 0.35:
        del node[key]
    else:
        node[key] = copy.deepcopy(chance.choice(VALUES))


def damage_bytes(chance: random.Random, data: bytes) -> bytes:
    place = chance.randrange(len(data) + 1)
    kind = chance.randrange(4)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + bytes([chance.randrange(256)]) + data[place:]
    if kind == 2:
        return data[:place] + chance.choice(BYTES) + data[place:]
    return chance.choice(BYTES)


def check_body(served: ServedGateway[EngineFrontend], seed: int) -> int:
    """The status that the body of this seed gets."""
    path, data = damaged_body(random.Random(seed))
    with closing(
        http.client.HTTPConnection(served.address.host, served.address.port, timeout=TIMEOUT_S)
    ) as connection:
        connection.request("POST", path, data)
        response = connection.getresponse()
        answer = response.read()
    told = f"seed {seed}: {path} {data[:300]!r} -> {response.status} {answer[:300]!r}"
    assert response.status in STATUSES, told
    assert response.headers["x-request-id"], told
    if response.status != 200 and path.startswith("/v1/messages"):
        assert set(json.loads(answer)) == {"type", "error", "request_id"}, told
    elif response.status != 200:
        assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}, told
    elif response.headers["content-type"].startswith("text/event-stream"):
        last = answer.split(b"\n\n")[-2]
        assert last.startswith(ENDS) and b'"error":{' not in answer, told
    else:
        json.loads(answer)
    return response.status


def run(served: ServedGateway[EngineFrontend], seeds: range) -> None:
    statuses = [check_body(served, seed) for seed in seeds]
    assert statuses.count(200) > len(seeds) // 20  # some damaged bodies are still valid
    assert statuses.count(400) > len(seeds) // 4
    served.until(lambda: not served.service.sinks)


def test_damaged_bodies(served: ServedGateway[EngineFrontend]) -> None:
    run(served, range(300))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_damaged_bodies(served: ServedGateway[EngineFrontend]) -> None:
    run(served, range(300, 10_300))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_damaged_bodies_as_the_schema_suggests_them(
    served: ServedGateway[EngineFrontend], tmp_path: Path
) -> None:
    """Schemathesis derives bodies from `/openapi.json`: no undocumented status, no 5xx."""
    checks = "not_a_server_error,status_code_conformance,unsupported_method"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"]
    options = ["--checks", checks, "--max-examples", "100", "--seed", "1", "--no-color"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-8000:]
    assert "Tested: 17" in result.stdout, result.stdout[-3000:]
