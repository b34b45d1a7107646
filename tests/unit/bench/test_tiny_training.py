"""The training of the tiny model: labels, starting weights, and growing rows."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from baton.bench.tiny import train
from baton.bench.tiny.tasks import END, Segment
from baton.bench.tiny.train import (
    IGNORED,
    LENGTHS,
    Trainer,
    build_model,
    build_tokenizer,
    encode_episode,
    export,
    learning_rate,
    load_model,
    special_id,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


def test_only_answers_are_labelled_and_each_ends(tokenizer: Tokenizer) -> None:
    episode = [Segment("k7=blue\nk7?"), Segment(" blue", is_answer=True), Segment("\n")]
    ids, labels = encode_episode(tokenizer, episode)
    blue = tokenizer.encode(" blue").ids[0]
    question = tokenizer.encode("?").ids[0]
    assert labels[ids.index(question)] == blue
    assert labels[ids.index(blue)] == special_id(tokenizer, END)
    assert sum(label != IGNORED for label in labels) == 2


def test_fresh_model_looks_from_the_question_to_the_value(tokenizer: Tokenizer) -> None:
    """The property that `initialise` is for: layer 1 finds the match before any training."""
    torch.manual_seed(0)
    model = build_model()
    model.set_attn_implementation("eager")
    encoding = tokenizer.encode("k7=blue k31=red k250=fox k9=owl\nk31?")
    with torch.no_grad():
        output = model(input_ids=torch.tensor([encoding.ids]), output_attentions=True)
    first_head = output.attentions[1][0, 0, -1]
    assert encoding.tokens[int(first_head.argmax())] == "red"


def test_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate(step, 1000) for step in (0, train.WARMUP_STEPS, 500, 999)]
    assert rates[0] < rates[1] == train.PEAK_RATE > rates[2] > rates[3] >= train.FINAL_RATE


def test_rows_grow_only_when_recall_is_right_and_up_to_the_last_length() -> None:
    trainer = Trainer(1, seed=0)
    for _ in range(200):
        trainer.record(0.5, 1.0)
    assert trainer.level == 0
    for _ in range(2000):
        trainer.record(1.0, 0.5)
    assert trainer.level == len(LENGTHS) - 1


def test_same_seed_trains_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "TOKENS_PER_BATCH", 128)
    monkeypatch.setattr(train, "HOLD_STEPS", 1)
    first, second, other = (Trainer(4, seed) for seed in (0, 0, 1))
    losses = [[trainer.step() for _ in range(3)] for trainer in (first, second, other)]
    assert losses[0] == losses[1] != losses[2]


def test_training_goes_on_from_an_exported_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train, "TOKENS_PER_BATCH", 128)
    export(Trainer(1, seed=0).model, tmp_path)
    continued = Trainer(2, seed=0, start=tmp_path)
    assert continued.level == len(LENGTHS) - 1
    exported = load_model(tmp_path).state_dict()
    assert all(torch.equal(weight, exported[name]) for name, weight in continued.model.state_dict().items())
    continued.step()
    assert not torch.equal(continued.model.lm_head.weight, exported["lm_head.weight"])
