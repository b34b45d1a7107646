"""The answer to one call: its choices are requests of the cluster, and their tokens become text here.

1. `start` opens choice 0 of every prompt. Its first token opens the other choices on the same worker, which
   has the pages of the prompt. A call with many choices opens OPEN_AT_ONCE in each turn of the event loop.
2. Every batch of tokens of a choice becomes a Delta, and the listener is told.
3. A choice ends with its last event, or at a stop string. No worker knows stop strings: the choice is
   cancelled there.
4. The call ends once: when all choices have ended, by the first failure of a choice, or by `cancel`. None of
   its requests runs on afterwards.
"""

import asyncio
import hashlib
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from baton.errors import BatonError, IntegrityError
from baton.gateway.api.call import Call, Prompt
from baton.gateway.api.errors import ApiError
from baton.gateway.streams.request_stream import RequestMarks, Service
from baton.gateway.streams.resume import NAME_BYTES, DeliveredChoice
from baton.gateway.text.answer_parsing import choice_reader
from baton.gateway.text.answer_reader import Delta, ToolCallDelta
from baton.gateway.text.tokenizer import ChoiceText, Tokenizer, detokenizer_of
from baton.request import FinishReason, Request, TokenEvent, TokenLogprobs
from baton.tenants import with_public

OPEN_AT_ONCE: Final = 16  # choices: they hold the event loop for about a millisecond
_NOTHING: Final = DeliveredChoice()  # of an answer that is not resumed

logger = logging.getLogger(__name__)


class Usage(NamedTuple):
    """Tokens of an answer."""

    prompt: int
    completion: int
    cached: int
    reasoning: int  # of the completion, with the tag that ends reasoning


class AnswerListener(Protocol):
    """The reader of an answer. One of `finished` and `failed` is called last, once."""

    def advanced(self, choice: "AnswerChoice", delta: Delta) -> None:
        """Take a part of a choice; the last part when `choice.finish_reason` is set."""

    def finished(self) -> None:
        """Every choice has ended."""

    def failed(self, error: BatonError) -> None:
        """The error has ended every choice."""


