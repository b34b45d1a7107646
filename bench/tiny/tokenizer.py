"""Builds the tiny model's tokenizer: byte-level BPE in which a key and a value are one token each.

A pair such as `k7=blue` must take the same number of tokens whatever its key, so the merges that make
`k0` to `k399` come first; the rest are trained on the words that the tasks use.
"""

import json
from itertools import pairwise
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import PreTokenizer

from baton.bench.tiny.tasks import ASSISTANT, END, FACTS, NUM_KEYS, SYSTEM, USER, VALUES

PAD: Final = "<|pad|>"
SPECIAL_TOKENS: Final = (PAD, END, USER, ASSISTANT, SYSTEM)
VOCAB_SIZE: Final = 1024

# A key stays whole, digits stand alone, a word takes the space before it unless digits follow.
PATTERN: Final = r"[a-z]\d{1,3}(?!\d)|\d| ?\p{L}+(?!\p{N})|[^\s\p{L}\p{N}]|\s"

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """The same tokenizer every time; at most VOCAB_SIZE tokens, special ones first."""
    word_merges = _train_word_merges()
    merges = _key_merges() + word_merges
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)])
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of one of SPECIAL_TOKENS."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, f"{token} is missing from the vocabulary"
    return token_id


def tokenizer_config(max_length: int) -> dict[str, object]:
    """What Hugging Face reads beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _pre_tokenizer() -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _key_merges() -> list[tuple[str, str]]:
    """`k` + `1`, then `k1` + `2`, then `k12` + `3`: every key is the one before it and a digit."""
    return [(f"k{index}"[:-1], f"k{index}"[-1]) for index in range(NUM_KEYS)]


def _train_word_merges() -> list[tuple[str, str]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - NUM_KEYS - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges]


def _corpus() -> list[str]:
    """Values weigh most: bare and after a space, each must become one token before any other word does."""
    values = [f"{left} {right}" for left, right in pairwise((*VALUES, VALUES[0]))] * 100
    tasks = ["What is ", "copy(", "sort(", "close "] * 50
    facts = [text for questions, answer in FACTS for text in (*questions, answer)]
    return values + tasks + facts
