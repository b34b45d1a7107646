"""Clusters whose transfers carry codes give the tokens of one engine that rounds the prompt's pages.

So tokens depend on the place where a prompt is computed, and on nothing else of the topology.
"""

import random
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams, TokenIds
from tests.cluster_threads import Cluster
from tests.parity.models import MODEL, VOCAB_SIZE
from tests.parity.runs import engine
from tests.parity.scripted_policy import POLICY, Words
from tests.parity.topologies import Side, Topology, alone
from tests.tiny_models import run_rounded, token_ids

INT8: Final = {"cache": {"kv_transfer_dtype": "int8"}}
FP8: Final = {"cache": {"kv_transfer_dtype": "fp8"}}
TOPOLOGIES: Final = (
    Topology(Side(tp=2, settings=INT8), Side(pages=64, settings=INT8)),
    Topology(Side(pp=2, pages=64, settings=FP8), Side(tp=2, settings=FP8), "tcp"),
    pytest.param(
        Topology(Side(tp=2, settings=INT8), Side(pp=2, settings=INT8), "gloo"), marks=pytest.mark.slow
    ),
)


def requests() -> list[Request]:
    rng = random.Random(3)
    return [
        Request(
            request_id=secrets.token_hex(16),
            token_ids=TokenIds.of(tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))),
            sampling=SamplingParams(temperature=1.2 * (num_tokens % 2), seed=num_tokens, max_tokens=30),
        )
        for num_tokens in (5, 16, 63, 64, 65, 150)
    ]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_cluster_gives_the_tokens_of_one_engine_that_rounds_prompts(
    topology: Topology, words: dict[str, Words], model_directory: Callable[..., Path]
) -> None:
    directory = model_directory(MODEL)
    transfer_dtype = topology.prefill.settings["cache"]["kv_transfer_dtype"]
    prefill, decode = topology.engines(directory)
    asked = requests()
    with engine(directory, cache={"enable_prefix_caching": False}) as oracle:
        expected = [token_ids(run_rounded(oracle, request, transfer_dtype)) for request in asked]
        assert expected != [alone(oracle, request) for request in asked]
    with Cluster(prefill, decode, transport=topology.transport, policy=POLICY) as cluster:
        (worker,) = cluster.workers_of(WorkerRole.PREFILL)
        words |= {each.request_id: Words(worker.hosted.node.hello.id, None) for each in asked}
        assert [answer.token_ids for answer in cluster.ask(asked)] == expected
        cluster.check_nothing_is_held()
