"""Whose the time of steps was, by a brute force count of whole runs."""

from collections import defaultdict
from math import inf
from random import Random

import pytest

from baton.clock import ManualClock
from baton.config.engine import SchedulerConfig
from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.page_pool import PagePool
from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequence import Sequence, SequenceStatus
from baton.request import Request, SamplingParams

STEP_TOKENS = 32
STEP_S = 0.5


class Steps:
    def __init__(self, attention_parity: float = inf, num_pages: int = 2000) -> None:
        cache = PrefixCache(PagePool(num_pages, 4), None, HostTier(0))
        config = SchedulerConfig(max_num_batched_tokens=STEP_TOKENS, max_num_seqs=8)
        self.scheduler = Scheduler(config, cache, ManualClock(), attention_parity)
        self.num_asked = 0

    def ask(self, num_tokens: int, max_tokens: int = 1) -> Sequence:
        self.num_asked += 1
        request = Request(
            request_id=str(self.num_asked),
            token_ids=(5,) * num_tokens,
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        sequence = Sequence.from_request(request, 0, max_model_len=1 << 16)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """What was computed, of whom."""
        batch = self.scheduler.apply(self.scheduler.plan())
        self.scheduler.commit(batch, [7] * len(batch.chunks), STEP_S)
        return {chunk.sequence.request_id: chunk.num_tokens for chunk in batch.chunks}


def test_a_prompt_alone_has_all_of_its_steps_and_decodes_have_none() -> None:
    steps = Steps()
    answered = steps.ask(10, max_tokens=50)
    steps.step()
    prompt, before_s = steps.ask(100), answered.own_s
    while steps.step().get("2"):
        pass
    assert prompt.status is SequenceStatus.FINISHED and prompt.own_s == 4 * STEP_S
    assert answered.own_s == before_s == STEP_S


@pytest.mark.parametrize("num_pages", [2000, 60])
def test_every_step_is_shared_out_among_the_prompts_in_it(num_pages: int) -> None:
    """Also where there are so few pages that some are preempted."""
    num_preemptions = sum(run_at_random(Random(seed), num_pages) for seed in range(20))
    assert (num_preemptions > 0) == (num_pages == 60)


def run_at_random(random: Random, num_pages: int) -> int:
    """How many were preempted."""
    steps = Steps(num_pages=num_pages)
    sequences: dict[str, Sequence] = {}
    own_s: dict[str, float] = defaultdict(float)
    while len(sequences) < 12 or steps.scheduler.has_work():
        if len(sequences) < 12 and random.random() < 0.5:
            sequence = steps.ask(random.choice([1, 3, 33, 200]), max_tokens=random.choice([1, 40]))
            sequences[sequence.request_id] = sequence
        has_answer = {name: each.num_generated_tokens > 0 for name, each in sequences.items()}
        computed = steps.step()
        if max(computed.values(), default=1) == 1:
            continue
        prompts = {name: num for name, num in computed.items() if num > 1 or not has_answer[name]}
        for name, num in prompts.items():
            own_s[name] += STEP_S * num / sum(prompts.values())
    for name, each in sequences.items():
        assert each.own_s == pytest.approx(own_s[name]), name
    return steps.scheduler.num_preemptions


def test_a_step_is_shared_by_what_tokens_cost() -> None:
    steps = Steps(attention_parity=100.0)
    late = steps.ask(200)
    for _ in range(5):
        steps.step()
    start, before_s = late.num_computed_tokens, late.own_s
    early = steps.ask(20)
    computed = steps.step()
    costs = [
        num * (1 + (first + num / 2) / 100) for num, first in ((computed["1"], start), (computed["2"], 0))
    ]
    assert late.own_s - before_s == pytest.approx(STEP_S * costs[0] / sum(costs))
    assert early.own_s == pytest.approx(STEP_S * costs[1] / sum(costs))
