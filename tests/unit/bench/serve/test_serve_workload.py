import itertools
import json
import random

import pytest

from baton.bench.serve.load import Job, Lengths, poisson, random_jobs, trace_jobs
from baton.bench.traces import TraceRequest
from baton.errors import ConfigError


def test_default_prompts_are_those_of_the_rivals() -> None:
    """Lengths and ids are drawn in the order of the client that measured them."""
    source = random.Random(3)
    expected = []
    for _ in range(32):
        num_input, num_output = source.randint(16, 256), source.randint(16, 128)
        expected.append((tuple(source.randrange(4, 32_000) for _ in range(num_input)), num_output))
    assert [(job.prompt, job.num_tokens) for job in random_jobs(32, 3, vocab_size=32_000)] == expected


def test_lengths_are_within_their_bounds_and_reach_them() -> None:
    jobs = random_jobs(200, 0, vocab_size=50, num_input=Lengths(1, 3), num_output=Lengths(5, 5))
    assert {len(job.prompt) for job in jobs} == {1, 2, 3}
    assert {job.num_tokens for job in jobs} == {5}
    assert all(4 <= token < 50 for job in jobs for token in job.prompt)


@pytest.mark.parametrize(("text", "expected"), [("16-256", (16, 256)), ("64", (64, 64))])
def test_lengths_are_read(text: str, expected: tuple[int, int]) -> None:
    assert Lengths.parse(text) == expected


@pytest.mark.parametrize("text", ["", "a", "5-3", "0-4", "-3", "1-2-3"])
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="LOW-HIGH"):
        Lengths.parse(text)


def test_arrivals_are_poisson() -> None:
    jobs = poisson([Job((5,), 1)] * 4000, rate=50.0, seed=1)
    gaps = [later.arrival_s - job.arrival_s for job, later in itertools.pairwise(jobs)]
    mean = sum(gaps) / len(gaps)
    assert jobs[0].arrival_s == 0.0
    assert mean == pytest.approx(1 / 50, rel=0.1)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(mean, rel=0.1)  # as of no other distribution at hand
    assert poisson([Job((5,), 1)] * 4000, rate=50.0, seed=1) == jobs


def test_equal_block_ids_are_equal_prompt_tokens() -> None:
    requests = [
        TraceRequest(arrival_s=0.0, input_tokens=10, output_tokens=3, block_ids=(7, 8), block_tokens=4),
        TraceRequest(arrival_s=4.0, input_tokens=9, output_tokens=2, block_ids=(7, 9), block_tokens=4),
        TraceRequest(arrival_s=6.0, input_tokens=6, output_tokens=1),
    ]
    first, second, third = trace_jobs(requests, vocab_size=1000, speed=2.0)
    assert [len(job.prompt) for job in (first, second, third)] == [10, 9, 6]
    assert first.prompt[:4] == second.prompt[:4] and first.prompt[4:8] != second.prompt[4:8]
    assert [job.arrival_s for job in (first, second, third)] == [0.0, 2.0, 3.0]
    assert [job.num_tokens for job in (first, second, third)] == [3, 2, 1]


def test_body_is_an_openai_completion() -> None:
    job = Job((5, 6), 9)
    assert json.loads(job.body("m", stream=False)) == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 9,
        "ignore_eos": True,
        "temperature": 0,
    }
    streamed = json.loads(job.body("m", stream=True, as_text=True))
    assert streamed["prompt"] == "w5 w6"
    assert streamed["stream"] is True and streamed["stream_options"] == {"include_usage": True}
