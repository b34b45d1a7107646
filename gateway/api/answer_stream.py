"""An answer on its way to one client, as fast as the client reads.

1. Tokens come in batches, by callbacks. What came in a turn of the loop is written at its end, in one piece;
   where that is more than MAX_TURN_BYTES, as echoed prompts may be, choice by choice in the turns after it.
2. While the client lags, text is held and joined. What is written then, and until the client has kept up for
   CALM_SENTENCES, is whole sentences.
3. A client that lags by more than MAX_HELD_BYTES is given up: the answer is cancelled.

So a slow client costs a bounded amount of memory, and nobody else's time.
"""

import asyncio
import logging
import re
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from baton.errors import BatonError, IntegrityError
from baton.gateway.api.answer import Answer, AnswerChoice, Delta
from baton.gateway.api.call import BYTES_PER_LOGPROB
from baton.gateway.api.errors import as_api_error
from baton.gateway.api.format import AnswerFormat
from baton.gateway.http.asgi import WriteCoalescer
from baton.gateway.http.response_body import ResponseWriter
from baton.gateway.streams.resume import ResumePoint, Shown

# How much of a resumable stream its client has: in the event ids that are sent, and where a stream goes on.
#
# A stream that is resumed is generated again from its first token, by the same seed. Whatever the client has
# is taken off (`rest`); from there on the stream is what the undisturbed one would have been. `Shown` counts
# characters, tokens and tool calls apart, since text may lag behind its tokens: half a character, the
# beginning of a stop string, the part of a sentence that a slow client is to get later.

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

    def has_ended(self, choice: AnswerChoice) -> bool:
        return self._shown[choice.index].has_ended

    # What is taken off.

    def rest(self, choice: AnswerChoice, delta: Delta) -> Delta:
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

    def began(self, choice: AnswerChoice) -> None:
        shown = self._shown[choice.index]
        self._shown[choice.index] = msgspec.structs.replace(
            shown, is_begun=True, num_cached_tokens=choice.num_cached_tokens
        )

    def wrote(self, choice: AnswerChoice, delta: Delta) -> None:
        """Its text and what belongs to its tokens; not its tool calls."""
        shown = self._shown[choice.index]
        self._shown[choice.index] = msgspec.structs.replace(
            shown,
            num_chars=shown.num_chars + len(delta.text),
            num_tokens=shown.num_tokens + len(delta.token_ids),
            token_checksum=_checksum(delta.token_ids, shown.token_checksum),
        )

    def wrote_tool_call(self, choice: AnswerChoice) -> None:
        shown = self._shown[choice.index]
        self._shown[choice.index] = msgspec.structs.replace(shown, num_tool_calls=shown.num_tool_calls + 1)

    def ended(self, choice: AnswerChoice) -> None:
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


MAX_HELD_BYTES: Final = 64 * 2**10  # a stream
MAX_TURN_BYTES: Final = 64 * 2**10  # with more written, the rest waits: others have their turn before
SENTENCE_END: Final = re.compile(r"[.!?\u2026\u3002\uff01\uff1f]['\")\]]*\s|\n")
MAX_SENTENCE_CHARS: Final = 400  # more is written without an end
CALM_SENTENCES: Final = 4
DONE: Final = b"[DONE]"
logger = logging.getLogger(__name__)


class Framing:
    """What stands around a chunk."""

    def __init__(self, before: bytes, after: bytes, ping: bytes) -> None:
        self.before = before
        self.after = after
        self.ping = ping


SERVER_SENT_EVENTS: Final = Framing(b"data: ", b"\n\n", b": ping\n\n")


