"""The wire format of answers: whole, or as the chunks of a stream, of a chat or of a completion.

The stream of a chat has for each choice a chunk with the role, chunks with text, and a chunk with the finish
reason and an empty delta. A chunk with the usage and no choices follows only if the client asked for it:
other clients would read choices[0]. The stream of a completion has no chunk with a role, and the text of its
first chunk may be empty.

Logprobs may be long: they are written in slices that take about a millisecond.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import orjson

from baton.gateway.api.answer import Answer, AnswerChoice, AnswerFormat
from baton.gateway.api.errors import ApiError
from baton.gateway.text.answer_reader import Delta, ToolCallDelta
from baton.gateway.text.chat_template import REASONING_KEYS
from baton.gateway.text.tokenizer import Tokenizer
from baton.request import FinishReason, TokenLogprobs

SLICE_ENTRIES: Final = 1024  # alternatives count
EntryT = TypeVar("EntryT", TokenLogprobs, TokenLogprobs | None)
# Log probabilities, and the tokens that they are about.
TokensShown: TypeAlias = tuple[Sequence[TokenLogprobs | None], Sequence[int]]
COLUMNS: Final = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
DONE: Final = b"[DONE]"  # the end of a stream
LEAST: Final = -9999.0  # OpenAI's value for an impossible token: JSON has no infinity


def slice_tokens(logprobs: Sequence[TokenLogprobs | None]) -> int:
    """Return the number of tokens in a slice."""
    num_top = max((len(entry.top) for entry in logprobs[:2] if entry is not None), default=0)
    return max(1, SLICE_ENTRIES // (num_top + 1))


def joined(slices: Iterable[bytes]) -> Iterator[bytes]:
    """Return the inside of a JSON list that has the slices' elements."""
    for index, each in enumerate(slices):
        if index:
            yield b","
        yield each


def _sliced(entries: Sequence[EntryT], show: Callable[[Sequence[EntryT]], object]) -> Iterator[bytes]:
    """Yield the list that `show` makes of the entries as slices: JSON without the brackets."""
    num_tokens = slice_tokens(entries)
    for first in range(0, len(entries), num_tokens):
        yield orjson.dumps(show(entries[first : first + num_tokens]))[1:-1]


