"""Many requests of one prompt spread over all decode workers, whatever noise their measurements have."""

from random import Random

import pytest

from baton.messages.control import Measured, Routed, Started
from baton.messages.workers import StepTimes
from tests.node_peers import a_request, id_of
from tests.unit.router.router_cluster import Cluster, cluster

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
