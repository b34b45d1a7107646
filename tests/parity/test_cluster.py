"""One engine and whole clusters give the same tokens for the same prompts.

A failure names the first layer and page of the prompt's KV that differ.
"""

import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from baton.config.engine import EngineConfig, engine_config
from baton.engine.engine import Engine, load_engine
from baton.engine.replica import LayerWatch
from baton.kvtransfer.protocol import transfer_plan
from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams, StepOutput, TokenIds
from tests.answer import Answer
from tests.cluster_threads import Cluster
from tests.parity.models import EVEN_EXPERTS, MODEL, VOCAB_SIZE
from tests.tiny_models import run_to_end, token_ids
from tests.transfer_ends import PACKAGES, needs


@dataclass(frozen=True)
class Topology:
    name: str
    num_prefill: int = 1
    num_decode: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_page_size: int = 16
    decode_page_size: int = 16
    transport: str = "auto"
    is_async: bool = False
    kv_cache_dtype: str = "auto"
    prefill_pp: int = 1
    decode_pp: int = 1
    prefill_settings: dict[str, Any] = field(default_factory=dict)
    decode_settings: dict[str, Any] = field(default_factory=dict)

    def engines(
        self, directory: Path, kv_bytes: int = 2**21
    ) -> tuple[list[EngineConfig], list[EngineConfig]]:
        def config(tp: int, pp: int, page_size: int, **settings: Any) -> EngineConfig:
            cache = {
                "page_size": page_size,
                "kv_cache_memory_bytes": kv_bytes,
                "kv_cache_dtype": self.kv_cache_dtype,
            }
            cache |= settings.pop("cache", {})
            sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
            base = {"model": str(directory), "device": "cpu", **sizes}
            scheduler = {"async_scheduling": self.is_async, **settings.pop("scheduler", {})}
            return engine_config({**base, "cache": cache, "scheduler": scheduler, **settings})

        steps = {"max_num_batched_tokens": 48}
        prefill = config(
            self.prefill_tp, self.prefill_pp, self.prefill_page_size, scheduler=steps, **self.prefill_settings
        )
        decode = config(self.decode_tp, self.decode_pp, self.decode_page_size, **self.decode_settings)
        return [prefill] * self.num_prefill, [decode] * self.num_decode


FAST: Final = (
    Topology("1P+1D"),
    Topology("2P+2D, tcp, pages 64 to 16", 2, 2, prefill_page_size=64, transport="tcp"),
    Topology("tp 2 to 1, pages 16 to 64", 1, 1, 2, 1, decode_page_size=64),
    Topology("async, 1P+2D, pages 64 to 16", 1, 2, prefill_page_size=64, is_async=True),
    Topology("async, tp 1 to 2", decode_tp=2, is_async=True),
    Topology("pp 1 to 2", decode_pp=2),
    Topology("pp 2 x tp 2 to 1, pages 16 to 64", prefill_tp=2, prefill_pp=2, decode_page_size=64),
    Topology(
        "drafts, 1P+2D, pages 64 to 16",
        1,
        2,
        prefill_page_size=64,
        decode_settings={"speculative": {"method": "suffix", "prompt_lookup_min": 1}},
    ),
    Topology(
        "drafts, tp 2 to pp 2",
        prefill_tp=2,
        decode_pp=2,
        decode_settings={"speculative": {"method": "ngram", "prompt_lookup_min": 1}},
    ),
)
SLOW: Final = tuple(
    Topology(f"{p}P+{d}D, {transport}, pages {a} to {b}", p, d, 1, 1, a, b, transport)
    for p, d in ((1, 1), (2, 2))
    for transport in ("shm", "tcp", "gloo")
    for a, b in ((16, 16), (16, 64), (64, 16))
)
SPLIT: Final = tuple(
    Topology(f"tp {p} to {d}, {transport}, pages {a} to {b}", 1, 1, p, d, a, b, transport)
    for p, d in ((1, 2), (2, 1), (2, 2))
    for transport in ("shm", "tcp", "gloo")
    for a, b in ((16, 16), (64, 16))
)

DRAFTS: Final = tuple(
    Topology(
        f"{method}, pp 2 x tp {tp}, {transport}, pages 64 to 16",
        prefill_tp=tp,
        decode_tp=tp,
        prefill_page_size=64,
        transport=transport,
        prefill_pp=2,
        decode_pp=2,
        decode_settings={"speculative": {"method": method, "prompt_lookup_min": 1}},
    )
    for method in ("ngram", "suffix")
    for tp in (1, 2)
    for transport in ("shm", "tcp")
)

