"""The time for which hostile bodies hold a gateway's event loop.

A real gateway process with a Qwen-style chat template and a context of 131,072 tokens, a real router, and a
decode worker that computes nothing. docs/benchmarks.md explains the figures.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import msgspec

from baton.bench.clusters import copy_tiny, tenants_yaml
from baton.bench.report import Report, Row, at_most, option, percentile, suite
from baton.bench.serve.client import Address, Client, at_once
from baton.bench.serve.overhead import Plane, stub_cluster
from baton.bench.serve.stub import FILE_VARIABLE, Held
from baton.errors import PeerGone

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MAX_BYTES: Final = 4 * 2**20
CALL: Final = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CONTEXT_TOKENS: Final = 131_072
HELD_BAR_MS: Final = 50.0
P99_BAR: Final = 2.0
ALONE_S: Final = 8.0
NUM_AT_ONCE: Final = 4
KEYS: Final = {"hostile": "hostile-key-0123456789", "quiet": "quiet-key-0123456789"}
SHORT_CHAT: Final = json.dumps(
    {"messages": [{"role": "user", "content": "sort(3 1 2)="}], "max_tokens": 16}
).encode()
TEMPLATE: Final = """\
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call tools.\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class Hostile(NamedTuple):
    """An expensive request: its path and its body. An empty body makes it a GET."""

    name: str
    path: str
    body: bytes


def reviewed() -> Iterator[Hostile]:
    """Yield bodies that held the loop of an early gateway for 0.16 to 3.3 s."""
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL] * 25_000}
    yield _chat("1.8 MiB of tool calls", [calls])
    empty = {"role": "assistant", "content": "", "tool_calls": [{}] * 50_000}
    yield _chat("50,000 empty tool calls", [empty])
    yield _completion("128 prompts of 4 KB", prompt=["the sun " * 500] * 128, max_tokens=1)
    yield _completion("2 M token ids", prompt=[1] * 2_000_000, max_tokens=1)
    yield _completion("128 prompts of 16,000 token ids", prompt=[[1] * 16_000] * 128, max_tokens=1)
    yield _completion("1,024 choices", prompt=["a"] * 128, n=8, max_tokens=1)


def others() -> Iterator[Hostile]:
    """Yield bodies that a reader of the code would try next."""
    yield _completion("300,000 biases", prompt="a", logit_bias={str(index): 1 for index in range(300_000)})
    unknown = {f"k{index}": 1 for index in range(300_000)}
    yield _completion("300,000 unknown keys", prompt="a", **unknown)
    yield _body("a response with the same", RESPONSES, {"input": "a", "max_output_tokens": 1, **unknown})
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
    usage = {"include_usage": True, "continuous_usage_stats": True}
    many = {"prompt": ["a"] * 128, "n": 8, "max_tokens": 16, "stream": True, "stream_options": usage}
    yield _completion("usage in each chunk of 1,024 choices", **many)
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    choice = {"type": "function", "name": "f", "x": [[]] * 1_000_000}  # the response repeats all of it
    asked = {"input": "a", "tools": [tool], "tool_choice": choice, "max_output_tokens": 4}
    yield _body("fields that a response repeats", RESPONSES, {**asked, "stream": True})
    yield _chat("numbers", [{"role": "user", "content": "a", "x": [1.5] * 800_000}])


def generated(num: int, seed: int) -> Iterator[Hostile]:
    """Yield bodies drawn by shape and size; a tenth is damaged."""
    draw = random.Random(seed)
    for index in range(num):
        size = int(2 ** draw.uniform(10, 21.5))
        path, fields = draw.choice(SHAPES)(draw, size)
        fields |= draw.choice(({}, {"stream": True}, {"n": draw.randint(1, 8)}, {"max_tokens": 1}))
        data = json.dumps(fields).encode()[:MAX_BYTES]
        if draw.random() < 0.1:
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


Shape = Callable[[random.Random, int], tuple[str, dict[str, Any]]]
SHAPES: Final[Sequence[Shape]] = (
    *(_messages, _tool_calls, _other_keys, _texts, _token_ids, _tools, _text_routes),
)


def _chat(name: str, messages: list[Any]) -> Hostile:
    return _body(name, CHAT, {"messages": messages, "max_tokens": 4})


def _completion(name: str, **fields: Any) -> Hostile:
    return _body(name, COMPLETIONS, fields)


def _body(name: str, path: str, fields: dict[str, Any]) -> Hostile:
    return Hostile(name, path, json.dumps(fields).encode())


class Gateway(NamedTuple):
    """A running gateway, by the addresses of its tenants, and the file of its loop's holds."""

    hostile: Address
    quiet: Address
    held_file: Path

    def longest_hold(self, since_s: float, until_s: float) -> Held:
        """Return the longest hold between two moments of the monotonic clock."""
        lines = self.held_file.read_text().splitlines() if self.held_file.exists() else []
        holds = [msgspec.json.decode(line, type=Held) for line in lines]
        between = [each for each in holds if since_s <= each.at_s <= until_s + 0.1]
        return max(between, key=lambda each: each.held_s, default=Held(0, 0, 0))


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Gateway]:
    """Run the gateway before a worker that computes nothing."""
    held_file, tenants = folder / "held", folder / "tenants.yaml"
    directory = folder / "qwen-like"
    copy_tiny(directory, CONTEXT_TOKENS)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    tenants.write_text(tenants_yaml(KEYS))
    with patch.dict(os.environ, {FILE_VARIABLE: str(held_file)}):  # the gateway's process inherits it
        async with stub_cluster(Plane(str(directory)), str(tenants)) as cluster:
            hostile, quiet = (Address(cluster.url, key) for key in KEYS.values())
            yield Gateway(hostile, quiet, held_file)


