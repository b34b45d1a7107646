"""The built-in model finds what stands a thousand tokens back: a wrong KV page would be a wrong answer."""

import pytest
import torch

from baton.bench.tiny.tasks import recall_cases
from baton.cluster.offline.llm import LLM
from baton.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def share_right(llm: LLM, num_cases: int, *, chat: bool = False) -> float:
    cases = recall_cases(num_cases, 1000, seed=99, chat=chat)
    completions = llm.generate([case.prompt for case in cases], GREEDY)
    assert min(len(completion.prompt_token_ids) for completion in completions) >= 1000
    answers = [completion.outputs[0].text for completion in completions]
    return sum(answer == case.answer for answer, case in zip(answers, cases, strict=True)) / num_cases


@pytest.mark.parametrize("num_cases", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_recall_over_a_thousand_tokens_is_right_in_95_of_100(num_cases: int) -> None:
    with LLM("tiny", scheduler={"max_num_batched_tokens": 700}) as llm:
        assert share_right(llm, num_cases) >= 0.95
        assert share_right(llm, num_cases // 5, chat=True) >= 0.95


def test_wrong_pages_show() -> None:
    (case,) = recall_cases(1, 1000, seed=5)
    with LLM("tiny", cache={"kv_cache_memory_bytes": 1 << 26}) as llm:
        assert llm.generate(case.prompt, GREEDY)[0].outputs[0].text == case.answer
        with torch.inference_mode():
            llm.engine.runner.pool.device.zero_()  # the prefix cache still vouches for these pages
        completion = llm.generate(case.prompt, GREEDY)[0]
    assert completion.num_cached_tokens >= 900
    assert completion.outputs[0].text != case.answer
