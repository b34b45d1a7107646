"""Generation throughput of one engine on the CPU, beside the machine's limit and beside other engines.

    python -m baton.bench.engine.throughput MODEL [--rival NAME=COMMAND ...] [--rounds 5] [--pairs 40]

A rival does the same work and prints "out tok/s N"; docs/benchmarks.md explains the figures. Three options
measure decode steps instead, in processor time (set OMP_NUM_THREADS=1: threads that wait take time):
--quantization METHOD without rivals: quantised weights beside those in the model's dtype, in batches of 1, 8
and 32. --lora N: an adapter for each of N requests, one adapter, and none. --pipeline N: N stages of one
thread; the bubble is the share of the stages' time in which they are not busy, so each needs a free core.
"""

import json
import re
import shlex
import subprocess
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final, NamedTuple

import torch
from safetensors.torch import save_file

from baton.adapters import CONFIG_FILE, WEIGHTS_FILE, Adapter, read_adapter
from baton.bench.engine.replica import (
    Ranks,
    decode_rate,
    generate,
    load_ranks,
    num_head_parameters,
    num_layer_parameters,
)
from baton.bench.machine import matmul_peak_tflops, read_bandwidth_gbps
from baton.bench.report import Report, Row, at_least, at_most, in_turns, option, suite
from baton.bench.serve.load import Job, random_jobs
from baton.cluster.model_directory import resolve_model
from baton.config.engine import engine_config
from baton.engine.engine import Engine, load_engine
from baton.engine.models.decoder import Decoder
from baton.engine.models.loading.checkpoint import weight_files
from baton.engine.models.registry import ModelConfig
from baton.engine.runner.step_inputs import StepArrays
from baton.errors import ConfigError
from baton.kernels import native
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
PLAIN: Final = "plain"
# Batch -> decoding with quantised weights over plain ones, at least.
DECODE_BARS: Final[dict[int, dict[str, float]]] = {
    1: {"int8": 1.6, "int4": 2.2},
    8: {"int8": 1.4, "int4": 1.6},
    32: {"int8": 1.1, "int4": 1.0},
}
LORA_RANK: Final = 8  # PEFT's default
LORA_BAR: Final = 0.85  # decoding with an adapter for each request over one adapter, at least
PIPELINE_BATCH: Final = 16
PIPELINE_TOKENS: Final = 64
BUBBLE_BARS: Final = {2: 10.0}  # stages -> percent of their time, at most
CPU: Final = torch.device("cpu")


def run_jobs(engine: Engine, jobs: Sequence[Job]) -> float:
    """Return the seconds until the last answer is complete; RuntimeError if an answer is too short."""
    started_s, num_expected = perf_counter(), sum(job.num_tokens for job in jobs)
    num_tokens = generate(engine, [job.prompt for job in jobs], [job.num_tokens for job in jobs])
    if num_tokens != num_expected:
        raise RuntimeError(f"{num_tokens} tokens came, {num_expected} were asked for")
    return perf_counter() - started_s


