"""The policy that predicts seconds learns from the workers' reports and changes no token."""

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.engine.engine import Engine
from tests.cluster_threads import Cluster, wait_for
from tests.parity.models import MODEL
from tests.parity.topologies import Side, Topology, alone, requests


@pytest.mark.parametrize("page_size", [16, 64])
def test_cost_policy_learns_from_its_workers_and_changes_no_token(
    page_size: int, oracle: Engine, model_directory: Callable[..., Path]
) -> None:
    topology = Topology(Side(num=2, pages=page_size), Side(num=2))
    prefill, decode = topology.engines(model_directory(MODEL))
    with Cluster(prefill, decode, policy="cost") as cluster:
        for seed in (0, 0, 1):  # what the first leaves behind is found by the second
            asked = requests(seed)
            expected = [alone(oracle, request) for request in asked]
            answers = cluster.ask(asked)
            assert [answer.token_ids for answer in answers] == expected
        cluster_state = cluster.router.cluster_state
        workers = [member.id for member in cluster.router.members.all()]
        wait_for(lambda: all(map(cluster_state.index.is_known, workers)))
        wait_for(lambda: sum(cluster_state.model.of(each).prefill.num_measured for each in workers) > 0)
        assert cluster_state.index.num_pages > 0
        counters = cluster.router.counters
        assert counters["decisions"] == 3 * len(asked)
        assert counters["blind_decisions"] <= len(asked)
        hits = [worker.hosted.engine.load().prefix_hits_tokens for worker in cluster.workers]
        assert sum(hits) > 0
        cluster.check_nothing_is_held()
        cluster.router.in_flight.check_integrity()
