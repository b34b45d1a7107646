"""Turns episodes into rows of token ids and labels.

B rows, L tokens a row. `labels[b, i]` is the token that must follow `ids[b, i]`, or IGNORED where the text
is not the model's to say. After the last token of an answer the label is the end token, whatever comes next.
"""

import random
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from baton.bench.tiny.tasks import END, Episode, recall_episode, short_episode
from baton.bench.tiny.tokenizer import PAD, special_id

IGNORED: Final = -100


def encode_episode(tokenizer: Tokenizer, episode: Episode) -> tuple[list[int], list[int]]:
    """The ids of an episode and their labels, equally many."""
    end_id = special_id(tokenizer, END)
    encodings = tokenizer.encode_batch([segment.text for segment in episode])
    ids: list[int] = []
    labels: list[int] = []
    for segment, encoding in zip(episode, encodings, strict=True):
        ids += encoding.ids
        if segment.is_answer:
            labels[-1:] = [*encoding.ids, end_id]
        else:
            labels += [IGNORED] * len(encoding.ids)
    return ids, labels


class BatchSource:
    """Draws batches without end; `rng` alone decides what they hold. Each is ids and labels, both [B, L]."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.rng = rng
        self._tokenizer = tokenizer
        self._pad_id = special_id(tokenizer, PAD)

    def draw_recall(self, num_tokens: int, length: int) -> tuple[Tensor, Tensor]:
        return _stack([self._recall_row(length) for _ in range(max(1, num_tokens // length))])

    def draw_short(self, num_tokens: int, length: int) -> tuple[Tensor, Tensor]:
        """Many short rows rather than few long ones: a short task is mostly asked at position 0."""
        return _stack([self._short_row(length) for _ in range(max(1, num_tokens // length))])

    def _recall_row(self, length: int) -> tuple[list[int], list[int]]:
        """One episode a row: a second one could give the same key another value."""
        return self._fit(*encode_episode(self._tokenizer, recall_episode(self.rng, length)), length)

    def _short_row(self, length: int) -> tuple[list[int], list[int]]:
        """As many short episodes as the row holds."""
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < length:
            more_ids, more_labels = encode_episode(self._tokenizer, short_episode(self.rng))
            ids += more_ids
            labels += more_labels
        return self._fit(ids, labels, length)

    def _fit(self, ids: list[int], labels: list[int], length: int) -> tuple[list[int], list[int]]:
        missing = max(0, length - len(ids))
        return (
            (ids + [self._pad_id] * missing)[:length],
            (labels + [IGNORED] * missing)[:length],
        )


def _stack(rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    ids, labels = zip(*rows, strict=True)
    return torch.tensor(ids), torch.tensor(labels)
