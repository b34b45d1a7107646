"""One engine and whole clusters give the same tokens for the same prompts."""

import random
import secrets
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from baton.engine.engine import Engine
from baton.engine.replica import LayerWatch
from baton.kvtransfer.protocol import transfer_plan
from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams, StepOutput, TokenIds
from tests.cluster_threads import Cluster
from tests.parity.models import EVEN_EXPERTS, MODEL, VOCAB_SIZE
from tests.parity.runs import engine
from tests.parity.topologies import Side, Topology, check, compare, drafts, requests
from tests.transfer_ends import PACKAGES, needs

# Of MODEL: 16 tokens, 2 layers, keys and values, 2 heads of 16 floats.
PAGE_BYTES: Final = 16 * 2 * 2 * 2 * 16 * 4
TRANSPORTS: Final = ("shm", "tcp", "gloo")
PAGES: Final = ((16, 16), (64, 16))
WHOLE_EXPERTS: Final = {"enable_expert_parallel": True}
EP_2: Final = Side(tp=2, pages=64, settings=WHOLE_EXPERTS)

FAST: Final = (
    Topology(),
    Topology(Side(num=2, pages=64), Side(num=2), "tcp"),
    Topology(Side(tp=2), Side(pages=64)),
    Topology(Side(pages=64), Side(num=2), is_async=True),
    Topology(decode=Side(tp=2), is_async=True),
    Topology(decode=Side(pp=2)),
    Topology(Side(tp=2, pp=2), Side(pages=64)),
    Topology(Side(pages=64), Side(num=2, settings=drafts("suffix"))),
    Topology(Side(tp=2), Side(pp=2, settings=drafts("ngram"))),
    Topology(Side(tp=2), Side(pages=64), kv_cache_dtype="fp8"),
    Topology(Side(tp=2, pages=64), model="llama-gqa4-tied"),  # one KV head
    Topology(EP_2, model="qwen2-moe-even"),
    Topology(Side(tp=2, pages=64), Side(settings=drafts("ngram")), model="deepseek3"),  # latent pages
)
SLOW: Final = (
    *(
        Topology(Side(num, pages=a), Side(num, pages=b), transport)
        for num, transport, (a, b) in product((1, 2), TRANSPORTS, (*PAGES, (16, 64)))
    ),
    *(
        Topology(Side(tp=p, pages=a), Side(tp=d, pages=b), transport)
        for (p, d), transport, (a, b) in product(((1, 2), (2, 1), (2, 2)), TRANSPORTS, PAGES)
    ),
    *(
        Topology(Side(1, p, pp, a), Side(1, d, decode_pp, b), transport)
        for (pp, p, decode_pp, d), transport, (a, b) in product(
            (
                *((1, 1, 2, 1), (2, 1, 1, 1), (2, 1, 1, 2), (1, 2, 2, 1)),
                *((2, 2, 1, 1), (2, 1, 2, 1), (2, 2, 2, 1)),
            ),
            TRANSPORTS,
            PAGES,
        )
    ),
    *(
        Topology(Side(tp=tp, pp=2, pages=64), Side(tp=tp, pp=2, settings=drafts(method)), transport)
        for method, tp, transport in product(("ngram", "suffix"), (1, 2), ("shm", "tcp"))
    ),
    *(
        Topology(Side(tp=p, pages=a), Side(tp=d, pages=b), transport, kv_cache_dtype=dtype)
        for dtype, (p, d), transport, (a, b) in product(
            ("int8", "fp8"), ((1, 1), (1, 2), (2, 2)), TRANSPORTS, PAGES
        )
    ),
    *(
        topology._replace(model="deepseek2")
        for topology in (
            Topology(),
            Topology(decode=Side(tp=2, pages=64), transport="tcp"),
            Topology(Side(tp=2), Side(tp=2), "gloo"),
            Topology(Side(tp=2, pp=2), Side(pages=64)),
        )
    ),
    Topology(decode=Side(tp=2), model="llama-gqa4-tied"),
    *(
        Topology(prefill, decode, transport, model=case.name)
        for case in EVEN_EXPERTS
        for transport in (TRANSPORTS if case.name == "qwen2-moe-even" else ("shm",))
        for prefill, decode in (
            (EP_2, Side()),
            (Side(pages=64), EP_2._replace(pages=16)),
            (Side(tp=2, pages=64), EP_2._replace(pages=16)),
            (EP_2._replace(pp=2), Side(tp=2)),
        )
    ),
)
OVER_LIBRARIES: Final = tuple(
    pytest.param(Topology(Side(tp=p, pages=64), Side(tp=d), name), marks=(needs(name), pytest.mark.slow))
    for p, d in ((1, 2), (2, 1))
    for name in PACKAGES
)


