"""What prompts are told of the time that others took, by a brute force count of whole runs."""

from math import inf
from random import Random

import pytest

from baton.clock import ManualClock
from baton.config import SchedulerConfig
from baton.engine.host_tier import HostTier
from baton.engine.pages import PagePool
from baton.engine.prefix_cache import PrefixCache
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence, SequenceStatus
from baton.request import Request, SamplingParams

STEP_TOKENS = 32
STEP_S = 0.5


class Steps:
    def __init__(self, attention_parity: float = inf) -> None:
        cache = PrefixCache(PagePool(2000, 4), None, HostTier(0))
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


def is_computed(sequence: Sequence) -> bool:
    """Or will be: it is behind by more than a token, which rides along as those of decodes do."""
    return sequence.status is not SequenceStatus.FINISHED and sequence.num_uncomputed_tokens > 1


def test_a_prompt_alone_shares_with_nobody_and_decodes_are_no_others() -> None:
    steps = Steps()
    answered = steps.ask(10, max_tokens=50)
    steps.step()
    prompt = steps.ask(100)
    while steps.step().get("2"):
        pass
    assert prompt.others_s == answered.others_s == 0.0 and prompt.status is SequenceStatus.FINISHED


@pytest.mark.parametrize("seed", range(20))
def test_every_step_is_shared_out_once_among_the_prompts_that_run(seed: int) -> None:
    random, steps = Random(seed), Steps()
    sequences: dict[str, Sequence] = {}
    own_s: dict[str, float] = {}
    running_s: dict[str, float] = {}
    while len(sequences) < 12 or steps.scheduler.has_work():
        if len(sequences) < 12 and random.random() < 0.5:
            sequence = steps.ask(random.choice([1, 3, 33, 200]), max_tokens=random.choice([1, 4]))
            sequences[sequence.request_id] = sequence
        before = {name: is_computed(each) for name, each in sequences.items()}
        computed = {name: num for name, num in steps.step().items() if before[name]}
        total = sum(computed.values())
        for name, num in computed.items():
            own_s[name] = own_s.get(name, 0.0) + STEP_S * num / total
        for name in sequences:
            has_begun = name in own_s and before[name]
            running_s[name] = running_s.get(name, 0.0) + STEP_S * has_begun
    for name, each in sequences.items():
        assert each.others_s == pytest.approx(running_s[name] - own_s.get(name, 0.0)), name


def test_a_step_is_shared_by_what_tokens_cost() -> None:
    steps = Steps(attention_parity=100.0)
    late = steps.ask(200)
    for _ in range(5):
        steps.step()
    start = late.num_computed_tokens
    early = steps.ask(20)
    computed = steps.step()
    costs = [
        num * (1 + (first + num / 2) / 100) for num, first in ((computed["1"], start), (computed["2"], 0))
    ]
    assert late.others_s == pytest.approx(STEP_S * costs[1] / sum(costs))
    assert early.others_s == pytest.approx(STEP_S * costs[0] / sum(costs))
