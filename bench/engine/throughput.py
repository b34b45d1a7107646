"""Generation throughput of one engine on the CPU, beside the machine's limit and beside other engines.

The work: 32 requests at once, prompts of 16 to 256 tokens, answers of 16 to 128, greedy, end tokens ignored.
Every rival is a command that does the same work and prints "out tok/s N"; rounds of Baton and the rivals
alternate, so that what else the machine does falls on all alike.

    python -m baton.bench.engine.throughput MODEL [--rival NAME=COMMAND ...] [--rounds 5] [--pairs 10]
"""

import argparse
import random
import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Final, NamedTuple

import torch

from baton.bench.engine.replica import num_head_parameters, num_layer_parameters
from baton.bench.machine import machine_description, matmul_peak_tflops, one_line, read_bandwidth_gbps
from baton.bench.report import RESULTS, Row, at_least, at_most, print_table, write_json
from baton.cluster.model_directory import resolve_model
from baton.config.engine import engine_config
from baton.engine.engine import Engine
from baton.engine.loading import load_engine
from baton.engine.models.registry import ModelConfig
from baton.engine.models.weights import TORCH_DTYPES
from baton.engine.runner.step_inputs import StepArrays
from baton.pages import DTYPE_BYTES
from baton.request import Request, SamplingParams
from baton.rpc import process

NUM_REQUESTS: Final = 32
MAX_BATCHED_TOKENS: Final = 512
KV_BYTES: Final = 2**27  # a cache that is full after three runs: evicting is part of its price
NUM_WARMUP_PAIRS: Final = 4
# Baton's throughput over a rival's, at least.
BARS: Final = {"vllm": 1.3, "transformers-cb": 3.0, "transformers-padded": 2.5, "openvino": 1.1}
CPU: Final = torch.device("cpu")


class Job(NamedTuple):
    token_ids: tuple[int, ...]
    num_new_tokens: int


def workload(vocab_size: int, seed: int = 0) -> list[Job]:
    source = random.Random(seed)
    jobs = []
    for _ in range(NUM_REQUESTS):
        prompt_length, num_new_tokens = source.randint(16, 256), source.randint(16, 128)
        token_ids = tuple(source.randrange(4, vocab_size) for _ in range(prompt_length))
        jobs.append(Job(token_ids, num_new_tokens))
    return jobs


def run(engine: Engine, jobs: list[Job], round_name: str) -> float:
    """Seconds until the last answer is complete; every answer must have its full length."""
    started_s = perf_counter()
    for index, job in enumerate(jobs):
        sampling = SamplingParams(temperature=0.0, max_tokens=job.num_new_tokens, ignore_eos=True)
        engine.add(Request(request_id=f"{round_name}-{index}", token_ids=job.token_ids, sampling=sampling))
    num_tokens = 0
    while engine.has_work():
        num_tokens += len(engine.step())
    if num_tokens != sum(job.num_new_tokens for job in jobs):
        raise RuntimeError(
            f"{num_tokens} tokens came, {sum(job.num_new_tokens for job in jobs)} were asked for"
        )
    return perf_counter() - started_s


class StepClock:
    """Adds up where an engine's time goes, by timing its parts from outside."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps: list[StepArrays] = []
        self._stack = engine.runner.decoder.stack
        self._before = self._stack.seconds() if self._stack is not None else {}
        self._wrap(engine.scheduler, "plan", "scheduler")
        self._wrap(engine.scheduler, "apply", "scheduler")
        self._wrap(engine.scheduler, "commit", "scheduler")
        self._wrap(engine._builder, "build", "input arrays")
        self._wrap(engine._sampler, "sample", "sampling")
        self._wrap(engine.runner.decoder, "logits", "output head")
        self._wrap(engine.runner, "execute", "forward")

    def shares(self, total_s: float) -> dict[str, float]:
        """Seconds by part; together they are `total_s`."""
        parts = dict(self.seconds)
        layers = self._stack.seconds() if self._stack is not None else {}
        layers = {name: seconds - self._before[name] for name, seconds in layers.items()}
        parts |= {f"layers: {name}": seconds for name, seconds in layers.items()}
        parts["between kernels"] = parts.pop("forward") - parts["output head"] - sum(layers.values())
        parts["loop"] = total_s - sum(parts.values())
        return parts

    def _wrap(self, owner: object, name: str, part: str) -> None:
        inner: Callable[..., object] = getattr(owner, name)

        def timed(*args: object) -> object:
            if name == "execute" and isinstance(args[0], StepArrays):
                self.steps.append(args[0])
            started_s = perf_counter()
            result = inner(*args)
            self.seconds[part] += perf_counter() - started_s
            return result

        setattr(owner, name, timed)


class Limit(NamedTuple):
    """The machine's rates, measured in this run, and what the work needs of them."""

    read_gbps: float
    matmul_tflops: float
    seconds: float


def measure_limit(model: ModelConfig, steps: list[StepArrays]) -> Limit:
    """For each step the larger of the time to read the weights and the time to multiply, added up."""
    dtype = TORCH_DTYPES[model.dtype]
    read_gbps, matmul_tflops = read_bandwidth_gbps(CPU), matmul_peak_tflops(CPU, dtype)
    layers, head = num_layer_parameters(model), num_head_parameters(model)
    read_s = (layers + head) * DTYPE_BYTES[model.dtype] / read_gbps / 1e9
    multiply_s = [
        2 * (layers * len(s.token_ids) + head * len(s.logit_rows)) / matmul_tflops / 1e12 for s in steps
    ]
    return Limit(read_gbps, matmul_tflops, sum(max(read_s, seconds) for seconds in multiply_s))


