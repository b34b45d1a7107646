"""Ray's head dies and comes back: what lives goes on, and what was lost meanwhile is started again."""

import shutil

import pytest

from baton.bench.faults import ray_faults

NUM_STREAMS = 4
AWAY_S = 15.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server on PATH")
def test_streams_outlive_rays_head_and_a_killed_worker_is_back_with_the_next() -> None:
    pytest.importorskip("ray")
    with ray_faults.world() as (nodes, served):
        golden = ray_faults.undisturbed(served.port, NUM_STREAMS)
        assert all(golden)
        missed = [row for row in ray_faults.head_away(nodes, served, golden, AWAY_S) if not row.met]
    assert not missed
