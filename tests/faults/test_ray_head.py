"""Ray's head dies and comes back: streams go on, and a worker killed meanwhile is started again."""

import pytest

from baton.bench.faults.clients import make_questions
from baton.bench.faults.ray_faults import head_away, ray_cluster
from tests.event_loop import on_loop
from tests.needs import needs_redis

NUM_STREAMS = 4
AWAY_S = 15.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_redis
@on_loop
async def test_streams_outlive_rays_head_and_a_killed_worker_is_back_with_the_next() -> None:
    pytest.importorskip("ray")
    questions = make_questions(seed=1)
    async with ray_cluster() as (nodes, cluster):
        rows = await head_away(nodes, cluster, questions, NUM_STREAMS, AWAY_S)
    assert rows and not [row for row in rows if not row.met]
