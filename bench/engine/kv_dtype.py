"""KV pages of one byte an element beside those in the model's dtype: room, speed, and answers.

    OMP_NUM_THREADS=1 python -m baton.bench.engine.kv_dtype [--rounds 5] [--cases 1000]

Tokens that fit in a GiB and bytes of a hand-off follow from the layouts of a Llama of 56 M parameters in
bf16, with heads of 64 elements. Its decode steps run in turns, in processor time, over contexts that the
prefix cache holds. The tiny model answers the same questions with each kind of pages.
"""

from argparse import Namespace
from functools import partial
from itertools import product
from statistics import median
from typing import Final

from baton.bench.engine.replica import LLAMA_56M, decode_rate, load_replica
from baton.bench.report import Report, Row, at_least, at_most, option, suite
from baton.bench.tiny.tasks import Case, mixed_cases
from baton.cluster.offline.llm import LLM
from baton.engine.engine import Engine
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.request import SamplingParams
from baton.rpc import process

PLAIN: Final = "auto"
KV_DTYPES: Final = (PLAIN, "int8", "fp8")
BATCHES: Final = (1, 8)
CONTEXTS: Final = (64, 1536)  # tokens
NUM_TOKENS: Final = 16
KV_BYTES: Final = 2**29
LONGEST_ANSWER: Final = 24  # tokens


def page_rows(engines: dict[str, Engine]) -> list[Row]:
    """Compare the bytes of pages and of hand-offs."""
    layouts = {name: engine.runner.layout for name, engine in engines.items()}
    units = {name: plan_transfer(layout, layout, 0, 0).sent_unit_bytes for name, layout in layouts.items()}
    rows = []
    for name, layout in layouts.items():
        rows.append(Row(f"{name}: tokens a GiB", 2**30 // layout.token_bytes, "tokens"))
        if name != PLAIN:
            room = layouts[PLAIN].page_bytes / layout.page_bytes
            rows.append(at_least(f"{name}: pages a GiB over {PLAIN}", room, "x", 1.9))
            rows.append(at_most(f"{name}: hand-off over {PLAIN}", units[name] / units[PLAIN], "x", 0.53))
    return rows


def speed_rows(engines: dict[str, Engine], num_rounds: int, report: Report) -> list[Row]:
    """Decode with each kind of pages in turns; return the rates and their quotients."""
    kinds = list(product(BATCHES, CONTEXTS, KV_DTYPES))
    rates = report.in_rounds(
        {kind: partial(decode_rate, engines[kind[2]], *kind[:2], NUM_TOKENS) for kind in kinds}, num_rounds
    )  # the round that does not count computes the prompts
    rows = []
    for batch, context, name in kinds:
        rate, plain = (median(rates[batch, context, each]) for each in (name, PLAIN))
        what = f"{name}, batch {batch}, {context} tokens"
        rows.append(Row(what, rate, "tok/s", note=f"{rate / plain:.2f} x {PLAIN}"))
    return rows


def share_right(kv_dtype: str, cases: list[Case]) -> float:
    """Return the percentage of cases that the tiny model answers exactly."""
    with LLM("tiny", cache={"kv_cache_dtype": kv_dtype, "kv_cache_memory_bytes": KV_BYTES}) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=LONGEST_ANSWER)
        completions = llm.generate([case.prompt for case in cases], sampling)
    answers = [completion.outputs[0].text for completion in completions]
    return 100 * sum(text == case.answer for text, case in zip(answers, cases, strict=True)) / len(cases)


def answer_rows(num_cases: int, report: Report) -> list[Row]:
    """Ask the tiny model with each kind of pages: half of the questions need a thousand tokens back."""
    cases = mixed_cases(num_cases, seed=20)
    right = {}
    for name in KV_DTYPES:
        report.tell(f"tiny with pages of {name}")
        right[name] = share_right(name, cases)
    rows = [Row(f"tiny, {PLAIN}: right answers", right[PLAIN], "%", note=f"of {num_cases}")]
    for name in KV_DTYPES[1:]:
        lost = right[PLAIN] - right[name]
        rows.append(at_most(f"tiny, {name}: points lost", lost, "points", 0.5, f"{right[name]:.1f} % right"))
    return rows


@suite(
    "kv_dtype",
    "KV pages of one byte",
    option("--rounds", 5, "of decoding"),
    option("--cases", 1000, "questions to the tiny model"),
)
def measure(options: Namespace, report: Report) -> None:
    """Compare pages, then decode in turns, then ask the tiny model."""
    engines = {}
    for name in KV_DTYPES:
        cache = {"kv_cache_dtype": name, "kv_cache_memory_bytes": KV_BYTES}
        engines[name] = load_replica(LLAMA_56M, {"device": "cpu", "cache": cache})
    report.rows += page_rows(engines)
    with process.freeze_gc():
        report.rows += speed_rows(engines, options.rounds, report)
    for engine in engines.values():
        engine.close()
    report.rows += answer_rows(options.cases, report)


if __name__ == "__main__":
    measure.main(__doc__)
