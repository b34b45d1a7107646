"""Generation throughput of one engine on the CPU, beside the machine's limit and beside other engines.

A rival does the same work and prints "out tok/s N"; docs/benchmarks.md explains the figures.
"""

import re
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from time import perf_counter
from typing import Final, NamedTuple

import torch

from baton.bench.engine.replica import (
    RecordedEngine,
    StepRows,
    generate,
    num_head_parameters,
    num_layer_parameters,
)
from baton.bench.machine import matmul_peak_tflops, read_bandwidth_gbps
from baton.bench.report import Report, Row, at_least, at_most, option, spread, suite
from baton.bench.serve.load import Job, random_jobs
from baton.cluster.model_directory import resolve_model
from baton.config.engine import engine_config
from baton.engine.engine import Engine, load_engine
from baton.engine.models.loading.checkpoint import weight_files
from baton.engine.models.registry import ModelConfig
from baton.kernels.native import TORCH_DTYPES
from baton.kernels.quantised import FORMAT_OF, Method, WeightFormat
from baton.pages import DTYPE_BYTES
from baton.rpc import process

NUM_REQUESTS: Final = 32
MAX_BATCHED_TOKENS: Final = 512
KV_BYTES: Final = 2**27  # a cache that is full after three runs: evicting is part of its price
NUM_WARMUP_PAIRS: Final = 4
# Baton's throughput over a rival's, at least.
BARS: Final = {
    "vllm": 1.3,
    "transformers-cb": 3.0,
    "transformers-padded": 2.5,
    "openvino": 1.1,
    "llama.cpp": 1.1,
}
CPU: Final = torch.device("cpu")


def run_jobs(engine: Engine, jobs: Sequence[Job]) -> float:
    """Return the seconds until the last answer is complete; RuntimeError if an answer is too short."""
    started_s, num_expected = perf_counter(), sum(job.num_tokens for job in jobs)
    num_tokens = generate(engine, [job.prompt for job in jobs], [job.num_tokens for job in jobs])
    if num_tokens != num_expected:
        raise RuntimeError(f"{num_tokens} tokens came, {num_expected} were asked for")
    return perf_counter() - started_s


class Limit(NamedTuple):
    """The rates of the machine in this run, and the seconds that the work takes at these rates."""

    read_gbps: float
    matmul_tflops: float
    seconds: float


def measure_limit(model: ModelConfig, steps: Sequence[StepRows], method: Method | None = None) -> Limit:
    """Add up, over the steps, the larger of the time to read the weights and the time to multiply.

    method: of quantised weights. Integers count as twice as fast as the model's dtype, which is measured.
    """
    dtype = TORCH_DTYPES[model.dtype]
    read_gbps, matmul_tflops = read_bandwidth_gbps(CPU), matmul_peak_tflops(CPU, dtype)
    weight_format = WeightFormat.PLAIN if method is None else FORMAT_OF[method]
    matmul_tflops *= 2 if weight_format.rounds_inputs else 1
    layers, head = num_layer_parameters(model), num_head_parameters(model)
    weight_bytes = DTYPE_BYTES[model.dtype] if method is None else weight_format.num_bits / 8
    read_s = (layers + head) * weight_bytes / read_gbps / 1e9
    multiply_s = [
        2 * (layers * step.num_tokens + head * step.num_logits) / matmul_tflops / 1e12 for step in steps
    ]
    return Limit(read_gbps, matmul_tflops, sum(max(read_s, seconds) for seconds in multiply_s))


def rival_tokens_per_s(command: str) -> float:
    """Return the best figure that the command prints; RuntimeError if the command prints none."""
    result = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=900, check=False)
    figures = re.findall(r"out tok/s ([0-9.]+)", result.stdout)
    if not figures:
        output = (result.stdout + result.stderr)[-2000:]
        raise RuntimeError(f"{command}: no 'out tok/s' in its output:\n{output}")
    return max(map(float, figures))


