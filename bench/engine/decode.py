"""Decoding on the CPU with other weights, KV pages, adapters, stages and experts, each beside the usual ones.

    OMP_NUM_THREADS=1 baton bench decode PART [--model MODEL] [--rounds 5]

PART is quantization (weights of 8 and 4 bits), kv-dtype (KV pages of one byte), lora (an adapter for each
request), pipeline (two stages) or experts (two ranks that split every expert, or have whole ones). The first
three count tokens a second of processor time of one thread: threads that wait take time. Stages and ranks
have a thread each and need a free core each. docs/benchmarks.md has the figures.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from itertools import product, repeat
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import save_file

from baton.adapters import CONFIG_FILE, WEIGHTS_FILE, Adapter, read_adapter
from baton.bench.engine.replica import LLAMA_56M, Ranks, greedy, load_ranks
from baton.bench.report import Report, Row, at_least, at_most, option, paired_ratio, suite
from baton.cluster.model_directory import resolve_model
from baton.config.engine import engine_config
from baton.engine.engine import Engine, load_engine
from baton.engine.models.loading.checkpoint import weight_files
from baton.kernels import native
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.rpc import process

PLAIN: Final = "plain"
KV_BYTES: Final = 2**29
NUM_RANKS: Final = 2
# Batch -> decoding with quantised weights over plain ones, at least.
QUANTIZATION_BARS: Final[dict[int, dict[str, float]]] = {
    1: {"int8": 1.6, "int4": 2.2},
    8: {"int8": 1.4, "int4": 1.6},
    32: {"int8": 1.1, "int4": 1.0},
}
METHODS: Final = ("int8", "int4", "fp8")
KV_DTYPES: Final = ("int8", "fp8")
CONTEXTS: Final = (64, 1536)  # tokens, which the prefix cache holds
ROOM_BAR: Final = 1.9  # pages of one byte in as much memory, over those of bf16, at least
HANDOFF_BAR: Final = 0.53  # bytes of a hand-off over those of bf16, at most
NUM_ADAPTERS: Final = 32
LORA_RANK: Final = 8  # PEFT's default
LORA_BAR: Final = 0.85  # decoding with an adapter for each request over one adapter, at least
PIPELINE_BATCH: Final = 16
PIPELINE_TOKENS: Final = 64
BUBBLE_BAR: Final = 10.0  # percent of the stages' time in which they are not busy, at most
EXPERT_BATCHES: Final = (1, 32)
EXPERT_TOKENS: Final = 48
ALONE, SPLIT, WHOLE = "one rank", "two ranks, experts split", "two ranks, whole experts"
EXPERT_SETTINGS: Final[dict[str, dict[str, Any]]] = {
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

    num_tokens: int
    elapsed_s: float
    used_s: tuple[float, ...]  # processor time of each rank
    answers: list[list[int]]  # of each request

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.elapsed_s

    @property
    def cpu_rate(self) -> float:
        """Tokens a second of processor time."""
        return self.num_tokens / sum(self.used_s)


def decode(
    ranks: Ranks,
    batch: int,
    num_prompt: int = 8,
    num_tokens: int = 24,
    adapters: Iterable[Adapter | None] = repeat(None),
    *,
    counts_prompts: bool = True,
) -> Decoded:
    """Answer a batch greedily after prompts of `num_prompt` tokens. counts_prompts: they are timed, too."""
    engine, answers = ranks.engine, dict[str, list[int]]()

    def step() -> int:
        outputs = engine.step()
        for output in outputs:
            assert output.token_id is not None
            answers[output.request_id].append(output.token_id)
        return len(outputs)

    for index, adapter in zip(range(batch), adapters, strict=False):
        request = greedy([1 + index] * num_prompt, num_tokens, adapter)
        answers[request.request_id] = []
        engine.add(request)
    if not counts_prompts:
        step()
    before_s, begin_s, num_decoded = ranks.used_s, perf_counter(), 0
    while engine.has_work():
        num_decoded += step()
    elapsed_s = perf_counter() - begin_s
    used_s = tuple(after - before for before, after in zip(before_s, ranks.used_s, strict=True))
    return Decoded(num_decoded, elapsed_s, used_s, list(answers.values()))


Kind = tuple[str, str]  # what is compared, under which work


def compare(
    subjects: Mapping[Kind, Callable[[], Decoded]],
    base: str,
    bars: Mapping[Kind, float],
    num_rounds: int,
    report: Report,
) -> list[Row]:
    """Decode in turns; return the rates, and those of each kind over those of `base` for the same work."""
    runs = report.in_rounds(subjects, num_rounds)
    rates = {kind: [run.cpu_rate for run in of_kind] for kind, of_kind in runs.items()}
    rows = []
    for (name, work), of_kind in rates.items():
        rows.append(Row(f"{name}, {work}", median(of_kind), "tok/s"))
        if name != base:
            ratio = paired_ratio(of_kind, rates[base, work])
            rows.append(at_least(f"{name} / {base}, {work}", ratio, "x", bars.get((name, work))))
    return rows


Load = Callable[..., Ranks]  # with settings of the engine


def quantization_rows(load: Load, num_rounds: int, report: Report) -> list[Row]:
    """Decode with plain and with quantised weights."""
    engines = {PLAIN: load(), **{method: load(quantization=method) for method in METHODS}}
    subjects, bars = dict[Kind, Callable[[], Decoded]](), dict[Kind, float]()
    for batch, bars_of in QUANTIZATION_BARS.items():
        work = f"batch {batch}"
        subjects |= {(name, work): partial(decode, ranks, batch) for name, ranks in engines.items()}
        bars |= {(name, work): bar for name, bar in bars_of.items()}
    return compare(subjects, PLAIN, bars, num_rounds, report)


def kv_dtype_rows(load: Load, num_rounds: int, report: Report) -> list[Row]:
    """Compare the bytes of pages and of hand-offs, then decode with each kind of pages."""
    dtypes = {PLAIN: "auto", **{name: name for name in KV_DTYPES}}
    engines = {
        name: load(cache={"kv_cache_dtype": dtype, "kv_cache_memory_bytes": KV_BYTES})
        for name, dtype in dtypes.items()
    }
    layouts = {name: ranks.engine.runner.layout for name, ranks in engines.items()}
    units = {name: plan_transfer(each, each, 0, 0).sent_unit_bytes for name, each in layouts.items()}
    rows = []
    for name, layout in layouts.items():
        rows.append(Row(f"{name}: tokens a GiB", 2**30 // layout.token_bytes, "tokens"))
        if name != PLAIN:
            room, handoff = layouts[PLAIN].page_bytes / layout.page_bytes, units[name] / units[PLAIN]
            rows.append(at_least(f"{name}: pages a GiB over {PLAIN}", room, "x", ROOM_BAR))
            rows.append(at_most(f"{name}: hand-off over {PLAIN}", handoff, "x", HANDOFF_BAR))
    subjects = {
        (name, f"batch {batch}, {context} tokens"): partial(decode, ranks, batch, context, 16)
        for batch, context in product((1, 8), CONTEXTS)
        for name, ranks in engines.items()
    }
    # The round that does not count computes the prompts.
    return rows + compare(subjects, PLAIN, {}, num_rounds, report)


def lora_rows(load: Load, num_rounds: int, report: Report) -> list[Row]:
    """Decode a batch with as many adapters as requests, with one, and with none."""
    ranks, one = load(enable_lora=True, max_loras=NUM_ADAPTERS), "1 adapter"
    many, work = f"{NUM_ADAPTERS} adapters", f"batch {NUM_ADAPTERS}"
    with TemporaryDirectory() as folder:
        adapters = [write_adapter(Path(folder) / str(i), ranks.engine, i) for i in range(NUM_ADAPTERS)]
        kinds: dict[str, Iterable[Adapter | None]] = {
            one: [adapters[0]] * NUM_ADAPTERS,
            many: adapters,
            "no adapter": [None] * NUM_ADAPTERS,
        }
        subjects = {
            (name, work): partial(decode, ranks, NUM_ADAPTERS, adapters=each) for name, each in kinds.items()
        }
        return compare(subjects, one, {(many, work): LORA_BAR}, num_rounds, report)


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


def pipeline_rows(load: Load, num_rounds: int, report: Report) -> list[Row]:
    """Decode with one stage and with two; return the rates, the busy shares and the bubble."""
    native.set_num_threads(NUM_RANKS)  # stages share them: one each
    stages = {number: load(pipeline_parallel_size=number) for number in (1, NUM_RANKS)}
    subjects = {
        number: partial(decode, ranks, PIPELINE_BATCH, num_tokens=PIPELINE_TOKENS)
        for number, ranks in stages.items()
    }
    runs = report.in_rounds(subjects, num_rounds)
    rates = {number: median(run.rate for run in of_one) for number, of_one in runs.items()}
    rows = [Row(f"{number} stages of 1 thread", rate, "tok/s") for number, rate in rates.items()]
    rows.append(Row(f"{NUM_RANKS} stages / 1", rates[NUM_RANKS] / rates[1], "x"))
    layout = stages[NUM_RANKS].engine.runner.layout
    for stage in range(NUM_RANKS):
        busy = median(100 * run.used_s[stage] / run.elapsed_s for run in runs[NUM_RANKS])
        note = f"{len(layout.layers_of(stage))} layers"
        rows.append(Row(f"  stage {stage} is busy", busy, "%", note=note))
    bubbles = [100 * (1 - sum(run.used_s) / (run.elapsed_s * NUM_RANKS)) for run in runs[NUM_RANKS]]
    name, spread = f"bubble, batch {PIPELINE_BATCH}", f"{min(bubbles):.1f} to {max(bubbles):.1f}"
    return [*rows, at_most(name, median(bubbles), "%", BUBBLE_BAR, spread)]


def expert_rows(load: Load, num_rounds: int, report: Report) -> list[Row]:
    """Decode a mixture with each kind of ranks, and compare the tokens."""
    native.set_num_threads(NUM_RANKS)  # ranks share them: one each
    engines = {name: load(**settings) for name, settings in EXPERT_SETTINGS.items()}
    kinds = product(EXPERT_BATCHES, EXPERT_SETTINGS)
    subjects = {
        (batch, name): partial(decode, engines[name], batch, num_tokens=EXPERT_TOKENS, counts_prompts=False)
        for batch, name in kinds
    }
    runs, rows, num_different = report.in_rounds(subjects, num_rounds), list[Row](), 0
    for (batch, name), of_kind in runs.items():
        rates = [run.rate for run in of_kind]
        spread = f"{min(rates):.0f} to {max(rates):.0f}"
        rows.append(Row(f"{name}, batch {batch}", median(rates), "tok/s", note=spread))
        cpu_ms = median(1e3 / run.cpu_rate for run in of_kind)
        rows.append(Row("  processor time of all ranks", cpu_ms, "ms a token"))
        pairs = zip(of_kind, runs[batch, ALONE], strict=True)
        num_different += sum(run.answers != alone.answers for run, alone in pairs)
    return [*rows, at_most("batches with other tokens than one rank", num_different, "", 0.0)]


PARTS: Final = {
    "quantization": quantization_rows,
    "kv-dtype": kv_dtype_rows,
    "lora": lora_rows,
    "pipeline": pipeline_rows,
    "experts": expert_rows,
}


@suite(
    "decode",
    "Decoding",
    option("part", choices=tuple(PARTS)),
    option("--model", help="a directory (a Llama of 56 M random parameters; of experts a mixture of 177 M)"),
    option("--rounds", 5, "of each kind, in turns"),
)
def measure(options: Namespace, report: Report) -> None:
    """Measure one part; the results are in decode-PART.json."""
    report.name, report.title = f"decode-{options.part}", f"Decoding: {options.part}"
    with ExitStack() as stack:
        if options.model is None:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            LLAMA_56M.write(folder, **(MIXTURE if options.part == "experts" else {}))
        else:
            folder = resolve_model(options.model)
        base = {
            "model": str(folder),
            "device": "cpu",
            "load_format": "auto" if weight_files(folder) else "dummy",
            "cache": {"kv_cache_memory_bytes": KV_BYTES},
            "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 512},
        }

        def load(**settings: object) -> Ranks:
            ranks = load_ranks(partial(load_engine, engine_config({**base, **settings})))
            stack.enter_context(closing(ranks.engine))
            return ranks

        with process.freeze_gc():
            report.rows += PARTS[options.part](load, options.rounds, report)
