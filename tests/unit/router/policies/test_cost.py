from collections import defaultdict
from collections.abc import Callable, Sequence
from math import exp
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from baton.clock import ManualClock
from baton.messages.control import Heartbeat, Measured, Routed, Started
from baton.messages.workers import Load as WorkerLoad
from baton.messages.workers import PrefillTimes, StepTimes, Tier, Worker, WorkerRole
from baton.router.in_flight import InFlight, InFlightAttempt, LagOf, SchedulingClass
from baton.router.index.prefix_index import Holdings, PrefixIndex
from baton.router.membership import Member
from baton.router.policies.base import ClusterView, PolicyContext, TenantClaim, WorkerPool
from baton.router.policies.candidates import PairCandidate
from baton.router.policies.cost import MAX_COMPARED, CostPolicy, PromptScorer, RecentWork
from baton.router.policies.cost_model import CostModel
from baton.router.sliced_work import PromptKeys, family_of
from tests.node_peers import a_request, a_worker, id_of
from tests.unit.router.choice_oracle import ChoiceOracle, Weighed, cheapest_of
from tests.unit.router.router_cluster import Cluster, a_member, cluster, stored

PROMPT_TOKENS = 400


def view_of(
    decoders: WorkerPool,
    prefills: WorkerPool,
    are_pair: Callable[[str, str], bool] = lambda decode, prefill: True,
) -> ClusterView:
    """A view in which these decode and prefill workers reach each other."""
    partners = {
        decode.id: {prefill.id for prefill in prefills.members if are_pair(decode.id, prefill.id)}
        for decode in decoders.members
    }
    return ClusterView(decoders, prefills, partners)


class World:
    """Workers in a state that the random numbers make up."""

    def __init__(self, random: Random, num_workers: int) -> None:
        self.random = random
        self.clock = ManualClock(1.0)
        self.in_flight, self.model, self.keys = InFlight(self.clock), CostModel(), PromptKeys()
        self.index = PrefixIndex(self.clock, 4096)
        self.request = a_request(num_tokens=PROMPT_TOKENS)
        self.members = []
        for number in range(num_workers):
            fingerprint = random.choice(("f", "f", "g"))
            name, num_pages = f"{'dp'[number % 2]}{number}", random.randint(30, 90)
            worker = a_worker(name, num_pages=num_pages, fingerprint=fingerprint)
            worker = replace(worker, max_num_batched_tokens=random.choice((0, 64, 256)))
            self.members.append(a_member(worker))
        for member in self.members:
            self._fill(member)
            self._measure(member)
            self._dispatch_some(member)
        self.clock.advance(random.random())

    def context(self, random: Random) -> PolicyContext:
        return PolicyContext(self.clock, self.in_flight, self.index, self.model, self.keys, random)

    def scorer(self, lag: float | None, lag_of: LagOf | None = None) -> PromptScorer:
        claim = TenantClaim(lag, lag_of)
        return PromptScorer(self.context(Random(0)), self.request, self.clock.now_s(), claim)

    def join(self, name: str, **changes: Any) -> Worker:
        """It has nothing, and room for much."""
        worker = a_worker(name, **{"num_pages": 1000, "max_num_seqs": 64, **changes})
        self.members.append(a_member(worker))
        return worker

    def pool(self, role: WorkerRole) -> WorkerPool:
        return WorkerPool([member for member in self.members if member.worker.role is role])

    def view(self) -> ClusterView:
        """All, and everybody reaches everybody."""
        pools = self.pool(WorkerRole.DECODE), self.pool(WorkerRole.PREFILL)
        return view_of(*pools)

    def _fill(self, member: Member) -> None:
        """With some of the prompt's first pages; or it is expected to have them; or it is not known."""
        keys = self.keys.keys(family_of(member.worker), self.request)
        num = self.random.choice((0, 0, 3, 9, 24, 25))
        if self.random.random() < 0.9:
            self.index.join(member.worker)
            self.index.apply(member.id, stored(keys[: 16 * num]))

    def _measure(self, member: Member) -> None:
        random = self.random
        for _ in range(random.randint(0, 3)):
            times = PrefillTimes(
                request_id=id_of("m"),
                attempt=0,
                waited_s=0.0,
                computed_s=random.uniform(0.01, 0.4),
                num_new_tokens=200,
                num_tokens=300,
                pulled_bytes=10**6,
                pulled_s=random.uniform(0.001, 0.01),
                moved_bytes=10**6,
                exposed_s=random.uniform(0.001, 0.01),
            )
            step = StepTimes(2, 0, 900, random.uniform(0.01, 0.1))
            self.model.learn(member.id, Measured(prefills=(times,), steps=(step,)))
            other = random.choice(self.members).id
            self.model.learn_pull(other, member.id, times)
            self.model.learn_handoff(member.id, other, times)

    def _dispatch_some(self, member: Member) -> None:
        random, is_prefill = self.random, member.worker.role is WorkerRole.PREFILL
        for number in range(random.choice((0, 0, 1, 4, 12))):
            decode = id_of("d0") if is_prefill else member.id
            prefill = member.id if is_prefill else ""
            num_tokens, compute_s = random.randint(10, 300), random.uniform(0.01, 0.5)
            entry = InFlightAttempt("g", decode, prefill, num_tokens, num_tokens, compute_s)
            entry = entry._replace(num_output_tokens=random.choice((1, 10, 256)))
            self.in_flight.enter((f"{member.id}{number}", 0), entry)
            if random.random() < 0.4:
                self.in_flight.started((f"{member.id}{number}", 0))
        if random.random() < 0.3:
            attempts = tuple((id_of(f"u{number}"), 0) for number in range(random.randint(1, 3)))
            load = WorkerLoad(pages={"active": random.randint(0, 60)})
            self.in_flight.beat(member.worker, Heartbeat(load=load, attempts=attempts))


