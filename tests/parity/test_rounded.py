"""Clusters whose transfers carry codes give the tokens of one engine that rounds the prompt's pages.

So tokens depend on the place where a prompt is computed, and on nothing else of the topology.
"""

import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from baton.engine.engine import load_engine
from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams, TokenIds
from tests.cluster_threads import Cluster
from tests.parity.models import MODEL, VOCAB_SIZE
from tests.parity.scripted_policy import WORDS, Words
from tests.parity.test_cluster import Topology, alone
from tests.parity.test_pulls import POLICY, config
from tests.tiny_models import run_rounded, token_ids


def rounding(name: str, transfer_dtype: str, **sizes: Any) -> Topology:
    settings = {"cache": {"kv_transfer_dtype": transfer_dtype}}
    return Topology(name, prefill_settings=settings, decode_settings=settings, **sizes)


TOPOLOGIES: Final = (
    rounding("int8, tp 2 to 1, pages 16 to 64", "int8", prefill_tp=2, decode_page_size=64),
    rounding(
        "fp8, pp 2 to tp 2, tcp, pages 64 to 16",
        "fp8",
        prefill_pp=2,
        decode_tp=2,
        prefill_page_size=64,
        transport="tcp",
    ),
    pytest.param(
        rounding("int8, tp 2 to pp 2, gloo", "int8", prefill_tp=2, decode_pp=2, transport="gloo"),
        marks=pytest.mark.slow,
    ),
)


@pytest.fixture
def words() -> Iterator[dict[str, Words]]:
    """The router's choices, by request."""
    yield WORDS
    WORDS.clear()


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


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.name)
def test_cluster_gives_the_tokens_of_one_engine_that_rounds_prompts(
    topology: Topology, words: dict[str, Words], model_directory: Callable[..., Path]
) -> None:
    directory = model_directory(MODEL)
    transfer_dtype = topology.prefill_settings["cache"]["kv_transfer_dtype"]
    oracle = load_engine(config(directory, 16, enable_prefix_caching=False))
    prefill, decode = topology.engines(directory)
    asked = requests()
    expected = [token_ids(run_rounded(oracle, request, transfer_dtype)) for request in asked]
    assert expected != [alone(oracle, request) for request in asked]
    oracle.close()
    with Cluster(prefill, decode, transport=topology.transport, policy=POLICY) as cluster:
        (worker,) = cluster.workers_of(WorkerRole.PREFILL)
        words |= {each.request_id: Words(worker.hosted.node.hello.id, None) for each in asked}
        assert [answer.token_ids for answer in cluster.ask(asked)] == expected
        cluster.check_nothing_is_held()
