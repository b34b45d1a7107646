"""The worth of prefix reuse: two prefill and two decode workers with prefix caches, and as many without.

Both clusters answer the same prompts, in turns, over HTTP. docs/benchmarks.md explains the figures.
"""

import asyncio
import json
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from baton.bench.clusters import served_cluster
from baton.bench.engine.replica import LLAMA_3M, random_tokens
from baton.bench.report import Plot, Report, Row, at_most, option, ranked_shares, suite
from baton.bench.serve.client import Address, Client, at_once
from baton.bench.serve.figures import streamed, token_ids_of
from baton.config.engine import CacheConfig, EngineSettings, SchedulerConfig

# A prompt takes a CPU long enough to be worth keeping, and a bench not too long.
SHAPE: Final = replace(LLAMA_3M, max_positions=4096, initializer_range=0.2)
KV_TOKEN_BYTES: Final = SHAPE.num_layers * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 4
ROOM_TOKENS: Final = 40_000  # in each worker's pages
STEP_TOKENS: Final = 128  # a worker reads its messages between two steps
DOCUMENT_TOKENS: Final = 1536
QUESTION_TOKENS: Final = 24
SYSTEM_TOKENS: Final = 1024  # that all conversations of a round begin with
TURN_TOKENS: Final = 32
ANSWER_TOKENS: Final = 8
NUM_AT_ONCE: Final = 2
MOST_TTFT_SHARE: Final = 0.4
POLICIES: Final = {True: "cost", False: "least-loaded"}  # with prefix caches, and without

tokens: Final = partial(random_tokens, SHAPE)


class Answer(NamedTuple):
    """The answer to a prompt."""

    ttft_s: float
    token_ids: list[int]


async def ask(client: Client, prompt: Sequence[int]) -> Answer:
    """Stream a greedy answer of ANSWER_TOKENS. Bad: the answer is not whole."""
    body = {"model": "m", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    answer = await client.post("/v1/completions", json.dumps(body).encode())
    return Answer(streamed(answer, answer.sent_s, ANSWER_TOKENS).ttft_s, token_ids_of(answer))


async def ask_about_documents(client: Client, random: Random) -> list[Answer]:
    """Ask six questions about each of two documents, in turns, NUM_AT_ONCE at a time."""
    documents = [tokens(random, DOCUMENT_TOKENS) for _ in range(2)]
    prompts = [[*document, *tokens(random, QUESTION_TOKENS)] for _ in range(6) for document in documents]
    return await at_once(NUM_AT_ONCE, prompts, partial(ask, client))


async def converse(client: Client, random: Random) -> list[Answer]:
    """Hold two conversations of five turns side by side; each prompt is the history and a little more."""
    system = tokens(random, SYSTEM_TOKENS)
    turns = [[tokens(random, TURN_TOKENS) for _ in range(5)] for _ in range(2)]

    async def hold(turns: Sequence[Sequence[int]]) -> list[Answer]:
        history, answers = list(system), list[Answer]()
        for turn in turns:
            history += turn
            answers.append(await ask(client, history))
            history += answers[-1].token_ids
        return answers

    return [answer for answers in await asyncio.gather(*map(hold, turns)) for answer in answers]


Workload = Callable[[Client, Random], Awaitable[list[Answer]]]
WORKLOADS: Final[dict[str, Workload]] = {"documents": ask_about_documents, "conversations": converse}


async def warm_up(client: Client, random: Random) -> None:
    """Ask prompts of all lengths, so that the router learns what they take."""
    for num_tokens in (24, 100, 400, 800, 1200, DOCUMENT_TOKENS):
        await asyncio.gather(*(ask(client, tokens(random, num_tokens)) for _ in range(4)))


async def open_client(stack: AsyncExitStack, folder: str, *, has_cache: bool) -> Client:
    """Start a cluster, and return a client of it; the stack ends both."""
    settings = EngineSettings(
        device="cpu",
        load_format="dummy",
        dtype="float32",
        cache=CacheConfig(
            kv_cache_memory_bytes=ROOM_TOKENS * KV_TOKEN_BYTES, enable_prefix_caching=has_cache
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=STEP_TOKENS),
    )
    options = ("--runtime", "local", "--served-model-name", "m", "--router-policy", POLICIES[has_cache])
    cluster = await stack.enter_async_context(served_cluster(options, model=folder, engine=settings))
    return stack.enter_context(closing(Client(Address(cluster.url))))


def workload_rows(name: str, answers: dict[bool, list[Answer]]) -> list[Row]:
    """Return times to the first token with reuse and without, of the same prompts."""
    with_s, without_s = (median(each.ttft_s for each in answers[has_cache]) for has_cache in POLICIES)
    pairs = zip(*answers.values(), strict=True)
    num_different = sum(one.token_ids != other.token_ids for one, other in pairs)
    return [
        Row(f"{name}: TTFT p50 with reuse", 1e3 * with_s, "ms", note=f"{len(answers[True])} requests"),
        Row(f"{name}: TTFT p50 without", 1e3 * without_s, "ms", note="no page is kept; least-loaded"),
        at_most(f"{name}: with / without", with_s / without_s, "x", MOST_TTFT_SHARE),
        at_most(f"{name}: answers that differ", num_different, "", 0),
    ]


@suite(
    "prefix",
    "Prefix reuse between processes",
    option("--rounds", 3, "of each workload"),
    option("--seed", 0),
)
async def measure(options: Namespace, report: Report) -> None:
    """Compare both clusters. WorkerLost: one does not come up; Bad: an answer is not whole."""
    found = {name: {has_cache: list[Answer]() for has_cache in POLICIES} for name in WORKLOADS}
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        SHAPE.write(Path(folder))
        report.tell("starting workers")
        clients = {each: await open_client(stack, folder, has_cache=each) for each in POLICIES}
        for client in clients.values():
            await warm_up(client, Random(options.seed + 1_000_000))
        for number, (name, has_cache) in report.turns(product(WORKLOADS, clients), options.rounds):
            random = Random(options.seed + number)
            found[name][has_cache] += await WORKLOADS[name](clients[has_cache], random)
    curves = {}
    for name, answers in found.items():
        report.rows += workload_rows(name, answers)
        ms = {each: [1e3 * answer.ttft_s for answer in of_one] for each, of_one in answers.items()}
        report.extra[f"{name}: TTFT, ms"] = {"with reuse": ms[True], "without": ms[False]}
        curves[name] = {"with reuse": ranked_shares(ms[True]), "without": ranked_shares(ms[False])}
    labels = {"x_label": "ms to the first token", "y_label": "share of requests"}
    report.plot = Plot(curves, **labels, is_log=True, is_stepped=True)
