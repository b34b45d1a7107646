"""Random workloads on small pools. Every page read, every ledger and every answer is checked at every
step."""

import random
from dataclasses import replace
from math import inf

import pytest
from _pytest.mark import ParameterSet

from baton.config.engine import SchedulerConfig
from baton.engine.scheduler.sequence import Sequence, SequenceStatus
from baton.engine.scheduler.step_planner import PressureMode
from baton.errors import InvalidRequest
from baton.request import SamplingParams
from baton.tenants import Sla
from tests.accounts import AccountHarness, scheduling_key
from tests.outside import Delivery, OpenHarness
from tests.scheduling import Harness, Settings

TEXT = [7, 7, 1, 2, 3, 9, 8, 4, 4, 4, 5, 6, 1, 1, 2, 30, 31]
TEXTS = [[number] * 5 + [number, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9] for number in range(3)]


def slow(seeds: range) -> ParameterSet:
    """Return the seeds of `make fuzz`."""
    return pytest.param(seeds, marks=pytest.mark.slow)


def random_settings(rng: random.Random, min_pages: int = 4) -> Settings:
    is_async = rng.random() < 0.5
    return Settings(
        num_pages=rng.randint(min_pages, 40),
        page_size=rng.choice([1, 2, 4, 8]),
        num_host_pages=rng.choice([0, 3, 20, 60]),
        prefix_caching=rng.random() < 0.7,
        scheduler=SchedulerConfig(
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=rng.choice([1, 3, 8, 17, 64]),
            policy=rng.choice(["continuous", "continuous", "continuous", "static", "dynamic"]),
            max_queue_delay_ms=rng.choice([0.0, 0.0, 20.0]),
        ),
        is_async=is_async,
        num_drafts=0 if is_async else rng.choice([0, 1, 2, 7]),
    )


def random_prompt(rng: random.Random) -> list[int]:
    if rng.random() < 0.3:
        return [rng.randrange(3)] * rng.randint(1, 20)  # comes again and again
    prefix = TEXT[: rng.randint(0, len(TEXT))] if rng.random() < 0.6 else []
    return prefix + [rng.randrange(50) for _ in range(rng.randint(1, 25))]


def disturb(harness: Harness, rng: random.Random, preempt_rate: float, abort_rate: float) -> None:
    """Preempt or abort a sequence now and then."""
    running = [key for key, s in harness.live.items() if s.status is SequenceStatus.RUNNING]
    if running and rng.random() < preempt_rate:
        harness.scheduler.preempt(rng.choice(running))
    if harness.live and rng.random() < abort_rate:
        harness.abort(rng.choice(list(harness.live))[0])


# One scheduling key.


def run_crowded(seed: int) -> None:
    """Bursts of requests with common beginnings; few pages, about as many on the host, room in every step."""
    rng = random.Random(seed)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=400)
    num_pages, num_host_pages = rng.randint(14, 30), rng.randint(4, 40)
    harness = Harness(
        Settings(num_pages=num_pages, page_size=8, num_host_pages=num_host_pages, scheduler=config)
    )
    texts = [[number] * 8 + [rng.randrange(3) for _ in range(32)] for number in range(3)]
    for number in range(40):
        for burst in range(rng.choice([0, 1, 3])):
            sampling = SamplingParams(max_tokens=rng.choice([1, 4, 17]))
            harness.add(f"r{number}-{burst}", rng.choice(texts)[: rng.randint(7, 40)], sampling)
        for _ in range(rng.randint(1, 3)):
            disturb(harness, rng, 0.4, 0.08)
        harness.step()
    harness.run()


def run_single_key(seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(random_settings(rng))
    rate = rng.choice([0.0, 0.3, 0.7])
    for number in range(rng.randint(1, 25)):
        sampling = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3]),
            max_tokens=rng.choice([1, 5, 20, 50]),
            stop_token_ids=tuple(rng.sample(range(50), rng.choice([0, 3]))),
            prompt_logprobs=rng.choice([None, None, None, 0]),
        )
        try:
            harness.add(
                f"r{number}",
                random_prompt(rng),
                sampling,
                priority=rng.choice([0, 0, 1]),
                arrival_s=harness.clock.now_s(),
                cache_salt=rng.choice([b"", b"", b"tenant"]),
            )
        except InvalidRequest:
            continue
        for _ in range(rng.choice([0, 0, 1, 5])):
            disturb(harness, rng, rate, rate / 5)
            harness.step()
            harness.clock.advance(0.001)
    harness.run(max_steps=20_000)


