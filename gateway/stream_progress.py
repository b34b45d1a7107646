"""How much of a resumable stream its client has: in the event ids that are sent, and where a stream goes on.

A stream that is resumed is generated again from its first token, by the same seed. Whatever the client has is
taken off (`rest`); from there on the stream is what the undisturbed one would have been. `Shown` counts
characters, tokens and tool calls apart, since text may lag behind its tokens: half a character, the beginning
of a stop string, the part of a sentence that a slow client is to get later.
"""

import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from baton.errors import IntegrityError
from baton.gateway.answer import Choice, Delta
from baton.gateway.answer_format import AnswerFormat
from baton.gateway.event_ids import ResumePoint, Shown

NOTHING_SHOWN: Final = Shown()


class StreamProgress:
    """Of one stream. `begun`, `wrote`, `ended` and `wrote_usage` are told before `event_id` is asked for."""

    def __init__(self, point: ResumePoint, form: AnswerFormat, seal: Callable[[ResumePoint], bytes]) -> None:
        """point: where the stream begins; nothing is shown yet unless it is resumed."""
        self._point = point
        self._form = form
        self._seal = seal
        self._shown = list(point.choices)
        self._skips = [_Skip(shown) for shown in point.choices]

    @property
    def begun(self) -> set[int]:
        """Choices whose client has a first chunk already."""
        return {index for index, shown in enumerate(self._shown) if shown.is_begun}

    def has_ended(self, choice: Choice) -> bool:
        return self._shown[choice.index].has_ended

    # What is taken off.

    def rest(self, choice: Choice, delta: Delta) -> Delta:
        """The part of the next tokens that the client does not have.

        Raises IntegrityError where they are not the ones that it has.
        """
        skip = self._skips[choice.index]
        if skip.is_over:
            return delta
        if not skip.has_started:
            skip.has_started = True
            self._form.first(choice)  # the form counts characters
        known, rest = skip.split(delta)
        self._form.delta(choice, known)
        if choice.finish_reason is not None and not skip.is_over:
            raise IntegrityError(f"the answer ended before the part of it that was sent: {skip}")
        return rest

    # What is sent.

    def began(self, choice: Choice) -> None:
        shown = self._shown[choice.index]
        self._shown[choice.index] = msgspec.structs.replace(
            shown, is_begun=True, num_cached_tokens=choice.num_cached_tokens
        )

    def wrote(self, choice: Choice, delta: Delta) -> None:
        """Its text and what belongs to its tokens; not its tool calls."""
        shown = self._shown[choice.index]
        self._shown[choice.index] = msgspec.structs.replace(
            shown,
            num_chars=shown.num_chars + len(delta.text),
            num_tokens=shown.num_tokens + len(delta.token_ids),
            token_checksum=_checksum(delta.token_ids, shown.token_checksum),
        )

    def wrote_tool_call(self, choice: Choice) -> None:
        shown = self._shown[choice.index]
        self._shown[choice.index] = msgspec.structs.replace(shown, num_tool_calls=shown.num_tool_calls + 1)

    def ended(self, choice: Choice) -> None:
        self._shown[choice.index] = msgspec.structs.replace(self._shown[choice.index], has_ended=True)

    def wrote_usage(self) -> None:
        self._point = msgspec.structs.replace(self._point, has_shown_usage=True)

    def event_id(self) -> bytes:
        return self._seal(msgspec.structs.replace(self._point, choices=tuple(self._shown)))


class _Skip:
    """What is still to be taken off one choice."""

    def __init__(self, shown: Shown) -> None:
        self.has_started = False
        self._num_chars = shown.num_chars
        self._num_tokens = shown.num_tokens
        self._num_tool_calls = shown.num_tool_calls
        self._checksum = 0  # of tokens that were taken off
        self._due_checksum = shown.token_checksum
        self._is_begun = shown.is_begun

    @property
    def is_over(self) -> bool:
        return not (self._num_chars or self._num_tokens or self._num_tool_calls) and (
            self.has_started or not self._is_begun
        )

    def split(self, delta: Delta) -> tuple[Delta, Delta]:
        """What the client has of it, and the rest."""
        chars, tokens, calls = self._num_chars, self._num_tokens, self._num_tool_calls
        known = Delta(delta.text[:chars], delta.token_ids[:tokens], delta.logprobs[:tokens])
        rest = Delta(
            delta.text[chars:], delta.token_ids[tokens:], delta.logprobs[tokens:], delta.tool_calls[calls:]
        )
        self._checksum = _checksum(known.token_ids, self._checksum)
        self._num_chars = max(0, chars - len(delta.text))
        self._num_tokens = max(0, tokens - len(delta.token_ids))
        self._num_tool_calls = max(0, calls - len(delta.tool_calls))
        if tokens and not self._num_tokens and self._checksum != self._due_checksum:
            raise IntegrityError("the answer was generated again and differs from the part that was sent")
        return known, rest

    def __str__(self) -> str:
        return f"{self._num_chars} characters, {self._num_tokens} tokens, {self._num_tool_calls} tool calls"


def _checksum(token_ids: Sequence[int], before: int) -> int:
    return zlib.crc32(array("I", token_ids).tobytes(), before)
