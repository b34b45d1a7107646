"""The 8B shape through the engine, beside vLLM: scheduler, graphs and sampling are part of the figures.

Shapes: B sequences, V vocabulary.
"""

import json
import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final, TypeAlias, cast

import msgspec
import numpy as np
import torch

from baton.bench.engine.replica import (
    TOY_LLAMA,
    LlamaShape,
    decode_step_seconds,
    generate,
    load_replica,
    num_head_parameters,
    num_layer_parameters,
    random_tokens,
    request_of,
)
from baton.bench.gpu.session import Session, Sizes, WrongResult, products_name, require_close
from baton.bench.machine import wall_seconds
from baton.bench.processes import Child, ProcessEnded
from baton.bench.report import Row, at_most, format_number
from baton.engine.models.loading.checkpoint import SINGLE_FILE
from baton.engine.models.model import dummy_checkpoint
from baton.engine.models.registry import read_model_config
from baton.engine.runner.step_inputs import StepArrays, StepBuilder
from baton.engine.scheduler.sequence import Batch
from baton.engine.scheduler.sequence import Sequence as EngineSequence
from baton.request import SamplingParams, StepOutput

NUM_RUNS: Final = 3
CHECKED_TOKENS: Final = 64
STEP_BARS: Final = {1: 80.0, 64: 75.0, 256: 65.0}  # percent of roofline
PREFILL_BAR: Final = 70.0  # percent of matmul peak
NUM_WARMUP_STEPS: Final = 5  # the first meet cold caches
NUM_PREFILLS: Final = 5
CHECKED_SHAPE: Final = replace(TOY_LLAMA, hidden_size=256, intermediate_size=512, head_dim=128)
CHECKED_LENGTHS: Final = (5, 33, 70)


def check(session: Session) -> Iterator[Row]:
    """Check a ragged prefill and a decode step in bf16 on the device against the CPU's kernels in fp32."""
    settings = {"cache": {"kv_cache_memory_bytes": 2**24}, "max_model_len": 256}
    tested = load_replica(CHECKED_SHAPE, {**settings, "device": session.device.type})
    oracle = load_replica(CHECKED_SHAPE, {**settings, "device": "cpu", "dtype": "float32"})
    rng = random.Random(0)
    prompts = [random_tokens(CHECKED_SHAPE, rng, length) for length in CHECKED_LENGTHS]
    steps = {
        "prefill": step_arrays([0] * len(prompts), prompts),
        "decode": step_arrays(CHECKED_LENGTHS, [random_tokens(CHECKED_SHAPE, rng, 1) for _ in prompts]),
    }
    for name, arrays in steps.items():
        got_BV, expected_BV = tested.runner.execute(arrays), oracle.runner.execute(arrays)
        require_close(f"logits of a {name} step", got_BV, expected_BV, limit=3e-2)
        error = float((got_BV.cpu() - expected_BV).norm() / expected_BV.norm())
        note = "bf16 against fp32 on the CPU"
        yield Row(f"logits of a {name} step", error, "rel. error", "< 0.03", True, note)


def decode_steps(session: Session) -> Iterator[Row]:
    """Measure whole engine steps in percent of roofline."""
    for batch in session.sizes.step_batches:
        yield from _decode_rows(session, batch, SamplingParams(), STEP_BARS.get(batch))
    top_p = SamplingParams(temperature=0.8, top_p=0.95, top_k=50)
    yield from _decode_rows(session, session.sizes.step_batches[-1], top_p, None)


def prefill(session: Session) -> Iterator[Row]:
    """Measure the percent of the matmul peak from adding a request to its first token."""
    for num_tokens in session.sizes.model_prefill_lengths:
        median_s = session.figures.prefill_seconds[num_tokens] = _prefill_seconds(session, num_tokens)
        tflops = prefill_flops(session.sizes.model, num_tokens) / median_s / 1e12
        note = f"{format_number(median_s * 1e3)} ms, {format_number(num_tokens / median_s)} tok/s"
        note += _share_of_products(session, products_name(num_tokens, 1), median_s)
        percent = 100 * tflops / session.rates.peak_tflops
        yield session.bar(f"prefill, {num_tokens:,} tokens", percent, "% of peak", PREFILL_BAR, note)


def _share_of_products(session: Session, name: str, seconds: float) -> str:
    """Return the end of a note: the floor of matrix products alone as percent of our time, if it is known."""
    floor_s = session.figures.product_seconds.get(name)
    return "" if floor_s is None else f", {100 * floor_s / seconds:.0f} % of the floor (products alone)"


