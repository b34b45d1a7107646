"""How long hostile bodies hold a gateway's event loop, and how much memory they take.

    python -m baton.bench.serve.gateway_loop [--generated 200] [--seed 1] [--out
    bench/results/gateway_loop.json]

A real gateway process with a Qwen-style chat template and a context of 131,072 tokens, a real router, and a
decode worker that computes nothing. Two tenants: one sends hostile bodies, one after the other and four at a
time, the other one short chat after another. bench/serve/gateway_loop_host.py watches the loop from inside
the gateway: each time is how late a timer of 2 ms was, less the time for which the loop's thread waited for a
core.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import psutil

from baton.bench.report import RESULTS, Row, at_most, print_table, write_json
from baton.bench.serve.figures import quantile
from baton.bench.serve.gateway_loop_host import FILE_VARIABLE, Held
from baton.bench.serve.stub import StubConfig
from baton.cluster.model_directory import resolve_model
from baton.cluster.process_spec import ProcessSpec
from baton.cluster.runtimes.local import LocalRuntime
from baton.config.gateway import GatewayConfig
from baton.config.router import RouterConfig
from baton.messages.workers import Address, WorkerRole

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MAX_BYTES: Final = 4 * 2**20
CALL: Final = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


class Hostile(NamedTuple):
    """Hostile bodies: those that a review has found, and any number of generated ones."""

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


TITLE: Final = "Event loop of a gateway under hostile bodies"
CONTEXT_TOKENS: Final = 131_072
HELD_BAR_MS: Final = 50.0
P99_BAR: Final = 2.0
MEMORY_BAR_MB: Final = 100.0
ALONE_S: Final = 8.0
NUM_AT_ONCE: Final = 4
FAST_STEP_S: Final = 0.01  # of a decode step with four calls of eight choices, on the fastest of GPUs
NUM_CLIENTS: Final = 40  # that do not read
MB: Final = 1e6
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


class Served(NamedTuple):
    address: Address
    pid: int
    held_file: Path


class Phase(NamedTuple):
    """The longest time between two moments for which the loop was held."""

    held_ms: float
    late_ms: float  # of the same tick, with its wait for a core


def model_directory(folder: Path) -> Path:
    """The tiny tokenizer with a Qwen-style template and a long context."""
    for file in resolve_model("tiny").glob("*.json"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
    return folder


def tenants_file(folder: Path) -> Path:
    path = folder / "tenants.yaml"
    lines = ["tenants:"]
    for name, key in KEYS.items():
        lines += [f"  {name}:", f'    keys: ["sha256:{hashlib.sha256(key.encode()).hexdigest()}"]']
    path.write_text("\n".join(lines) + "\n")
    return path


@contextlib.asynccontextmanager
async def served(folder: Path, step_s: float = 0.0) -> AsyncIterator[Served]:
    """The gateway before a worker whose steps take `step_s`."""
    directory = folder / "qwen-like"
    directory.mkdir(exist_ok=True)
    model_directory(directory)
    key = secrets.token_bytes(32)
    held_file = folder / "held"
    runtime = LocalRuntime(key)
    stubs = LocalRuntime(key, command=(sys.executable, "-m", "baton.bench.serve.stub"))
    os.environ[FILE_VARIABLE] = str(held_file)
    hosts = LocalRuntime(key, command=(sys.executable, "-m", "baton.bench.serve.gateway_loop_host"))
    try:
        choosing = RouterConfig(redis="none")
        router = await (
            await runtime.spawn(ProcessSpec(kind="router", name="router", config=choosing))
        ).ready()
        stub = StubConfig(
            id=secrets.token_hex(16),
            name="decode-0",
            role=WorkerRole.DECODE,
            model="qwen-like",
            router=router,
            vocab_size=json.loads((directory / "config.json").read_text())["vocab_size"],
            max_model_len=CONTEXT_TOKENS,
            step_s=step_s,
        )
        await (await stubs.spawn(ProcessSpec(kind="worker", name="decode-0", config=stub))).ready()
        config = GatewayConfig(
            model=str(directory), routers=(router,), port=0, tenants_file=str(tenants_file(folder))
        )
        process = await hosts.spawn(ProcessSpec(kind="gateway", name="gateway-0", config=config))
        address = await process.ready()
        await _until_it_answers(address)
        yield Served(address, process.pid, held_file)
    finally:
        await hosts.close()
        await stubs.close()
        await runtime.close()


async def ask(address: Address, tenant: str, path: str, body: bytes) -> int:
    """The status; the answer is read and thrown away. 0: the connection ended without one."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS[tenant]}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        line = await reader.readline()
        while await reader.read(1 << 20):
            pass
        return int(line.split(b" ", 2)[1]) if line else 0
    except ConnectionError:
        return 0
    finally:
        writer.close()


