"""KV pages and hand-offs of one byte an element, beside those of bf16: bytes, answers and divergence.

A prefill worker and a decode worker serve the tiny model in bf16, with each kind of pages and of transfers;
every prompt is handed over. Half of the questions need a thousand tokens back.

Then one engine computes prompts of `tiny`, and of a Llama of 56 M random parameters. Its next step runs
twice: on exact pages, and on pages rounded as a transfer rounds them. The second gives the decode worker's
tokens (tests/parity/test_rounded.py).
"""

import asyncio
import json
import random
import re
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from itertools import zip_longest
from statistics import median
from typing import Any, Final, NamedTuple

import torch

from baton.bench.clusters import served_cluster
from baton.bench.engine.replica import LLAMA_56M, RecordedEngine, greedy, load_replica
from baton.bench.report import Report, Row, at_most, option, suite
from baton.bench.serve.client import Address, Client, at_once
from baton.bench.tiny.tasks import Case, mixed_cases
from baton.cluster.model_directory import resolve_model
from baton.config.engine import engine_config
from baton.engine.engine import Engine, load_engine
from baton.gateway.text.tokenizer import Tokenizer
from baton.kernels.kv_rows import round_rows
from baton.kernels.native import TORCH_DTYPES

PLAIN: Final = "bf16"
DTYPES: Final = ("int8", "fp8")
# name -> options of `baton serve`
KINDS: Final[dict[str, tuple[str, ...]]] = {
    PLAIN: (),
    **{f"transfers of {dtype}": ("--kv-transfer-dtype", dtype) for dtype in DTYPES},
    **{f"pages of {dtype}": ("--kv-cache-dtype", dtype) for dtype in DTYPES},
}
LONGEST_ANSWER: Final = 24  # tokens
NUM_CLIENTS: Final = 4
REPORT_S: Final = 3.0  # in which the gateway hears of the last hand-offs
# A policy that computes no prompt on its decode worker.
OPTIONS: Final = ("--runtime", "local", "--transport", "tcp", "--router-policy", "least-loaded")
SENT: Final = re.compile(r"^baton_worker_kv_sent_bytes\S* (\S+)$", re.MULTILINE)
KV_BYTES: Final = 2**24
NUM_TOKENS: Final = 64  # of greedy answers


class Answers(NamedTuple):
    """The texts and tokens of all cases, and the bytes that were handed over."""

    texts: list[str]
    token_ids: list[list[int]]
    sent_bytes: float


async def ask(options: Sequence[str], cases: Sequence[Case]) -> Answers:
    """Serve tiny by two workers with these options, and answer all cases greedily."""

    async def complete(case: Case) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": case.prompt, "max_tokens": LONGEST_ANSWER}
        body |= {"temperature": 0.0, "return_token_ids": True}
        got = await client.post("/v1/completions", json.dumps(body).encode())
        assert got.status == 200, got.body
        (choice,) = json.loads(got.body)["choices"]
        return dict(choice)

    async with served_cluster((*OPTIONS, *options), prefill=1, decode=1) as cluster:
        with closing(Client(Address(cluster.url))) as client:
            choices = await at_once(NUM_CLIENTS, cases, complete)
            await asyncio.sleep(REPORT_S)
            metrics = await client.get("/metrics")
    sent_bytes = sum(float(number) for number in SENT.findall(metrics.body.decode()))
    return Answers([each["text"] for each in choices], [each["token_ids"] for each in choices], sent_bytes)