class StepClock:
    """Adds up the time of an engine's parts, timed from outside; `steps` are the steps that ran."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps: list[StepArrays] = []
        assert isinstance(engine.runner.model, Decoder)
        self._stack = engine.runner.model.stack
        self._before = self._stack.seconds() if self._stack is not None else {}
        self._wrap(engine.scheduler, "plan", "scheduler")
        self._wrap(engine.scheduler, "apply", "scheduler")
        self._wrap(engine.scheduler, "commit", "scheduler")
        self._wrap(engine._builders[0], "build", "input arrays")
        self._wrap(engine._sampler, "sample", "sampling")
        self._wrap(engine.runner.model, "logits", "output head")
        self._wrap(engine.runner, "execute", "forward")

    def shares(self, total_s: float) -> dict[str, float]:
        """Return seconds by part; the parts add up to `total_s`."""
        parts = dict(self.seconds)
        layers = self._stack.seconds() if self._stack is not None else {}
        layers = {name: seconds - self._before[name] for name, seconds in layers.items()}
        parts |= {f"layers: {name}": seconds for name, seconds in layers.items()}
        parts["between kernels"] = parts.pop("forward") - parts["output head"] - sum(layers.values())
        parts["loop"] = total_s - sum(parts.values())
        return parts

    def _wrap(self, owner: object, name: str, part: str) -> None:
        inner: Callable[..., object] = getattr(owner, name)

        def timed(*args: object, **named: object) -> object:
            if name == "execute" and isinstance(args[0], StepArrays):
                self.steps.append(args[0])
            started_s = perf_counter()
            result = inner(*args, **named)
            self.seconds[part] += perf_counter() - started_s
            return result

        setattr(owner, name, timed)


class Limit(NamedTuple):
    """The rates of the machine in this run, and the seconds that the work takes at these rates."""

    read_gbps: float
    matmul_tflops: float
    seconds: float


def measure_limit(model: ModelConfig, steps: list[StepArrays], method: Method | None = None) -> Limit:
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
        2 * (layers * len(s.token_ids) + head * len(s.logit_rows)) / matmul_tflops / 1e12 for s in steps
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
    engines = {caching: load(caching) for caching in (False, True)}
    vocab_size = engines[False].vocab_size
    losses = []
    for pair in range(num_pairs + NUM_WARMUP_PAIRS):
        report.tell(f"prefix cache, pair {pair + 1} of {num_pairs + NUM_WARMUP_PAIRS}")
        jobs = random_jobs(NUM_REQUESTS, pair, vocab_size=vocab_size)
        seconds = {caching: run_jobs(engines[caching], jobs) for caching in in_turns((True, False), pair)}
        losses.append(100 * (seconds[True] / seconds[False] - 1))
    del losses[:NUM_WARMUP_PAIRS]
    for engine in engines.values():
        engine.close()
    low, _, high = quantiles(losses) if num_pairs > 1 else losses * 3
    note = f"median of {num_pairs} pairs, half of them from {low:+.1f} to {high:+.1f}"
    return at_most("prefix cache at 0 % hits costs", median(losses), "%", 1.0, note)


def rows_of(figures: dict[str, list[float]], limit: Limit, num_tokens: int) -> list[Row]:
    """Return the rates of Baton, of the limit and of each rival, in tokens a second."""
    ours = median(figures["baton"])
    spread = f"{min(figures['baton']):.0f} to {max(figures['baton']):.0f} in {len(figures['baton'])} runs"
    rates = f"{limit.read_gbps:.1f} GB/s, {limit.matmul_tflops:.3f} TFLOP/s measured in this run"
    rows = [
        Row("Baton", ours, "tok/s", note=spread),
        Row("limit: weights and multiplications", num_tokens / limit.seconds, "tok/s", note=rates),
        Row("Baton / limit", ours * limit.seconds / num_tokens, "x"),
    ]
    for name, values in figures.items():
        if name != "baton":
            rows.append(Row(name, median(values), "tok/s", note=f"{min(values):.0f} to {max(values):.0f}"))
            rows.append(at_least(f"Baton / {name}", ours / median(values), "x", BARS.get(name)))
    return rows


def quantised_rows(
    load: Callable[[str | None], Engine], methods: Sequence[str], num_rounds: int, report: Report
) -> list[Row]:
    """Decode with plain and with quantised weights in turns; return the rates and their quotients."""
    engines = {name: load(None if name == PLAIN else name) for name in (PLAIN, *methods)}
    kinds = list(product(engines, DECODE_BARS))
    found = report.in_rounds(
        {each: partial(decode_rate, engines[each[0]], each[1]) for each in kinds}, num_rounds
    )
    rates = {kind: median(of_kind) for kind, of_kind in found.items()}
    for engine in engines.values():
        engine.close()
    rows = []
    for batch, name in product(DECODE_BARS, engines):
        rows.append(Row(f"{name}, batch {batch}", rates[name, batch], "tok/s"))
        if name != PLAIN:
            ratio, bar = rates[name, batch] / rates[PLAIN, batch], DECODE_BARS[batch].get(name)
            rows.append(at_least(f"{name} / {PLAIN}, batch {batch}", ratio, "x", bar))
    return rows


def write_adapter(folder: Path, engine: Engine, seed: int) -> Adapter:
    """Write an adapter with random weights for all projections of the engine's model."""
    folder.mkdir()
    random, tensors = torch.Generator().manual_seed(seed), {}
    assert engine.runner.adapters is not None
    for name, (outputs, inputs) in engine.runner.adapters.shapes.items():
        for part, shape in (("A", (LORA_RANK, inputs)), ("B", (outputs, LORA_RANK))):
            tensors[f"{name}.lora_{part}.weight"] = torch.randn(shape, generator=random) / inputs
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": 1}))
    return Adapter(str(folder), read_adapter(str(folder)).digest)


def lora_rows(engine: Engine, num_adapters: int, num_rounds: int, report: Report) -> list[Row]:
    """Decode a batch with as many adapters as requests, with one, and with none, in turns."""
    many, one = f"{num_adapters} adapters", "1 adapter"
    with TemporaryDirectory() as folder:
        adapters = [write_adapter(Path(folder) / str(i), engine, i) for i in range(num_adapters)]
        kinds: dict[str, Sequence[Adapter | None]] = {
            many: adapters,
            one: [adapters[0]] * num_adapters,
            "no adapter": [None] * num_adapters,
        }
        decode = partial(decode_rate, engine, num_adapters)
        subjects = {name: partial(decode, adapters=of_kind) for name, of_kind in kinds.items()}
        rates = report.in_rounds(subjects, num_rounds)
    quotient = median(ours / theirs for ours, theirs in zip(rates[many], rates[one], strict=True))
    rows = [Row(name, median(each), "tok/s", note=f"batch {num_adapters}") for name, each in rates.items()]
    return [*rows, at_least(f"{many} / {one}", quotient, "x", LORA_BAR)]


class StageTimes(NamedTuple):
    """One run of a pipeline: its seconds, and the processor time of each stage."""

    tokens_per_s: float
    elapsed_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble_percent(self) -> float:
        return 100 * (1 - sum(self.busy_s) / (self.elapsed_s * len(self.busy_s)))


def time_stages(stages: Ranks) -> StageTimes:
    """Decode one batch."""
    prompts = [[1 + index] * 8 for index in range(PIPELINE_BATCH)]
    before_s, started_s = stages.used_s, perf_counter()
    num_tokens = generate(stages.engine, prompts, [PIPELINE_TOKENS] * PIPELINE_BATCH)
    elapsed_s = perf_counter() - started_s
    busy_s = tuple(after - before for before, after in zip(before_s, stages.used_s, strict=True))
    return StageTimes(num_tokens / elapsed_s, elapsed_s, busy_s)


def pipeline_rows(load: Callable[..., Engine], num_stages: int, num_rounds: int, report: Report) -> list[Row]:
    """Decode with one stage and with several in turns; return the rates, the busy shares and the bubble."""
    engines = {number: load_ranks(partial(load, pipeline_parallel_size=number)) for number in (1, num_stages)}
    subjects = {number: partial(time_stages, stages) for number, stages in engines.items()}
    runs = report.in_rounds(subjects, num_rounds)
    layout = engines[num_stages].engine.runner.layout
    for stages in engines.values():
        stages.engine.close()
    rates = {number: median(run.tokens_per_s for run in of_one) for number, of_one in runs.items()}
    rows = [Row(f"{number} stages of 1 thread", rate, "tok/s") for number, rate in rates.items()]
    rows.append(Row(f"{num_stages} stages / 1", rates[num_stages] / rates[1], "x"))
    for stage in range(num_stages):
        busy = median(100 * run.busy_s[stage] / run.elapsed_s for run in runs[num_stages])
        note = f"{len(layout.layers_of(stage))} layers"
        rows.append(Row(f"  stage {stage} is busy", busy, "%", note=note))
    bubbles = [run.bubble_percent for run in runs[num_stages]]
    spread, bar = f"{min(bubbles):.1f} to {max(bubbles):.1f}", BUBBLE_BARS.get(num_stages, 100.0)
    name = f"bubble of {num_stages} stages, batch {PIPELINE_BATCH}"
    return [*rows, at_most(name, median(bubbles), "%", bar, spread)]