class AnswerStream:
    """A Listener. Until `begin` nothing is written: a request that fails early is refused plainly."""

    def __init__(
        self,
        answer: Answer,
        form: AnswerFormat,
        framing: Framing,
        turn: WriteCoalescer,
        observe: Callable[[AnswerChoice, Delta], None],
        progress: StreamProgress | None = None,
    ) -> None:
        """progress: of a stream whose events have ids; None: they have none."""
        self._answer = answer
        self._form = form
        self._framing = framing
        self._turn = turn
        self._is_due = False  # at the end of this turn
        self._observe = observe
        self._writer: ResponseWriter | None = None
        self._held: list[list[Delta]] = [[] for _ in answer.choices]
        self._num_held_bytes = 0  # while the client lags
        self._num_calm = CALM_SENTENCES  # sentences written since it lagged
        self._progress = progress
        self._greeted: set[int] = progress.begun if progress is not None else set()
        self._chunks: list[bytes] = []
        self._num_put_bytes = 0  # of these
        self._has_news = asyncio.Event()
        self.error: BatonError | None = None
        self.is_over = False
        self.is_gone = False  # the client, before the end
        self.is_given_up = False
        self._has_written = False  # since `wait` began

    def begin(self, writer: ResponseWriter) -> None:
        """The response has its headers: write what has come, and what comes from now on."""
        self._writer = writer
        writer.on_writable = self.writable
        self._has_news.clear()
        if writer.is_gone:
            self.gone()
        else:
            self._write_all()

    async def wait(self, seconds: float) -> bool:
        """Until something happens that the one who waits must see: the first tokens, the end. False: nothing
        did, and nothing was written either.
        """
        self._has_written = False
        try:
            async with asyncio.timeout(seconds):
                await self._has_news.wait()
        except TimeoutError:
            return self._has_written
        self._has_news.clear()
        return True

    def ping(self) -> None:
        if self._writer is not None and self._framing.ping and not self._writer.lags:
            self._writer.write(self._framing.ping)

    # What an answer calls.

    def advanced(self, choice: AnswerChoice, delta: Delta) -> None:
        self._observe(choice, delta)
        if self._progress is not None:
            delta = self._progress.rest(choice, delta)
        if self._progress is None or not self._progress.has_ended(choice):
            self._held[choice.index].append(delta)
        writer = self._writer
        if writer is None:
            self._has_news.set()
        elif writer.lags:
            self._hold(delta)
        else:
            self._write_soon()

    def finished(self) -> None:
        self._ended()

    def failed(self, error: BatonError) -> None:
        self.error = error
        self._ended()

    # What an outlet calls.

    def writable(self) -> None:
        self._write_all()

    def gone(self) -> None:
        if not self.is_over:
            self.is_gone = True
            self._answer.cancel()
            self._end()

    # Writing.

    def _ended(self) -> None:
        """There will be no more; `writable` writes the rest for a client that lags."""
        if self._writer is None:
            self._has_news.set()
        elif not self._writer.lags:
            self._write_soon()

    def _write_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._turn.add(self._write_due)

    def _write_due(self) -> None:
        try:
            self._write_all()
        except Exception:  # others' streams are written in the same turn
            logger.exception("a stream could not be written")
            self.gone()

    def _hold(self, delta: Delta) -> None:
        self._num_calm = 0
        num_logprobs = sum(len(entry.top) + 1 for entry in delta.logprobs)
        self._num_held_bytes += len(delta.text) * 4 + num_logprobs * BYTES_PER_LOGPROB
        self._num_held_bytes += len(delta.token_ids) * 4
        self._num_held_bytes += sum(len(call.arguments) * 4 for call in delta.tool_calls)
        if self._num_held_bytes > MAX_HELD_BYTES:
            self.is_given_up = True
            self.gone()

    def _write_all(self) -> None:
        self._is_due = False
        writer = self._writer
        if writer is None or self.is_over:
            return
        self._num_held_bytes = 0
        for choice in self._answer.choices:
            self._put_choice(choice)
            if self._num_put_bytes > MAX_TURN_BYTES:
                self._flush(writer)
                if not writer.lags:  # `writable` goes on otherwise
                    self._write_soon()
                return
        if self._answer.is_over:
            self._put_end()
            self._end()
        self._flush(writer)

    def _put_choice(self, choice: AnswerChoice) -> None:
        index, progress = choice.index, self._progress
        held = self._held[index]
        if not held:
            return
        delta, has_ended = Delta.joined(held), choice.finish_reason is not None
        held.clear()
        shows_arrival = False  # of its first tokens, though no character may be whole yet
        if index not in self._greeted:
            self._greeted.add(index)
            first = self._form.first(choice)
            shows_arrival = not first and not has_ended
            if progress is not None:
                progress.began(choice)
            self._put(first)
        if self._num_calm < CALM_SENTENCES and not has_ended and not self._answer.is_over:
            delta = self._whole_sentences(delta, held)
        has_ids = delta.token_ids and self._answer.call.returns_token_ids
        if progress is not None:
            progress.wrote(choice, delta)
        if delta.text or delta.logprobs or has_ids or shows_arrival:
            self._put(self._form.delta(choice, delta))
        for tool_call in delta.tool_calls:
            if progress is not None:
                progress.wrote_tool_call(choice)
            self._put(self._form.tool_call(choice, tool_call))
        if has_ended:
            if progress is not None:
                progress.ended(choice)
            self._put(self._form.last(choice))

    def _whole_sentences(self, delta: Delta, held: list[Delta]) -> Delta:
        """What may go of `delta`; the rest is put back. Logprobs and ids belong to tokens: then all goes."""
        ends = list(SENTENCE_END.finditer(delta.text))
        is_of_tokens = delta.logprobs or self._answer.call.returns_token_ids
        if is_of_tokens or delta.tool_calls or len(delta.text) > MAX_SENTENCE_CHARS:
            return delta
        end = ends[-1].end() if ends else 0
        self._num_calm += len(ends)
        if end == len(delta.text):
            return delta
        held.append(Delta(delta.text[end:], delta.token_ids))
        return Delta(delta.text[:end])

    def _put_end(self) -> None:
        """An error and the end have no id: whoever resumes after them goes on after what came before."""
        if self.error is not None:
            self._put(as_api_error(self.error).body(), has_id=False)
        elif self._answer.call.has_usage:
            if self._progress is not None:
                self._progress.wrote_usage()
            self._put(self._form.usage())
        self._put(DONE, has_id=False)

    def _put(self, chunk: bytes, *, has_id: bool = True) -> None:
        if chunk:
            if has_id and self._progress is not None:
                self._chunks += (b"id: ", self._progress.event_id(), b"\n")
            self._chunks += (self._framing.before, chunk, self._framing.after)
            self._num_put_bytes += len(chunk)

    def _flush(self, writer: ResponseWriter) -> None:
        if self._chunks:
            writer.write(b"".join(self._chunks))
            self._chunks.clear()
            self._num_put_bytes = 0
            self._has_written = True

    def _end(self) -> None:
        self.is_over = True
        self._has_news.set()