class LogprobsFormat:
    """Logprobs as chats and completions show them."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer a token shows as "token_id:7"."""
        self._tokenizer = tokenizer

    def chat(self, logprobs: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
        """Return entries of `choices[].logprobs.content`."""
        return [
            self._entry(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in entry.top]}
            for entry in logprobs
        ]

    def chat_slices(self, logprobs: Sequence[TokenLogprobs]) -> Iterator[bytes]:
        """Return the result of `chat` as slices: JSON without the brackets."""
        return _sliced(logprobs, self.chat)

    def prompt_slices(self, logprobs: Sequence[TokenLogprobs | None], num_top: int) -> Iterator[bytes]:
        """Return vLLM's `prompt_logprobs` as slices: for each token the likeliest ones and itself, by id."""
        return _sliced(
            logprobs, lambda now: [None if each is None else self._by_id(each, num_top) for each in now]
        )

    def completion(
        self, logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int], offset: int
    ) -> dict[str, Any]:
        """Return `choices[].logprobs`, one entry for each of `token_ids`.

        logprobs: None for a prompt's first token, which follows nothing. offset: characters before the text.
        """
        return {name: self._column(name, logprobs, token_ids, offset) for name in COLUMNS}

    def completion_slices(self, *parts: TokensShown) -> Iterator[bytes]:
        """Return the result of `completion` for the parts together, as slices.

        One column is written after the other, from the parts again, so that nothing is kept.
        """
        for index, name in enumerate(COLUMNS):
            yield b'%s"%s":[' % (b"," if index else b"{", name.encode())
            yield from joined(self._column_slices(name, parts))
            yield b"]"
        yield b"}"

    def num_chars(self, token_ids: Sequence[int]) -> int:
        """Return the number of characters that `completion` counts for these tokens."""
        return sum(len(self._text(token_id)) for token_id in token_ids)

    def _column_slices(self, name: str, parts: Iterable[TokensShown]) -> Iterator[bytes]:
        offset = 0
        for logprobs, token_ids in parts:
            num_tokens = slice_tokens(logprobs)
            for first in range(0, len(token_ids), num_tokens):
                now = slice(first, first + num_tokens)
                yield orjson.dumps(self._column(name, logprobs[now], token_ids[now], offset))[1:-1]
                offset += self.num_chars(token_ids[now])

    def _column(
        self, name: str, logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int], offset: int
    ) -> list[Any]:
        match name:
            case "text_offset":
                lengths = (len(self._text(token_id)) for token_id in token_ids)
                return list(accumulate(lengths, initial=offset))[:-1]
            case "token_logprobs":
                return [None if entry is None else _finite(entry.logprob) for entry in logprobs]
            case "tokens":
                return [self._text(token_id) for token_id in token_ids]
            case _:
                return [None if entry is None else self._alternatives(entry) for entry in logprobs]

    def _by_id(self, entry: TokenLogprobs, num_top: int) -> dict[str, dict[str, Any]]:
        likeliest = ((*pair, rank) for rank, pair in enumerate(entry.top[:num_top], 1))
        return {
            str(token_id): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self._text(token_id),
            }
            for token_id, logprob, rank in ((entry.token_id, entry.logprob, entry.rank), *likeliest)
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the likeliest tokens and the sampled one; of equal texts the likelier token is shown."""
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


Json = dict[str, Any]


def answer_format(answer: Answer, created_s: int) -> AnswerFormat:
    """Return the wire format of a chat or a completion. created_s: in seconds since 1970."""
    kind = ChatFormat if answer.call.is_chat else CompletionFormat
    tokenizer = None if answer.call.names_tokens_by_id else answer.tokenizer
    return kind(answer, LogprobsFormat(tokenizer), created_s)


class _Format:
    """The parts that chats and completions share."""

    ID_PREFIX = ""
    CHUNK = ""
    WHOLE = ""

    def __init__(self, answer: Answer, logprobs: LogprobsFormat, created_s: int) -> None:
        self._answer = answer
        self._call = answer.call
        self._logprobs = logprobs
        self._head: Json = {
            "id": f"{self.ID_PREFIX}{answer.name.hex()}",
            "object": self.CHUNK,
            "created": created_s,
            "model": self._call.model,
        }
        self._has_plain_deltas = (
            self._call.sampling.logprobs is None
            and not self._call.has_running_usage
            and not self._call.returns_token_ids
        )

    @cached_property
    def _starts(self) -> list[bytes]:
        """The start of a chunk with a plain delta, for each choice."""
        start = orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'
        return [b"%s%d," % (start, choice.index) for choice in self._answer.choices]

    def usage(self) -> bytes:
        return orjson.dumps({**self._head, "choices": [], "usage": self._usage()})

    def failed(self, error: ApiError) -> bytes:
        return error.body()

    def end(self) -> bytes:
        return DONE

    def _chunk(self, choice: Json, *, has_tokens: bool = True, **particulars: object) -> bytes:
        """has_tokens: False for a chunk before the first token of its choice."""
        chunk: Json = {**self._head, "choices": [choice]} | particulars
        if self._call.has_running_usage:
            chunk["usage"] = self._usage()
            if not has_tokens and len(self._answer.choices) == 1:
                num_prompt = chunk["usage"]["prompt_tokens"]
                chunk["usage"] |= {"completion_tokens": 0, "total_tokens": num_prompt}
        return orjson.dumps(chunk)

    def _in_one(
        self, choices: Iterable[Iterator[bytes]], tail: Iterable[bytes] = (), **particulars: object
    ) -> Iterator[bytes]:
        yield orjson.dumps({**self._head, "object": self.WHOLE})[:-1] + b',"choices":['
        for index, parts in enumerate(choices):
            if index:
                yield b","
            yield from parts
        yield b"]"
        yield from tail
        yield b"," + orjson.dumps({"usage": self._usage(), **particulars})[1:]

    def _prompt_logprobs(self, choice: AnswerChoice) -> Iterator[bytes]:
        """Return the prompt's log probabilities as a further key, if the call asks for them."""
        num_top = self._call.num_prompt_logprobs
        if num_top is not None:
            first = self._answer.choices[choice.index - choice.number]  # only its request asks for them
            yield b',"prompt_logprobs":['
            yield from joined(self._logprobs.prompt_slices(first.prompt_logprobs or (), num_top))
            yield b"]"

    def _usage(self) -> Json:
        num_prompt, num_completion, num_cached, num_reasoning = self._answer.usage
        if self._call.hides_tokens:
            num_completion = num_reasoning = 0
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
        if self._call.is_chat:
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage

    def _end(self, choice: AnswerChoice) -> Json:
        if self._call.hides_tokens:
            return {"finish_reason": "length", "stop_reason": None}
        has_chosen = choice.num_tool_calls and not self._call.parsing.is_named
        if has_chosen and choice.finish_reason is FinishReason.STOP:
            return {"finish_reason": "tool_calls", "stop_reason": choice.stop_reason}
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}


