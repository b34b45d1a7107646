"""As much of a client of the OpenAI API as `baton chat` needs."""

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import msgspec

from baton.errors import ConfigError, InvalidRequest, WorkerLost
from baton.request import FinishReason, TokenLogprobs

Message: TypeAlias = dict[str, str]
TIMEOUT_S: Final = 600.0
DONE: Final = "[DONE]"


class ApiClient:
    def __init__(self, url: str, key: str | None) -> None:
        """url: with or without the /v1. ConfigError unless it is of HTTP."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url: expected one such as http://127.0.0.1:8000, got {url!r}")
        secure = parts.scheme == "https"
        self._kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def first_model(self) -> str:
        models = json.load(self._ask("GET", "/models"))["data"]
        if not models:
            raise WorkerLost("the API has no model")
        return str(models[0]["id"])

    def chat(self, model: str, messages: Sequence[Message], settings: Mapping[str, Any]) -> Iterator[str]:
        """The answer in pieces, as they come. InvalidRequest or WorkerLost with what the API says."""
        body = {"model": model, "messages": list(messages), "stream": True, **settings}
        answer = self._ask("POST", "/chat/completions", json.dumps(body).encode())
        for line in answer:
            event = line.decode().strip().removeprefix("data:").strip()
            if event == DONE:
                return
            if not event or event.startswith(":"):
                continue
            chunk = json.loads(event)
            if "error" in chunk:
                raise WorkerLost(chunk["error"]["message"])
            for choice in chunk.get("choices", ()):
                yield choice["delta"].get("content") or ""
        raise WorkerLost("the answer ended before its end")

    def _ask(self, method: str, route: str, body: bytes | None = None) -> http.client.HTTPResponse:
        where = f"{self._host}:{self._port or ''}"
        connection = self._kind(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request(method, self._path + route, body, self._headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise WorkerLost(f"the API at {where} does not answer: {error}") from None
        if answer.status == 401:
            wrong = (
                "does not know the key" if "Authorization" in self._headers else "wants a key, none was given"
            )
            raise ConfigError(f"the API at {where} {wrong}: set BATON_API_KEY or OPENAI_API_KEY")
        if answer.status >= 400:
            kind = InvalidRequest if answer.status < 500 else WorkerLost
            raise kind(_message(answer.read(1 << 16)) or f"the API at {where} answers {answer.status}")
        return answer


def _message(body: bytes) -> str:
    """What an error of OpenAI's shape says; "" for another."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


# What the offline API answers; names as vLLM's where the thing is the same.


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One of the `n` choices for one prompt.

    `text` has no special tokens, no stop string and no token that ended it; `token_ids` has all of them. A
    model without a tokenizer has no text: "".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string, or the one of `stop_token_ids`, that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one a token, when asked for


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str | None  # None when it was given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one more token added to one choice. With `finish_reason` set, the last of that choice.

    `text` is "" while a character is not whole or a stop string may have begun.
    """

    prompt_index: int  # which of the prompts given
    index: int  # which of its `n` choices
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