async def stored_conversation(address: Address) -> Hostile:
    """Store a response to 4 MB of input; return the question for the items of the input."""
    asked = {"input": [{"role": "user", "content": "a", "x": [[]] * 1_000_000}], "max_output_tokens": 1}
    with contextlib.closing(Client(address)) as client:
        answer = await client.post(RESPONSES, json.dumps(asked).encode())
    id = msgspec.json.decode(answer.body, type=dict[str, Any])["id"]
    return Hostile("items of a stored response", f"{RESPONSES}/{id}/input_items", b"")


async def ask(client: Client, path: str, body: bytes) -> int:
    """Return the status of the answer; 0: the connection ended without one."""
    try:
        return (await (client.post(path, body) if body else client.get(path))).status
    except (PeerGone, OSError):
        return 0


async def chat_until(address: Address, stop: asyncio.Event) -> list[float]:
    """Ask one short chat after another until `stop`; return their seconds, infinity for a refused one."""
    latencies_s = list[float]()
    with contextlib.closing(Client(address)) as client:
        while not stop.is_set():
            since_s = time.monotonic()
            status = await ask(client, CHAT, SHORT_CHAT)
            latencies_s.append(time.monotonic() - since_s if status == 200 else float("inf"))
            await asyncio.sleep(0.005)
    return latencies_s


async def chat_alone(gateway: Gateway) -> list[float]:
    """Return the latencies of short chats for ALONE_S, in seconds."""
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(ALONE_S, stop.set)
    return await chat_until(gateway.quiet, stop)


_prepared: list[Hostile] = []  # in the process that sends them


def prepare(work: Sequence[Hostile]) -> None:
    """Keep the bodies in the process that is going to send them."""
    _prepared[:] = work


def send_prepared(address: Address, num_at_once: int) -> Counter[int]:
    """Send the bodies, so many at once; return the counts of statuses."""

    async def send_all() -> list[int]:
        with contextlib.closing(Client(address)) as client:
            return await at_once(num_at_once, _prepared, lambda each: ask(client, each.path, each.body))

    return Counter(asyncio.run(send_all()))


async def chat_beside(
    gateway: Gateway, work: Sequence[Hostile], num_at_once: int, sender: Executor, statuses: Counter[int]
) -> list[float]:
    """Return the latencies of the quiet tenant while another process sends `work`."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(sender, prepare, work)
    watching = asyncio.create_task(chat_until(gateway.quiet, stop))
    statuses.update(await loop.run_in_executor(sender, send_prepared, gateway.hostile, num_at_once))
    stop.set()
    return await watching


@suite(
    "gateway_loop",
    "Event loop of a gateway under hostile bodies",
    option("--generated", 200, "bodies that are drawn"),
    option("--seed", 1),
    fails_on_miss=True,
)
async def measure(options: Namespace, report: Report) -> None:
    """Send every hostile body beside the quiet tenant."""
    statuses, alone, beside = Counter[int](), list[float](), list[float]()
    drawn = list(generated(options.generated, options.seed))
    parts = [(each.name, [each], 1) for each in (*reviewed(), *others())]
    parts.append((f"{len(drawn)} generated bodies", drawn, NUM_AT_ONCE))
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as sender,
    ):
        async with running(Path(folder)) as gateway:
            stored = await stored_conversation(gateway.hostile)
            parts.insert(-1, (stored.name, [stored], 1))
            since_s = time.monotonic()
            alone += await chat_alone(gateway)
            hold = gateway.longest_hold(since_s, time.monotonic())
            report.rows.append(Row("held with short chats alone", 1e3 * hold.held_s, "ms"))
            for name, work, at_once in parts:
                report.tell(name)
                since_s = time.monotonic()
                beside += await chat_beside(gateway, work, at_once, sender, statuses)
                hold = gateway.longest_hold(since_s, time.monotonic())
                note = f"{1e3 * hold.late_s:.1f} ms with the wait for a core"
                report.rows.append(at_most(f"loop held: {name}", 1e3 * hold.held_s, "ms", HELD_BAR_MS, note))
            alone += await chat_alone(gateway)  # before and after: the machine's other load varies
    alone_ms, beside_ms = percentile(alone, 99) * 1e3, percentile(beside, 99) * 1e3
    note = f"{alone_ms:.1f} ms alone, {beside_ms:.1f} ms beside"
    report.rows += [
        at_most("other tenant's p99", beside_ms / alone_ms, "times", P99_BAR, note),
        at_most("answers of status 500 or none", statuses[500] + statuses[0], "", 0),
    ]
    counts = {str(status): num for status, num in sorted(statuses.items())}
    report.extra = {"statuses": counts, "seed": options.seed}