def prefix_cache_cost(load: Callable[[bool], Engine], num_pairs: int, report: Report) -> Row:
    """Measure the throughput lost to a prefix cache that never hits, by pairs of runs over fresh prompts."""
    engines, num_rounds = {caching: load(caching) for caching in (True, False)}, NUM_WARMUP_PAIRS + num_pairs
    seconds: dict[bool, list[float]] = {caching: [] for caching in engines}
    for pair, caching in report.turns(engines, num_rounds, "prefix cache, "):
        jobs = random_jobs(NUM_REQUESTS, pair, vocab_size=engines[caching].vocab_size)
        seconds[caching].append(run_jobs(engines[caching], jobs))
    pairs = list(zip(seconds[True], seconds[False], strict=True))[NUM_WARMUP_PAIRS:]
    losses = [100 * (with_s / without_s - 1) for with_s, without_s in pairs]
    for engine in engines.values():
        engine.close()
    low, _, high = quantiles(losses) if num_pairs > 1 else losses * 3
    note = f"median of {num_pairs} pairs, half of them from {low:+.1f} to {high:+.1f}"
    return at_most("prefix cache at 0 % hits costs", median(losses), "%", 1.0, note)


def rows_of(figures: dict[str, list[float]], limit: Limit, num_tokens: int) -> list[Row]:
    """Return the rates of Baton, of the limit and of each rival, in tokens a second."""
    ours = median(figures["baton"])
    rates = f"{limit.read_gbps:.1f} GB/s, {limit.matmul_tflops:.3f} TFLOP/s measured in this run"
    rows = [
        Row("Baton", ours, "tok/s", note=spread(figures["baton"])),
        Row("limit: weights and multiplications", num_tokens / limit.seconds, "tok/s", note=rates),
        Row("Baton / limit", ours * limit.seconds / num_tokens, "x"),
    ]
    for name, values in figures.items():
        if name != "baton":
            rows.append(Row(name, median(values), "tok/s", note=spread(values)))
            rows.append(at_least(f"Baton / {name}", ours / median(values), "x", BARS.get(name)))
    return rows


def whole_work_rows(
    engine: Engine, rivals: Mapping[str, str], method: Method | None, num_rounds: int, report: Report
) -> list[Row]:
    """Do the same work with Baton and its rivals in turns; close the engine. method: of quantised weights."""
    jobs = random_jobs(NUM_REQUESTS, 0, vocab_size=engine.vocab_size)
    num_tokens = sum(job.num_tokens for job in jobs)
    figures: dict[str, list[float]] = {"baton": [], **{name: [] for name in rivals}}
    with process.freeze_gc():
        run_jobs(engine, jobs)
        for _, name in report.turns(figures, num_rounds):
            if name in rivals:
                figures[name].append(rival_tokens_per_s(rivals[name]))
            else:
                figures[name] += [num_tokens / run_jobs(engine, jobs) for _ in range(3)]
        recorded = RecordedEngine(engine)
        run_jobs(engine, jobs)
    limit = measure_limit(engine.runner.model_config, recorded.steps, method)
    engine.close()
    report.extra = {"tokens_per_s": figures}
    return rows_of(figures, limit, num_tokens)


@suite(
    "engine",
    "Engine throughput",
    option("model", help='a model directory, or "tiny", which comes with Baton'),
    option("--dtype", "auto"),
    option("--rival", [], action="append", metavar="NAME=COMMAND"),
    option("--quantization", None, "of Baton's weights", choices=("int8", "fp8", "int4")),
    option("--rounds", 5, "of Baton and every rival"),
    option("--pairs", 40, "runs with and without the prefix cache"),
)
def measure(options: Namespace, report: Report) -> None:
    """Run Baton and the rivals in turns, then measure the price of the prefix cache."""
    rivals, model = dict(rival.split("=", 1) for rival in options.rival), resolve_model(options.model)
    settings = {
        "model": str(model),
        "dtype": options.dtype,
        "load_format": "auto" if weight_files(model) else "dummy",
        "quantization": options.quantization,
        "scheduler": {"max_num_seqs": NUM_REQUESTS, "max_num_batched_tokens": MAX_BATCHED_TOKENS},
    }

    def load(prefix_caching: bool) -> Engine:
        cache = {"enable_prefix_caching": prefix_caching, "kv_cache_memory_bytes": KV_BYTES}
        return load_engine(engine_config({**settings, "cache": cache}))

    report.rows += whole_work_rows(load(False), rivals, options.quantization, options.rounds, report)
    if options.pairs:
        with process.freeze_gc():
            report.rows.append(prefix_cache_cost(load, options.pairs, report))
