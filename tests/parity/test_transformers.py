"""Every architecture gives the logits and the greedy tokens that transformers gives, in fp32."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parity.models import CASES, Oracle
from tests.parity.runs import GREEDY, NUM_NEW_TOKENS, engine, forward_logits, prompts, run, tokens

Directory = Callable[..., Path]


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, model_directory: Directory) -> None:
    directory = model_directory(name)
    oracle = Oracle(directory)
    with engine(directory) as made:
        logits = forward_logits(made, prompts()[-1])
        torch.testing.assert_close(logits, oracle.logits(prompts()[-1]), atol=1e-4, rtol=1e-4)
        got = tokens(run(made, prompts(), GREEDY))
    assert {len(answer) for answer in got} == {NUM_NEW_TOKENS}
    assert got == [oracle.greedy(*asked) for asked in zip(prompts(), got, strict=True)]
    assert min(len(set(answer)) for answer in got) > 8, "the model repeats itself: equality proves little"


def test_model_in_shards_is_the_same_model(model_directory: Directory, tmp_path: Path) -> None:
    directory = model_directory("qwen2")
    Oracle(directory).model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    with engine(directory) as whole, engine(tmp_path) as sharded:
        assert tokens(run(sharded, prompts(), GREEDY)) == tokens(run(whole, prompts(), GREEDY))
