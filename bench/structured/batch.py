"""The time that forms add to a token in a batch: a Llama of 56 million parameters, with and without."""

import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from baton.bench.engine.replica import LlamaShape, request_of
from baton.bench.report import Report, Row, at_most
from baton.bench.structured.cases import END_ID, ORDER, PERSON, VOCAB_SIZES, tokenizer_text
from baton.config.engine import engine_config
from baton.engine.engine import Engine, load_engine
from baton.request import SamplingParams, StructuredOutputs
from baton.rpc import process

TPOT_BAR: Final = 3.0  # % that forms add
BATCH: Final = 32
NUM_ANSWER_TOKENS: Final = 64
LLAMA_56M: Final = LlamaShape(
    hidden_size=512,
    intermediate_size=1408,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=min(VOCAB_SIZES),
    max_positions=2048,
)


def batch_engine(directory: Path) -> Engine:
    """Return an engine with dummy weights and the smaller tokenizer."""
    LLAMA_56M.write(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": END_ID}))
    (directory / "tokenizer.json").write_text(tokenizer_text(LLAMA_56M.vocab_size))
    cache = {"kv_cache_memory_bytes": 2**29}
    return load_engine(engine_config({"model": str(directory), "load_format": "dummy", "cache": cache}))


def step_s(engine: Engine, forms: Sequence[StructuredOutputs | None]) -> float:
    """Return the seconds of a decode step of a batch; its sequences take turns at the forms.

    No answer ends before its last token, and every prompt is in the prefix cache.
    """
    rng = random.Random(1)
    prompts = [rng.sample(range(1, LLAMA_56M.vocab_size), 64) for _ in range(BATCH)]
    for prompt in prompts:
        engine.add(request_of(prompt, SamplingParams(max_tokens=1)))
    while engine.has_work():
        engine.step()
    for number, prompt in enumerate(prompts):
        form = forms[number % len(forms)]
        sampling = SamplingParams(
            max_tokens=NUM_ANSWER_TOKENS, temperature=0.0, ignore_eos=form is None, structured_outputs=form
        )
        engine.add(request_of(prompt, sampling))
    times_s, num_tokens = list[float](), 0
    while engine.has_work():
        began_s = time.perf_counter()
        num_tokens += len(engine.step())
        times_s.append(time.perf_counter() - began_s)
    if num_tokens != BATCH * NUM_ANSWER_TOKENS:
        raise RuntimeError(
            f"{num_tokens} tokens instead of {BATCH * NUM_ANSWER_TOKENS}: an answer ended early"
        )
    return sum(times_s[2:]) / len(times_s[2:])  # without those that compile and compute the prompts' ends


def batch_rows(report: Report, num_pairs: int) -> list[Row]:
    """Return what forms add to the time of a token at batch 32."""
    forms = [
        StructuredOutputs(json=json.dumps({"type": "array", "minItems": 500, "items": items}))
        for items in (PERSON, ORDER)
    ]
    with tempfile.TemporaryDirectory() as folder, process.freeze_gc():
        engine = batch_engine(Path(folder))
        step_s(engine, [None])
        step_s(engine, forms)
        before, with_s, without_s = engine.load(), list[float](), list[float]()
        for pair in range(num_pairs):
            report.tell(f"batch of {BATCH}", pair / num_pairs)
            for is_on in (True, False)[:: 1 if pair % 2 else -1]:
                (with_s if is_on else without_s).append(step_s(engine, forms if is_on else [None]))
        after = engine.load()
        engine.close()
    added = 100 * (median(on / off for on, off in zip(with_s, without_s, strict=True)) - 1)
    mask_us = (after.mask_us - before.mask_us) / (after.num_masks - before.num_masks)
    note = (
        f"{1e3 * median(without_s):.2f} -> {1e3 * median(with_s):.2f} ms, "
        f"a mask takes {mask_us:.0f} us of the step"
    )
    return [at_most(f"TPOT added at batch {BATCH}", added, "%", TPOT_BAR, note)]
