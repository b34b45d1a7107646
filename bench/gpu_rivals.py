"""`transformers` on the same device with the same dummy weights: padded batches, its own SDPA attention."""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import torch
from torch import Tensor

from baton.bench.gpu_model import generate, random_tokens, step_arrays
from baton.bench.gpu_session import Session, require_close
from baton.bench.replica import LlamaShape
from baton.bench.report import Row, format_number
from baton.bench.timing import Call, wall_seconds
from baton.engine.dummy_weights import DummyCheckpoint
from baton.engine.hf_config import read_model_config

GENERATE_BAR: Final = 8.0  # our throughput / padded generate on ragged requests
NUM_DECODE_TOKENS: Final = 33
NUM_RUNS: Final = 3
CHECKED_TOKENS: Final = 64


class Rival:
    """A transformers model in bf16; its weights are the engine's, tensor by tensor."""

    def __init__(self, shape: LlamaShape, device: torch.device) -> None:
        import transformers  # only here: the rest of the bench runs without it

        transformers.logging.set_verbosity_error()
        self._device = device
        with TemporaryDirectory() as folder:
            shape.write(Path(folder))
            config = transformers.AutoConfig.from_pretrained(folder)
            checkpoint = DummyCheckpoint(read_model_config(Path(folder)), 0, device=str(device))
        with torch.device(device):
            self._model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            ).eval()
        for name, parameter in self._model.named_parameters():
            parameter.copy_(checkpoint.tensor(name))

    def last_logits(self, prompt: list[int]) -> Tensor:
        """[1, V]: of the last token."""
        token_ids = torch.tensor([prompt], device=self._device)
        logits: Tensor = self._model(token_ids, logits_to_keep=1).logits[:, -1]
        return logits

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> None:
        """Greedy, all prompts padded on the left to the longest, `num_tokens` for every one."""
        longest = max(map(len, prompts))
        token_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        self._model.generate(
            token_ids.to(self._device),
            attention_mask=mask.to(self._device),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )


def against_transformers(session: Session) -> Iterator[Row]:
    if find_spec("transformers") is None:
        yield Row("transformers", None, "", note="not installed")
        return
    sizes, rng = session.sizes, random.Random(2)
    rival = Rival(sizes.model, session.device)
    _check(session, rival, random_tokens(rng, sizes.model, CHECKED_TOKENS))
    for num_tokens, our_s in session.prefill_seconds.items():
        prompt = random_tokens(rng, sizes.model, num_tokens)
        rival_s = _median_seconds(session, partial(rival.last_logits, prompt))
        note = f"theirs {format_number(rival_s * 1e3)} ms"
        yield Row(f"prefill, {num_tokens:,} tokens: times as fast", rival_s / our_s, "x", note=note)
    for batch in sizes.step_batches[:2]:
        if batch in session.step_seconds:
            yield _decode_row(session, rival, batch)
    yield from _mixed_rows(session, rival)


def _decode_row(session: Session, rival: Rival, batch: int) -> Row:
    sizes, rng = session.sizes, random.Random(batch)
    prompts = [random_tokens(rng, sizes.model, sizes.step_context) for _ in range(batch)]

    def seconds(num_tokens: int) -> float:
        return _median_seconds(session, lambda: rival.generate(prompts, num_tokens))

    rival_s = (seconds(NUM_DECODE_TOKENS) - seconds(1)) / (NUM_DECODE_TOKENS - 1)
    note = f"theirs {format_number(rival_s * 1e3)} ms"
    name = f"decode step, {batch} x {sizes.step_context:,}: times as fast as generate"
    return Row(name, rival_s / session.step_seconds[batch], "x", note=note)


def _mixed_rows(session: Session, rival: Rival) -> Iterator[Row]:
    """Ragged requests: ours as they come, theirs as one padded batch that runs to the longest answer."""
    sizes, rng = session.sizes, random.Random(3)
    lengths = [rng.randint(*sizes.mixed_lengths) for _ in range(2 * sizes.num_mixed_requests)]
    prompts = [random_tokens(rng, sizes.model, length) for length in lengths[::2]]
    num_new_tokens = lengths[1::2]
    generate(session.replica, prompts, num_new_tokens)  # captures the graph of every batch size on the way
    our_s = wall_seconds(lambda: generate(session.replica, prompts, num_new_tokens), session.device)
    ours = sum(num_new_tokens) / our_s
    name = f"{len(prompts)} ragged requests"
    yield Row(f"{name}: Baton", ours, "tok/s", note=f"{sizes.mixed_lengths} tokens in and out")
    rival.generate(prompts, 2)
    rival_s = wall_seconds(lambda: rival.generate(prompts, max(num_new_tokens)), session.device)
    theirs = sum(num_new_tokens) / rival_s
    yield Row(f"{name}: padded generate", theirs, "tok/s", note="tokens past an answer's end not counted")
    yield session.bar(f"{name}: times as fast", ours / theirs, "x", GENERATE_BAR)


def _check(session: Session, rival: Rival, prompt: list[int]) -> None:
    ours_1V = session.replica.runner.execute(step_arrays([0], [prompt]))
    # Both in bf16, whose rounding grows with the layers; another model's logits would be off by 1.4.
    require_close("logits against transformers", ours_1V, rival.last_logits(prompt), limit=0.1)


def _median_seconds(session: Session, run: Call) -> float:
    run()
    return median(wall_seconds(run, session.device) for _ in range(NUM_RUNS))
