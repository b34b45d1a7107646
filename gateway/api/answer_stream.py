"""An answer on its way to one client: streamed as fast as the client reads, or kept until its end.

`AnswerCollector` keeps an answer in little memory, charged to the tenant as it grows. `AnswerStream` writes:

1. Tokens come in batches, by callbacks. The chunks of one turn of the event loop are written at its end, in
   one piece. More than MAX_TURN_BYTES, such as echoed prompts, are written choice by choice in later turns.
2. While the client lags, text is held and joined. It is written in one piece when the client can take it.
3. A client that lags by more than MAX_HELD_BYTES is given up: the answer is cancelled.

So a slow client costs a bounded amount of memory and delays no other client.

A resumed stream is generated again from its first token with the same seed, and `StreamProgress` drops the
part that the client has. `DeliveredChoice` counts characters of text, of reasoning and of tool calls, and
tokens separately, because text may be held back: an incomplete character, a possible stop string.
"""

import asyncio
import logging
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import StringIO
from typing import Final, NamedTuple, overload

import msgspec

from baton.errors import BatonError, IntegrityError
from baton.gateway.api.answer import Answer, AnswerChoice, AnswerFormat
from baton.gateway.api.call import BYTES_PER_LOGPROB
from baton.gateway.api.errors import ClientGone, as_api_error
from baton.gateway.http.protocol import ResponseWriter
from baton.gateway.streams.resume import DeliveredChoice, ResumePoint
from baton.gateway.tenants.budget import Charge
from baton.gateway.text.answer_reader import Delta, ToolCallDelta, joined_calls
from baton.request import TOKEN_ID_BYTES, TokenIds, TokenLogprobs

MAX_HELD_BYTES: Final = 64 * 2**10  # a stream
MAX_TURN_BYTES: Final = 64 * 2**10  # then other streams have their turn
BLOCK_TOKENS: Final = 256  # of PackedLogprobs
BYTES_PER_CHARACTER: Final = 4
logger = logging.getLogger(__name__)


class Framing(NamedTuple):
    """The bytes around each chunk."""

    before: bytes
    after: bytes
    ping: bytes


SERVER_SENT_EVENTS: Final = Framing(b"data: ", b"\n\n", b": ping\n\n")
TYPED_EVENTS: Final = Framing(b"", b"", b": ping\n\n")  # a chunk has whole events


