"""The 8B shape through the engine itself: its scheduler, graphs and sampling are all in the figures.

Shapes: B sequences, V vocabulary.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np

from baton.bench.gpu_session import TOY_LLAMA, Session, WrongResult, require_close
from baton.bench.replica import (
    LlamaShape,
    Replica,
    load_replica,
    num_head_parameters,
    num_layer_parameters,
)
from baton.bench.report import Row, format_number
from baton.bench.timing import wall_seconds
from baton.engine.step_arrays import StepArrays
from baton.request import Request, SamplingParams, StepOutput

STEP_BARS: Final = {1: 80.0, 64: 75.0, 256: 65.0}  # percent of roofline
PREFILL_BAR: Final = 70.0  # percent of matmul peak
NUM_WARMUP_STEPS: Final = 5  # the first captures the batch size's graph
NUM_PREFILLS: Final = 5
CHECKED_SHAPE: Final = replace(TOY_LLAMA, hidden_size=256, intermediate_size=512, head_dim=128)
CHECKED_LENGTHS: Final = (5, 33, 70)
_request_ids = count()


def check(session: Session) -> Iterator[Row]:
    """A ragged prefill and a decode step in bf16 on the device against the CPU's kernels in fp32."""
    settings = {"cache": {"kv_cache_memory_bytes": 2**24}, "max_model_len": 256}
    tested = load_replica(CHECKED_SHAPE, {**settings, "device": session.device.type})
    oracle = load_replica(CHECKED_SHAPE, {**settings, "device": "cpu", "dtype": "float32"})
    rng = random.Random(0)
    prompts = [random_tokens(rng, CHECKED_SHAPE, length) for length in CHECKED_LENGTHS]
    steps = {
        "prefill": step_arrays([0] * len(prompts), prompts),
        "decode": step_arrays(CHECKED_LENGTHS, [random_tokens(rng, CHECKED_SHAPE, 1) for _ in prompts]),
    }
    for name, arrays in steps.items():
        got_BV, expected_BV = tested.runner.execute(arrays), oracle.runner.execute(arrays)
        require_close(f"logits of a {name} step", got_BV, expected_BV, limit=3e-2)
        error = float((got_BV.cpu() - expected_BV).norm() / expected_BV.norm())
        yield Row(
            f"logits of a {name} step", error, "rel. error", "< 0.03", True, "bf16 against fp32 on the CPU"
        )


def decode_steps(session: Session) -> Iterator[Row]:
    """Percent of roofline of a whole engine step."""
    for batch in session.sizes.step_batches:
        yield from _decode_rows(session, batch, SamplingParams(), STEP_BARS.get(batch))
    top_p = SamplingParams(temperature=0.8, top_p=0.95, top_k=50)
    yield from _decode_rows(session, session.sizes.step_batches[-1], top_p, None)


def prefill(session: Session) -> Iterator[Row]:
    """Percent of the matmul peak from adding a request to its first token."""
    engine, rng = session.replica.engine, random.Random(1)
    for num_tokens in session.sizes.model_prefill_lengths:
        seconds = []
        for _ in range(1 + NUM_PREFILLS):
            request = _request(
                random_tokens(rng, session.sizes.model, num_tokens), SamplingParams(max_tokens=1)
            )
            started_s = perf_counter()
            engine.add(request)
            while engine.has_work():
                engine.step()
            seconds.append(perf_counter() - started_s)
        median_s = session.prefill_seconds[num_tokens] = median(seconds[1:])
        tflops = prefill_flops(session.sizes.model, num_tokens) / median_s / 1e12
        note = f"{format_number(median_s * 1e3)} ms, {format_number(num_tokens / median_s)} tok/s"
        percent = 100 * tflops / session.rates.peak_tflops
        yield session.bar(f"prefill, {num_tokens:,} tokens", percent, "% of peak", PREFILL_BAR, note)


def prefill_flops(shape: LlamaShape, num_tokens: int) -> float:
    """Matrices, the causal half of attention, and the head for the last token."""
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens**2
    return 2 * num_layer_parameters(shape) * num_tokens + attention + 2 * num_head_parameters(shape)


def roofline_seconds(session: Session, batch: int, num_context_tokens: int) -> float:
    """Read all weights or multiply with them, whichever takes longer, then read the keys and values."""
    shape, rates = session.sizes.model, session.rates
    num_parameters = num_layer_parameters(shape) + num_head_parameters(shape)
    weights_s = 2 * num_parameters / rates.read_gbps / 1e9
    multiply_s = 2 * num_parameters * batch / rates.peak_tflops / 1e12
    kv_bytes = num_context_tokens * session.replica.runner.layout.token_bytes
    return max(weights_s, multiply_s) + kv_bytes / rates.read_gbps / 1e9


def random_tokens(rng: random.Random, shape: LlamaShape, num_tokens: int) -> list[int]:
    return rng.choices(range(shape.vocab_size), k=num_tokens)


