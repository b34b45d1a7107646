"""Runs requests through an engine in any configuration, with preemptions and other events."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from baton.adapters import Adapter
from baton.config.engine import RankSidecar, engine_config
from baton.engine.engine import Engine, load_engine
from baton.engine.models.model import split_layers
from baton.engine.models.registry import read_model_config
from baton.engine.runner.step_inputs import NO_SLOTS, StepArrays
from baton.engine.scheduler.sequence import Sequence, SequenceStatus
from baton.pages import PageLayout
from baton.request import Request, SamplingParams, StepOutput, TokenIds
from tests.parity.models import VOCAB_SIZE
from tests.tiny_models import pause

NUM_NEW_TOKENS: Final = 64
PROMPT_LENGTHS: Final = (1, 5, 16, 33, 70)
GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
SEEDED: Final = SamplingParams(
    temperature=1.5, top_p=0.9, top_k=40, seed=7, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=2
)
Hook = Callable[[Engine], None]


def prompts(seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


@contextmanager
def engine(directory: Path, sidecar: RankSidecar | None = None, **settings: Any) -> Iterator[Engine]:
    """Yield an engine; at the end its ledgers must be sound and its work done."""
    cache = {"kv_cache_memory_bytes": 2**22, **settings.pop("cache", {})}
    if "num_kv_tokens" in settings:
        cache["kv_cache_memory_bytes"] = settings.pop("num_kv_tokens") * _token_bytes(
            directory, settings.get("pipeline_parallel_size", 1)
        )
    config = engine_config({"model": str(directory), "device": "cpu", "cache": cache, **settings})
    made = load_engine(config, sidecar=sidecar)
    try:
        yield made
        made.scheduler.check_integrity()
        assert not made.has_work()
    finally:
        made.close()


def _token_bytes(directory: Path, num_stages: int) -> int:
    """Return the bytes of a token in the stage with the most layers."""
    model = read_model_config(directory)
    return PageLayout(
        tp_size=1,
        page_size=1,
        num_layers=max(split_layers(model, num_stages)),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_planes=model.num_kv_planes,
        dtype=model.dtype,
    ).token_bytes


def run(
    made: Engine,
    token_lists: list[list[int]],
    sampling: SamplingParams,
    before_step: Hook | None = None,
    begun: list[list[int]] | None = None,
) -> list[list[StepOutput]]:
    """Return all outputs of each prompt, in order. before_step: called before each step; begun: the first
    tokens of each answer, from an earlier attempt.
    """
    outputs: dict[str, list[StepOutput]] = {str(index): [] for index in range(len(token_lists))}
    for index, token_ids in enumerate(token_lists):
        request = Request(
            request_id=str(index),
            token_ids=TokenIds.of(token_ids),
            sampling=sampling,
            generated_token_ids=tuple(begun[index]) if begun else (),
        )
        made.add(request)
    while made.has_work():
        if before_step is not None:
            before_step(made)
        for output in made.step():
            outputs[output.request_id].append(output)
        pause(made)
    return list(outputs.values())


def essence(outputs: list[list[StepOutput]]) -> list[list[Any]]:
    """The tokens and log probabilities of each request."""
    return [[(output.token_id, output.logprobs) for output in of_one] for of_one in outputs]


@cache
def plain(
    directory: Path, quantization: str | None = None, cache_dtype: str = "auto"
) -> tuple[list[list[StepOutput]], list[list[StepOutput]]]:
    """The greedy and the seeded answers of one rank without further settings."""
    with engine(directory, quantization=quantization, cache={"kv_cache_dtype": cache_dtype}) as made:
        return run(made, prompts(), GREEDY), run(made, prompts(1), SEEDED)


def check_settings(
    directory: Path,
    settings: Mapping[str, Any],
    quantization: str | None = None,
    cache_dtype: str = "auto",
) -> None:
    """The answers with the settings are those of `plain`."""
    greedy, seeded = plain(directory, quantization, cache_dtype)
    cache = {**settings.get("cache", {}), "kv_cache_dtype": cache_dtype}
    with engine(directory, **{**settings, "quantization": quantization, "cache": cache}) as made:
        assert essence(run(made, prompts(), GREEDY)) == essence(greedy)
        assert essence(run(made, prompts(1), SEEDED)) == essence(seeded)


def tokens(outputs: list[list[StepOutput]]) -> list[list[int | None]]:
    return [[output.token_id for output in of_one] for of_one in outputs]


def forward_logits(made: Engine, token_ids: list[int], adapter: Adapter | None = None) -> Tensor:
    """Return the logits of every position, [T, V]: one prefill in the first pages of the idle pool."""
    slots = NO_SLOTS
    if adapter is not None:
        _, tensors = made.runner.read_adapter(adapter)
        made.runner.put_adapter(0, tensors)
        slots = np.zeros(len(token_ids), np.int32)
    num_tokens, page_size = len(token_ids), made.runner.layout.page_size
    positions = np.arange(num_tokens)
    arrays = StepArrays(
        token_ids=np.array(token_ids, np.int64),
        positions=positions,
        slots=positions,
        cu_seqlens=np.array([0, num_tokens], np.int32),
        context_lens=np.array([num_tokens], np.int32),
        page_table=np.arange(-(-num_tokens // page_size), dtype=np.int32)[None],
        logit_rows=positions,
        num_decodes=0,
        max_seqlen_q=num_tokens,
        copies_to_host=(),
        copies_to_device=(),
        adapter_slots=slots,
    )
    return made.runner.execute(arrays)


class PreemptInTurn:
    """Before every step, preempt one running sequence, each in its turn.

    evicts: the pages of those that were preempted before go to the host tier, or are computed again.
    """

    def __init__(self, *, evicts: bool = False) -> None:
        self._evicts = evicts
        self.num_preemptions = 0

    def __call__(self, made: Engine) -> None:
        if self._evicts:
            made.scheduler.cache.make_room(made.pages.num_available)
        running = [sequence for sequence in _live(made) if _is_under_way(sequence)]
        if not running:
            return
        victim = running[self.num_preemptions % len(running)]
        made.scheduler.preempt(victim.key)
        self.num_preemptions += 1


def _live(made: Engine) -> list[Sequence]:
    return [sequence for sequence in made.scheduler.sequences() if sequence.status is SequenceStatus.RUNNING]


def _is_under_way(sequence: Sequence) -> bool:
    return sequence.num_computed_tokens > 0
