"""What an answer looks like on the wire: whole, or as the chunks of a stream, of a chat or of a completion.

A stream of a chat, choice by choice: a chunk with the role, chunks with text, one with the finish reason and
an empty delta. Then, only if asked, one with the usage and no choices: clients that did not ask would read
choices[0] of it. A completion's stream has no chunk for a role; the text of its first one may be empty.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import orjson

from baton.gateway.answer import Answer, Choice, Delta
from baton.gateway.logprobs_format import Columns, LogprobsFormat, joined
from baton.gateway.tokenizer import Tokenizer
from baton.gateway.tool_forms import ToolCall
from baton.request import FinishReason

Json = dict[str, Any]


class AnswerFormat(Protocol):
    def first(self, choice: Choice) -> bytes:
        """The chunk before a choice's first text; b"" for none."""

    def delta(self, choice: Choice, delta: Delta) -> bytes: ...

    def tool_call(self, choice: Choice, tool_call: ToolCall) -> bytes:
        """One call, whole; only chats have any."""

    def last(self, choice: Choice) -> bytes: ...

    def usage(self) -> bytes: ...

    def whole(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """The answer in one piece, in parts that take a millisecond or so, so that others may have a turn
        after each; some are empty. `deltas` by the index of their choice.
        """


def answer_format(answer: Answer, tokenizer: Tokenizer | None, created_s: int) -> AnswerFormat:
    kind = ChatFormat if answer.call.is_chat else CompletionFormat
    return kind(answer, LogprobsFormat(tokenizer), created_s)


class _Format:
    """What both share."""

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
        """Of a chunk with a plain delta, for each choice."""
        start = orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'
        return [b"%s%d," % (start, choice.index) for choice in self._answer.choices]

    def usage(self) -> bytes:
        return orjson.dumps({**self._head, "choices": [], "usage": self._usage()})

    def _chunk(self, choice: Json) -> bytes:
        chunk = {**self._head, "choices": [choice]}
        if self._call.has_running_usage:
            chunk["usage"] = self._usage()
        return orjson.dumps(chunk)

    def _in_one(self, choices: Iterable[Iterator[bytes]], **particulars: object) -> Iterator[bytes]:
        yield orjson.dumps({**self._head, "object": self.WHOLE})[:-1] + b',"choices":['
        for index, parts in enumerate(choices):
            if index:
                yield b","
            yield from parts
        yield b"]," + orjson.dumps({"usage": self._usage(), **particulars})[1:]

    def _usage(self) -> Json:
        num_prompt, num_completion, num_cached = self._answer.usage
        if self._call.hides_tokens:
            num_completion = 0
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _end(self, choice: Choice) -> Json:
        if self._call.hides_tokens:
            return {"finish_reason": "length", "stop_reason": None}
        if choice.num_tool_calls and choice.finish_reason is FinishReason.STOP:
            return {"finish_reason": "tool_calls", "stop_reason": choice.stop_reason}
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}