def _prefill_seconds(session: Session, num_tokens: int) -> float:
    rng, seconds = random.Random(num_tokens), []
    for _ in range(1 + NUM_PREFILLS):
        prompt = random_tokens(session.sizes.model, rng, num_tokens)
        started_s = perf_counter()
        generate(session.replica.engine, [prompt], [1])
        seconds.append(perf_counter() - started_s)
    return median(seconds[1:])


def prefill_flops(shape: LlamaShape, num_tokens: int) -> float:
    """Return the FLOPs of the matrices, the causal half of attention, and the head for the last token."""
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens**2
    return 2 * num_layer_parameters(shape) * num_tokens + attention + 2 * num_head_parameters(shape)


def roofline_seconds(session: Session, batch: int, num_context_tokens: int) -> float:
    """Return the time to read or multiply all weights, whichever is longer, and to read keys and values."""
    shape, rates = session.sizes.model, session.rates
    num_parameters = num_layer_parameters(shape) + num_head_parameters(shape)
    weights_s = 2 * num_parameters / rates.read_gbps / 1e9
    multiply_s = 2 * num_parameters * batch / rates.peak_tflops / 1e12
    kv_bytes = num_context_tokens * session.replica.engine.runner.layout.token_bytes
    return max(weights_s, multiply_s) + kv_bytes / rates.read_gbps / 1e9


def step_arrays(starts: Sequence[int], tokens: Sequence[list[int]]) -> StepArrays:
    """Return a step in which sequence b has `starts[b]` computed tokens and pages of its own."""
    lengths = [len(chunk) for chunk in tokens]
    pages_each = 8  # at least, so that a later step finds the pages of an earlier one
    while pages_each * PAGE_SIZE < max(map(add, starts, lengths)):
        pages_each *= 2
    prompts = [[0] * start + chunk for start, chunk in zip(starts, tokens, strict=True)]
    sequences = [
        EngineSequence.from_request(request_of(prompt, SamplingParams()), 0, max_model_len=1 << 20)
        for prompt in prompts
    ]
    for number, sequence in enumerate(sequences):
        sequence.page_table = list(range(number * pages_each, (number + 1) * pages_each))
    is_decode = max(lengths) == 1
    batch = Batch(
        sequences=sequences,
        starts=np.array(starts),
        lengths=lengths,
        num_decodes=len(tokens) if is_decode else 0,
        is_pure_decode=is_decode,
    )
    return StepBuilder(PAGE_SIZE, len(tokens), pages_each).build(batch)


PAGE_SIZE: Final = 16
INVARIANCE_SETTINGS: Final[dict[str, dict[str, object]]] = {
    "chunks of 48 tokens": {"scheduler": {"max_num_batched_tokens": 48}},
    "one at a time": {"scheduler": {"max_num_seqs": 1}},
    "pages of 1": {"cache": {"page_size": 1}},
    "pages of 64": {"cache": {"page_size": 64}},
}
INVARIANCE_LENGTHS: Final = (5, 150, 300)
INVARIANCE_BAR: Final = 15.0  # percent of time that batch invariance may cost and stay the default


def batch_invariance(session: Session) -> Iterator[Row]:
    """Compare all bits of answers across settings, then the speed with and without batch invariance."""
    expected = _invariance_outputs(session, {})
    for name, settings in INVARIANCE_SETTINGS.items():
        got = _invariance_outputs(session, settings)
        num_different = sum(one != other for one, other in zip(got, expected, strict=True))
        yield at_most(f"answers that {name} change", num_different, f"of {len(expected)}", 0)
    library = replace(session, batch_invariant=False, _replica=None)
    for batch in session.sizes.step_batches:
        name = _step_name(batch, session.sizes.step_context)
        our_s = session.figures.step_seconds.get(name)
        if our_s is not None:
            library_s, _ = _decode_seconds(library, batch, SamplingParams())
            yield _cost(session, f"{name}: cost of batch invariance", our_s, library_s)
    for num_tokens, our_s in session.figures.prefill_seconds.items():
        library_s = _prefill_seconds(library, num_tokens)
        yield _cost(session, f"prefill, {num_tokens:,} tokens: cost of batch invariance", our_s, library_s)


def _invariance_outputs(session: Session, settings: dict[str, object]) -> list[list[StepOutput]]:
    """Greedy answers with the log probabilities of prompt and answer, by request."""
    base = {"device": session.device.type, "max_model_len": 512}
    cache = {"kv_cache_memory_bytes": 2**26, **cast(dict[str, object], settings.get("cache", {}))}
    engine = load_replica(CHECKED_SHAPE, {**base, **settings, "cache": cache})
    rng = random.Random(3)
    sampling = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=5, prompt_logprobs=0, seed=0
    )
    outputs: dict[str, list[StepOutput]] = {}
    for index, length in enumerate(INVARIANCE_LENGTHS):
        request = request_of(random_tokens(CHECKED_SHAPE, rng, length), sampling)
        engine.add(msgspec.structs.replace(request, request_id=str(index)))
        outputs[str(index)] = []
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(output)
    return list(outputs.values())


