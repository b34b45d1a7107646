"""Answers as typed events, which OpenAI's Responses and Anthropic's Messages have in common.

An answer has parts, one after another: reasoning, text, and calls of tools. Each part begins, grows and ends,
and each of these moments is an event of its own:

    begun -> part 0 begins, grows ..., ends -> part 1 begins, grows ..., ends -> ended | failed

`TypedFormat` follows the parts. A subclass writes the events of each moment, and the answer in one piece.
Answers of this kind have one choice.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from io import StringIO
from typing import Any, TypeAlias

import orjson

from baton.gateway.api.answer import Answer, AnswerChoice, Delta
from baton.gateway.api.errors import ApiError
from baton.gateway.text.answer_reader import ToolCallDelta
from baton.request import FinishReason

Json: TypeAlias = dict[str, Any]


class PartKind(StrEnum):
    """The kinds of parts."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class ContentPart:
    """One part of an answer."""

    def __init__(self, kind: PartKind, index: int, call: ToolCallDelta | None = None) -> None:
        """call: the beginning of a call."""
        self.kind = kind
        self.index = index
        self.call_id = "" if call is None else call.id
        self.name = "" if call is None else call.name
        self._text = StringIO()

    def append(self, text: str) -> None:
        """Add text, or a piece of a call's arguments."""
        self._text.write(text)

    @property
    def text(self) -> str:
        """The text so far; of a call, its arguments."""
        return self._text.getvalue()


def event(content: Json) -> bytes:
    """Return a server-sent event; its name is the `type` of the content."""
    return b"event: %s\ndata: %s\n\n" % (content["type"].encode(), orjson.dumps(content))


class TypedFormat(ABC):
    """An AnswerFormat of typed events."""

    def __init__(self, answer: Answer, created_s: int) -> None:
        """created_s: in seconds since 1970."""
        self._answer = answer
        self._call = answer.call
        self._created_s = created_s
        self._parts: list[ContentPart] = []
        self._open: ContentPart | None = None

    # The moments of an answer, for subclasses.

    @abstractmethod
    def _begun(self) -> Iterator[Json]:
        """Yield the events before the first part."""

    @abstractmethod
    def _part_begun(self, part: ContentPart) -> Iterator[Json]:
        """Yield the events of a new part, which has no text."""

    @abstractmethod
    def _part_grown(self, part: ContentPart, text: str) -> Iterator[Json]:
        """Yield the events of more text, which the part has already."""

    @abstractmethod
    def _part_ended(self, part: ContentPart, *, is_cut_off: bool) -> Iterator[Json]:
        """Yield the events of the end of a part. is_cut_off: the limit of tokens has ended it."""

    @abstractmethod
    def _ended(self, choice: AnswerChoice) -> Iterator[Json]:
        """Yield the events after the last part."""

    @abstractmethod
    def _failed(self, error: ApiError) -> Iterator[Json]:
        """Yield the events of a failure."""

    @abstractmethod
    def _whole(self, choice: AnswerChoice) -> Json:
        """Return the answer in one piece; it has ended, and has all its parts."""

    # What AnswerStream and Inference call: see AnswerFormat.

    def first(self, choice: AnswerChoice) -> bytes:
        """See AnswerFormat."""
        return self._written(self._begun())

    def delta(self, choice: AnswerChoice, delta: Delta) -> bytes:
        """See AnswerFormat."""
        return self._written(self._grow(delta))

    def tool_call(self, choice: AnswerChoice, part: ToolCallDelta) -> bytes:
        """See AnswerFormat."""
        return self._written(self._grow_call(part))

    def last(self, choice: AnswerChoice) -> bytes:
        """See AnswerFormat."""
        return self._written([*self._close(is_cut_off=_is_cut_off(choice)), *self._ended(choice)])

    def usage(self) -> bytes:
        """See AnswerFormat: the last event has the usage."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """See AnswerFormat."""
        return self._written(self._failed(error))

    def end(self) -> bytes:
        """See AnswerFormat: the last event is the end."""
        return b""

    def whole(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """See AnswerFormat."""
        (delta,), (choice,) = deltas, self._answer.choices
        for _ in self._grow(delta):
            pass
        for part in delta.tool_calls:
            for _ in self._grow_call(part):
                pass
        for _ in self._close(is_cut_off=_is_cut_off(choice)):
            pass
        yield orjson.dumps(self._whole(choice))

    def _written(self, events: Iterable[Json]) -> bytes:
        return b"".join([event(each) for each in events])

    def _grow(self, delta: Delta) -> Iterator[Json]:
        for kind, text in ((PartKind.REASONING, delta.reasoning), (PartKind.TEXT, delta.text)):
            if text:
                if self._open is None or self._open.kind is not kind:
                    yield from self._begin(ContentPart(kind, len(self._parts)))
                yield from self._add(text)

    def _grow_call(self, part: ToolCallDelta) -> Iterator[Json]:
        if part.is_first:
            yield from self._begin(ContentPart(PartKind.CALL, len(self._parts), part))
        if part.arguments:
            yield from self._add(part.arguments)

    def _begin(self, part: ContentPart) -> Iterator[Json]:
        yield from self._close(is_cut_off=False)
        self._open = part
        self._parts.append(part)
        yield from self._part_begun(part)

    def _add(self, text: str) -> Iterator[Json]:
        part = self._open
        assert part is not None
        part.append(text)
        yield from self._part_grown(part, text)

    def _close(self, *, is_cut_off: bool) -> Iterator[Json]:
        part, self._open = self._open, None
        if part is not None:
            yield from self._part_ended(part, is_cut_off=is_cut_off)


def _is_cut_off(choice: AnswerChoice) -> bool:
    return choice.finish_reason is FinishReason.LENGTH