class ChatFormat(_Format):
    ID_PREFIX = "chatcmpl-"
    CHUNK = "chat.completion.chunk"
    WHOLE = "chat.completion"

    def first(self, choice: Choice) -> bytes:
        body: Json = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if not self._call.returns_token_ids:
            return self._chunk(body)
        chunk = orjson.loads(self._chunk(body))
        return orjson.dumps({**chunk, "prompt_token_ids": choice.prompt.token_ids})

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        if self._has_plain_deltas:
            return b'%s"delta":{"content":%s},"logprobs":null,"finish_reason":null}]}' % (
                self._starts[choice.index],
                orjson.dumps(delta.text),
            )
        body: Json = {
            "index": choice.index,
            "delta": {"content": delta.text},
            "logprobs": self._logprobs_of(delta),
            "finish_reason": None,
        }
        if self._call.returns_token_ids:
            body["token_ids"] = delta.token_ids
        return self._chunk(body)

    def tool_call(self, choice: Choice, tool_call: ToolCall) -> bytes:
        delta = {"tool_calls": [{"index": tool_call.index, **_called(tool_call)}]}
        return self._chunk({"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None})

    def last(self, choice: Choice) -> bytes:
        return self._chunk({"index": choice.index, "delta": {}, "logprobs": None, **self._end(choice)})

    def whole(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        choices = map(self._whole_choice, self._answer.choices, deltas)
        if not self._call.returns_token_ids:
            return self._in_one(choices)
        return self._in_one(choices, prompt_token_ids=self._call.prompts[0].token_ids)

    def _whole_choice(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
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
    ID_PREFIX = "cmpl-"
    CHUNK = "text_completion"
    WHOLE = "text_completion"

    def __init__(self, answer: Answer, logprobs: LogprobsFormat, created_s: int) -> None:
        super().__init__(answer, logprobs, created_s)
        self._num_chars = [0] * len(answer.choices)  # shown of each choice, by its tokens' own texts
        self._echoes: dict[int, Columns] = {}  # by the first choice of their prompt, for its other choices
        self._num_echoed: Counter[int] = Counter()  # by the same

    def first(self, choice: Choice) -> bytes:
        """With `echo`, the prompt."""
        if not self._call.has_echo:
            return b""
        body = self._body(choice, Delta(), is_first=True)
        if self._call.sampling.logprobs is not None:
            echo = _result(self._echo(choice))
            self._num_chars[choice.index] = echo.num_chars
            body["logprobs"] = orjson.Fragment(b"".join(Columns.written(echo)))
        return self._chunk(body | {"finish_reason": None})

    def delta(self, choice: Choice, delta: Delta) -> bytes:
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

    def tool_call(self, choice: Choice, tool_call: ToolCall) -> bytes:
        raise AssertionError("a completion calls no tools")

    def last(self, choice: Choice) -> bytes:
        return self._chunk({"index": choice.index, "text": "", "logprobs": None, **self._end(choice)})

    def whole(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        return self._in_one(map(self._whole_choice, self._answer.choices, deltas))

    def _whole_choice(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
        if self._call.hides_tokens:
            delta = Delta()
        body = self._body(choice, delta, is_first=True) | self._end(choice)
        if self._call.sampling.logprobs is None:
            yield orjson.dumps(body)
            return
        echo = yield from self._echo(choice)
        own = yield from self._logprobs.columns(delta.logprobs, delta.token_ids, echo.num_chars)
        del body["logprobs"]
        yield orjson.dumps(body)[:-1] + b',"logprobs":'
        yield from Columns.written(echo, own)
        yield b"}"

    def _body(self, choice: Choice, delta: Delta, *, is_first: bool) -> Json:
        """Without logprobs."""
        shows_prompt = is_first and self._call.has_echo
        text = (choice.prompt.text or "") + delta.text if shows_prompt else delta.text
        body: Json = {"index": choice.index, "text": text, "logprobs": None}
        if self._call.returns_token_ids:
            body["token_ids"] = delta.token_ids
            if is_first:
                body["prompt_token_ids"] = choice.prompt.token_ids
        return body

    def _echo(self, choice: Choice) -> Generator[bytes, None, Columns]:
        """Of its prompt; made once for all choices of the prompt, and let go after the last of them."""
        if not self._call.has_echo:
            return Columns(0)
        first = self._answer.choices[choice.index - choice.number]  # it alone was asked for them
        columns = self._echoes.pop(first.index, None)
        if columns is None:
            token_ids = choice.prompt.token_ids
            entries = first.prompt_logprobs or [None] * len(token_ids)
            columns = yield from self._logprobs.columns(entries, token_ids, 0)
        self._num_echoed[first.index] += 1
        if self._num_echoed[first.index] < self._call.num_choices:
            self._echoes[first.index] = columns
        return columns

    def _logprobs_of(self, choice: Choice, delta: Delta) -> Json:
        offset = self._num_chars[choice.index]
        shown = self._logprobs.completion(delta.logprobs, delta.token_ids, offset)
        if delta.token_ids:
            self._num_chars[choice.index] = shown["text_offset"][-1] + len(shown["tokens"][-1])
        return shown


def _message(delta: Delta) -> Json:
    if not delta.tool_calls:
        return {"role": "assistant", "content": delta.text}
    called = [_called(tool_call) for tool_call in delta.tool_calls]
    return {"role": "assistant", "content": delta.text or None, "tool_calls": called}


def _called(tool_call: ToolCall) -> Json:
    function = {"name": tool_call.name, "arguments": tool_call.arguments}
    return {"id": tool_call.id, "type": "function", "function": function}


def _result(work: Generator[bytes, None, Columns]) -> Columns:
    """What it returns, at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            assert isinstance(end.value, Columns)
            return end.value