STAGES: Final = tuple(
    Topology(
        f"pp {pp} x tp {tp} to pp {decode_pp} x tp {decode_tp}, {transport}, pages {a} to {b}",
        1,
        1,
        tp,
        decode_tp,
        a,
        b,
        transport,
        prefill_pp=pp,
        decode_pp=decode_pp,
    )
    for pp, tp, decode_pp, decode_tp in (
        *((1, 1, 2, 1), (2, 1, 1, 1), (2, 1, 1, 2), (1, 2, 2, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 2, 2, 1)),
    )
    for transport in ("shm", "tcp", "gloo")
    for a, b in ((16, 16), (64, 16))
)

CODES: Final = (
    Topology("fp8, tp 2 to 1, pages 16 to 64", 1, 1, 2, 1, decode_page_size=64, kv_cache_dtype="fp8"),
    *(
        pytest.param(
            Topology(
                f"{name}, tp {p} to {d}, {transport}, pages {a} to {b}",
                1,
                1,
                p,
                d,
                a,
                b,
                transport,
                False,
                name,
            ),
            marks=pytest.mark.slow,
        )
        for name in ("int8", "fp8")
        for p, d in ((1, 1), (1, 2), (2, 2))
        for transport in ("shm", "tcp", "gloo")
        for a, b in ((16, 16), (64, 16))
    ),
)

WHOLE_EXPERTS: Final = {"enable_expert_parallel": True}


def _of_experts(
    name: str, prefill: tuple[int, int, bool], decode: tuple[int, int, bool], transport: str = "auto"
) -> Topology:
    """prefill, decode: ranks of a stage, stages, whether ranks have whole experts. Pages of 64 go to 16."""
    (prefill_tp, prefill_pp, prefill_ep), (decode_tp, decode_pp, decode_ep) = prefill, decode
    return Topology(
        name,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_page_size=64,
        transport=transport,
        prefill_pp=prefill_pp,
        decode_pp=decode_pp,
        prefill_settings=WHOLE_EXPERTS if prefill_ep else {},
        decode_settings=WHOLE_EXPERTS if decode_ep else {},
    )


OF_MODELS: Final = (
    ("llama-gqa4-tied", Topology("tp 2 with one KV head to 1", prefill_tp=2, prefill_page_size=64)),
    ("qwen2-moe-even", _of_experts("ep 2 to 1", (2, 1, True), (1, 1, False))),
    (
        "deepseek3",
        Topology(
            "latent pages, tp 2 to 1, drafts",
            prefill_tp=2,
            prefill_page_size=64,
            decode_settings={"speculative": {"method": "ngram", "prompt_lookup_min": 1}},
        ),
    ),
    *(
        pytest.param("deepseek2", topology, marks=pytest.mark.slow)
        for topology in (
            Topology("latent pages"),
            Topology(
                "latent pages, 1 to tp 2, tcp, 16 to 64", decode_tp=2, decode_page_size=64, transport="tcp"
            ),
            Topology("latent pages, tp 2 to 2, gloo", prefill_tp=2, decode_tp=2, transport="gloo"),
            Topology("latent pages, pp 2 x tp 2 to 1", prefill_tp=2, prefill_pp=2, decode_page_size=64),
        )
    ),
    pytest.param(
        "llama-gqa4-tied", Topology("1 to tp 2 with one KV head", decode_tp=2), marks=pytest.mark.slow
    ),
    *(
        pytest.param(case.name, topology, marks=pytest.mark.slow)
        for case in EVEN_EXPERTS
        for transport in (("shm", "tcp", "gloo") if case.name == "qwen2-moe-even" else ("shm",))
        for topology in (
            _of_experts(f"ep 2 to 1, {transport}", (2, 1, True), (1, 1, False), transport),
            _of_experts(f"1 to ep 2, {transport}", (1, 1, False), (2, 1, True), transport),
            _of_experts(f"tp 2 to ep 2, {transport}", (2, 1, False), (2, 1, True), transport),
            _of_experts(f"pp 2 x ep 2 to tp 2, {transport}", (2, 2, True), (2, 1, False), transport),
        )
    ),
)

OVER_LIBRARIES: Final = tuple(
    pytest.param(
        Topology(f"tp {p} to {d}, {name}, pages 64 to 16", 1, 1, p, d, 64, 16, name), marks=needs(name)
    )
    for p, d in ((1, 2), (2, 1))
    for name in PACKAGES
)


