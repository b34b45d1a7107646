"""Topologies of clusters, and the comparison of their answers with those of one engine.

A failure names the first layer and page of the prompt's KV that differ.
"""

import random
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from baton.config.engine import EngineConfig, engine_config
from baton.engine.engine import Engine
from baton.request import Request, SamplingParams, TokenIds
from tests.answer import Answer
from tests.cluster_threads import Cluster
from tests.parity.models import MODEL, VOCAB_SIZE
from tests.tiny_models import run_to_end, token_ids

PREFILL_STEPS: Final = {"max_num_batched_tokens": 48}


class Side(NamedTuple):
    """The workers of one role. settings: further ones of their engines."""

    num: int = 1
    tp: int = 1
    pp: int = 1
    pages: int = 16
    settings: Mapping[str, Any] = {}


class Topology(NamedTuple):
    """The workers of both roles, and what they have in common; its text names what is not a default."""

    prefill: Side = Side()
    decode: Side = Side()
    transport: str = "auto"
    is_async: bool = False
    kv_cache_dtype: str = "auto"
    model: str = MODEL

    def __str__(self) -> str:
        sides = zip(Side._fields, self.prefill, self.decode, Side(), strict=True)
        parts = [
            f"{name} {prefill} to {decode}"
            for name, prefill, decode, default in sides
            if (prefill, decode) != (default, default)
        ]
        common = zip(self._fields[2:], self[2:], Topology()[2:], strict=True)
        parts += [f"{name} {value}" for name, value, default in common if value != default]
        return ", ".join(parts) or "1P+1D"

    def engines(
        self, directory: Path, kv_bytes: int = 2**21
    ) -> tuple[list[EngineConfig], list[EngineConfig]]:
        """Return the settings of every prefill worker, and of every decode worker."""

        def configs(side: Side, steps: Mapping[str, int]) -> list[EngineConfig]:
            cache: dict[str, Any] = {"page_size": side.pages, "kv_cache_memory_bytes": kv_bytes}
            cache |= {"kv_cache_dtype": self.kv_cache_dtype, **side.settings.get("cache", {})}
            settings: dict[str, Any] = {
                "model": str(directory),
                "device": "cpu",
                "tensor_parallel_size": side.tp,
                "pipeline_parallel_size": side.pp,
                "scheduler": {"async_scheduling": self.is_async, **steps},
                **side.settings,
                "cache": cache,
            }
            return [engine_config(settings)] * side.num

        return configs(self.prefill, PREFILL_STEPS), configs(self.decode, {})


def drafts(method: str) -> dict[str, Any]:
    """Return the settings of a speculating engine."""
    return {"speculative": {"method": method, "prompt_lookup_min": 1}}


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
