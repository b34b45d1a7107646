"""Logprobs as the two ways to ask show them."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from baton.gateway.tokenizer import Tokenizer
from baton.request import TokenLogprobs

LEAST: Final = -9999.0  # what OpenAI writes for a token that cannot come: JSON has no infinity


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