def from_one_on(members: Sequence[Member], random: Random) -> Sequence[Member]:
    """Candidates as the policy makes them."""
    first = int(random.random() * len(members))
    return [*members[first:], *members[:first]]


def pair_of(each: PairCandidate | Weighed) -> tuple[str, str, str, int, int]:
    return each.decode, each.prefill, each.source, each.num_held_tokens, each.num_new_tokens


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 2 * MAX_COMPARED))
def test_candidates_equal_those_of_the_oracle(seed: int, num_workers: int) -> None:
    random = Random(seed)
    world = World(random, num_workers)
    decoders, prefills = world.pool(WorkerRole.DECODE), world.pool(WorkerRole.PREFILL)
    strangers = {(random.choice(world.members).id, random.choice(world.members).id) for _ in range(9)}

    def are_pair(decode: str, prefill: str) -> bool:
        return (decode, prefill) not in strangers

    order = Random(seed)
    oracle = ChoiceOracle(world.context(order), world.request, world.clock.now_s())
    decoding, prefilling = (from_one_on(pool.members, order) for pool in (decoders, prefills))
    expected = oracle.candidates(decoding, prefilling, are_pair)
    cost_policy = CostPolicy(world.context(Random(seed)))
    choice = cost_policy.choose(world.request, view_of(decoders, prefills, are_pair))
    assert list(map(pair_of, choice.candidates)) == list(map(pair_of, expected))
    for found, weighed in zip(choice.candidates, expected, strict=True):
        assert astuple(found.terms) == pytest.approx(astuple(weighed.terms))
    wanted = cheapest_of(expected, order.getrandbits(32))
    assert choice.candidate is not None and pair_of(choice.candidate) == pair_of(wanted)


class Drawing(Random):
    """Draws these numbers first, and then random ones."""

    def __init__(self, drawn: Sequence[float]) -> None:
        super().__init__(0)
        self._drawn = list(drawn)

    def random(self) -> float:
        return self._drawn.pop(0) if self._drawn else super().random()


def test_least_busy_workers_of_a_random_draw_are_compared() -> None:
    """Four more workers hold some of the prompt, and are too busy to be chosen."""
    world, num = World(Random(0), 0), MAX_COMPARED + 4
    keys = b""
    for name in ("d0", *(f"p{number}" for number in range(num))):
        worker = world.join(name, num_pages=64, max_num_seqs=8)
        keys = world.keys.keys(family_of(worker), world.request)[:16]
        world.index.join(worker)
    for number, work_s in {0: 9.0, 1: 9.0, 2: 9.0, 3: 9.0, 5: 2.0, 6: 1.0}.items():
        if number < 4:
            world.index.apply(id_of(f"p{number}"), stored(keys))
        entry = InFlightAttempt("g", id_of("d0"), id_of(f"p{number}"), 10, 10, work_s)
        world.in_flight.enter((f"{number}", 0), entry)
    drawn = [0.0, 0.0, *((number + 0.5) / num for number in (5, 7, 6, 8))]
    cost_policy = CostPolicy(world.context(Drawing(drawn)))
    pools = world.pool(WorkerRole.DECODE), world.pool(WorkerRole.PREFILL)
    choice = cost_policy.choose(world.request, view_of(*pools))
    weighed = {each.prefill for each in choice.candidates if each.prefill}
    assert weighed > {id_of("p7"), id_of("p8")} and not weighed & {id_of("p5"), id_of("p6")}
    assert choice.prefill in ("", id_of("p7"), id_of("p8"))


