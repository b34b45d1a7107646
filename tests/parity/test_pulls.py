"""Pulling a prompt's prefix from the prefill worker that holds the prefix changes no token.

The test writes the router's choices: the pair of workers, and the worker to pull from.
"""

import queue
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

from baton.config.engine import EngineConfig, engine_config
from baton.engine.engine import Engine
from baton.messages.control import PullSource
from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams, TokenIds
from tests.cluster_threads import TIMEOUT_S, Cluster, WorkerThread
from tests.parity.models import MODEL, VOCAB_SIZE
from tests.parity.runs import engine
from tests.parity.scripted_policy import POLICY, Words
from tests.parity.topologies import alone

NUM_TOKENS: Final = 200
SMALL: Final = 24  # pages: little more than one prompt has room
ResultT = TypeVar("ResultT")


def config(
    directory: Path, page_size: int, tensor_parallel_size: int = 1, **more_cache: int | str
) -> EngineConfig:
    cache = {"page_size": page_size, "kv_cache_memory_bytes": 2**21, **more_cache}
    base: dict[str, Any] = {"model": str(directory), "device": "cpu", "cache": cache}
    steps = {"max_num_batched_tokens": 48}
    return engine_config({**base, "tensor_parallel_size": tensor_parallel_size, "scheduler": steps})


@pytest.fixture
def oracle(request: pytest.FixtureRequest, model_directory: Callable[..., Path]) -> Iterator[Engine]:
    """One engine; a test may give the dtype of its pages as the parameter."""
    kv_cache_dtype = getattr(request, "param", "auto")
    with engine(model_directory(MODEL), cache={"kv_cache_dtype": kv_cache_dtype}) as made:
        yield made


def on_its_thread(worker: WorkerThread, call: Callable[[], ResultT]) -> ResultT:
    """Between two of its steps."""
    done: queue.SimpleQueue[ResultT] = queue.SimpleQueue()
    worker.hosted.endpoint.post(lambda: done.put(call()))
    return done.get(timeout=TIMEOUT_S)


def held(worker: WorkerThread, token_ids: Sequence[int]) -> PullSource:
    """The source that the worker would have reported to the router."""

    def look() -> PullSource:
        engine = worker.hosted.engine
        claim = engine.claim_prefix(token_ids, b"", "the router")
        engine.release(claim)
        return PullSource(worker.hosted.node.hello.id, claim.num_tokens)

    return on_its_thread(worker, look)


def pulls(worker: WorkerThread) -> Counter[str]:
    return Counter(on_its_thread(worker, lambda: worker.hosted.node.load().counters))


def num_on_device(worker: WorkerThread, token_ids: Sequence[int], page_size: int) -> int:
    """The number of the prompt's full pages that are on the worker's device."""

    def look() -> int:
        engine = worker.hosted.engine
        keys = engine.page_keys(token_ids, b"", page_size)
        return sum(engine.scheduler.cache.page_of(key) is not None for key in keys)

    return on_its_thread(worker, look)


def prompts() -> list[tuple[int, ...]]:
    document = tuple((11 * i + i * i) % VOCAB_SIZE for i in range(NUM_TOKENS))
    return [(*document[: NUM_TOKENS - index], *range(index, index + 20)) for index in range(4)]


def a_request(name: str, token_ids: tuple[int, ...], temperature: float) -> Request:
    sampling = SamplingParams(temperature=temperature, seed=7, max_tokens=24, ignore_eos=True)
    return Request(request_id=name * 32, token_ids=TokenIds.of(token_ids), sampling=sampling)