async def _until_it_answers(address: Address) -> None:
    async with asyncio.timeout(60):
        while await ask(address, "quiet", "/v1/chat/completions", SHORT_CHAT) != 200:
            await asyncio.sleep(0.1)


async def quiet(address: Address, latencies_s: list[float], stop: asyncio.Event) -> None:
    """One short chat after another, until `stop`."""
    while not stop.is_set():
        since_s = time.monotonic()
        status = await ask(address, "quiet", "/v1/chat/completions", SHORT_CHAT)
        latencies_s.append(time.monotonic() - since_s if status == 200 else float("inf"))
        await asyncio.sleep(0.005)


async def quiet_alone(address: Address) -> list[float]:
    """Latencies of short chats for ALONE_S, in seconds."""
    latencies_s, stop = list[float](), asyncio.Event()
    asyncio.get_running_loop().call_later(ALONE_S, stop.set)
    await quiet(address, latencies_s, stop)
    return latencies_s


_prepared: list[Hostile] = []  # of the process that sends them


def prepare(work: Sequence[Hostile]) -> None:
    """Keep the bodies, in the process that is going to send them."""
    _prepared[:] = work


def send_prepared(address: Address, num_at_once: int) -> Counter[int]:
    """Send the bodies, so many at once, and count the statuses."""

    async def send(queue: list[Hostile]) -> Counter[int]:
        statuses = Counter[int]()
        while queue:
            hostile = queue.pop()
            statuses[await ask(address, "hostile", hostile.path, hostile.body)] += 1
        return statuses

    async def send_all() -> Counter[int]:
        queue = _prepared[::-1]
        return sum(await asyncio.gather(*(send(queue) for _ in range(num_at_once))), Counter[int]())

    return asyncio.run(send_all())


async def beside_quiet(
    address: Address, work: Sequence[Hostile], num_at_once: int, sender: Executor, statuses: Counter[int]
) -> list[float]:
    """Latencies of the quiet tenant while the other sends `work` from a process of its own."""
    latencies_s, stop = list[float](), asyncio.Event()
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(sender, prepare, work)
    watching = asyncio.create_task(quiet(address, latencies_s, stop))
    statuses.update(await loop.run_in_executor(sender, send_prepared, address, num_at_once))
    stop.set()
    await watching
    return latencies_s


def phase(served: Served, since_s: float, until_s: float) -> Phase:
    lines = served.held_file.read_text().splitlines() if served.held_file.exists() else []
    late = [msgspec.json.decode(line, type=Held) for line in lines]
    between = [each for each in late if since_s <= each.at_s <= until_s + 0.1]
    longest = max(between, key=lambda each: each.late_s - each.waited_s, default=Held(0, 0, 0))
    return Phase(max(0.0, longest.late_s - longest.waited_s) * 1e3, longest.late_s * 1e3)