@pytest.mark.parametrize("seeds", [range(60), slow(range(60, 400))], ids=str)
def test_workloads_of_one_key_are_exact_and_end(seeds: range) -> None:
    for seed in seeds:
        run_single_key(seed)


@pytest.mark.parametrize("seeds", [range(30), slow(range(30, 200))], ids=str)
def test_crowded_workloads_are_exact_and_end(seeds: range) -> None:
    for seed in seeds:
        run_crowded(seed)


# Several scheduling keys: shares, classes, quotas and pressure.


def run_several_keys(seed: int) -> None:
    rng = random.Random(seed)
    harness = AccountHarness(
        replace(random_settings(rng, 6), attention_mlp_crossover=rng.choice([inf, 1.0, 10.0]))
    )
    keys = [
        scheduling_key(
            weight=rng.choice([0.5, 1.0, 1.0, 4.0]),
            rank=rng.choice([0, 0, 0, 1]),
            max_kv_pages=rng.choice([None, None, rng.randint(2, 12)]),
        )
        for _ in range(rng.randint(2, 5))
    ]
    rate = rng.choice([0.0, 0.0, 0.4])
    harness.step_s = rng.choice([0.001, 0.02, 0.2])  # recent work decays, or hardly
    for number in range(rng.randint(2, 25)):
        tenant = rng.randrange(len(keys))
        if rng.random() < 0.1:  # its policy has changed
            keys[tenant] = scheduling_key(weight=2.0, max_kv_pages=rng.choice([None, rng.randint(2, 12)]))
        try:
            harness.add(
                f"r{number}",
                random_prompt(rng),
                SamplingParams(n=rng.choice([1, 1, 2]), max_tokens=rng.choice([1, 5, 20, 50])),
                tenant=f"t{tenant}",
                cache_salt=rng.choice([b"", b"t%d" % tenant]),
                priority=rng.choice([0, 0, 1]),
                arrival_s=harness.clock.now_s(),
                scheduling_key=keys[tenant],
                sla=rng.choice([Sla(), Sla(ttft_ms=rng.randint(1, 1000))]),
            )
        except InvalidRequest:
            continue
        for _ in range(rng.choice([0, 0, 1, 5])):
            if rng.random() < rate / 4:
                harness.scheduler.pressure_mode = PressureMode(rng.random() < 0.5, rng.random() < 0.5)
            disturb(harness, rng, rate, rate / 5)
            harness.step()
    harness.run(max_steps=20_000)


@pytest.mark.parametrize("seeds", [range(30), slow(range(30, 200))], ids=str)
def test_workloads_of_several_keys_are_exact_and_end(seeds: range) -> None:
    for seed in seeds:
        run_several_keys(seed)


# KV arrives for some requests, claims and reservations come and go, ended sequences keep their pages.


def beginning_of_a_text(rng: random.Random) -> list[int]:
    text = rng.choice(TEXTS)[: rng.randint(1, 21)]
    return text + [rng.randrange(50) for _ in range(rng.choice([0, 0, 3]))]


