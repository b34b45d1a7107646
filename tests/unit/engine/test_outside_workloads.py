"""Random traffic: KV arrives for some requests, claims and reservations come and go, ended sequences keep
their pages, and every page read, every book and every answer is checked at every step."""

import random

import pytest

from baton.config.engine import SchedulerConfig
from baton.engine.scheduler.sequence import PreemptMode, Sequence, SequenceStatus
from baton.engine.scheduler.step_planner import PreemptionRates
from baton.errors import InvalidRequest
from tests.outside import Delivery, OpenHarness
from tests.scheduling import Settings

TEXTS = [[number] * 5 + [number, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9] for number in range(3)]


def open_harness(rng: random.Random) -> OpenHarness:
    harness = OpenHarness(
        Settings(
            num_pages=rng.randint(10, 40),
            page_size=rng.choice([1, 2, 4, 8]),
            num_host_pages=rng.choice([0, 0, 20, 60]),
            prefix_caching=rng.random() < 0.8,
            scheduler=SchedulerConfig(
                max_num_seqs=rng.randint(1, 6),
                max_num_batched_tokens=rng.choice([3, 8, 64]),
                policy=rng.choice(["continuous", "continuous", "continuous", "static", "dynamic"]),
            ),
        )
    )
    if rng.random() < 0.5:
        harness.scheduler.rates = PreemptionRates(rng.random(), rng.random())
    return harness


def prompt_of(rng: random.Random) -> list[int]:
    text = rng.choice(TEXTS)[: rng.randint(1, 21)]
    return text + [rng.randrange(50) for _ in range(rng.choice([0, 0, 3]))]


class Traffic:
    """What comes and goes around a harness, chosen by one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.harness = open_harness(self.rng)
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
            harness.step()
            assert harness.num_steps < 20_000, "no end in sight: a livelock"
        harness.run()

    def come(self, name: str) -> None:
        rng, harness = self.rng, self.harness
        prompt, num_generated = prompt_of(rng), rng.choice([0, 1, 1, 4])
        num_tokens = len(prompt) + num_generated
        request = harness.begun(name, prompt, num_generated, max_tokens=num_generated + rng.randint(1, 12))
        try:
            if rng.random() < 0.5 and num_tokens > 1:
                delivery = harness.begin(
                    request, rng.choice([num_tokens - 1, rng.randint(1, num_tokens - 1)])
                )
                if delivery is not None:
                    self.on_their_way.append(delivery)
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
        running = [key for key, s in harness.live.items() if s.status is SequenceStatus.RUNNING]
        if running and rng.random() < 0.1:
            harness.scheduler.preempt(rng.choice(running), rng.choice(list(PreemptMode)))
        if harness.live and rng.random() < 0.05:
            harness.abort(rng.choice(list(harness.live))[0])
        self._read()
        for sequence in [s for s in self.keepers if s.key in harness.kept]:
            if rng.random() < 0.2:
                harness.release_kept(sequence)

    def _read(self) -> None:
        """Somebody sends pages of a live sequence, or is done with them."""
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
                harness.pool.lease(self.readers[reader], reader, 1e9)


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_random_traffic_is_exact_and_ends(first_seed: int) -> None:
    num_delivered = 0
    for seed in range(first_seed, first_seed + 50):
        transfer_manager = Traffic(seed)
        transfer_manager.run()
        num_delivered += transfer_manager.num_delivered
    assert num_delivered > 100


@pytest.mark.parametrize("first_seed", range(0, 100, 25))
def test_live_sequences_end_however_long_reservations_last(first_seed: int) -> None:
    """All that is granted is held until everything has ended, and every grant that is possible is made."""
    num_granted = 0
    for seed in range(first_seed, first_seed + 25):
        rng = random.Random(seed)
        harness = open_harness(rng)
        for number in range(rng.randint(1, 8)):
            request = harness.begun(str(number), prompt_of(rng), 0, max_tokens=rng.randint(1, 40))
            try:
                harness.add(request.request_id, request.token_ids, request.sampling)
            except InvalidRequest:
                continue
        while harness.scheduler.has_work():
            num_pages = rng.randint(0, harness.scheduler.holds.num_reservable())
            if num_pages and rng.random() < 0.7:
                harness.cache.make_room(num_pages, keep=False)
                lessee = f"lease {num_granted}"
                harness.leased[lessee] = set(harness.pool.reserve(num_pages, lessee, 1e9))
                num_granted += num_pages
            plan, _, _ = harness.step()
            assert plan.scheduled or plan.preempted, "a deadlock"
        harness.check_answers()
    assert num_granted > 100