class StreamProgress:
    """Tracks how much of a resumable stream its client has received; each event's id carries that state.

    `shown[index]` of a choice must be up to date before `event_id` is called.
    """

    def __init__(self, point: ResumePoint, form: AnswerFormat, seal: Callable[[ResumePoint], bytes]) -> None:
        """point: the beginning of the stream, or the event after which it resumes."""
        self.shown = [msgspec.structs.replace(shown) for shown in point.choices]
        self.has_shown_usage = point.has_shown_usage
        self._point = point
        self._form = form
        self._seal = seal
        self._skips = [_Skip(shown) for shown in point.choices]

    def rest(self, choice: AnswerChoice, delta: Delta) -> Delta:
        """Return the part of the next tokens that the client does not have.

        Raises IntegrityError when the tokens differ from those that the client has.
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

    def wrote(self, choice: AnswerChoice, delta: Delta) -> None:
        """Count the text of a delta and its tokens, not its tool calls."""
        shown = self.shown[choice.index]
        shown.num_chars += len(delta.text)
        shown.num_reasoning_chars += len(delta.reasoning)
        shown.num_tokens += len(delta.token_ids)
        shown.num_reasoning_tokens = max(shown.num_reasoning_tokens, choice.num_reasoning_tokens)
        shown.token_checksum = _checksum(delta.token_ids, shown.token_checksum)

    def event_id(self) -> bytes:
        """Return the id of the next event."""
        choices, has_usage = tuple(self.shown), self.has_shown_usage
        return self._seal(msgspec.structs.replace(self._point, choices=choices, has_shown_usage=has_usage))


class _Skip:
    """The delivered part of one choice that is not skipped yet."""

    def __init__(self, shown: DeliveredChoice) -> None:
        self.has_started = False
        self._left = msgspec.structs.replace(shown)
        self._checksum = 0  # of skipped tokens

    @property
    def is_over(self) -> bool:
        left = self._left
        num_left = left.num_chars + left.num_tokens + left.num_call_chars + left.num_reasoning_chars
        return not num_left and (self.has_started or not left.is_begun)

    def split(self, delta: Delta) -> tuple[Delta, Delta]:
        """Return the part of the delta that the client has, and the rest."""
        left = self._left
        chars, tokens, thought = left.num_chars, left.num_tokens, left.num_reasoning_chars
        known = Delta(
            delta.text[:chars],
            delta.token_ids[:tokens],
            delta.logprobs[:tokens],
            reasoning=delta.reasoning[:thought],
        )
        rest = Delta(
            delta.text[chars:],
            delta.token_ids[tokens:],
            delta.logprobs[tokens:],
            [part for each in delta.tool_calls for part in self._rest_of(each)],
            delta.reasoning[thought:],
        )
        self._checksum = _checksum(known.token_ids, self._checksum)
        left.num_chars = max(0, chars - len(delta.text))
        left.num_tokens = max(0, tokens - len(delta.token_ids))
        left.num_reasoning_chars = max(0, thought - len(delta.reasoning))
        if tokens and not left.num_tokens and self._checksum != left.token_checksum:
            raise IntegrityError("the answer was generated again and differs from the part that was sent")
        return known, rest

    def _rest_of(self, part: ToolCallDelta) -> Iterator[ToolCallDelta]:
        known = self._left.num_call_chars
        self._left.num_call_chars = max(0, known - num_chars_of(part))
        if not known:
            yield part
        elif known < num_chars_of(part):
            yield ToolCallDelta(part.index, arguments=part.arguments[known:])

    def __str__(self) -> str:
        left = self._left
        return (
            f"{left.num_chars} characters, {left.num_reasoning_chars} of reasoning, "
            f"{left.num_call_chars} of tool calls, {left.num_tokens} tokens"
        )


def num_chars_of(part: ToolCallDelta) -> int:
    """Return the count of a part of a call, as in `DeliveredChoice`."""
    return int(part.is_first) + len(part.arguments)


def _checksum(token_ids: Sequence[int], before: int) -> int:
    return zlib.crc32(TokenIds.of(token_ids).packed, before)


class AnswerStream:
    """An AnswerListener that writes to a client: the chunks of one turn of the event loop in one piece.

    It writes nothing before `begin`: a call that fails early is refused with a status.
    """

    def __init__(
        self,
        answer: Answer,
        form: AnswerFormat,
        framing: Framing,
        progress: StreamProgress | None = None,
        kept: Charge | None = None,
    ) -> None:
        """progress: None for a stream without event ids. kept: charged with the text that `form` keeps."""
        self._answer = answer
        self._form = form
        self._framing = framing
        self._kept = kept
        self._is_due = False  # at the end of this turn
        self._writer: ResponseWriter | None = None
        self._held: list[list[Delta]] = [[] for _ in answer.choices]
        self._num_held_bytes = 0  # while the client lags
        self._progress = progress
        shown = progress.shown if progress is not None else ()
        # Choices with a written first chunk, which comes before any text.
        self._begun = {index for index, each in enumerate(shown) if each.is_begun}
        self._chunks: list[bytes] = []
        self._num_put_bytes = 0  # of the chunks
        self._has_news = asyncio.Event()
        self.error: BatonError | None = None
        self.is_over = False
        self.is_gone = False  # the client has left before the end
        self.is_given_up = False
        self._has_written = False  # since `wait` began

    def begin(self, writer: ResponseWriter) -> None:
        """Write everything so far and from now on; the response must have its headers."""
        self._writer = writer
        writer.on_writable = self._write_due
        self._has_news.clear()
        if writer.is_gone:
            self.gone()
        else:
            self._write_all()

    async def wait(self, seconds: float) -> bool:
        """Wait for the first tokens or the end. Return False when neither came and nothing was written."""
        self._has_written = False
        try:
            async with asyncio.timeout(seconds):
                await self._has_news.wait()
        except TimeoutError:
            return self._has_written
        self._has_news.clear()
        return True

    def ping(self) -> None:
        """Write a sign of life, unless the client lags."""
        if self._writer is not None and self._framing.ping and not self._writer.lags:
            self._writer.write(self._framing.ping)

    def gone(self) -> None:
        """Cancel the answer: the client has left."""
        if not self.is_over:
            self.is_gone = True
            self._answer.cancel()
            self._end()

    def advanced(self, choice: AnswerChoice, delta: Delta) -> None:
        if self._kept is not None:
            try:
                self._kept.add(BYTES_PER_CHARACTER * num_chars(delta))
            except BatonError as error:
                self._answer.fail(error)
        progress = self._progress
        if progress is not None:
            delta = progress.rest(choice, delta)
        if progress is None or not progress.shown[choice.index].has_ended:
            self._held[choice.index].append(delta)
        writer = self._writer
        if writer is None:
            self._has_news.set()
        elif writer.lags:
            self._hold(delta)
        else:
            self._write_soon()

    def finished(self) -> None:
        """See AnswerListener. A client that lags gets the rest when it can be written."""
        if self._writer is None:
            self._has_news.set()
        elif not self._writer.lags:
            self._write_soon()

    def failed(self, error: BatonError) -> None:
        self.error = error
        self.finished()

    def _write_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._write_due)

    def _write_due(self) -> None:
        try:
            self._write_all()
        except Exception:  # a bug: without the end of this stream its client would wait
            logger.exception("a stream could not be written")
            self.gone()

    def _hold(self, delta: Delta) -> None:
        num_logprobs = sum(len(entry.top) + 1 for entry in delta.logprobs)
        num_held = num_chars(delta)
        self._num_held_bytes += BYTES_PER_CHARACTER * num_held + TOKEN_ID_BYTES * len(delta.token_ids)
        self._num_held_bytes += BYTES_PER_LOGPROB * num_logprobs
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
                if not writer.lags:  # else `on_writable` continues
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
        shows_arrival = False  # of the first tokens, even when no character is whole yet
        if index not in self._begun:
            self._begun.add(index)
            first = self._form.first(choice)
            shows_arrival = not first and not has_ended
            if progress is not None:
                shown = progress.shown[index]
                shown.is_begun, shown.num_cached_tokens = True, choice.num_cached_tokens
            self._put(first)
        has_ids = delta.token_ids and self._answer.call.returns_token_ids
        if progress is not None:
            progress.wrote(choice, delta)
        if delta.text or delta.reasoning or delta.logprobs or has_ids or shows_arrival:
            self._put(self._form.delta(choice, delta))
        for part in delta.tool_calls:
            if progress is not None:
                progress.shown[index].num_call_chars += num_chars_of(part)
            self._put(self._form.tool_call(choice, part))
        if has_ended:
            if progress is not None:
                progress.shown[index].has_ended = True
            self._put(self._form.last(choice))

    def _put_end(self) -> None:
        """Put the error or the usage, and the end. An error and the end have no id: a client that resumes
        after them goes on after the event before.
        """
        if self.error is not None:
            self._put(self._form.failed(as_api_error(self.error)), has_id=False)
        elif self._answer.call.has_usage:
            if self._progress is not None:
                self._progress.has_shown_usage = True
            self._put(self._form.usage())
        self._put(self._form.end(), has_id=False)

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


class AnswerCollector:
    """An AnswerListener that keeps the answer until its end, in little memory, charged as it grows."""

    def __init__(self, answer: Answer, charge: Charge) -> None:
        self._answer = answer
        self._charge = charge
        call = answer.call
        keeps_ids = call.returns_token_ids or call.sampling.logprobs is not None
        self._kept = [_Kept(keeps_ids=keeps_ids) for _ in answer.choices]
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> list[Delta]:
        """Return each whole choice. Raises the error that ended the answer, or ClientGone."""
        await self._end
        kept, self._kept = self._kept, []
        return [choice.joined() for choice in kept]

    def advanced(self, choice: AnswerChoice, delta: Delta) -> None:
        try:
            self._charge.add(self._kept[choice.index].add(delta))
        except BatonError as error:
            self._kept.clear()
            self._charge.release()  # at once: the next call finds the room
            self._answer.fail(error)

    def finished(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def failed(self, error: Exception) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def gone(self) -> None:
        """Cancel the answer: the client has left."""
        self._answer.cancel()
        self.failed(ClientGone())


class _Kept:
    """The deltas of one choice, in little memory."""

    def __init__(self, *, keeps_ids: bool) -> None:
        self._text = StringIO()
        self._keeps_ids = keeps_ids
        self._token_ids = array("i")
        self._logprobs = PackedLogprobs()
        self._reasoning: StringIO | None = None  # of an answer that has reasoned
        self._tool_calls: list[ToolCallDelta] = []

    def add(self, delta: Delta) -> int:
        """Keep a delta; returns the approximate bytes that it takes."""
        before = self._logprobs.num_bytes + TOKEN_ID_BYTES * len(self._token_ids)
        self._text.write(delta.text)
        if delta.reasoning:
            self._reasoning = self._reasoning or StringIO()
            self._reasoning.write(delta.reasoning)
        if self._keeps_ids:
            self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._tool_calls += delta.tool_calls
        after = self._logprobs.num_bytes + TOKEN_ID_BYTES * len(self._token_ids)
        return BYTES_PER_CHARACTER * num_chars(delta) + after - before

    def joined(self) -> Delta:
        return Delta(
            self._text.getvalue(),
            self._token_ids.tolist(),
            self._logprobs,
            joined_calls(self._tool_calls),
            "" if self._reasoning is None else self._reasoning.getvalue(),
        )


def num_chars(delta: Delta) -> int:
    """Return the characters of all parts of a delta."""
    return len(delta.text) + len(delta.reasoning) + sum(len(part.arguments) for part in delta.tool_calls)


class PackedLogprobs(Sequence[TokenLogprobs]):
    """Log probabilities of an answer's tokens in 12 bytes an alternative, where objects take 150.

    Blocks of BLOCK_TOKENS tokens never move as the answer grows: many large arrays that move would leave the
    memory fragmented.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._blocks: list[_LogprobsBlock] = []  # all but the last are full
        self._num_tokens = 0

    def extend(self, entries: Iterable[TokenLogprobs]) -> None:
        """Append entries."""
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
        """Append an entry; returns the bytes that it takes."""
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