class AnswerFormat(Protocol):
    """The wire format of an answer, such as that of a chat. A chunk of b"" is not sent."""

    def first(self, choice: "AnswerChoice") -> bytes:
        """Return the chunk before the first text of a choice."""

    def delta(self, choice: "AnswerChoice", delta: Delta) -> bytes:
        """Return the chunk of some text."""

    def tool_call(self, choice: "AnswerChoice", part: ToolCallDelta) -> bytes:
        """Return the chunk of a part of a tool call; only chats have any."""

    def last(self, choice: "AnswerChoice") -> bytes:
        """Return the chunk with the finish reason."""

    def usage(self) -> bytes:
        """Return the chunk with the usage."""

    def failed(self, error: ApiError) -> bytes:
        """Return the chunk of the error that has ended the answer."""

    def end(self) -> bytes:
        """Return the chunk after all others."""

    def whole(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Return the answer in one piece, as parts that take about a millisecond each; some are empty.

        deltas: by the index of their choice.
        """


class Answer:
    """The running answer to one call. `choices` are ordered by prompt, then by number."""

    def __init__(self, call: Call, service: Service, tokenizer: Tokenizer | None) -> None:
        self.call = call
        self.tokenizer = tokenizer
        self.service = service
        self._sampling = call.sampling.of_tokens()
        self.listener: AnswerListener | None = None
        self.observe: Callable[[AnswerChoice, Delta], None] = _ignore  # called with each delta first
        self.error: BatonError | None = None  # that has ended the answer
        resumed = call.resumed
        self.name = resumed.answer if resumed is not None else secrets.token_bytes(NAME_BYTES)
        self.choices = [
            AnswerChoice(self, prompt, number, index * call.num_choices + number)
            for index, prompt in enumerate(call.prompts)
            for number in range(call.num_choices)
        ]
        self._unopened: deque[tuple[AnswerChoice, str]] = deque()  # with the worker that has the prompt
        self._num_running = len(self.choices)
        self.is_over = False
        self._usage: Usage | None = None  # of the tokens so far; every chunk may show it

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that were found in a prefix cache."""
        return sum(choice.num_cached_tokens for choice in self.choices if choice.number == 0)

    @property
    def usage(self) -> Usage:
        """The usage of the whole answer; a resumed answer counts the part that was delivered before."""
        if self._usage is not None:
            return self._usage
        resumed, num_completion, num_cached, num_reasoning = self.call.resumed, 0, 0, 0
        delivered = (_NOTHING,) * len(self.choices) if resumed is None else resumed.choices
        for choice, shown in zip(self.choices, delivered, strict=True):
            num_completion += max(choice.num_tokens, shown.num_tokens)
            num_reasoning += max(choice.num_reasoning_tokens, shown.num_reasoning_tokens)
            if choice.number == 0:
                num_cached += shown.num_cached_tokens if shown.is_begun else choice.num_cached_tokens
        self._usage = Usage(self.call.num_prompt_tokens, num_completion, num_cached, num_reasoning)
        return self._usage

    @property
    def is_whole(self) -> bool:
        """Every choice has ended well."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def is_placed(self) -> bool:
        """A worker has a part of the answer."""
        return any(self.service.decode_worker(choice.request_id) for choice in self.choices)

    def start(self, listener: AnswerListener) -> None:
        """Open the choices, a few in each turn of the event loop.

        Raises the errors of `Service.open`, and nothing runs then. The listener is told of an error in a
        later turn.
        """
        self.listener = listener
        self._unopened.extend((choice, "") for choice in self.choices[:: self.call.num_choices])
        try:
            self._open_few()
        except BatonError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the answer. The listener hears nothing more."""
        self.is_over = True
        self.listener = None
        self._unopened.clear()
        for choice in self.choices:
            if choice.is_running:
                choice.is_running = False
                self.service.cancel(choice.request_id)

    def fail(self, error: BatonError) -> None:
        """End the answer and tell the listener why."""
        listener, self.error = self.listener, error
        self.cancel()
        if listener is not None:
            listener.failed(error)

    def advanced(self, choice: "AnswerChoice", delta: Delta, *, by_worker: bool) -> None:
        """Take a part of a choice. by_worker: the worker has ended the choice itself, if this is the end."""
        self._usage = None
        is_first = choice.num_tokens == len(delta.token_ids)
        if is_first and choice.number == 0 and self.call.num_choices > 1:
            self._open_others(choice)
        if choice.finish_reason is not None:
            choice.is_running = False
            self._num_running -= 1
            if not by_worker:
                self.service.cancel(choice.request_id)
        self.is_over = self.is_over or not self._num_running
        if self.listener is not None:
            self.observe(choice, delta)
            self.listener.advanced(choice, delta)
        if not self._num_running and self.listener is not None:
            self.listener.finished()

    def _open_others(self, first: "AnswerChoice") -> None:
        sticky_worker = self.service.decode_worker(first.request_id)
        others = self.choices[first.index + 1 : first.index + self.call.num_choices]
        is_opening = bool(self._unopened)  # a later turn continues
        self._unopened.extend((choice, sticky_worker) for choice in others)
        if not is_opening:
            self._open_next()

    def _open_next(self) -> None:
        try:
            self._open_few()
        except BatonError as error:
            self.fail(error)

    def _open_few(self) -> None:
        for _ in range(OPEN_AT_ONCE):
            if not self._unopened:
                return
            self._open(*self._unopened.popleft())
        if self._unopened:
            asyncio.get_running_loop().call_soon(self._open_next)

    def _open(self, choice: "AnswerChoice", sticky_worker: str) -> None:
        call, sampling = self.call, self._sampling
        if choice.number and sampling.prompt_logprobs is not None:  # they are the same for every choice
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        request = Request(
            request_id=choice.request_id,
            token_ids=choice.prompt.token_ids,
            sampling=sampling,
            choice=choice.number,
            tenant=call.tenant.name,
            model=call.served,
            cache_salt=with_public(call.tenant_salt, choice.prompt.num_public_tokens),
            adapter=call.adapter,
            priority=call.priority,
            sla=call.sla,
            scheduling_key=call.scheduling_key,
            arrival_s=call.arrival_s,
        )
        choice.is_running = True
        try:
            choice.marks = self.service.open(request, choice, sticky_worker=sticky_worker)
        except BatonError:
            choice.is_running = False
            raise


def _ignore(choice: "AnswerChoice", delta: Delta) -> None:
    """Observe nothing."""


class AnswerChoice:
    """One choice, the sink of one request. `index` counts over all prompts, `number` within the prompt."""

    def __init__(self, answer: Answer, prompt: Prompt, number: int, index: int) -> None:
        # The first attempt at an answer may still run somewhere when another gateway resumes it.
        is_named = index == 0 and answer.call.resumed is None
        self.request_id = (answer.name if is_named else secrets.token_bytes(NAME_BYTES)).hex()
        self.prompt = prompt
        self.number = number
        self.index = index
        self.is_running = False  # the service knows of the request
        self.marks: RequestMarks | None = None  # from then on
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_reasoning_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._answer = answer
        call = answer.call
        detokenizer = detokenizer_of(
            answer.tokenizer, prompt.token_ids, skip_special_tokens=call.sampling.skip_special_tokens
        )
        self._text = ChoiceText(detokenizer, call.sampling)
        self._reader = choice_reader(call.parsing, _tool_call_digests(answer.name, index))

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason of the end; None while the choice runs."""
        return self._text.finish_reason

    @property
    def num_tool_calls(self) -> int:
        """Calls of tools that have begun."""
        return 0 if self._reader is None else self._reader.num_calls

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the choice, if any."""
        return self._text.stop_reason

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        """See Sink. An error ends only this answer: the caller has tokens of other requests too."""
        if not self.is_running:
            return
        try:
            self._accept(events)
        except Exception as error:
            logger.exception("the tokens of request %s could not be shown", self.request_id)
            self._answer.fail(IntegrityError(f"request {self.request_id}: {error}"))

    def failed(self, error: BatonError) -> None:
        """See Sink."""
        if self.is_running:
            self.is_running = False
            self._answer.fail(error)

    def _accept(self, events: Sequence[TokenEvent]) -> None:
        pieces: list[str] = []  # list[str]() would take a microsecond more
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        by_worker = False
        for event in events:
            if event.token_id is not None:
                token_ids.append(event.token_id)
            if event.logprobs is not None:
                logprobs.append(event.logprobs)
            if event.index == 0:
                self.num_cached_tokens = event.num_cached_tokens
                self.prompt_logprobs = event.prompt_logprobs
            pieces.append(self._text.accept(event.token_id, event.finish_reason))
            if self._text.finish_reason is not None:
                by_worker = event.finish_reason is not None
                break
        self.num_tokens += len(token_ids)
        delta = (
            Delta("".join(pieces), token_ids, logprobs)
            if self._reader is None
            else self._read(pieces, token_ids, logprobs)
        )
        self._answer.advanced(self, delta, by_worker=by_worker)

    def _read(self, pieces: list[str], token_ids: list[int], logprobs: list[TokenLogprobs]) -> Delta:
        """Split the text into shown text, reasoning and calls of tools. pieces: a text for each token.

        There may be a further piece, without a token, at the end.
        """
        reader = self._reader
        assert reader is not None
        deltas: list[Delta] = []
        for number, piece in enumerate(pieces):
            was_reasoning = reader.is_reasoning
            deltas.append(reader.push(piece))
            is_reasoning = was_reasoning or reader.is_reasoning
            self.num_reasoning_tokens += is_reasoning and number < len(token_ids)
        if self._text.finish_reason is not None:
            deltas.append(reader.finish())
        read = Delta.joined(deltas)
        read.token_ids, read.logprobs = token_ids, logprobs
        if not self._answer.call.shows_reasoning:
            read.reasoning = ""
        return read


def _tool_call_digests(answer: bytes, choice: int) -> Iterator[str]:
    """Return the sources of ids, which are the same each time the answer is generated."""
    for number in itertools.count():
        content = b"%s tool call %d of choice %d" % (answer, number, choice)
        yield hashlib.blake2b(content, digest_size=12).hexdigest()
