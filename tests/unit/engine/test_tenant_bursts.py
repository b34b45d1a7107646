"""Bursts of quiet scheduling keys beside a key that always wants more, in steps."""

from random import Random
from typing import Final

from baton.clock import ManualClock
from baton.config.engine import SchedulerConfig
from baton.engine.cache.page_pool import PagePool
from baton.engine.cache.prefix_cache import HostTier, PrefixCache
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequence import Sequence, SequenceKey
from baton.fair_queue import HALF_LIFE_S
from baton.request import Request, SamplingParams

STEP_TOKENS: Final = 128
NUM_STEPS: Final = 128  # in a half-life
NUM_QUIET: Final = 4
QUIET_LOAD: Final = 0.5  # of all that can be computed
LONG: Final = 2000


class Prefill:
    """Computes prompts to their first tokens and records the waits in steps."""

    def __init__(self) -> None:
        cache = PrefixCache(PagePool(4000, 16), None, HostTier(0))
        self._clock = ManualClock()
        self._scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=STEP_TOKENS), cache, self._clock)
        self._began: dict[SequenceKey, int] = {}
        self.num_steps = 0
        self.num_computed = {"quiet": 0, "noisy": 0}
        self.waited: list[int] = []  # the quiet ones

    def add(self, tenant: str, num_tokens: int) -> None:
        request = Request(
            request_id=f"{len(self._began):x}",
            token_ids=(5,) * num_tokens,
            tenant=tenant,
            sampling=SamplingParams(max_tokens=1),
        )
        sequence = Sequence.from_request(request, 0, max_model_len=1 << 16)
        self._scheduler.add(sequence)
        self._began[sequence.key] = self.num_steps

    def step(self) -> None:
        self.num_steps += 1
        self._clock.advance(HALF_LIFE_S / NUM_STEPS)
        batch = self._scheduler.apply(self._scheduler.plan())
        for chunk in batch.chunks:
            self.num_computed[chunk.sequence.scheduling_key.split("-")[0]] += chunk.num_tokens
        for advance in self._scheduler.commit(batch, [7] * len(batch.chunks)):
            if advance.sequence.scheduling_key != "noisy":
                self.waited.append(self.num_steps - self._began[advance.sequence.key])

    @property
    def num_noisy(self) -> int:
        return sum(each.scheduling_key == "noisy" for each in self._scheduler.sequences())


def quiet_tenants(num_steps: int, seed: int, *, is_noisy: bool) -> list[int]:
    """How many steps each of their prompts took, sorted."""
    random, prefill, due = Random(seed), Prefill(), 0.0
    mean_tokens = 305
    while prefill.num_steps < num_steps:
        while due <= prefill.num_steps:
            due += random.expovariate(QUIET_LOAD * STEP_TOKENS / mean_tokens)
            num_tokens = max(16, min(LONG, round(random.lognormvariate(5.4, 0.8))))
            prefill.add(f"quiet-{random.randrange(NUM_QUIET)}", num_tokens)
        while is_noisy and prefill.num_noisy < 3:
            prefill.add("noisy", LONG)
        prefill.step()
    return sorted(prefill.waited)


def test_busy_key_hardly_delays_bursts_of_quiet_keys() -> None:
    for seed in range(2):
        alone = quiet_tenants(1500, seed, is_noisy=False)
        beside = quiet_tenants(1500, seed, is_noisy=True)
        assert len(beside) > 0.98 * len(alone)
        slow_alone, slow = (waited[int(0.97 * len(waited))] for waited in (alone, beside))
        assert slow <= 1.1 * slow_alone + 1, (seed, slow, slow_alone)


def test_burst_is_served_at_once_up_to_a_bound() -> None:
    prefill = Prefill()
    for _ in range(80):
        prefill.add("noisy", LONG)
    for _ in range(4 * NUM_STEPS):
        prefill.step()
    noisy_before = prefill.num_computed["noisy"]
    for _ in range(40):
        prefill.add("quiet-0", LONG)
    for _ in range(4 * NUM_STEPS):
        prefill.step()
    noisy = prefill.num_computed["noisy"] - noisy_before
    most = NUM_STEPS * STEP_TOKENS  # of a key without recent work: see `DecayedShares`
    assert prefill.num_computed["quiet"] - noisy <= most + 2 * STEP_TOKENS
    assert prefill.num_computed["quiet"] - noisy >= 0.9 * most
