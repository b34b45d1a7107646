"""A mixture of experts on two ranks that split every expert, and on two ranks that have whole experts.

    python -m baton.bench.engine.experts [--rounds 5]

A Qwen3-MoE with dummy weights in bf16: 8 layers of 16 experts, 4 of them for a token. Each rank has one
thread. Batches of 1 and 32 are decoded in turns, in elapsed time and in the processor time of all ranks. For
the elapsed time every rank needs a core of its own.
"""

from argparse import Namespace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final, NamedTuple

from baton.bench.engine.replica import LLAMA_56M, Ranks, greedy, load_ranks
from baton.bench.report import Report, Row, at_most, option, suite
from baton.config.engine import engine_config
from baton.engine.engine import load_engine
from baton.kernels import native
from baton.rpc import process

NUM_RANKS: Final = 2
BATCHES: Final = (1, 32)
NUM_TOKENS: Final = 48
PROMPT_TOKENS: Final = 8
KV_BYTES: Final = 2**27
SPLIT, WHOLE, ALONE = "two ranks, experts split", "two ranks, whole experts", "one rank"
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    ALONE: {},
    SPLIT: {"tensor_parallel_size": NUM_RANKS},
    WHOLE: {"tensor_parallel_size": NUM_RANKS, "enable_expert_parallel": True},
}
MIXTURE: Final[dict[str, object]] = {  # beside the sizes of a Llama
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 704,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}


class Decoded(NamedTuple):
    """One decoded batch."""

    tokens_per_s: float
    cpu_ms_a_token: float
    answers: list[list[int]]  # of each request


def decode(ranks: Ranks, batch: int) -> Decoded:
    """Decode a batch; the figures begin after the prompts."""
    engine = ranks.engine
    answers: dict[str, list[int]] = {}
    for index in range(batch):
        request = greedy([1 + index] * PROMPT_TOKENS, NUM_TOKENS)
        answers[request.request_id] = []
        engine.add(request)
    started_s = used_s = 0.0
    num_tokens = 0
    while engine.has_work():
        for output in engine.step():
            assert output.token_id is not None
            answers[output.request_id].append(output.token_id)
            num_tokens += started_s > 0
        if not started_s:
            started_s, used_s = perf_counter(), sum(ranks.used_s)
    elapsed_s, used_s = perf_counter() - started_s, sum(ranks.used_s) - used_s
    return Decoded(num_tokens / elapsed_s, 1000 * used_s / num_tokens, list(answers.values()))


@suite("experts", "Mixture of experts on two ranks", option("--rounds", 5, "of decoding"))
def measure(options: Namespace, report: Report) -> None:
    """Decode with each kind of ranks in turns, and compare the tokens."""
    native.set_num_threads(NUM_RANKS)  # ranks share them: one each
    with TemporaryDirectory() as folder:
        LLAMA_56M.write(Path(folder), **MIXTURE)
        base = {"model": folder, "device": "cpu", "load_format": "dummy"}
        cache = {"kv_cache_memory_bytes": KV_BYTES}
        configs = {name: engine_config({**base, "cache": cache, **more}) for name, more in SETTINGS.items()}
        engines = {name: load_ranks(partial(load_engine, each)) for name, each in configs.items()}
    with process.freeze_gc():
        kinds = product(BATCHES, SETTINGS)
        runs = report.in_rounds(
            {each: partial(decode, engines[each[1]], each[0]) for each in kinds}, options.rounds
        )
    for each in engines.values():
        each.engine.close()
    for (batch, name), of_kind in runs.items():
        rates = [run.tokens_per_s for run in of_kind]
        what, spread = f"{name}, batch {batch}", f"{min(rates):.0f} to {max(rates):.0f}"
        report.rows.append(Row(what, median(rates), "tok/s", note=spread))
        cpu_ms = median(run.cpu_ms_a_token for run in of_kind)
        report.rows.append(Row("  processor time of all ranks", cpu_ms, "ms a token"))
    num_different = sum(
        run.answers != alone.answers
        for (batch, _), of_kind in runs.items()
        for run, alone in zip(of_kind, runs[batch, ALONE], strict=True)
    )
    report.rows.append(at_most("batches with other tokens than one rank", num_different, "", 0.0))


if __name__ == "__main__":
    measure.main(__doc__)
