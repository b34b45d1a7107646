"""A published checkpoint: real text, its own tokenizer and chat template.

`make published` downloads it once (100 MB); where it cannot be had the tests are skipped.
"""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import torch

from baton.cluster.offline.llm import LLM
from baton.request import Request, SamplingParams, StructuredOutputs, TokenIds
from tests.cluster_threads import Cluster
from tests.parity import published
from tests.parity.models import Oracle
from tests.parity.runs import engine, forward_logits, run, tokens
from tests.parity.topologies import Side, Topology, compare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * published.TIMEOUT_S)]

QUESTIONS: Final = (
    "What is the capital of France?",
    "Write a short story about a dog who learns to sail.",
    "Explain in three sentences why the sky is blue.",
    "List five fruits, one a line.",
    "Repeat this text word for word: The river runs past the mill, and the mill turns when the river runs.",
    "Write a Python function that returns the largest of three numbers.",
)
MEMORY: Final = 256 * 2**20
TEXT: Final = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
NUM_TEXT_TOKENS: Final = 1500
COLOUR: Final = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "reason": {"type": "string", "maxLength": 80},
    },
    "required": ["colour", "reason"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def directory(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    try:
        return published.checkpoint(pytestconfig.cache.mkdir("published"))
    except ConnectionError as error:
        pytest.skip(f"the checkpoint cannot be had: {error}")


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, cache={"kv_cache_memory_bytes": MEMORY}) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    """The questions in the model's chat template."""
    return [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]


def asked(prompts: list[list[int]], **sampling: Any) -> list[Request]:
    params = SamplingParams(**{"max_tokens": 64, "seed": 11, **sampling})
    return [
        Request(request_id=secrets.token_hex(16), token_ids=TokenIds.of(prompt), sampling=params)
        for prompt in prompts
    ]


def perplexity(directory: Path, token_ids: list[int], **settings: Any) -> float:
    """Return the perplexity of a text; the KV of its first half comes from pages, in chunks of 128 tokens."""
    cache = {"kv_cache_memory_bytes": MEMORY, **settings.pop("cache", {})}
    scheduler = {"max_num_batched_tokens": 128}
    with LLM(directory, cache=cache, scheduler=scheduler, **settings) as made:
        (scored,) = made.generate([token_ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert scored.prompt_logprobs is not None
    logprobs = [entry.logprob for entry in scored.prompt_logprobs if entry is not None]
    return float(torch.tensor(logprobs, dtype=torch.float64).mean().neg().exp())


def test_answers_make_sense(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=32)
    (answer,) = llm.chat([{"role": "user", "content": QUESTIONS[0]}], greedy)
    assert answer.outputs[0].text == "The capital of France is Paris."


def test_logits_and_greedy_tokens_are_those_of_transformers(
    directory: Path, prompts: list[list[int]]
) -> None:
    oracle, greedy = Oracle(directory), SamplingParams(temperature=0.0, max_tokens=64)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048}
    with engine(directory, cache={"kv_cache_memory_bytes": MEMORY}, **settings) as made:
        expected = oracle.logits(prompts[1])
        torch.testing.assert_close(forward_logits(made, prompts[1]), expected, atol=1e-3, rtol=1e-4)
        got = tokens(run(made, prompts, greedy))
    assert got == [oracle.greedy(*pair) for pair in zip(prompts, got, strict=True)]


@pytest.mark.parametrize(
    "topology",
    [
        Topology(Side(pages=64)),
        Topology(Side(num=2), Side(num=2), "tcp"),
        Topology(Side(pp=2), Side(pp=3, pages=64)),
        Topology(decode=Side(settings={"speculative": {"method": "ngram", "prompt_lookup_min": 2}})),
    ],
    ids=str,
)
def test_cluster_gives_the_tokens_of_one_engine(
    topology: Topology, directory: Path, prompts: list[list[int]]
) -> None:
    prefill, decode = topology.engines(directory, MEMORY)
    with (
        engine(directory, cache={"kv_cache_memory_bytes": MEMORY}) as oracle,
        Cluster(prefill, decode, transport=topology.transport) as cluster,
    ):
        for sampling in ({"temperature": 0.0}, {"temperature": 1.0}):
            compare(cluster, oracle, asked(prompts, **sampling))
        cluster.check_nothing_is_held()


def test_answer_keeps_its_form(llm: LLM) -> None:
    form = StructuredOutputs(json=json.dumps(COLOUR))
    sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=128, structured_outputs=form)
    for question in ("Choose a colour for a boat, in JSON.", "Which colour has grass? Answer in JSON."):
        (answer,) = llm.chat([{"role": "user", "content": question}], sampling)
        jsonschema.validate(json.loads(answer.outputs[0].text), COLOUR)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"quantization": "int8"}, 1.01),
        ({"quantization": "fp8"}, 1.08),
        ({"quantization": "int4"}, 1.35),
        ({"cache": {"kv_cache_dtype": "int8"}}, 1.01),
        ({"cache": {"kv_cache_dtype": "fp8"}}, 1.02),
    ],
    ids=str,
)
def test_codes_cost_little_perplexity(
    settings: dict[str, Any], most: float, directory: Path, llm: LLM
) -> None:
    token_ids = llm.tokenizer.encode(TEXT)[:NUM_TEXT_TOKENS]
    plain, coded = perplexity(directory, token_ids), perplexity(directory, token_ids, **settings)
    print(f"{settings}: perplexity {coded:.3f}, {plain:.3f} in bf16")
    assert coded <= most * plain
