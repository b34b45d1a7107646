"""Logprobs as the two ways to ask show them. Long ones are written in slices of about a millisecond."""

from array import array
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, overload

import orjson

from baton.gateway.tokenizer import Tokenizer
from baton.request import TokenLogprobs

SLICE_ENTRIES: Final = 1024  # alternatives count
BLOCK_TOKENS: Final = 256
COLUMNS: Final = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
LEAST: Final = -9999.0  # what OpenAI writes for a token that cannot come: JSON has no infinity


class Columns:
    """The four lists of a completion's logprobs: slices, which are JSON without the brackets."""

    def __init__(self, num_chars: int) -> None:
        self.num_chars = num_chars  # of the text up to their end
        self.slices: dict[str, list[bytes]] = {name: [] for name in COLUMNS}

    def add(self, shown: Mapping[str, Sequence[Any]]) -> None:
        for name, slices in self.slices.items():
            slices.append(orjson.dumps(shown[name])[1:-1])
        self.num_chars = shown["text_offset"][-1] + len(shown["tokens"][-1])

    @classmethod
    def written(cls, *parts: "Columns") -> Iterator[bytes]:
        """One after the other, as one object; the slices themselves are given out, for who shares them."""
        for index, name in enumerate(COLUMNS):
            yield b'%s"%s":[' % (b"," if index else b"{", name.encode())
            slices = [each for part in parts for each in part.slices[name]]
            yield from joined(slices)
            yield b"]"
        yield b"}"


class PackedLogprobs(Sequence[TokenLogprobs]):
    """Log probabilities of an answer's tokens, in 12 bytes an alternative, where objects take 150.

    They lie in blocks of BLOCK_TOKENS tokens, so that a long answer never moves as it grows: what many large
    arrays leave behind when they move is lost to fragmentation.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._blocks: list[_LogprobsBlock] = []  # all but the last are full
        self._num_tokens = 0

    def extend(self, entries: Iterable[TokenLogprobs]) -> None:
        for entry in entries:
            if self._num_tokens % BLOCK_TOKENS == 0:
                self._blocks.append(_LogprobsBlock())
            self.num_bytes += self._blocks[-1].append(entry)
            self._num_tokens += 1

    def __len__(self) -> int:
        return self._num_tokens

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(index, slice):
            return [self._entry(each) for each in range(self._num_tokens)[index]]
        return self._entry(range(self._num_tokens)[index])

    def _entry(self, index: int) -> TokenLogprobs:
        return self._blocks[index // BLOCK_TOKENS].entry(index % BLOCK_TOKENS)


class _LogprobsBlock:
    def __init__(self) -> None:
        self._token_ids = array("i")  # of each token: itself, then its alternatives
        self._logprobs = array("d")  # beside them
        self._ranks = array("i")  # of each token
        self._ends = array("i", [0])  # token i has [ends[i], ends[i + 1]) of the first two

    def append(self, entry: TokenLogprobs) -> int:
        """Returns how many bytes that takes."""
        self._token_ids.append(entry.token_id)
        self._logprobs.append(entry.logprob)
        self._ranks.append(entry.rank)
        for token_id, logprob in entry.top:
            self._token_ids.append(token_id)
            self._logprobs.append(logprob)
        self._ends.append(len(self._token_ids))
        return 12 * (len(entry.top) + 1) + 8

    def entry(self, index: int) -> TokenLogprobs:
        first, end = self._ends[index], self._ends[index + 1]
        return TokenLogprobs(
            token_id=self._token_ids[first],
            logprob=self._logprobs[first],
            rank=self._ranks[index],
            top=tuple(zip(self._token_ids[first + 1 : end], self._logprobs[first + 1 : end], strict=True)),
        )


def slice_tokens(logprobs: Sequence[TokenLogprobs | None]) -> int:
    """How many tokens make a slice."""
    num_top = max((len(entry.top) for entry in logprobs[:2] if entry is not None), default=0)
    return max(1, SLICE_ENTRIES // (num_top + 1))


def joined(slices: Iterable[bytes]) -> Iterator[bytes]:
    """The inside of a JSON list of the slices' elements."""
    for index, each in enumerate(slices):
        if index:
            yield b","
        yield each


class LogprobsFormat:
    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer tokens show as "token_id:7"."""
        self._tokenizer = tokenizer

    def chat(self, logprobs: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
        """Entries of `choices[].logprobs.content`."""
        return [
            self._entry(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in entry.top]}
            for entry in logprobs
        ]

    def chat_slices(self, logprobs: Sequence[TokenLogprobs]) -> Iterator[bytes]:
        """What `chat` returns, as slices of JSON without the brackets."""
        num_tokens = slice_tokens(logprobs)
        for first in range(0, len(logprobs), num_tokens):
            yield orjson.dumps(self.chat(logprobs[first : first + num_tokens]))[1:-1]

    def completion(
        self, logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int], offset: int
    ) -> dict[str, Any]:
        """`choices[].logprobs`. One entry for each of `token_ids`; None for a prompt's first token, which
        follows nothing. `offset`: characters of the text that stand before.
        """
        texts = [self._text(token_id) for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
            "tokens": texts,
            "top_logprobs": [None if entry is None else self._alternatives(entry) for entry in logprobs],
        }

    def columns(
        self, logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int], offset: int
    ) -> "Generator[bytes, None, Columns]":
        """What `completion` returns, as slices of JSON; b"" comes after each, for others to have a turn."""
        columns = Columns(offset)
        num_tokens = slice_tokens(logprobs)
        for first in range(0, len(token_ids), num_tokens):
            now = slice(first, first + num_tokens)
            columns.add(self.completion(logprobs[now], token_ids[now], columns.num_chars))
            yield b""
        return columns

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that came; of tokens with the same text the likelier is shown."""
        found: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            found.setdefault(self._text(token_id), _finite(logprob))
        return found

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}

    def _text(self, token_id: int) -> str:
        return self._bytes(token_id).decode("utf-8", "replace")

    def _bytes(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return b"token_id:%d" % token_id
        return self._tokenizer.token_bytes(token_id)


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST
