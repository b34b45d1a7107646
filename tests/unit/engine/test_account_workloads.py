"""Random workloads of several accounts on small pools: shares, classes, quotas, books and every answer."""

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.engine import SchedulerConfig
from baton.engine.scheduler.sequence import PreemptMode, SequenceStatus
from baton.engine.scheduler.step_planner import PreemptionRates, PressureMode
from baton.errors import InvalidRequest
from baton.request import SamplingParams
from baton.tenants import Sla
from tests.accounts import AccountHarness, scheduling_key
from tests.scheduling import Settings

TEXT = [7, 7, 1, 2, 3, 9, 8, 4, 4, 4, 5, 6, 1, 1, 2, 30, 31]


class Workload:
    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.harness = AccountHarness(
            Settings(
                num_pages=rng.randint(6, 40),
                page_size=rng.choice([1, 2, 4, 8]),
                num_host_pages=rng.choice([0, 3, 20, 60]),
                prefix_caching=rng.random() < 0.7,
                attention_mlp_crossover=rng.choice([inf, 1.0, 10.0]),
                scheduler=SchedulerConfig(
                    max_num_seqs=rng.randint(1, 8),
                    max_num_batched_tokens=rng.choice([1, 3, 8, 17, 64]),
                    policy="continuous" if rng.random() < 0.8 else rng.choice(["static", "dynamic"]),
                    max_queue_delay_ms=rng.choice([0.0, 0.0, 20.0]),
                ),
            )
        )
        if rng.random() < 0.5:
            self.harness.scheduler.rates = PreemptionRates(rng.random(), rng.random())
        self.scheduling_keys = [
            scheduling_key(
                weight=rng.choice([0.5, 1.0, 1.0, 4.0]),
                rank=rng.choice([0, 0, 0, 1]),
                max_kv_pages=rng.choice([None, None, rng.randint(2, 12)]),
            )
            for _ in range(rng.randint(2, 5))
        ]
        self.disturbance = rng.choice([0.0, 0.0, 0.4])
        self.harness.step_s = rng.choice([0.001, 0.02, 0.2])  # what was had fades, or hardly

    def run(self) -> None:
        rng, harness = self.rng, self.harness
        for number in range(rng.randint(2, 25)):
            self._come(f"r{number}")
            for _ in range(rng.choice([0, 0, 1, 5])):
                self._disturb()
                harness.step()
        harness.run(max_steps=20_000)

    def _come(self, name: str) -> None:
        rng = self.rng
        tenant = rng.randrange(len(self.scheduling_keys))
        if rng.random() < 0.1:  # its policy has changed
            self.scheduling_keys[tenant] = scheduling_key(
                weight=2.0, max_kv_pages=rng.choice([None, rng.randint(2, 12)])
            )
        prefix = TEXT[: rng.randint(0, len(TEXT))] if rng.random() < 0.6 else []
        prompt = prefix + [rng.randrange(50) for _ in range(rng.randint(1, 25))]
        try:
            self.harness.add(
                name,
                prompt,
                SamplingParams(n=rng.choice([1, 1, 2]), max_tokens=rng.choice([1, 5, 20, 50])),
                tenant=f"t{tenant}",
                cache_salt=rng.choice([b"all", b"t%d" % tenant]),
                priority=rng.choice([0, 0, 1]),
                arrival_s=self.harness.clock.now_s(),
                scheduling_key=self.scheduling_keys[tenant],
                sla=rng.choice([Sla(), Sla(ttft_ms=rng.randint(1, 1000))]),
            )
        except InvalidRequest:
            return

    def _disturb(self) -> None:
        rng, harness = self.rng, self.harness
        if rng.random() < self.disturbance / 4:
            harness.scheduler.pressure_mode = PressureMode(rng.random() < 0.5, rng.random() < 0.5)
        running = [key for key, s in harness.live.items() if s.status is SequenceStatus.RUNNING]
        if running and rng.random() < self.disturbance:
            harness.scheduler.preempt(rng.choice(running), rng.choice(list(PreemptMode)))
        if harness.live and rng.random() < self.disturbance / 5:
            harness.abort(rng.choice(list(harness.live))[0])


@pytest.mark.parametrize("first_seed", range(0, 60, 30))
def test_workloads_of_several_accounts_are_exact_and_end(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 30):
        Workload(seed).run()


@settings(max_examples=15, deadline=None)
@given(st.integers(min_value=1000))
def test_any_workload_of_several_accounts_is_exact_and_ends(seed: int) -> None:
    Workload(seed).run()