def requests(seed: int) -> list[Request]:
    """Return prompts of all lengths, some with a common prefix, with all sampling parameters."""
    rng = random.Random(seed)
    prefix = [rng.randrange(VOCAB_SIZE) for _ in range(80)]
    made = []
    for index in range(14):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 3, 15, 16, 17, 31, 64, 65, 100)))]
        shared = prefix[: rng.choice((0, 16, 50, 80))]
        settings: dict[str, Any] = {"max_tokens": rng.randrange(1, 40), "seed": rng.randrange(2**40)}
        if index % 2:
            settings |= {
                "temperature": rng.choice((0.7, 1.0, 1.5)),
                "top_k": rng.choice((0, 20)),
                "min_p": 0.01,
            }
        else:
            settings |= {"temperature": 0.0}
        if index % 3 == 0:
            settings |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 2}
        if index % 4 == 0:
            settings |= {"stop_token_ids": tuple(range(30)), "min_tokens": 3, "max_tokens": 40}
        made.append(
            Request(
                request_id=secrets.token_hex(16),
                token_ids=TokenIds.of((*shared, *own)),
                sampling=SamplingParams(**settings),
                choice=index % 3,
            )
        )
    return made


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


def alone(engine: Engine, request: Request) -> list[int | None]:
    """Return the tokens of an idle engine."""
    engine.add(request)
    return token_ids(run_to_end(engine))


@cache
def expected_tokens(oracle: Engine, seed: int) -> list[list[int | None]]:
    """Return the tokens of `requests(seed)`, the same for every topology of the oracle's model."""
    return [alone(oracle, request) for request in requests(seed)]


def check(topology: Topology, oracle: Engine, directory: Path) -> None:
    prefill, decode = topology.engines(directory)
    with Cluster(prefill, decode, transport=topology.transport) as cluster:
        for _ in range(2):  # the second round finds the pages of the first
            compare_with(expected_tokens(oracle, seed=0), cluster, oracle, requests(seed=0))
        cluster.check_nothing_is_held()


def compare(cluster: Cluster, oracle: Engine, asked: list[Request]) -> None:
    """Ask the cluster for all answers at once and compare each with that of one idle engine."""
    compare_with([alone(oracle, request) for request in asked], cluster, oracle, asked)


def compare_with(
    expected: list[list[int | None]], cluster: Cluster, oracle: Engine, asked: list[Request]
) -> None:
    """Ask the cluster for all answers at once and compare each with the expected tokens of the oracle."""
    for request, answer, tokens in zip(asked, cluster.ask(asked), expected, strict=True):
        assert answer.token_ids == tokens, difference(request, answer, cluster, oracle)
        assert [event.index for event in answer.events] == list(range(len(tokens)))


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


def difference(request: Request, answer: Answer, cluster: Cluster, oracle: Engine) -> str:
    """Name the first full page of the prompt that differs from the KV of one engine."""
    for worker in cluster.workers:
        found = _first_difference(request.token_ids, worker.hosted.engine, oracle)
        if found:
            return f"{worker.config.name}: {found}"
    return f"no page of the prompt that is still known differs; the answer was {answer.token_ids}"


def _first_difference(token_ids: Sequence[int], engine: Engine, oracle: Engine) -> str | None:
    theirs, ours = _prompt_kv(engine, token_ids), _prompt_kv(oracle, token_ids)
    num_heads, num_tokens = theirs.shape[2], min(theirs.shape[3], ours.shape[3])  # rank 0 has the first heads
    num_layers = len(theirs)  # and in a pipeline the first layers
    differs_LCHTD = theirs[:, :, :, :num_tokens] != ours[:num_layers, :, :num_heads, :num_tokens]
    for layer in range(num_layers):
        differs_T = differs_LCHTD[layer].amax((0, 1, 3))
        if differs_T.any():
            token = int(differs_T.nonzero()[0])
            return f"layer {layer}, page {token // engine.pages.page_size} of the prompt, token {token}"
    return None