class Peak:
    """The most memory that a process has had while this was watched, beyond what it had before."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._before = self._most = self._process.memory_info().rss
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            self._most = max(self._most, self._process.memory_info().rss)
            await asyncio.sleep(0.02)

    def end(self) -> float:
        """In MB."""
        self._task.cancel()
        return (self._most - self._before) / MB


async def growth_without_readers(served: Served) -> float:
    """40 clients ask `/detokenize` and `/tokenize` for the largest answers and read nothing."""
    peak, clients = Peak(served.pid), list[socket.socket]()
    bodies = [
        ("/detokenize", json.dumps({"tokens": [300] * CONTEXT_TOKENS}).encode()),
        ("/tokenize", json.dumps({"prompt": "a " * 400_000, "return_token_strs": True}).encode()),
    ]
    loop = asyncio.get_running_loop()
    for index in range(NUM_CLIENTS):
        path, body = bodies[index % 2]
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, (served.address.host, served.address.port))
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS['hostile']}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        clients.append(client)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(10):
                await loop.sock_sendall(client, head.encode() + body)
    await asyncio.sleep(5)
    for client in clients:
        client.close()
    return peak.end()


async def growth_of_logprobs(served: Served, statuses: Counter[int]) -> float:
    """Whole answers of 20 log probabilities a token, four calls at once."""
    peak = Peak(served.pid)
    fields = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    max_tokens = GatewayConfig(model="tiny", routers=()).max_answer_entries // (8 * 21)  # eight choices
    body = json.dumps(fields | {"n": 8, "max_tokens": max_tokens, "ignore_eos": True}).encode()
    found = await asyncio.gather(
        *(ask(served.address, "hostile", "/v1/chat/completions", body) for _ in range(4))
    )
    statuses.update(found)
    return peak.end()


async def measure(num_generated: int, seed: int) -> tuple[list[Row], dict[str, object]]:
    rows, extra = list[Row](), dict[str, object]()
    statuses = Counter[int]()
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as sender,
    ):
        async with served(Path(folder)) as gateway:
            since_s = time.monotonic()
            alone = await quiet_alone(gateway.address)
            calm = phase(gateway, since_s, time.monotonic())
            rows.append(Row("held with short chats alone", calm.held_ms, "ms"))
            kinds: list[tuple[str, Iterable[Hostile], int]] = [
                ("bodies of the review", reviewed(), 1),
                ("further bodies", others(), 1),
                (f"{num_generated} generated bodies", generated(num_generated, seed), NUM_AT_ONCE),
            ]
            sticky_worker = list[float]()
            for name, bodies, num_at_once in kinds:
                work = list(bodies)
                for part in [[one] for one in work] if num_at_once == 1 else [work]:
                    since_s = time.monotonic()
                    sticky_worker += await beside_quiet(gateway.address, part, num_at_once, sender, statuses)
                    found = phase(gateway, since_s, time.monotonic())
                    note = f"{found.late_ms:.1f} ms with the wait for a core"
                    label = part[0].name if num_at_once == 1 else name
                    rows.append(at_most(f"loop held: {label}", found.held_ms, "ms", HELD_BAR_MS, note))
                    print(f"{label}: {found.held_ms:.1f} ms ({note})", file=sys.stderr, flush=True)
            alone += await quiet_alone(gateway.address)  # before and after: what else the machine does varies
            alone_ms, beside_ms = quantile(alone, 99) * 1e3, quantile(sticky_worker, 99) * 1e3
            note = f"{alone_ms:.1f} ms alone, {beside_ms:.1f} ms beside"
            rows.append(at_most("other tenant's p99", beside_ms / alone_ms, "times", P99_BAR, note))
            grown = await growth_without_readers(gateway)
            rows.append(at_most("RSS growth, 40 clients that do not read", grown, "MB", MEMORY_BAR_MB))
        async with served(Path(folder), step_s=FAST_STEP_S) as gateway:
            grown = await growth_of_logprobs(gateway, statuses)
            rows.append(at_most("RSS growth, four calls of 20 logprobs", grown, "MB", MEMORY_BAR_MB))
            extra["statuses"] = {str(status): num for status, num in sorted(statuses.items())}
            rows.append(at_most("answers of status 500 or none", statuses[500] + statuses[0], "", 0))
    return rows, extra


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--generated", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "gateway_loop.json")
    arguments = parser.parse_args()
    rows, extra = asyncio.run(measure(arguments.generated, arguments.seed))
    print_table(TITLE, rows)
    write_json(arguments.out, TITLE, rows, {**extra, "seed": arguments.seed})
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