def rival_tokens_per_s(command: str) -> float:
    """The best figure the command prints (it may try several settings); RuntimeError if it prints none."""
    result = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=900, check=False)
    figures = re.findall(r"out tok/s ([0-9.]+)", result.stdout)
    if not figures:
        raise RuntimeError(
            f"{command}: no 'out tok/s' in its output:\n{(result.stdout + result.stderr)[-2000:]}"
        )
    return max(map(float, figures))


def compare(
    engine: Engine, jobs: list[Job], rivals: dict[str, str], num_rounds: int
) -> dict[str, list[float]]:
    """Tokens per second of each, a figure a round."""
    num_tokens = sum(job.num_new_tokens for job in jobs)
    figures: dict[str, list[float]] = {"baton": [], **{name: [] for name in rivals}}
    run(engine, jobs, "warm-up")
    for index in range(num_rounds):
        figures["baton"] += [num_tokens / run(engine, jobs, f"{index}.{repeat}") for repeat in range(3)]
        for name, command in rivals.items():
            figures[name].append(rival_tokens_per_s(command))
    return figures


def prefix_cache_cost(load: Callable[[bool], Engine], num_pairs: int) -> Row:
    """Throughput lost to a prefix cache that never hits, from pairs of runs over fresh prompts.

    Every other pair runs the cache first, so that a machine that slows down or speeds up favours neither.
    """
    engines = {caching: load(caching) for caching in (False, True)}
    vocab_size = engines[False].runner.model.vocab_size
    losses = []
    for pair in range(num_pairs + NUM_WARMUP_PAIRS):
        jobs = workload(vocab_size, seed=pair)
        order = (False, True) if pair % 2 else (True, False)
        seconds = {caching: run(engines[caching], jobs, f"pair {pair}") for caching in order}
        losses.append(100 * (seconds[True] / seconds[False] - 1))
    del losses[:NUM_WARMUP_PAIRS]
    for engine in engines.values():
        engine.close()
    low, _, high = quantiles(losses)
    note = f"median of {num_pairs} pairs, half of them from {low:+.1f} to {high:+.1f}"
    return at_most("prefix cache at 0 % hits costs", median(losses), "%", 1.0, note)


def rows_of(figures: dict[str, list[float]], limit: Limit, num_tokens: int) -> list[Row]:
    ours = median(figures["baton"])
    spread = f"{min(figures['baton']):.0f} to {max(figures['baton']):.0f} in {len(figures['baton'])} runs"
    rows = [
        Row("Baton", ours, "tok/s", note=spread),
        Row(
            "limit: weights and multiplications",
            num_tokens / limit.seconds,
            "tok/s",
            note=f"{limit.read_gbps:.1f} GB/s, {limit.matmul_tflops:.3f} TFLOP/s measured in this run",
        ),
        Row("Baton / limit", ours * limit.seconds / num_tokens, "x"),
    ]
    for name, values in figures.items():
        if name != "baton":
            rows.append(Row(name, median(values), "tok/s", note=f"{min(values):.0f} to {max(values):.0f}"))
            rows.append(_ratio(f"Baton / {name}", ours / median(values), BARS.get(name)))
    return rows


def _ratio(name: str, value: float, bar: float | None) -> Row:
    return Row(name, value, "x") if bar is None else at_least(name, value, "x", bar)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help='a model directory, or "tiny", which comes with Baton')
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rival", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=40, help="runs with and without the prefix cache")
    parser.add_argument("--output", type=Path, default=RESULTS / "engine.json")
    options = parser.parse_args()
    rivals = dict(rival.split("=", 1) for rival in options.rival)
    settings = {
        "model": str(resolve_model(options.model)),
        "dtype": options.dtype,
        "scheduler": {"max_num_seqs": NUM_REQUESTS, "max_num_batched_tokens": MAX_BATCHED_TOKENS},
    }

    def load(prefix_caching: bool) -> Engine:
        cache = {"enable_prefix_caching": prefix_caching, "kv_cache_memory_bytes": KV_BYTES}
        return load_engine(engine_config({**settings, "cache": cache}))

    engine = load(False)
    jobs = workload(engine.runner.model.vocab_size)
    num_tokens = sum(job.num_new_tokens for job in jobs)
    print(one_line(machine_description()), flush=True)
    with process.freeze_gc():
        figures = compare(engine, jobs, rivals, options.rounds)
        clock = StepClock(engine)
        parts = clock.shares(run(engine, jobs, "timed"))
    rows = rows_of(figures, measure_limit(engine.runner.model, clock.steps), num_tokens)
    total_s = sum(parts.values())
    rows += [
        Row(f"  {name}", 100 * seconds / total_s, "% of a run") for name, seconds in sorted(parts.items())
    ]
    engine.close()
    if options.pairs:
        with process.freeze_gc():
            rows.append(prefix_cache_cost(load, options.pairs))
    print_table("Engine throughput", rows)
    write_json(options.output, "Engine throughput", rows, {"tokens_per_s": figures, "seconds": parts})


if __name__ == "__main__":
    main()