def _prompt_kv(engine: Engine, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the KV of the cached prefix on rank 0: [L, 2, H, T, D]."""
    filled = engine.claim_prefix(token_ids, b"", "the comparison")
    pages = engine.runner.pool.device[list(filled.pages)].clone()  # [P, L, 2, H, S, D]
    engine.release(filled)
    return pages.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)


@pytest.mark.parametrize("topology", FAST, ids=lambda topology: topology.name)
def test_cluster_gives_the_tokens_of_one_engine(
    topology: Topology, oracle: Engine, model_directory: Callable[..., Path]
) -> None:
    check(topology, oracle, model_directory(MODEL))


@pytest.mark.parametrize("topology", CODES, ids=lambda topology: topology.name)
def test_cluster_of_quantised_pages_gives_the_tokens_of_one_engine(
    topology: Topology, model_directory: Callable[..., Path]
) -> None:
    with oracle_of(topology.kv_cache_dtype, model_directory(MODEL)) as oracle:
        check(topology, oracle, model_directory(MODEL))


@pytest.mark.parametrize(
    ("name", "topology"), OF_MODELS, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_cluster_of_another_model_gives_the_tokens_of_one_engine(
    name: str, topology: Topology, model_directory: Callable[..., Path]
) -> None:
    directory = model_directory(name)
    with oracle_of("auto", directory) as oracle:
        check(topology, oracle, directory)


@contextmanager
def oracle_of(kv_cache_dtype: str, directory: Path) -> Iterator[Engine]:
    cache = {"kv_cache_memory_bytes": 2**22, "kv_cache_dtype": kv_cache_dtype}
    engine = load_engine(engine_config({"model": str(directory), "device": "cpu", "cache": cache}))
    yield engine
    engine.close()


@pytest.mark.slow
def test_preemption_to_the_host_changes_no_token_of_quantised_pages(
    model_directory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    few_pages = {"kv_cache_memory_bytes": 17 * PAGE_BYTES * 18 // 64, "host_cache_memory_bytes": 2**20}
    topology = Topology("few pages", kv_cache_dtype="int8", decode_settings={"cache": few_pages})
    prefill, decode = topology.engines(model_directory(MODEL))
    with oracle_of("int8", model_directory(MODEL)) as oracle, Cluster(prefill, decode) as cluster:
        (worker,) = cluster.workers_of(WorkerRole.DECODE)
        hold_steps_until(worker.hosted.engine, 2, monkeypatch)
        compare(cluster, oracle, long_answers())
        assert worker.hosted.engine.load().num_preemptions
        compare(cluster, oracle, requests(seed=0) + long_answers())
        cluster.check_nothing_is_held()


PAGE_BYTES: Final = (
    16 * 2 * 2 * 2 * 16 * 4
)  # of MODEL: 16 tokens, 2 layers, keys and values, 2 heads of 16 floats


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
        settings["speculative"] = {"method": "ngram", "prompt_lookup_min": 1}
    topology = Topology("few pages", decode_pp=num_stages, decode_settings=settings)
    prefill, decode = topology.engines(model_directory(MODEL))
    with Cluster(prefill, decode) as cluster:
        (worker,) = cluster.workers_of(WorkerRole.DECODE)
        hold_steps_until(worker.hosted.engine, 2, monkeypatch)
        compare(cluster, oracle, long_answers())
        assert worker.hosted.engine.load().num_preemptions
        for _ in range(2):
            compare(cluster, oracle, requests(seed=0) + long_answers())
        cluster.check_nothing_is_held()


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology", (*SLOW, *SPLIT, *STAGES, *DRAFTS, *OVER_LIBRARIES), ids=lambda topology: topology.name
)
def test_every_topology_gives_the_tokens_of_one_engine(
    topology: Topology, oracle: Engine, model_directory: Callable[..., Path]
) -> None:
    check(topology, oracle, model_directory(MODEL))


@pytest.mark.parametrize(
    "topology",
    [
        Topology("1P+1D"),
        Topology("tcp, pages 16 to 64", decode_page_size=64, transport="tcp"),
        Topology("async", is_async=True),
        Topology("pp 2 to 1", prefill_pp=2),
        pytest.param(
            Topology("pp 2 to 2, tcp", prefill_pp=2, decode_pp=2, transport="tcp"), marks=pytest.mark.slow
        ),
        pytest.param(Topology("tp 2 to 1", prefill_tp=2), marks=pytest.mark.slow),
        pytest.param(Topology("tp 1 to 2, gloo", decode_tp=2, transport="gloo"), marks=pytest.mark.slow),
    ],
    ids=lambda topology: topology.name,
)
def test_layerwise_transfers_give_the_tokens_of_one_engine(
    topology: Topology,
    oracle: Engine,
    model_directory: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer_plan, "MIN_GROUP_BYTES", 1)  # otherwise the model's pages are too short
    check(topology, oracle, model_directory(MODEL))