def _cost(session: Session, name: str, our_s: float, library_s: float) -> Row:
    note = f"{format_number(our_s * 1e3)} ms, {format_number(library_s * 1e3)} with the library's products"
    limit = INVARIANCE_BAR if session.sizes.has_bars else None
    return at_most(name, 100 * (our_s / library_s - 1), "%", limit, note)


def _decode_rows(session: Session, batch: int, sampling: SamplingParams, bar: float | None) -> Iterator[Row]:
    step_s, model_s = _decode_seconds(session, batch, sampling)
    arrays = session.replica.last_step
    num_context_tokens = 0 if arrays is None else int(arrays.context_lens.sum())
    percent = 100 * roofline_seconds(session, batch, num_context_tokens) / step_s
    note = (
        f"{format_number(step_s * 1e3)} ms a step, {format_number(model_s * 1e3)} of them the model, "
        f"{format_number(batch / step_s)} tok/s"
    )
    note += _share_of_products(session, products_name(batch, batch), step_s)
    name = _step_name(batch, session.sizes.step_context)
    if sampling != SamplingParams():
        yield Row(f"{name}, top-k and top-p", percent, "% of roofline", note=note)
        return
    session.figures.step_seconds[name] = step_s
    yield session.bar(name, percent, "% of roofline", bar, note)


def _decode_seconds(session: Session, batch: int, sampling: SamplingParams) -> tuple[float, float]:
    """Median seconds of a decode step of `batch` sequences, and of its model alone."""
    rng, sizes = random.Random(batch), session.sizes
    # Long enough that no request ends while the others are prefilled or timed.
    sampling = msgspec.structs.replace(sampling, max_tokens=sizes.max_model_len - sizes.step_context)
    requests = [
        request_of(random_tokens(sizes.model, rng, sizes.step_context), sampling) for _ in range(batch)
    ]
    num_steps = NUM_WARMUP_STEPS + sizes.num_steps
    seconds = decode_step_seconds(session.replica.engine, requests, num_steps)
    return median(seconds[NUM_WARMUP_STEPS:]), _model_seconds(session)


def _step_name(batch: int, num_context_tokens: int) -> str:
    return f"decode step, {batch} x {num_context_tokens:,}"


def _model_seconds(session: Session) -> float:
    """Time the last decode step's forward pass alone: inputs, graph and logits, without sampling."""
    runner, num_runs = session.replica.engine.runner, session.sizes.num_steps
    arrays = session.replica.last_step
    if arrays is None:
        raise RuntimeError("no step has run")

    def run() -> None:
        for _ in range(num_runs):
            runner.execute(arrays)

    return wall_seconds(run, session.device) / num_runs


Job: TypeAlias = tuple[list[int], int]  # a prompt, and the tokens of its answer
VLLM_BAR: Final = 0.95  # our output tokens a second / vLLM's
VLLM_GOAL: Final = 1.1
LEAST_AGREEMENT: Final = 0.5  # of first tokens; rounding in bf16 may choose another, chance hits none
HAS_VLLM: Final = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
# Run by an interpreter that may have no Baton. Reads a list of jobs a line; writes the version, then the
# seconds and the tokens of each list.
VLLM_PROGRAM: Final = """
import json, os, sys, time
lines = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what vLLM prints is no answer
import vllm
llm = vllm.LLM(**json.loads(sys.argv[1]))
print(json.dumps(vllm.__version__), file=lines)
for line in sys.stdin:
    prompts, sampling = [], []
    for prompt, num_tokens in json.loads(line):
        prompts.append({"prompt_token_ids": prompt})
        sampling.append(vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        ))
    began_s = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began_s
    print(json.dumps([seconds, [list(each.outputs[0].token_ids) for each in outputs]]), file=lines)
"""


