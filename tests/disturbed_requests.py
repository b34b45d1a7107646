"""Requests of every kind that come, and are preempted, at random; their answers must not depend on it."""

import random
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from baton.engine.engine import Engine
from baton.engine.scheduler.sequence import SequenceKey
from baton.request import StepOutput
from tests.tiny_models import VOCAB_SIZE, add, run_to_end

SAMPLINGS: Final[list[dict[str, Any]]] = [
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 3, "top_k": 20, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.0, "seed": 4, "n": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 5, "min_tokens": 4, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 3))},
    {"temperature": 1.0, "seed": 6, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 7)), "logprobs": 0},
    {"temperature": 0.0, "prompt_logprobs": 1, "logit_bias": {5: 3.0}},
    {"temperature": 0.0, "max_tokens": 1},
]
Prompt: TypeAlias = Callable[[random.Random], list[int]]
# Everything but the number of cached tokens, which depends on when other requests were computed.
Answers: TypeAlias = dict[SequenceKey, list[tuple[object, ...]]]


def any_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))]


def repeated_prompt(rng: random.Random) -> list[int]:
    """A phrase, up to three times."""
    phrase = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 10))]
    return phrase * rng.randint(1, 3)


def answers(
    engine: Engine, seed: int, samplings: list[dict[str, Any]] = SAMPLINGS, prompt: Prompt = any_prompt
) -> Answers:
    """Run a dozen requests to the end, and check the ledgers after each of the first steps."""
    rng, chance = random.Random(seed), random.Random(seed)
    outputs: list[StepOutput] = []
    for number in range(12):
        add(engine, str(number), prompt(rng), **{"max_tokens": 20, **rng.choice(samplings)})
        for _ in range(rng.randint(0, 6)):
            running = [each.key for each in engine.scheduler.sequences() if each.is_running]
            if running and chance.random() < 0.3:
                engine.scheduler.preempt(chance.choice(running))
            outputs += engine.step()
            engine.scheduler.check_integrity()
    found: Answers = {}
    for each in outputs + run_to_end(engine):
        kept = (each.index, each.token_id, each.finish_reason, each.logprobs, each.prompt_logprobs)
        found.setdefault((each.request_id, each.choice), []).append(kept)
    return found
