"""Answers of `tiny`, sampled at temperature 1: are they valid, and do drafts or kills change them?

With kills:

1. One engine answers questions with forms, at temperature 1 with a seed each.
2. Clients ask a cluster of two prefill and two decode workers the same, in streams and whole, and hang up now
   and then. Decode workers have two ranks. Pages are few, so sequences are preempted, too.
3. Meanwhile a decode worker and a prefill worker get SIGKILL in turns. The next is killed once the cluster is
   whole again, for a request survives one death (docs/faults.md).
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from typing import Any, Final

from baton.bench.clusters import MODEL, START_S, WatchedCluster, local_cluster
from baton.bench.faults.clients import Clients, Question
from baton.bench.report import Report, Row, at_least, at_most
from baton.bench.structured.masks import BATCH, Case
from baton.cluster.model_directory import resolve_model
from baton.cluster.offline.llm import LLM
from baton.config.cluster import ServeConfig, WorkersConfig
from baton.config.engine import CacheConfig, EngineSettings
from baton.config.router import RouterConfig
from baton.errors import WorkerLost
from baton.gateway.text.tokenizer import Tokenizer
from baton.request import FinishReason, SamplingParams

PROMPTS: Final = ("k1=fig k2=plum\nk1?", "copy(sun moon star)=", "7+5=", "close ([{ =")
MAX_ANSWER_TOKENS: Final = 400


def sampled_answers(
    cases: Sequence[Case], num_answers: int, report: Report, speculative: Mapping[str, Any] | None = None
) -> list[tuple[Case, list[int], bool]]:
    """Return answers of `tiny` at temperature 1: the schema, the tokens, whether max_tokens cut it."""
    report.tell(f"answers{' with drafts' if speculative else ''}")
    asked = [cases[number % len(cases)] for number in range(num_answers)]
    sampling = [
        SamplingParams(
            max_tokens=MAX_ANSWER_TOKENS, temperature=1.0, seed=number, structured_outputs=case.form
        )
        for number, case in enumerate(asked)
    ]
    prompts = [PROMPTS[number // len(cases) % len(PROMPTS)] for number in range(num_answers)]
    cache, steps = {"kv_cache_memory_bytes": 2**26}, {"max_num_seqs": BATCH}
    with LLM(MODEL, device="cpu", cache=cache, scheduler=steps, speculative=speculative) as llm:
        answers = [completion.outputs[0] for completion in llm.generate(prompts, sampling)]
    return [
        (case, list(answer.token_ids), answer.finish_reason is FinishReason.LENGTH)
        for case, answer in zip(asked, answers, strict=True)
    ]


def error_of(case: Case, text: str) -> str | None:
    """Return why the text is no instance of the schema by jsonschema, or None."""
    import jsonschema

    validator = jsonschema.validators.validator_for(case.schema)
    checker = validator(case.schema, format_checker=validator.FORMAT_CHECKER)
    try:
        error = jsonschema.exceptions.best_match(checker.iter_errors(json.loads(text)))
    except ValueError as wrong:
        return str(wrong)
    return None if error is None else f"{error.message} at {error.json_path}"


def answer_rows(report: Report, cases: Sequence[Case], num_answers: int) -> list[Row]:
    """Return how many sampled answers are valid, and how many tokens drafts change."""
    tokenizer = Tokenizer.find(resolve_model("tiny"))
    assert tokenizer is not None
    plain = sampled_answers(cases, num_answers, report)
    invalid, num_cut = list[str](), 0
    for case, tokens, is_cut in plain:
        num_cut += is_cut
        error = None if is_cut else error_of(case, tokenizer.decode(tokens))
        if error is not None:
            invalid.append(f"{case.name}: {error}"[:200])
    num_whole = len(plain) - num_cut
    note = f"{num_whole:,} of {num_answers:,}, {num_cut:,} cut by max_tokens {MAX_ANSWER_TOKENS}"
    percent = 100 * (1 - len(invalid) / num_whole)
    rows = [at_least("whole answers that are valid", percent, "%", 100, note)]
    report.extra["invalid answers"] = invalid
    drafted = sampled_answers(cases, num_answers, report, {"method": "ngram"})
    num_differing = sum(one != other for (_, one, _), (_, other, _) in zip(plain, drafted, strict=True))
    note = f"of {sum(len(tokens) for _, tokens, _ in plain):,} tokens"
    return [*rows, at_most("answers that drafts change", num_differing, "", 0, note)]


NUM_CLIENTS: Final = 8
VICTIMS: Final = ("decode-0", "prefill-0", "decode-1", "prefill-1")
QUIET_S: Final = 2.0  # between a whole cluster and the next kill
LOOK_S: Final = 0.2
CONFIG: Final = ServeConfig(
    model=MODEL,
    runtime="local",
    port=0,
    prefill=WorkersConfig(num_workers=2),
    decode=WorkersConfig(num_workers=2, page_size=32, tensor_parallel_size=2),
    engine=EngineSettings(max_model_len=768, cache=CacheConfig(kv_cache_memory_bytes=2**21)),
    router=RouterConfig(policy="least-loaded"),  # which sends every prompt to a prefill worker
)


def form_questions(cases: Sequence[Case], num_questions: int, report: Report) -> list[Question]:
    """Return completions with forms, each with the tokens that one engine gives."""
    tokenizer = Tokenizer.find(resolve_model(MODEL))
    assert tokenizer is not None
    answers = sampled_answers(cases, num_questions, report)
    questions = []
    for number, (case, tokens, _) in enumerate(answers):
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": list(tokenizer.encode(PROMPTS[number // len(cases) % len(PROMPTS)])),
            "structured_outputs": {"json": case.schema},
            "return_token_ids": True,
            "max_tokens": MAX_ANSWER_TOKENS,
            "temperature": 1.0,
            "seed": number,
        }
        questions.append(Question(body, tokens))
    return questions


async def run_with_kills(
    questions: Sequence[Question], num_answers: int, report: Report
) -> tuple[Clients, Counter[str]]:
    """Ask a cluster until so many answers are compared and each of `VICTIMS` was killed once at least.

    Returns the clients, and the kills by worker.
    """
    num_kills = Counter[str]()
    async with local_cluster(CONFIG) as cluster:
        clients = Clients(cluster.url, questions, seed=0, num_clients=NUM_CLIENTS)
        async with clients.asking():
            killing = asyncio.create_task(_kill_in_turns(cluster, num_kills))
            while clients.num_compared < num_answers or len(num_kills) < len(VICTIMS):
                report.tell("answers while workers are killed", min(1.0, clients.num_compared / num_answers))
                await asyncio.wait([killing], timeout=LOOK_S)
                if killing.done():
                    await killing
            killing.cancel()
            with suppress(asyncio.CancelledError):
                await killing
    return clients, num_kills


async def _kill_in_turns(cluster: WatchedCluster, num_kills: Counter[str]) -> None:
    for name in cycle(VICTIMS):
        await asyncio.sleep(QUIET_S)
        if await cluster.kill(name):
            num_kills[name] += 1
            await cluster.seconds_until(lambda status: not cluster.is_whole(status), QUIET_S)
        if await cluster.seconds_until(cluster.is_whole, START_S) is None:
            raise WorkerLost(f"the cluster is not whole again after {name} was killed")


async def kill_rows(report: Report, cases: Sequence[Case], num_answers: int) -> list[Row]:
    """Return how many answers differ from those of one engine while workers are killed."""
    questions = form_questions(cases, len(cases), report)
    clients, num_kills = await run_with_kills(questions, num_answers, report)
    report.extra["kills"] = dict(num_kills)
    report.extra["answers with kills"] = dict(clients.outcomes)
    note = f"{num_kills.total()} kills; {'; '.join(clients.complaints[:3])}".removesuffix("; ")
    return [
        at_least("answers compared while workers are killed", clients.num_compared, "", num_answers, note),
        at_most("of these with a differing token", clients.outcomes["wrong"], "", 0),
        at_most("calls without an answer", clients.outcomes["lost"], "", 0),
    ]
