"""A mixture of experts on two ranks that split every expert, and on two ranks that have whole experts.

    python -m baton.bench.engine.experts [--rounds 5]

A Qwen3-MoE with dummy weights in bf16: 8 layers of 16 experts, 4 of them for a token. Each rank has one
thread. Batches of 1 and 32 are decoded in turns, in elapsed time and in the processor time of all ranks. For
the elapsed time every rank needs a core of its own.
"""

import json
from argparse import Namespace
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final, NamedTuple

import psutil

from baton.bench.engine.replica import request_of
from baton.bench.report import Report, Row, at_most, in_turns, option, suite
from baton.config.engine import engine_config
from baton.engine.engine import Engine, load_engine
from baton.kernels import native
from baton.request import SamplingParams
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
KEYS: Final = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1408,
    "moe_intermediate_size": 704,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


class Ranks(NamedTuple):
    """An engine, and the processes of its ranks."""

    engine: Engine
    processes: tuple[psutil.Process, ...]

    @property
    def used_s(self) -> float:
        """Processor time of all ranks so far."""
        return sum(times.user + times.system for times in (each.cpu_times() for each in self.processes))


class Decoded(NamedTuple):
    """One decoded batch."""

    tokens_per_s: float
    cpu_ms_a_token: float
    answers: list[list[int]]  # of each request


def load(settings: dict[str, object]) -> Ranks:
    """Load an engine."""
    here = psutil.Process()
    before = set(here.children())
    engine = load_engine(engine_config(settings))
    return Ranks(engine, (here, *(each for each in here.children() if each not in before)))


def decode(ranks: Ranks, batch: int) -> Decoded:
    """Decode a batch; the figures begin after the prompts."""
    engine = ranks.engine
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for index in range(batch):
        request = request_of([1 + index] * PROMPT_TOKENS, sampling)
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
            started_s, used_s = perf_counter(), ranks.used_s
    elapsed_s, used_s = perf_counter() - started_s, ranks.used_s - used_s
    return Decoded(num_tokens / elapsed_s, 1000 * used_s / num_tokens, list(answers.values()))


@suite("experts", "Mixture of experts on two ranks", option("--rounds", 5, "of decoding"))
def measure(options: Namespace, report: Report) -> None:
    """Decode with each kind of ranks in turns, and compare the tokens."""
    native.set_num_threads(NUM_RANKS)  # ranks share them: one each
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(KEYS))
        base = {"model": folder, "device": "cpu", "load_format": "dummy"}
        cache = {"kv_cache_memory_bytes": KV_BYTES}
        engines = {name: load({**base, "cache": cache, **settings}) for name, settings in SETTINGS.items()}
    runs: defaultdict[tuple[str, int], list[Decoded]] = defaultdict(list)
    with process.freeze_gc():
        for turn in range(options.rounds + 1):  # the first is no part of the figures
            report.tell(f"round {turn} of {options.rounds}")
            for batch, name in product(BATCHES, in_turns(SETTINGS, turn)):
                runs[name, batch].append(decode(engines[name], batch))
    for each in engines.values():
        each.engine.close()
    for batch, name in product(BATCHES, SETTINGS):
        rates = [run.tokens_per_s for run in runs[name, batch][1:]]
        what, spread = f"{name}, batch {batch}", f"{min(rates):.0f} to {max(rates):.0f}"
        report.rows.append(Row(what, median(rates), "tok/s", note=spread))
        cpu_ms = median(run.cpu_ms_a_token for run in runs[name, batch][1:])
        report.rows.append(Row("  processor time of all ranks", cpu_ms, "ms a token"))
    num_different = sum(
        run.answers != alone.answers
        for (_, batch), of_one in runs.items()
        for run, alone in zip(of_one, runs[ALONE, batch], strict=True)
    )
    report.rows.append(at_most("batches with other tokens than one rank", num_different, "", 0.0))


if __name__ == "__main__":
    measure.main(__doc__)
