"""A prefix that one prefill worker has computed, asked for while that worker is busy: another one pulls it.

A trial: the first prefill worker computes a document, and is then kept busy with other prompts. A question
about the document goes to the second one, which holds none of it; whether it pulls or computes is the
router's to choose. Then it computes a prompt of that length which nobody holds, in the same circumstances.
Decode workers keep nothing, so the document is the first worker's alone.
"""

import statistics
from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from baton.bench.prefix_workloads import ANSWER_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS, tokens
from baton.bench.prefix_world import PAGE_SIZE, Answer, Plan, Wish, World
from baton.decision import Decision
from baton.worker import WorkerRole

PLAN: Final = Plan(policy="cost", caching=(WorkerRole.PREFILL,))
BUSY_PROMPTS: Final = 2
NUM_LESSONS: Final = 3
FIRST, SECOND = "prefill-0", "prefill-1"


class Costs(NamedTuple):
    """Of one prompt's KV at the second worker, in seconds, until the first token."""

    expected_s: float  # by the router, when it chose
    measured_s: float  # by the worker
    pulled_bytes: int
    pulled_s: float

    @classmethod
    def of(cls, decision: Decision) -> "Costs":
        terms, measured = decision.chosen.terms, decision.measured
        assert measured is not None
        return cls(
            terms["pull_s"] + terms["compute_s"],
            measured.pulled_s + measured.computed_s,
            measured.pulled_bytes,
            measured.pulled_s,
        )


class Trial(NamedTuple):
    pulled: Costs
    computed: Costs
    queue_s: float  # that the busy worker was expected to have
    is_from_busy_worker: bool
    prompt: list[int]
    token_ids: list[int]  # of the answer after the pull

    @property
    def expected_margin_s(self) -> float:
        return self.computed.expected_s - self.pulled.expected_s

    @property
    def measured_margin_s(self) -> float:
        return self.computed.measured_s - self.pulled.measured_s


async def trials(world: World, num_trials: int, seed: int) -> list[Trial]:
    """The first ones teach the router what a pull takes, and are left out."""
    random = Random(seed)
    found = [await _trial(world, random) for _ in range(num_trials + NUM_LESSONS)]
    return found[NUM_LESSONS:]


def median_ratio(trials: Sequence[Trial]) -> float | None:
    """Expected to measured margin; None where pulling was no faster."""
    expected_s = statistics.median(trial.expected_margin_s for trial in trials)
    measured_s = statistics.median(trial.measured_margin_s for trial in trials)
    return expected_s / measured_s if measured_s > 0 else None


async def _trial(world: World, random: Random) -> Trial:
    document = tokens(random, DOCUMENT_TOKENS)
    at_first, at_second = _at(world, FIRST), _at(world, SECOND)
    question = [*document, *tokens(random, QUESTION_TOKENS)]
    num_told = world.num_told(FIRST)
    await (await world.ask([*document, *tokens(random, QUESTION_TOKENS)], 1, at_first)).end()
    await world.news(FIRST, num_told + DOCUMENT_TOKENS // PAGE_SIZE)
    busy = await _keep_busy(world, random, at_first)
    queue_s = world.router.books.wait_s(world.worker_id(FIRST))
    answer = await world.ask(question, ANSWER_TOKENS, at_second)
    pulled = await world.told(await answer.end())
    for each in busy:
        await each.end()
    busy = await _keep_busy(world, random, at_first)
    cold = await world.ask(tokens(random, len(question)), ANSWER_TOKENS, at_second)
    computed = await world.told(await cold.end())
    for each in busy:
        await each.end()
    is_from_first = pulled.chosen.source == world.worker_id(FIRST)
    return Trial(
        Costs.of(pulled), Costs.of(computed), queue_s, is_from_first, question, list(answer.token_ids)
    )


async def _keep_busy(world: World, random: Random, wish: Wish) -> list[Answer]:
    return [await world.ask(tokens(random, DOCUMENT_TOKENS), 1, wish) for _ in range(BUSY_PROMPTS)]


def _at(world: World, name: str) -> Wish:
    worker_id = world.worker_id(name)
    return lambda candidate: candidate.prefill == worker_id