@pytest.mark.parametrize("seed", range(20))
def test_decode_worker_without_a_slot_leaves_the_prompt_to_a_prefill_worker(seed: int) -> None:
    world = World(Random(seed), 8)
    decoders, prefills = world.pool(WorkerRole.DECODE), world.pool(WorkerRole.PREFILL)

    class Slotless(CostPolicy):
        needs_slots = False

    def choose(has_slot: bool, fill: bool = True, policy: type[CostPolicy] = CostPolicy) -> PairCandidate:
        cost_policy = policy(world.context(Random(seed)))
        view = view_of(decoders, prefills, lambda decode, prefill: fill)
        choice = cost_policy.choose(world.request, view, TenantClaim(has_slot=lambda worker: has_slot))
        assert choice.candidate is not None
        return choice.candidate

    first = choose(True)
    assert choose(False).prefill, "a worker that computes prompts alone is chosen with or without a free slot"
    assert not first.prefill or choose(False) == first, "and whichever is cheapest"
    assert not choose(False, fill=False).prefill, "no other worker can"
    assert choose(False, policy=Slotless) == first


@given(st.integers(0, 2**32), st.floats(-1e4, 1e4))
@settings(max_examples=50, deadline=None)
def test_tenant_with_a_deficit_waits_no_longer_anywhere(seed: int, lag: float) -> None:
    world = World(Random(seed), 8)
    views = world.pool(WorkerRole.PREFILL).views(world.index)
    waits_s = []
    for each in (lag, lag - 100.0):
        candidates = world.scorer(each).prefill_candidates(views)
        waits_s.append([candidate.wait_s for candidate in candidates])
    assert all(sooner <= later for sooner, later in zip(*waits_s, strict=True))


def test_tenant_with_a_deficit_counts_no_harm_to_tenants_beyond_their_share() -> None:
    """Nor to a lower rank. Tenants with a deficit of their own count, and so does the own tenant."""
    world = World(Random(3), 2)
    world.join("d9")
    own, equal, beyond = SchedulingClass(), SchedulingClass("equal"), SchedulingClass("beyond")
    lower, higher = SchedulingClass("lower", rank=2), SchedulingClass("higher", rank=-1)
    for number, scheduling_class in enumerate(
        [own, *[equal] * 2, *[beyond] * 4, *[lower] * 8, *[higher] * 16]
    ):
        key = (f"new{number}", 0)
        world.in_flight.enter(key, InFlightAttempt("g", id_of("d9"), "", 10, 20, 0.1, scheduling_class))
        world.in_flight.started(key)
    world.in_flight.check_integrity()
    lags = {own: 5.0, equal: 1.0, beyond: 0.0, lower: 9.0, higher: -9.0}

    def num_delayed(lag: float | None) -> int:
        views = world.pool(WorkerRole.DECODE).views(world.index)
        (decoder,) = world.scorer(lag, lags.get).decode_candidates(
            [view for view in views if view.id == id_of("d9")]
        )
        return decoder.num_delayed

    assert num_delayed(5.0) == 1 + 2 + 16
    assert num_delayed(0.0) == num_delayed(None) == 1 + 2 + 4 + 8 + 16


@pytest.mark.parametrize(("num_output_tokens", "patience"), [(20, 10.0), (200, 100.0), (2, 1.0)])
def test_delay_of_running_decodes_ends_with_their_answers(num_output_tokens: int, patience: float) -> None:
    """The answers of the delayed decodes count, others do not."""
    world = World(Random(3), 2)
    worker = world.join("d9", max_num_batched_tokens=256)
    beyond = SchedulingClass("beyond")
    answers = {SchedulingClass(): num_output_tokens, beyond: 100_000}
    for scheduling_class, num_tokens in answers.items():
        entry = InFlightAttempt("g", worker.id, "", 10, 20, 0.0, scheduling_class, num_tokens)
        world.in_flight.enter((scheduling_class.tenant, 0), entry)
        world.in_flight.started((scheduling_class.tenant, 0))
    views = world.pool(WorkerRole.DECODE).views(world.index)
    (decoder,) = world.scorer(1.0, {beyond: -5.0}.get).decode_candidates(
        [view for view in views if view.id == worker.id]
    )
    fixed_s, sequence_s, context_s, token_s = world.model.of(worker.id).step.coefficients
    step_s = fixed_s + 2 * sequence_s + 40 * context_s + 256 * token_s
    assert decoder.num_delayed == 1 and decoder.patience_s == pytest.approx(patience * step_s)