def start_vllm(session: Session, folder: Path) -> Child:
    """Start vLLM in a process of its own, with the engine's weights from a checkpoint in `folder`."""
    sizes = session.sizes
    _write_checkpoint(sizes.model, folder, session.device)
    settings: dict[str, object] = {
        "model": str(folder),
        "dtype": "bfloat16",
        "max_model_len": min(sizes.max_model_len, sizes.model.max_positions),
        "max_num_seqs": max(sizes.step_batches),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    if session.device.type == "cuda":
        # The share is only checked against the free memory; pages get as much memory as ours.
        settings |= {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": sizes.kv_cache_bytes}
    return Child("-c", VLLM_PROGRAM, json.dumps(settings), python=session.rival_python)


class VllmRival:
    """The vLLM of `start_vllm`; the caller ends the process."""

    def __init__(self, process: Child) -> None:
        """Wait until vLLM has loaded. RuntimeError: its process ends."""
        self._process = process
        self.version = self._read()

    def generate(self, jobs: Sequence[Job]) -> tuple[float, list[list[int]]]:
        """Return the seconds and the tokens of greedy answers. WrongResult: answers have other lengths."""
        self._process.tell(json.dumps(jobs))
        seconds, answers = cast(tuple[float, list[list[int]]], self._read())
        if [len(answer) for answer in answers] != [num_tokens for _, num_tokens in jobs]:
            raise WrongResult("vLLM: answers are not as long as asked for")
        return seconds, answers

    def _read(self) -> object:
        try:
            said: object = json.loads(self._process.read())
        except ProcessEnded as error:
            raise RuntimeError("vLLM's process has ended: the stage's log has its messages") from error
        return said


def _write_checkpoint(shape: LlamaShape, folder: Path, device: torch.device) -> None:
    from safetensors.torch import save_file  # the other stages run without it

    shape.write(folder)
    checkpoint = dummy_checkpoint(read_model_config(folder), 0, device)
    tensors = {name: checkpoint.slice(name, 0, 0, checkpoint.shape(name)[0]) for name in checkpoint.names()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE_FILE)


def against_vllm(session: Session) -> Iterator[Row]:
    """Compare offline throughput with vLLM: same weights, same requests, same memory for pages, in turns."""
    if subprocess.run([session.rival_python, "-c", HAS_VLLM], check=False).returncode:
        note = f"skipped: not installed for {session.rival_python}; --rival-python names another interpreter"
        yield Row("vllm", None, "", note=note)
        return
    with TemporaryDirectory() as folder, start_vllm(session, Path(folder)) as process:
        rival = VllmRival(process)
        yield _agreement_row(session, rival)
        for name, jobs in rival_loads(session.sizes).items():
            yield from _vllm_rows(session, rival, f"{name}, {len(jobs)} requests", jobs)


def rival_loads(sizes: Sizes) -> dict[str, list[Job]]:
    """Return the loads by name: lengths spread like those of ShareGPT, and prompts and answers of one length.

    ShareGPT's conversations have about 220 tokens in and 200 out on average, and many short ones.
    """
    rng, (num_in, num_out) = random.Random(4), sizes.rival_lengths

    def length(median_tokens: float, spread: float) -> int:
        return max(4, min(num_in, round(median_tokens * rng.lognormvariate(0, spread))))

    lengths = [(length(90, 1.34), length(130, 0.9)) for _ in range(sizes.num_rival_requests)]
    return {
        "lengths like ShareGPT's": [(random_tokens(sizes.model, rng, size), new) for size, new in lengths],
        f"{num_in:,} in, {num_out} out": [
            (random_tokens(sizes.model, rng, num_in), num_out) for _ in range(sizes.num_rival_requests)
        ],
    }


def _agreement_row(session: Session, rival: VllmRival) -> Row:
    """Compare first tokens, so that other weights have no figure."""
    rng, sizes = random.Random(5), session.sizes
    jobs = [(random_tokens(sizes.model, rng, CHECKED_TOKENS), 1) for _ in range(sizes.num_rival_requests)]
    arrays = [step_arrays([0], [prompt]) for prompt, _ in jobs]
    ours = [int(session.replica.engine.runner.execute(each).argmax()) for each in arrays]
    _, answers = rival.generate(jobs)
    agreed = sum(mine == answer[0] for mine, answer in zip(ours, answers, strict=True)) / len(ours)
    if agreed < LEAST_AGREEMENT:
        raise WrongResult(f"vLLM: {100 * agreed:.0f} % of first tokens are ours: other weights?")
    return Row("vllm: first tokens that are ours", 100 * agreed, "%", note=f"vLLM {rival.version}")


def _vllm_rows(session: Session, rival: VllmRival, name: str, jobs: list[Job]) -> Iterator[Row]:
    prompts, lengths = [prompt for prompt, _ in jobs], [num_tokens for _, num_tokens in jobs]
    ours = partial(generate, session.replica.engine, prompts, lengths)
    rounds = [(wall_seconds(ours, session.device), rival.generate(jobs)[0]) for _ in range(1 + NUM_RUNS)]
    our_s, their_s = (median(each) for each in zip(*rounds[1:], strict=True))
    yield Row(f"{name}: Baton", sum(lengths) / our_s, "tok/s", note=f"{sum(map(len, prompts)):,} tokens in")
    yield Row(f"{name}: vLLM", sum(lengths) / their_s, "tok/s")
    yield session.bar(f"{name}: times as fast as vLLM", their_s / our_s, "x", VLLM_BAR, f"goal {VLLM_GOAL}")
