"""The built-in model over a prefill and a decode worker: what stands a thousand tokens back is found.

Every page that the prompt left in one pool is read from the other: a wrong or a missing one would be a wrong
answer, which none of the engine's own figures could hide.
"""

from collections.abc import Iterator

import pytest

from baton.bench.tiny.tasks import Case, recall_cases
from baton.cluster.model_directory import resolve_model
from baton.cluster.offline.generation import Completion
from baton.cluster.offline.llm import LLM
from baton.config.engine import EngineConfig, engine_config
from baton.messages.workers import Load, WorkerRole
from baton.request import Request, SamplingParams
from tests.cluster_threads import Cluster

NUM_CASES = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny") as made:
        yield made


def settings(page_size: int) -> EngineConfig:
    return engine_config(
        {
            "model": str(resolve_model("tiny")),
            "device": "cpu",
            "cache": {"page_size": page_size, "kv_cache_memory_bytes": 2**26},
        }
    )


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return recall_cases(NUM_CASES, 1000, seed=77)


@pytest.fixture(scope="module")
def expected(llm: LLM, cases: list[Case]) -> list[Completion]:
    """What one replica alone answers."""
    return llm.generate([case.prompt for case in cases], GREEDY)


def load_of(cluster: Cluster, role: WorkerRole) -> Load:
    (worker,) = cluster.workers_of(role)
    return worker.hosted.node.load()


@pytest.mark.parametrize(("transport", "page_sizes"), [("shm", (16, 16)), ("tcp", (64, 16))])
def test_recall_through_a_pair_is_right(
    llm: LLM,
    cases: list[Case],
    expected: list[Completion],
    transport: str,
    page_sizes: tuple[int, int],
) -> None:
    requests = [
        Request(
            request_id=f"{number:032x}", token_ids=tuple(llm.tokenizer.encode(case.prompt)), sampling=GREEDY
        )
        for number, case in enumerate(cases)
    ]
    prefill, decode = map(settings, page_sizes)
    with Cluster([prefill], [decode], transport=transport) as cluster:
        answers = cluster.ask(requests)
        cluster.check_nothing_is_held()
        prefill_load, decode_load = (load_of(cluster, role) for role in WorkerRole)
    assert [tuple(answer.token_ids) for answer in answers] == [each.outputs[0].token_ids for each in expected]
    rights = [each.outputs[0].text == case.answer for each, case in zip(expected, cases, strict=True)]
    assert sum(rights) >= 0.95 * NUM_CASES
    assert prefill_load.num_tokens == NUM_CASES  # a first token each, and all pages went over
    assert prefill_load.kv_bytes and not decode_load.counters.get("recomputed_prefills")