def generate(replica: Replica, prompts: Sequence[list[int]], num_new_tokens: Sequence[int]) -> int:
    """Run requests of these prompts and answer lengths to the end; return the tokens generated."""
    for prompt, num_tokens in zip(prompts, num_new_tokens, strict=True):
        replica.engine.add(_request(prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0)))
    num_generated = 0
    while replica.engine.has_work():
        num_generated += len(replica.engine.step())
    return num_generated


def step_arrays(starts: Sequence[int], tokens: Sequence[list[int]], page_size: int = 16) -> StepArrays:
    """A step of an idle engine: sequence b has `starts[b]` tokens behind it and pages of its own."""
    lengths = np.array([len(chunk) for chunk in tokens])
    ends = np.array(starts) + lengths
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    pages_each = 8  # as many in every step, so that a later one finds what an earlier one stored
    while pages_each * page_size < ends.max():
        pages_each *= 2
    page_table = np.arange(len(tokens) * pages_each, dtype=np.int32).reshape(len(tokens), pages_each)
    positions = np.concatenate([np.arange(*span) for span in zip(starts, ends.tolist(), strict=True)])
    owner = np.repeat(np.arange(len(tokens)), lengths)
    pages = page_table[owner, positions // page_size].astype(np.int64)
    return StepArrays(
        token_ids=np.concatenate([np.array(chunk, np.int64) for chunk in tokens]),
        positions=positions,
        slots=pages * page_size + positions % page_size,
        cu_seqlens=cu_seqlens,
        context_lens=ends.astype(np.int32),
        page_table=page_table,
        logit_rows=cu_seqlens[1:].astype(np.int64) - 1,
        num_decodes=len(tokens) if lengths.max() == 1 else 0,
        max_seqlen_q=int(lengths.max()),
        copies_to_host=(),
        copies_to_device=(),
    )


def _decode_rows(session: Session, batch: int, sampling: SamplingParams, bar: float | None) -> Iterator[Row]:
    replica, sizes = session.replica, session.sizes
    request_ids = _fill(session, batch, sampling)
    seconds = []
    for _ in range(NUM_WARMUP_STEPS + sizes.num_steps):
        started_s = perf_counter()
        outputs = replica.engine.step()
        seconds.append(perf_counter() - started_s)
        if len(outputs) != batch:
            raise WrongResult(f"a decode step of {batch} sequences yielded {len(outputs)} tokens")
    step_s, model_s = median(seconds[NUM_WARMUP_STEPS:]), _model_seconds(session)
    arrays = replica.runner.last_step
    num_context_tokens = 0 if arrays is None else int(arrays.context_lens.sum())
    for request_id in request_ids:
        replica.engine.abort(request_id)
    percent = 100 * roofline_seconds(session, batch, num_context_tokens) / step_s
    note = (
        f"{format_number(step_s * 1e3)} ms a step, {format_number(model_s * 1e3)} of them the model, "
        f"{format_number(batch / step_s)} tok/s"
    )
    name = f"decode step, {batch} x {sizes.step_context:,}"
    if sampling != SamplingParams():
        yield Row(f"{name}, top-k and top-p", percent, "% of roofline", note=note)
        return
    session.step_seconds[batch] = step_s
    yield (
        Row(name, percent, "% of roofline", note=note)
        if bar is None
        else session.bar(name, percent, "% of roofline", bar, note)
    )


def _fill(session: Session, batch: int, sampling: SamplingParams) -> list[str]:
    """Add requests and prefill until every one has its first token; return their ids."""
    engine, rng, sizes = session.replica.engine, random.Random(batch), session.sizes
    # Enough that none ends while the others are prefilled or timed.
    num_tokens = sizes.max_model_len - sizes.step_context
    sampling = SamplingParams(
        max_tokens=num_tokens, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
    )
    requests = [_request(random_tokens(rng, sizes.model, sizes.step_context), sampling) for _ in range(batch)]
    for request in requests:
        engine.add(request)
    started: set[str] = set()
    while len(started) < batch:
        outputs: list[StepOutput] = engine.step()
        started.update(output.request_id for output in outputs)
    return [request.request_id for request in requests]


def _model_seconds(session: Session) -> float:
    """The last decode step's forward pass again and again: inputs, graph and logits, nothing sampled."""
    runner, num_runs = session.replica.runner, session.sizes.num_steps
    arrays = runner.last_step
    if arrays is None:
        raise RuntimeError("no step has run")

    def run() -> None:
        for _ in range(num_runs):
            runner.execute(arrays)

    return wall_seconds(run, session.device) / num_runs


def _request(prompt: list[int], sampling: SamplingParams) -> Request:
    """Ends by length alone: the models here have no end token."""
    return Request(request_id=f"bench-{next(_request_ids)}", token_ids=tuple(prompt), sampling=sampling)