@pytest.mark.parametrize(
    ("page_sizes", "transport", "tensor_parallel_size"),
    [
        ((16, 16, 16), "auto", 1),
        ((64, 16, 16), "tcp", 1),
        pytest.param((16, 64, 16), "auto", 1, marks=pytest.mark.slow),
        pytest.param((16, 16, 64), "gloo", 1, marks=pytest.mark.slow),
        pytest.param((16, 64, 16), "auto", 2, marks=pytest.mark.slow),
    ],
)
def test_pulled_prefixes_give_the_tokens_of_one_engine(
    page_sizes: tuple[int, int, int],
    transport: Any,
    tensor_parallel_size: int,
    oracle: Engine,
    words: dict[str, Words],
    model_directory: Callable[..., Path],
) -> None:
    """Page sizes: of the holder, of who pulls, of the decode worker, which computes two of the prompts itself
    and knows them already or pulls them too. The holder has so many ranks.
    """
    directory = model_directory(MODEL)
    holder_size, puller_size, decode_size = page_sizes
    prefill = [config(directory, holder_size, tensor_parallel_size), config(directory, puller_size)]
    with Cluster(prefill, [config(directory, decode_size)], transport=transport, policy=POLICY) as cluster:
        holder, puller = cluster.workers_of(WorkerRole.PREFILL)
        (decode,) = cluster.workers_of(WorkerRole.DECODE)
        holder_id, puller_id = holder.hosted.node.hello.id, puller.hosted.node.hello.id
        first = a_request("a", prompts()[0], 0.0)
        words[first.request_id] = Words(holder_id, None)
        assert cluster.ask([first])[0].token_ids == alone(oracle, first)
        named = zip("bcde", prompts(), (0.0, 1.0, 0.0, 1.5), strict=True)
        asked = [a_request(name, prompt, temperature) for name, prompt, temperature in named]
        for request, prefill_id in zip(asked, (puller_id, "", puller_id, ""), strict=True):
            source = held(holder, request.token_ids)
            assert source.num_tokens >= 192
            words[request.request_id] = Words(prefill_id, source)
        expected = [alone(oracle, request) for request in asked]
        assert [answer.token_ids for answer in cluster.ask(asked)] == expected
        assert pulls(puller)["pulls"] >= 1
        assert not pulls(puller)["pulls_failed"] and not pulls(decode)["pulls_failed"]
        cluster.check_nothing_is_held()


@pytest.mark.parametrize(
    ("tensor_parallel_size", "oracle"),
    [
        (1, "auto"),
        pytest.param(2, "auto", marks=pytest.mark.slow),
        pytest.param(1, "int8", marks=pytest.mark.slow),
        pytest.param(2, "fp8", marks=pytest.mark.slow),
    ],
    indirect=["oracle"],
)
def test_pages_on_a_holders_host_give_the_same_tokens(
    tensor_parallel_size: int,
    oracle: Engine,
    words: dict[str, Words],
    model_directory: Callable[..., Path],
) -> None:
    """Other prompts push them there; every rank of the holder brings its share of each page back."""
    directory = model_directory(MODEL)
    kv_cache_dtype = oracle.runner.config.cache.kv_cache_dtype
    roomy = config(directory, 16, kv_cache_dtype=kv_cache_dtype)
    small = config(
        directory,
        16,
        tensor_parallel_size,
        kv_cache_memory_bytes=SMALL * oracle.runner.layout.page_bytes // tensor_parallel_size,
        host_cache_memory_bytes=2**21,
        kv_cache_dtype=kv_cache_dtype,
    )
    with Cluster([small, roomy], [roomy], policy=POLICY) as cluster:
        holder, puller = cluster.workers_of(WorkerRole.PREFILL)
        holder_id, puller_id = holder.hosted.node.hello.id, puller.hosted.node.hello.id
        prompt, *others = prompts()[0], *(tuple(range(start, start + 200)) for start in (1, 2))
        for name, token_ids in zip("abc", (prompt, *others), strict=True):
            words[name * 32] = Words(holder_id, None)
            cluster.ask([a_request(name, token_ids, 0.0)])
        asked = a_request("d", prompt, 1.0)
        num_pages = len(prompt) // 16
        assert num_on_device(holder, prompt, 16) < num_pages
        words[asked.request_id] = Words(puller_id, PullSource(holder_id, 16 * num_pages))
        assert cluster.ask([asked])[0].token_ids == alone(oracle, asked)
        assert pulls(puller)["pulls"] == 1 and not pulls(puller)["pulls_failed"]
        cluster.check_nothing_is_held()