DEFICIT, SERVED = TenantClaim(lag=1.0), TenantClaim(lag=0.0)


@pytest.mark.parametrize("claim", [SERVED, TenantClaim(lag=-1e6), TenantClaim()])
def test_flood_of_another_tenant_does_not_delay_a_tenant_with_a_deficit(claim: TenantClaim) -> None:
    world = World(Random(0), 8)
    view, cost_policy = world.view(), CostPolicy(world.context(Random(0)))

    def queue_delays_s(claim: TenantClaim) -> set[float]:
        return {
            each.terms.queue_delay_s for each in cost_policy.choose(world.request, view, claim).candidates
        }

    for _ in range(50):
        cost_policy.expect(cost_policy.choose(world.request, view, claim), PROMPT_TOKENS)
    assert queue_delays_s(DEFICIT) == {0.0}
    assert min(queue_delays_s(SERVED) | queue_delays_s(TenantClaim())) > 0.0
    cost_policy.expect(cost_policy.choose(world.request, view, DEFICIT), PROMPT_TOKENS)
    assert min(queue_delays_s(DEFICIT)) > 0.0


@pytest.mark.parametrize("prefill", ["p0", ""])
def test_local_prefill_harms_running_decodes(prefill: str) -> None:
    """Attempts without a first token have no next token that would wait."""
    world, num = World(Random(0), 0), 3
    for name in ("d0", "p0"):
        world.join(name)
    keys = [(id_of(f"u{number}"), 0) for number in range(num)]
    for key in keys:
        world.in_flight.enter(key, InFlightAttempt("g", id_of("d0"), prefill and id_of(prefill), 10, 10))
    view, cost_policy = world.view(), CostPolicy(world.context(Random(0)))

    def local() -> PairCandidate:
        choice = cost_policy.choose(world.request, view)
        return next(each for each in choice.candidates if not each.prefill)

    before = local().terms
    for key in keys:
        world.in_flight.started(key)
    after, compute_s = local(), before.compute_s
    assert compute_s > 0.0 and after.terms.decode_delay_s == pytest.approx(
        before.decode_delay_s + num * compute_s
    )
    assert after.total_s == pytest.approx(after.terms.total_s)
    world.in_flight.beat(world.members[0].worker, Heartbeat(load=WorkerLoad(), attempts=((id_of("old"), 0),)))
    assert local().terms.decode_delay_s > after.terms.decode_delay_s + compute_s, (
        "what only the worker knows of decodes"
    )


def test_tenant_beyond_its_share_is_not_waited_for() -> None:
    world, other = World(Random(0), 0), SchedulingClass("another")
    for name in ("d0", "p0"):
        world.join(name)
    entry = InFlightAttempt("g", id_of("d0"), id_of("p0"), 1000, 1000, 10.0, other, charged=1050.0)
    for name in ("u", "v"):
        world.in_flight.enter((id_of(name), 0), entry)
    cost_policy = CostPolicy(world.context(Random(0)))

    def queue_s(had_by_other: float) -> float:
        claim = TenantClaim(lag=0.0, lag_of={other: -had_by_other}.__getitem__)
        choice = cost_policy.choose(world.request, world.view(), claim)
        return next(each for each in choice.candidates if each.prefill).terms.queue_s

    assert queue_s(0.0) == 20.0
    charged = 2100.0  # with their answers
    assert queue_s(charged) == pytest.approx(20.0 * PROMPT_TOKENS / 2000)
    assert queue_s(charged + PROMPT_TOKENS) == 0.0


MEMORY_S = 30.0


def test_mean_without_workers_is_zero() -> None:
    recent = RecentWork(MEMORY_S, 0.0)
    assert recent.mean(0.0) == 0.0
    recent.add("a", 100.0, 0.0)
    recent.forget("a", 0.0)
    assert recent.mean(0.0) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_mean_equals_that_of_the_oracle(seed: int) -> None:
    random, recent, now_s = Random(seed), RecentWork(MEMORY_S, 0.0), 0.0
    given: list[tuple[str, float, float]] = []
    for _ in range(300):
        now_s += random.expovariate(1 / random.choice([0.1, 6.0]))
        worker = f"w{random.randrange(6)}"
        if random.random() < 0.05:
            recent.forget(worker, now_s)
            given = [each for each in given if each[0] != worker]
            continue
        given.append((worker, random.uniform(0.0, 10.0), now_s))
        recent.add(*given[-1])
        had = defaultdict[str, float](float)
        for name, amount, at_s in given:
            had[name] += amount * exp((at_s - now_s) / MEMORY_S)
        expected = sum(each * each for each in had.values()) / sum(had.values())
        assert recent.mean(now_s) == pytest.approx(expected, rel=1e-6)