def long_answers() -> list[Request]:
    """Return requests that each grow from 3 to 10 pages."""
    rng = random.Random(9)
    return [
        Request(
            request_id=secrets.token_hex(16),
            token_ids=TokenIds.of(tuple(rng.randrange(VOCAB_SIZE) for _ in range(40))),
            sampling=SamplingParams(temperature=0.0, max_tokens=120, min_tokens=120),
        )
        for _ in range(4)
    ]


def hold_steps_until(engine: Engine, num_sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes no step until so many sequences are live; then it steps as usual, for good."""
    step, has_begun = engine.step, False

    def step_once_gathered(watch: LayerWatch | None = None) -> list[StepOutput]:
        nonlocal has_begun
        has_begun = has_begun or len(engine.scheduler.sequences()) >= num_sequences
        if has_begun:
            return step(watch)
        engine.wait_s = 0.01
        return []

    monkeypatch.setattr(engine, "step", step_once_gathered)


@pytest.mark.parametrize(
    "topology",
    [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW), *OVER_LIBRARIES],
    ids=str,
)
def test_cluster_gives_the_tokens_of_one_engine(
    topology: Topology, oracle: Engine, model_directory: Callable[..., Path]
) -> None:
    directory = model_directory(topology.model)
    if (topology.model, topology.kv_cache_dtype) == (MODEL, "auto"):
        check(topology, oracle, directory)
        return
    with engine(directory, cache={"kv_cache_dtype": topology.kv_cache_dtype}) as own:
        check(topology, own, directory)


@pytest.mark.slow
def test_preemption_to_the_host_changes_no_token_of_quantised_pages(
    model_directory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    few_pages = {"kv_cache_memory_bytes": 17 * PAGE_BYTES * 18 // 64, "host_cache_memory_bytes": 2**20}
    topology = Topology(decode=Side(settings={"cache": few_pages}), kv_cache_dtype="int8")
    prefill, decode = topology.engines(model_directory(MODEL))
    with (
        engine(model_directory(MODEL), cache={"kv_cache_dtype": "int8"}) as oracle,
        Cluster(prefill, decode) as cluster,
    ):
        (worker,) = cluster.workers_of(WorkerRole.DECODE)
        hold_steps_until(worker.hosted.engine, 2, monkeypatch)
        compare(cluster, oracle, long_answers())
        assert worker.hosted.engine.load().num_preemptions
        compare(cluster, oracle, requests(seed=0) + long_answers())
        cluster.check_nothing_is_held()


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_preemption_for_want_of_pages_changes_no_token(
    num_stages: int,
    oracle: Engine,
    model_directory: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two long answers begin in the same step of the decode worker and outgrow its 17 pages together.

    With two stages there are drafts, too.
    """
    settings: dict[str, Any] = {"cache": {"kv_cache_memory_bytes": 17 * PAGE_BYTES // num_stages}}
    if num_stages > 1:
        settings |= drafts("ngram")
    topology = Topology(decode=Side(pp=num_stages, settings=settings))
    prefill, decode = topology.engines(model_directory(MODEL))
    with Cluster(prefill, decode) as cluster:
        (worker,) = cluster.workers_of(WorkerRole.DECODE)
        hold_steps_until(worker.hosted.engine, 2, monkeypatch)
        compare(cluster, oracle, long_answers())
        assert worker.hosted.engine.load().num_preemptions
        for _ in range(2):
            compare(cluster, oracle, requests(seed=0) + long_answers())
        cluster.check_nothing_is_held()


@pytest.mark.parametrize(
    "topology",
    [
        Topology(),
        Topology(decode=Side(pages=64), transport="tcp"),
        Topology(is_async=True),
        Topology(Side(pp=2)),
        pytest.param(Topology(Side(pp=2), Side(pp=2), "tcp"), marks=pytest.mark.slow),
        pytest.param(Topology(Side(tp=2)), marks=pytest.mark.slow),
        pytest.param(Topology(decode=Side(tp=2), transport="gloo"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layerwise_transfers_give_the_tokens_of_one_engine(
    topology: Topology,
    oracle: Engine,
    model_directory: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer_plan, "MIN_GROUP_BYTES", 1)  # otherwise the model's pages are too short
    check(topology, oracle, model_directory(MODEL))