class Traffic:
    """Deliveries, keepers and readers around a harness, chosen by one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.harness = OpenHarness(random_settings(self.rng, 10))
        self.on_their_way: list[Delivery] = []
        self.keepers: list[Sequence] = []
        self.readers: dict[str, list[int]] = {}  # in the order of the tokens
        self.num_delivered = 0

    def run(self) -> None:
        rng, harness = self.rng, self.harness
        for number in range(rng.randint(5, 40)):
            self.come(str(number))
            self.go()
            if rng.random() < 0.7:
                harness.step()
        while harness.scheduler.has_work() or self.on_their_way or harness.kept or harness.leased:
            self.go()
            plan, _, _ = harness.step()
            harness.clock.advance(plan.wait_s or 0.0)
            assert harness.num_steps < 20_000, "no end in sight: a livelock"
        harness.run()

    def come(self, name: str) -> None:
        rng, harness = self.rng, self.harness
        prompt, num_generated = beginning_of_a_text(rng), rng.choice([0, 1, 1, 4])
        num_tokens = len(prompt) + num_generated
        request = harness.begun(name, prompt, num_generated, max_tokens=num_generated + rng.randint(1, 12))
        try:
            if rng.random() < 0.5 and num_tokens > 1:
                num_delivered = rng.choice([num_tokens - 1, rng.randint(1, num_tokens - 1)])
                delivery = harness.begin(request, num_delivered)
                self.on_their_way += [] if delivery is None else [delivery]
                return
            sequence = harness.sequence_of(request)
            sequence.keeps_pages = rng.random() < 0.5
            harness.scheduler.add(sequence)
        except InvalidRequest:
            return
        harness.live[sequence.key] = sequence
        self.keepers += [sequence] if sequence.keeps_pages else []

    def go(self) -> None:
        rng, harness = self.rng, self.harness
        if self.on_their_way and rng.random() < 0.4:
            delivery = self.on_their_way.pop(rng.randrange(len(self.on_their_way)))
            if rng.random() < 0.2:
                harness.cancel(delivery)
            else:
                self.num_delivered += harness.arrive(delivery)
        disturb(harness, rng, 0.1, 0.05)
        self._read()
        for sequence in [s for s in self.keepers if s.key in harness.kept]:
            if rng.random() < 0.2:
                harness.release_kept(sequence)

    def _read(self) -> None:
        """A reader holds pages of a live sequence, or releases the held pages."""
        rng, harness = self.rng, self.harness
        for reader in list(self.readers):
            if rng.random() < 0.3:
                harness.pool.release(self.readers.pop(reader), reader)
                del harness.leased[reader]
        size = harness.pool.page_size
        full = [s.page_table[: s.num_computed_tokens // size] for s in harness.live.values()]
        tables = [table for table in full if table]
        if tables and rng.random() < 0.2:
            reader, table = f"reader at {harness.num_steps}", rng.choice(tables)
            if reader not in self.readers:
                self.readers[reader] = table[: rng.randint(1, len(table))]
                harness.leased[reader] = set(self.readers[reader])
                harness.pool.hold(self.readers[reader], reader)


@pytest.mark.parametrize("seeds", [range(60), slow(range(60, 300))], ids=str)
def test_workloads_with_deliveries_are_exact_and_end(seeds: range) -> None:
    num_delivered = 0
    for seed in seeds:
        traffic = Traffic(seed)
        traffic.run()
        num_delivered += traffic.num_delivered
    assert num_delivered > 100


@pytest.mark.parametrize("seeds", [range(40), slow(range(40, 200))], ids=str)
def test_workloads_end_however_long_reservations_last(seeds: range) -> None:
    """Every granted page is held until all sequences have ended, and every possible grant is made."""
    num_granted = 0
    for seed in seeds:
        rng = random.Random(seed)
        harness = OpenHarness(random_settings(rng, 10))
        for number in range(rng.randint(1, 8)):
            sampling = SamplingParams(max_tokens=rng.randint(1, 40))
            try:
                harness.add(str(number), beginning_of_a_text(rng), sampling)
            except InvalidRequest:
                continue
        while harness.scheduler.has_work():
            num_pages = rng.randint(0, harness.scheduler.holds.num_reservable())
            if num_pages and rng.random() < 0.7:
                harness.cache.make_room(num_pages, keep=False)
                lessee = f"lease {num_granted}"
                harness.leased[lessee] = set(harness.pool.reserve(num_pages, lessee))
                num_granted += num_pages
            was_running = harness.is_running
            plan, _, _ = harness.step()
            assert was_running or plan.scheduled or plan.preempted or plan.wait_s, "a deadlock"
            harness.clock.advance(plan.wait_s or 0.0)
        harness.check_answers()
    assert num_granted > 100