def share_equal(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the percentage of tokens that are equal at their places."""
    is_equal: list[bool] = []
    for one, other in zip(ours, theirs, strict=True):
        is_equal += [a == b for a, b in zip_longest(one, other)]
    return 100 * sum(is_equal) / len(is_equal)


def served_rows(cases: Sequence[Case], answers: dict[str, Answers]) -> list[Row]:
    """Compare the clusters."""
    plain, rows, right = answers[PLAIN], list[Row](), dict[str, float]()
    for name, each in answers.items():
        right[name] = 100 * sum(a == b.answer for a, b in zip(each.texts, cases, strict=True)) / len(cases)
        if name == PLAIN:
            rows.append(Row(f"tiny, {PLAIN}: right answers", right[PLAIN], "%", note=f"of {len(cases):,}"))
            continue
        size, note = each.sent_bytes / plain.sent_bytes, f"{each.sent_bytes / 2**20:.1f} MiB"
        rows.append(at_most(f"tiny, {name}: bytes of hand-offs over {PLAIN}", size, "x", 0.53, note))
        equal = share_equal(each.token_ids, plain.token_ids)
        rows.append(Row(f"tiny, {name}: tokens equal to {PLAIN}", equal, "%"))
        lost, note = right[PLAIN] - right[name], f"{right[name]:.1f} % right"
        rows.append(at_most(f"tiny, {name}: points lost", lost, "points", 0.5, note))
    return rows


def answer(engine: Engine, prompt: Sequence[int], num_tokens: int, transfer_dtype: str = PLAIN) -> list[int]:
    """Return the answer; after its first token all pages are rounded."""
    engine.add(greedy(prompt, num_tokens))
    token_ids: list[int] = []
    while engine.has_work():
        is_first = not token_ids
        token_ids += [output.token_id for output in engine.step() if output.token_id is not None]
        if is_first and token_ids and transfer_dtype != PLAIN:
            with torch.inference_mode():
                pages = engine.runner.pool.device
                pages.copy_(round_rows(pages, TORCH_DTYPES[transfer_dtype]))
    return token_ids


class Divergence(NamedTuple):
    """The differences that rounded pages make to the logits of an answer's second token."""

    max_abs_diff: float  # of any logit
    std: float  # of the plain logits
    same_argmax: bool


@torch.inference_mode()
def divergence(replica: RecordedEngine, prompt: Sequence[int], transfer_dtype: str) -> Divergence:
    """Compute one step after the prompt's first token, with the prompt's pages as they are and rounded."""
    answer(replica.engine, prompt, 2)
    step, pages = replica.last_step, replica.engine.runner.pool.device
    assert step is not None
    plain = replica.engine.runner.execute(step)[0].clone()
    before = pages.clone()
    pages.copy_(round_rows(pages, TORCH_DTYPES[transfer_dtype]))
    ours = replica.engine.runner.execute(step)[0]
    pages.copy_(before)
    max_abs_diff = float((ours - plain).abs().max())
    return Divergence(max_abs_diff, float(plain.std()), bool(ours.argmax() == plain.argmax()))


def logit_rows(name: str, replica: RecordedEngine, prompts: Sequence[Sequence[int]]) -> list[Row]:
    """Compare logits and greedy answers of one model."""
    rows = []
    plain = [answer(replica.engine, prompt, NUM_TOKENS) for prompt in prompts]
    for transfer_dtype in DTYPES:
        found = [divergence(replica, prompt, transfer_dtype) for prompt in prompts]
        max_abs_diff = max(each.max_abs_diff for each in found)
        same_argmax = 100 * sum(each.same_argmax for each in found) / len(found)
        middle, std = median(each.max_abs_diff for each in found), median(each.std for each in found)
        note = (
            f"median of {len(found)} prompts {middle:.3f}; the standard deviation of logits is {std:.2f}; "
            f"{same_argmax:.0f} % have the same top token"
        )
        what = f"{name}, transfers of {transfer_dtype}: largest difference of a logit"
        rows.append(Row(what, max_abs_diff, "", note=note))
        ours = [answer(replica.engine, prompt, NUM_TOKENS, transfer_dtype) for prompt in prompts]
        equal = share_equal(ours, plain)
        what = f"{name}, transfers of {transfer_dtype}: greedy tokens equal to {PLAIN}"
        rows.append(Row(what, equal, "%", note=f"of {NUM_TOKENS} a prompt"))
    return rows


@suite(
    "kv_dtype",
    "KV pages and transfers of one byte",
    option("--cases", 1000, "questions to the tiny model"),
    option("--prompts", 64, "whose logits are compared, for each model"),
)
async def measure(options: Namespace, report: Report) -> None:
    """Ask clusters, then compare logits."""
    cases, answers = mixed_cases(options.cases, seed=20), {}
    for name, kind_options in KINDS.items():
        report.tell(f"tiny, {name}")
        answers[name] = await ask(kind_options, cases)
    report.rows += served_rows(cases, answers)
    cache = {"kv_cache_memory_bytes": KV_BYTES, "enable_prefix_caching": False}
    settings = {"device": "cpu", "cache": cache, "scheduler": {"async_scheduling": False}}
    tiny, rng = resolve_model("tiny"), random.Random(7)
    encode, lengths = Tokenizer.from_directory(tiny).encode, (64, 512)
    models = {
        "tiny": (
            load_engine(engine_config({"model": str(tiny), **settings})),
            [encode(case.prompt) for case in mixed_cases(options.prompts, seed=20)],
        ),
        "Llama, 56 M": (
            load_replica(LLAMA_56M, settings),
            [rng.choices(range(LLAMA_56M.vocab_size), k=lengths[at % 2]) for at in range(options.prompts)],
        ),
    }
    for name, (engine, prompts) in models.items():
        report.tell(f"logits of {name}")
        report.rows += logit_rows(name, RecordedEngine(engine), prompts)
        engine.close()