def whole_work_rows(
    engine: Engine, rivals: Mapping[str, str], method: Method | None, num_rounds: int, report: Report
) -> list[Row]:
    """Do the same work with Baton and its rivals in turns; close the engine. method: of quantised weights."""
    jobs = random_jobs(NUM_REQUESTS, 0, vocab_size=engine.vocab_size)
    num_tokens = sum(job.num_tokens for job in jobs)
    figures: dict[str, list[float]] = {"baton": [], **{name: [] for name in rivals}}
    with process.freeze_gc():
        run_jobs(engine, jobs)
        for index in range(num_rounds):
            report.tell(f"round {index + 1} of {num_rounds}")
            figures["baton"] += [num_tokens / run_jobs(engine, jobs) for _ in range(3)]
            for name, command in rivals.items():
                figures[name].append(rival_tokens_per_s(command))
        clock = StepClock(engine)
        parts = clock.shares(run_jobs(engine, jobs))
    limit = measure_limit(engine.runner.model_config, clock.steps, method)
    engine.close()
    total_s = sum(parts.values())
    shares = (
        Row(f"  {name}", 100 * seconds / total_s, "% of a run") for name, seconds in sorted(parts.items())
    )
    report.extra = {"tokens_per_s": figures, "seconds": parts}
    return [*rows_of(figures, limit, num_tokens), *shares]


def decode_rows(load: Callable[..., Engine], options: Namespace, report: Report) -> list[Row]:
    """Time decode steps with adapters, in stages, or with quantised weights, as the options say."""
    if options.lora:
        with closing(load(enable_lora=True, max_loras=options.lora)) as engine:
            return lora_rows(engine, options.lora, options.rounds, report)
    if options.pipeline:
        native.set_num_threads(options.pipeline)  # stages share them: one each
        return pipeline_rows(load, options.pipeline, options.rounds, report)
    return quantised_rows(
        lambda method: load(quantization=method), options.quantization, options.rounds, report
    )


@suite(
    "engine",
    "Engine throughput",
    option("model", help='a model directory, or "tiny", which comes with Baton'),
    option("--dtype", "auto"),
    option("--rival", [], action="append", metavar="NAME=COMMAND"),
    option("--quantization", [], action="append", choices=("int8", "fp8", "int4")),
    option("--lora", 0, "adapters in a batch; 0: no such run"),
    option("--pipeline", 0, "stages that decode a batch; 0: no such run"),
    option("--rounds", 5, "of Baton and every rival"),
    option("--pairs", 40, "runs with and without the prefix cache"),
)
def measure(options: Namespace, report: Report) -> None:
    """Run Baton and the rivals in turns, then one timed run, then the price of the prefix cache."""
    rivals = dict(rival.split("=", 1) for rival in options.rival)
    settings = {
        "model": str(resolve_model(options.model)),
        "dtype": options.dtype,
        "scheduler": {"max_num_seqs": NUM_REQUESTS, "max_num_batched_tokens": MAX_BATCHED_TOKENS},
    }

    def load_with(**more: object) -> Engine:
        load_format = "auto" if weight_files(Path(str(settings["model"]))) else "dummy"
        cache = {"kv_cache_memory_bytes": KV_BYTES}
        return load_engine(engine_config({**settings, "load_format": load_format, "cache": cache, **more}))

    if options.lora or options.pipeline or (options.quantization and not rivals):
        with process.freeze_gc():
            report.rows += decode_rows(load_with, options, report)
        return

    if len(options.quantization) > 1:
        raise ConfigError("--quantization: beside rivals, Baton has one method")
    method: Method | None = next(iter(options.quantization), None)

    def load(prefix_caching: bool) -> Engine:
        cache = {"enable_prefix_caching": prefix_caching, "kv_cache_memory_bytes": KV_BYTES}
        return load_with(cache=cache, quantization=method)

    report.rows += whole_work_rows(load(False), rivals, method, options.rounds, report)
    if options.pairs:
        with process.freeze_gc():
            report.rows.append(prefix_cache_cost(load, options.pairs, report))


if __name__ == "__main__":
    measure.main(__doc__)
