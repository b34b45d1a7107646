"""The tiny model's tokenizer: one token a key and a value, the same text back, the same file as shipped."""

import json
import random
from pathlib import Path

import minijinja
import pytest
from tokenizers import Tokenizer

from baton.bench.tiny.tasks import (
    END,
    NUM_KEYS,
    VALUES,
    call_episode,
    call_text,
    chat_prompt,
    form_episode,
    recall_cases,
    recall_episode,
    result_turn,
    short_episode,
    tools_turn,
)
from baton.bench.tiny.train import CHAT_TEMPLATE, SPECIAL_TOKENS, VOCAB_SIZE, build_tokenizer
from baton.gateway.text.chat_template import ChatTemplate, read_messages
from baton.gateway.text.tool_calls import parser_of_template

SHIPPED = Path(__file__).parents[3] / "engine" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


def test_every_key_and_value_is_one_token(tokenizer: Tokenizer) -> None:
    texts = [f"k{index}" for index in range(NUM_KEYS)] + [*VALUES] + [f" {value}" for value in VALUES]
    assert [text for text in texts if len(tokenizer.encode(text).ids) != 1] == []


def test_ids_fit_the_model_and_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    assert [tokenizer.id_to_token(token_id) for token_id in range(len(SPECIAL_TOKENS))] == [*SPECIAL_TOKENS]


@pytest.mark.parametrize("text", ["What's k7? T5 k1234\n", "naïve  日本 🙂", "a=b\t{x: [1, 23]}"])
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_recall_prompts_have_the_length_that_their_generator_promises(tokenizer: Tokenizer) -> None:
    for case in recall_cases(3, 1000, seed=0):
        assert len(tokenizer.encode(case.prompt).ids) == 1002
    for case in recall_cases(3, 1000, seed=0, chat=True):
        assert len(tokenizer.encode(case.prompt).ids) == 1005


@pytest.mark.parametrize("seed", range(4))
def test_segments_encode_apart_as_they_do_together(tokenizer: Tokenizer, seed: int) -> None:
    """Training labels tokens by segment; serving encodes the whole prompt."""
    rng = random.Random(seed)
    drawn = (recall_episode(rng, 256), short_episode(rng), form_episode(rng), call_episode(rng))
    for episode in drawn:
        whole = tokenizer.encode("".join(segment.text for segment in episode)).ids
        parts = tokenizer.encode_batch([segment.text for segment in episode])
        assert whole == [token_id for part in parts for token_id in part.ids]


def test_chat_template_writes_what_training_saw() -> None:
    environment = minijinja.Environment(templates={"chat": CHAT_TEMPLATE})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "k7=blue\nk7?"}]
    rendered = environment.render_template("chat", messages=messages, add_generation_prompt=True)
    assert rendered == chat_prompt("k7=blue\nk7?", system="Be brief.")


def test_tool_template_writes_what_training_saw() -> None:
    template = ChatTemplate((SHIPPED / "tools.jinja").read_text(), {})
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "weather")]
    function = {"name": "add", "arguments": '{"a": 7, "b": 5}'}
    messages = read_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "7+5="},
            {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "12"},
        ]
    )
    rendered = template.render(messages, tools=tools, add_generation_prompt=True)
    call = call_text("add", '{"a": 7, "b": 5}')
    asked = chat_prompt("7+5=", system="Be brief.")
    assert rendered == f"{tools_turn(['add', 'weather'])}{asked}{call}{END}{result_turn('12')}"
    assert parser_of_template(template.source) == "hermes"


def test_tool_template_is_the_chat_template_where_there_are_no_tools() -> None:
    template = ChatTemplate((SHIPPED / "tools.jinja").read_text(), {})
    messages = read_messages([{"role": "user", "content": "k7=blue\nk7?"}])
    assert template.render(messages, add_generation_prompt=True) == chat_prompt("k7=blue\nk7?")


def test_shipped_tokenizer_is_the_one_built_here(tokenizer: Tokenizer) -> None:
    assert json.loads((SHIPPED / "tokenizer.json").read_text()) == json.loads(tokenizer.to_str())