def members(num: int) -> list[Member]:
    return [a_member(a_worker(f"p{number}")) for number in range(num)]


def holdings(pool: WorkerPool, index: PrefixIndex, held: list[int]) -> Holdings:
    """The expected holders, by a sort of all members."""
    bits = [worker_view.slot_bit for worker_view in pool.views(index)]
    assert all(bits)
    levels = sorted(set(filter(None, held)), reverse=True)
    return Holdings(
        [(num, sum(bit for bit, of in zip(bits, held, strict=True) if of >= num)) for num in levels]
    )


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 11))
def test_holders_are_the_workers_that_hold_most(held: list[int], limit: int, first: int) -> None:
    workers, index = members(len(held)), PrefixIndex(ManualClock(), 1000)
    for each in workers:
        index.join(each.worker)
    pool = WorkerPool(workers)
    views, lengths = pool.views(index), holdings(pool, index, held)
    found = pool.holders(pool.families[0], lengths, limit, views[first % len(held)])
    lengths_found = [lengths.num_pages(worker_view.slot_bit) for worker_view in found]
    assert lengths_found == sorted(filter(None, held), reverse=True)[:limit]
    assert len({worker_view.id for worker_view in found}) == len(found)


NUM_REQUESTS = 50
LEAST_SHARE = 0.3


def measure(c: Cluster, random: Random) -> None:
    """Report a few steps of small batches, some delayed: they hardly tell what a sequence takes."""
    for name in ("d0", "d1"):
        steps = []
        for _ in range(16):
            num = random.randint(1, 4)
            context = num * random.randint(40, 120)
            held_up = random.uniform(2.0, 8.0) if random.random() < 0.2 else random.uniform(1.0, 3.0)
            steps.append(StepTimes(num, 0, context, held_up * (2e-3 + 1e-4 * num + 1e-7 * context)))
        c[name].say(Measured(steps=tuple(steps)))


@pytest.mark.parametrize("num_tokens", [14, 400])
@pytest.mark.parametrize("seed", range(8))
def test_requests_of_one_prompt_spread_over_idle_decode_workers(seed: int, num_tokens: int) -> None:
    random = Random(seed)
    c = cluster(policy="cost", seed=seed)
    for name in ("p0", "d0", "d1"):
        c.add(name, num_pages=10_000, max_num_seqs=256)
    measure(c, random)
    chosen = {id_of("d0"): 0, id_of("d1"): 0}
    for number in range(NUM_REQUESTS):
        request = a_request(f"r{number}", num_tokens=num_tokens)
        routed = c.submit(request)
        assert isinstance(routed, Routed)
        chosen[routed.decode] += 1
        c.clock.advance(0.01)
        c["g"].say(Started(attempts=((request.request_id, 0),)))
    assert min(chosen.values()) >= LEAST_SHARE * NUM_REQUESTS, chosen


def test_worker_with_the_prompt_on_its_device_goes_before_one_that_reads_it_from_a_slow_disk() -> None:
    world = World(Random(0), 0)
    for name in ("d0", "p0", "p1"):
        worker = world.join(name)
        world.index.join(worker)
    keys = world.keys.keys(family_of(worker), world.request)
    num_pages = len(keys) // 8
    for name, tier in (("p0", Tier.DISK), ("p1", Tier.DEVICE)):
        world.index.apply(id_of(name), stored(keys, tier=tier))
    world.model.learn_tiers(id_of("p0"), {Tier.HOST: 1_000, Tier.DISK: 100_000})
    pools = world.pool(WorkerRole.DECODE), world.pool(WorkerRole.PREFILL)
    choice = CostPolicy(world.context(Random(0))).choose(world.request, view_of(*pools))
    assert choice.prefill == id_of("p1")
    costs = {each.prefill: each.terms.pull_s for each in choice.candidates if not each.source}
    assert costs[id_of("p0")] == pytest.approx(1e-4 * num_pages * worker.page_size)
    assert costs[id_of("p1")] == 0
    world.model.forget(id_of("p0"))
    assert not world.model.tier_token_s