class ChatFormat(_Format):
    """An AnswerFormat for `/v1/chat/completions`."""

    ID_PREFIX = "chatcmpl-"
    CHUNK = "chat.completion.chunk"
    WHOLE = "chat.completion"

    def first(self, choice: AnswerChoice) -> bytes:
        body: Json = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        ids = {"prompt_token_ids": tuple(choice.prompt.token_ids)} if self._call.returns_token_ids else {}
        return self._chunk(body, has_tokens=False, **ids)

    def delta(self, choice: AnswerChoice, delta: Delta) -> bytes:
        shown = _reasoning(delta)
        if delta.text or not shown:
            shown["content"] = delta.text
        if self._has_plain_deltas:
            return b'%s"delta":%s,"logprobs":null,"finish_reason":null}]}' % (
                self._starts[choice.index],
                orjson.dumps(shown),
            )
        body: Json = {
            "index": choice.index,
            "delta": shown,
            "logprobs": self._logprobs_of(delta),
            "finish_reason": None,
        }
        if self._call.returns_token_ids:
            body["token_ids"] = delta.token_ids
        return self._chunk(body)

    def tool_call(self, choice: AnswerChoice, part: ToolCallDelta) -> bytes:
        function = {"arguments": part.arguments}
        shown: Json = {"index": part.index, "function": function}
        if part.is_first:
            shown = {"index": part.index, **_called(part, part.arguments)}
        delta = {"tool_calls": [shown]}
        return self._chunk({"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None})

    def last(self, choice: AnswerChoice) -> bytes:
        return self._chunk({"index": choice.index, "delta": {}, "logprobs": None, **self._end(choice)})

    def whole(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        choices = map(self._whole_choice, self._answer.choices, deltas)
        tail = self._prompt_logprobs(self._answer.choices[0])
        if not self._call.returns_token_ids:
            return self._in_one(choices, tail)
        return self._in_one(choices, tail, prompt_token_ids=tuple(self._call.prompts[0].token_ids))

    def _whole_choice(self, choice: AnswerChoice, delta: Delta) -> Iterator[bytes]:
        body: Json = {
            "index": choice.index,
            "message": _message(delta),
            **self._end(choice),
        }
        if self._call.returns_token_ids:
            body["token_ids"] = delta.token_ids
        if self._call.sampling.logprobs is None:
            yield orjson.dumps({**body, "logprobs": None})
            return
        yield orjson.dumps(body)[:-1] + b',"logprobs":{"content":['
        yield from joined(self._logprobs.chat_slices(delta.logprobs))
        yield b'],"refusal":null}}'

    def _logprobs_of(self, delta: Delta) -> Json | None:
        if self._call.sampling.logprobs is None:
            return None
        return {"content": self._logprobs.chat(delta.logprobs), "refusal": None}


class CompletionFormat(_Format):
    """An AnswerFormat for `/v1/completions`."""

    ID_PREFIX = "cmpl-"
    CHUNK = "text_completion"
    WHOLE = "text_completion"

    def __init__(self, answer: Answer, logprobs: LogprobsFormat, created_s: int) -> None:
        super().__init__(answer, logprobs, created_s)
        self._num_chars = [0] * len(answer.choices)  # shown of each choice, by the texts of single tokens
        self._echoes: dict[int, bytes] = {}  # by the first choice of the prompt, for its other choices
        self._num_echoed: Counter[int] = Counter()  # by the same

    def first(self, choice: AnswerChoice) -> bytes:
        """Return the prompt when it is echoed."""
        if not self._call.has_echo:
            return b""
        body = self._body(choice, Delta(), is_first=True)
        if self._call.sampling.logprobs is not None:
            self._num_chars[choice.index] = self._logprobs.num_chars(choice.prompt.token_ids)
            body["logprobs"] = orjson.Fragment(self._echo_logprobs(choice))
        return self._chunk(body | {"finish_reason": None})

    def delta(self, choice: AnswerChoice, delta: Delta) -> bytes:
        if self._call.hides_tokens:
            return b""
        if self._has_plain_deltas:
            return b'%s"text":%s,"logprobs":null,"finish_reason":null}]}' % (
                self._starts[choice.index],
                orjson.dumps(delta.text),
            )
        body = self._body(choice, delta, is_first=False)
        if self._call.sampling.logprobs is not None:
            body["logprobs"] = self._logprobs_of(choice, delta)
        return self._chunk(body | {"finish_reason": None})

    def tool_call(self, choice: AnswerChoice, part: ToolCallDelta) -> bytes:
        raise AssertionError("a completion calls no tools")

    def last(self, choice: AnswerChoice) -> bytes:
        return self._chunk({"index": choice.index, "text": "", "logprobs": None, **self._end(choice)})

    def whole(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        return self._in_one(map(self._whole_choice, self._answer.choices, deltas))

    def _whole_choice(self, choice: AnswerChoice, delta: Delta) -> Iterator[bytes]:
        if self._call.hides_tokens:
            delta = Delta()
        body = self._body(choice, delta, is_first=True) | self._end(choice)
        if self._call.sampling.logprobs is None:
            yield orjson.dumps(body)[:-1]
            yield from self._prompt_logprobs(choice)
            yield b"}"
            return
        del body["logprobs"]
        yield orjson.dumps(body)[:-1] + b',"logprobs":'
        own = delta.logprobs, delta.token_ids
        yield from self._logprobs.completion_slices(self._echo(choice), own)
        yield from self._prompt_logprobs(choice)
        yield b"}"

    def _body(self, choice: AnswerChoice, delta: Delta, *, is_first: bool) -> Json:
        """Return a choice without logprobs."""
        shows_prompt = is_first and self._call.has_echo
        text = (choice.prompt.text or "") + delta.text if shows_prompt else delta.text
        body: Json = {"index": choice.index, "text": text, "logprobs": None}
        if self._call.returns_token_ids:
            body["token_ids"] = delta.token_ids
            if is_first:
                body["prompt_token_ids"] = tuple(choice.prompt.token_ids)
        return body

    def _echo(self, choice: AnswerChoice) -> TokensShown:
        """Return the log probabilities and the tokens of the prompt; none without an echo."""
        if not self._call.has_echo:
            return (), ()
        first = self._answer.choices[choice.index - choice.number]  # only its request asks for them
        token_ids, sampling = choice.prompt.token_ids, self._call.sampling
        entries: Sequence[TokenLogprobs | None] = first.prompt_logprobs or [None] * len(token_ids)
        if sampling.prompt_logprobs != sampling.logprobs:  # more are asked for beside the echo
            entries = [
                None if each is None else msgspec.structs.replace(each, top=each.top[: sampling.logprobs])
                for each in entries
            ]
        return entries, token_ids

    def _echo_logprobs(self, choice: AnswerChoice) -> bytes:
        """Return `logprobs` of the prompt, made once for its choices and dropped after the last of them."""
        first = choice.index - choice.number
        echo = self._echoes.pop(first, None)
        if echo is None:
            echo = b"".join(self._logprobs.completion_slices(self._echo(choice)))
        self._num_echoed[first] += 1
        if self._num_echoed[first] < self._call.num_choices:
            self._echoes[first] = echo
        return echo

    def _logprobs_of(self, choice: AnswerChoice, delta: Delta) -> Json:
        offset = self._num_chars[choice.index]
        shown = self._logprobs.completion(delta.logprobs, delta.token_ids, offset)
        if delta.token_ids:
            self._num_chars[choice.index] = shown["text_offset"][-1] + len(shown["tokens"][-1])
        return shown


def _reasoning(delta: Delta) -> Json:
    return dict.fromkeys(REASONING_KEYS, delta.reasoning) if delta.reasoning else {}


def _message(delta: Delta) -> Json:
    reasoning = _reasoning(delta)
    if not delta.tool_calls:
        return {"role": "assistant", **reasoning, "content": delta.text}
    arguments: dict[int, list[str]] = {}
    for part in delta.tool_calls:
        arguments.setdefault(part.index, []).append(part.arguments)
    called = [_called(part, "".join(arguments[part.index])) for part in delta.tool_calls if part.is_first]
    return {"role": "assistant", **reasoning, "content": delta.text or None, "tool_calls": called}


def _called(first: ToolCallDelta, arguments: str) -> Json:
    return {"id": first.id, "type": "function", "function": {"name": first.name, "arguments": arguments}}
