"""Reads the bodies of requests: decodes and checks a body, renders its chat, tokenises its prompts.

`PromptReader` reads one body; reading is pure. Decoding JSON and rendering templates hold the interpreter's
lock, so a thread that read a large body would delay the event loop. `BodyReader` reads small bodies on the
event loop. Two helper processes read the large ones, and small chats of which the template makes a long text:

1. `BodyReader.read` chooses a helper. One of the two takes no job above EXPRESS_BYTES: ordinary prompts never
   wait for the largest ones alone.
2. The job waits in the helper's queue: tenants share a helper fairly, by bytes (baton/fair_queue.py).
3. The gateway writes a frame with a `ReadJob` to the helper's standard input, then the body as it is. The
   helper answers on its standard output with a frame that holds a `ReadBody` or a `ReadFailed`. A frame is a
   length and a message in msgpack.
4. The helper takes the next job when the result is there, also when the caller has been cancelled meanwhile.
5. A job that takes longer than MAX_JOB_S fails, and so does the job of a helper that ends. The gateway kills
   that helper, and the next job starts another one.

A helper is this module run as a program: `python -m baton.gateway.api.body_reader DIRECTORY SETTINGS`. The
helper has the model's directory, no key and no socket, and a lower priority than the gateway. The helper ends
at the end of its input, which is also the end of the gateway.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO, Final, Literal, TypeAlias

import msgspec
import orjson

from baton.errors import BatonError, InvalidRequest, ModelError, Overloaded
from baton.fair_queue import FairShare
from baton.gateway.api.call import (
    AnyBody,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GivenPrompt,
    Prompt,
    TokenizeBody,
    check_sampled_ids,
    check_token_ids,
    decode_body,
    list_prompts,
    raw_fields,
)
from baton.gateway.api.errors import ApiError, as_api_error, invalid
from baton.gateway.api.form_checker import FormChecker
from baton.gateway.api.helper_process import LENGTH_BYTES, frame, lower_priority
from baton.gateway.api.structured_output import AskedForm, FormKeys
from baton.gateway.api.tool_choice import Tool, ToolChoice, read_tool_choice
from baton.gateway.streams.request_stream import Service
from baton.gateway.tenants.tenants import Tenant
from baton.gateway.text.answer_grammar import Tags
from baton.gateway.text.answer_parsing import AnswerParsing, ModelParsers, frame_of
from baton.gateway.text.chat_template import REASONING_EFFORT, ChatTemplate, Message, read_messages
from baton.gateway.text.model_files import read_vocab_size
from baton.gateway.text.reasoning import REASONING_PARSERS, ReasoningState
from baton.gateway.text.tokenizer import Tokenizer
from baton.gateway.text.tool_calls import has_tagged_arguments
from baton.request import SamplingParams, StructuredOutputs
from baton.tenants import has_slots
from baton.token_ids import TokenIds

MAX_CHARS_PER_TOKEN: Final = 16  # on average; a longer prompt cannot fit the model and is not tokenised
MAX_TEXT_ANSWER_BYTES: Final = 8 * 2**20  # of /tokenize and /detokenize
NO_WORKERS_RETRY_S: Final = 2.0
SMALL_BYTES: Final = 4096  # bodies and chats of this size are read on the event loop, in a millisecond or two
EXPRESS_BYTES: Final = 64 * 2**10
MAX_WAITING: Final = 256  # jobs a helper
MAX_JOB_S: Final = 30.0
RETRY_AFTER_S: Final = 1.0

MAX_PUBLIC_TOKENS: Final = 2**17  # of one text of `public_prefixes`
MAX_PUBLIC_TEXTS: Final = 1024  # that are kept, those of former tenants files included

BodyKind: TypeAlias = Literal["chat", "completion", "either", "tokenize", "detokenize"]
PublicForms: TypeAlias = tuple[tuple[int, ...], ...]  # token ids of each form of a public text

WITHOUT_FORM: Final = dict.fromkeys(FormKeys.__struct_fields__)  # the values of a body without a form

logger = logging.getLogger(__name__)


class ReadPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that a body is checked against."""

    model: str  # the served name
    may_use: bool  # the tenant may use the model
    max_model_len: int | None  # None: no worker has joined yet
    is_strict: bool = False  # unknown keys are refused
    max_chars: int | None = None  # of a chat's text; see `LongText`

    def longest(self) -> int:
        """Return the model's context length in tokens. Raises ApiError 503 while it is not known."""
        if self.max_model_len is None:
            message = "no worker has joined yet: the cluster is starting"
            raise ApiError(503, message, code="no_worker", retry_after_s=NO_WORKERS_RETRY_S)
        return self.max_model_len

    def check_model(self, asked_for: str | None) -> None:
        """Raise ApiError 404 for another model, 403 for one that the tenant may not use. None: any model."""
        if asked_for is not None and asked_for != self.model:
            message = f"the model {asked_for[:80]!r} does not exist; {self.model!r} does"
            raise ApiError(404, message, code="model_not_found", param="model")
        if not self.may_use:
            raise ApiError(403, f"this key may not use the model {self.model!r}", code="model_forbidden")

    def check_length(self, num_tokens: int) -> None:
        """Raise ApiError or InvalidRequest for a prompt length that the model cannot take."""
        longest = self.longest()
        if not num_tokens:
            raise InvalidRequest("the prompt is empty: at least one token is needed")
        if num_tokens >= longest:
            raise ApiError(
                400,
                f"the prompt has {num_tokens} tokens; the model takes {longest}, one of them for the answer",
                code="context_length_exceeded",
                param="prompt",
            )


class ReadBody(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A body that has been read, in a form that is quick to send between processes.

    It has one of `answer`, `chat` and `completion`; the bodies no longer have their prompts.
    """

    num_unknown: int  # keys of the body
    answer: bytes | None = None  # JSON, of /tokenize and /detokenize
    chat: ChatBody | None = None
    completion: CompletionBody | None = None
    prompts: list[Prompt] = []
    parsing: AnswerParsing = AnswerParsing()  # of a chat's answer
    asked_form: AskedForm | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


class TextSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a gateway that tell how text is read. The names are those of `GatewaySettings`."""

    chat_template: str | None = None  # a file in place of the model's own chat template
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


class LongText(Exception):
    """The chat template made a long text of a small body; a helper reads that body."""

    def __init__(self, num_chars: int) -> None:
        super().__init__(num_chars)
        self.num_chars = num_chars


class PromptReader:
    """Reads bodies for one model. Raises InvalidRequest and ApiError for faults of the client."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        vocab_size: int | None = None,
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """vocab_size: of the model; None when it is not known. Parsers: see `ModelParsers.chosen`.

        Raises ConfigError for a parser that does not exist.
        """
        self.tokenizer = tokenizer  # None when the model has none
        self._chat_template = chat_template
        self._vocab_size = vocab_size
        self._tags = Tags({} if tokenizer is None else tokenizer.added_tokens)
        self._special_tokens = frozenset[str]() if tokenizer is None else tokenizer.special_tokens
        source = "" if chat_template is None else chat_template.source
        self._parsers = ModelParsers.chosen(
            source, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser
        )

    @classmethod
    def from_directory(cls, directory: Path, settings: "TextSettings | None" = None) -> "PromptReader":
        """Read the model's files. Raises ModelError and ConfigError."""
        settings = settings or TextSettings()
        return cls(
            Tokenizer.find(directory),
            ChatTemplate.from_directory(directory, settings.chat_template),
            read_vocab_size(directory),
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
        )

    @property
    def _needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: prompts are token ids")
        return self.tokenizer

    def read(self, kind: BodyKind, data: bytes, policy: ReadPolicy) -> ReadBody:
        """Read a body. kind: "either" is a chat when the body has messages, else a completion.

        Raises LongText for a chat whose text is longer than the policy's `max_chars`.
        """
        if kind == "either":
            kind = "chat" if "messages" in raw_fields(data) else "completion"
        read = {
            "chat": self._chat,
            "completion": self._completion,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
        }[kind]
        return read(data, policy)

    def encode(self, text: str, *, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Text that cannot fit `max_tokens` raises before it is tokenised."""
        tokenizer = self._needed_tokenizer
        _check_length(len(text), max_tokens)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        max_chars: int | None = None,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        kwargs: Message | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation as the model's template renders it."""
        text = self._render_chat(
            messages,
            max_tokens=max_tokens,
            max_chars=max_chars,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            kwargs=kwargs,
        )
        return self._needed_tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _render_chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        max_chars: int | None,
        tools: Sequence[Tool] | None,
        add_generation_prompt: bool,
        kwargs: Message | None,
    ) -> str:
        _, template = self._needed_tokenizer, self._chat_template
        if template is None:
            raise InvalidRequest("the model has no chat template: it completes text and cannot chat")
        if tools and self._parsers.tool_call_parser is None:
            message = "tools: this model's chat template has none; leave them out"
            raise ApiError(400, message, code="unsupported", param="tools")
        read = read_messages(messages)
        _check_length(sum(len(str(message.get("content"))) for message in read), max_tokens)
        text = template.render(read, tools=tools, add_generation_prompt=add_generation_prompt, kwargs=kwargs)
        _check_length(len(text), max_tokens)
        if max_chars is not None and len(text) > max_chars:
            raise LongText(len(text))
        return text

    def _chat(self, data: bytes, policy: ReadPolicy) -> ReadBody:
        body, num_unknown = _decode(data, ChatBody, policy)
        check_sampled_ids(body, self._vocab_size)
        choice = read_tool_choice(body.tools, body.tool_choice, body.parallel_tool_calls)
        policy.check_model(body.model)
        kwargs = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            kwargs[REASONING_EFFORT] = body.reasoning_effort
        text = self._chat_text(body, policy, choice.tools, kwargs)
        token_ids = self._needed_tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
        policy.check_length(len(token_ids))
        state = self._reasoning_state(text)
        form = self._framed(self._form(body), choice, state)
        rest = msgspec.structs.replace(
            body, messages=[{}], tools=None, tool_choice=None, chat_template_kwargs=None, **WITHOUT_FORM
        )
        return ReadBody(
            num_unknown=num_unknown,
            chat=rest,
            prompts=[Prompt(None, TokenIds.of(token_ids))],
            parsing=self._parsing(body, choice, state),
            asked_form=form,
            bad_words_token_ids=self._bad_words(body),
        )

    def _chat_text(
        self,
        body: ChatBody | TokenizeBody,
        policy: ReadPolicy,
        tools: Sequence[Tool],
        kwargs: Message | None,
    ) -> str:
        return self._render_chat(
            body.messages or (),
            max_tokens=policy.longest(),
            max_chars=policy.max_chars,
            tools=tools or None,
            add_generation_prompt=body.add_generation_prompt is not False,
            kwargs=kwargs,
        )

    def _reasoning_state(self, prompt: str) -> ReasoningState:
        parser = REASONING_PARSERS.get(self._parsers.reasoning_parser or "")
        return ReasoningState.AFTER if parser is None else parser.state(prompt)

    def _parsing(self, body: ChatBody, choice: ToolChoice, state: ReasoningState) -> AnswerParsing:
        calls = self._parsers.tool_call_parser if choice.tools else None
        reasoning = None if body.separate_reasoning is False else self._parsers.reasoning_parser
        tags = self._tags.split("" if reasoning is None else REASONING_PARSERS[reasoning].tags)
        return AnswerParsing(
            tool_call_parser=calls,
            reasoning_parser=reasoning,
            reasoning_state=state,
            is_parallel=choice.is_parallel,
            is_named=choice.mode == "named",
            # The tags of calls are special tokens in some vocabularies.
            keeps_special_tokens=calls is not None or not self._special_tokens.isdisjoint(tags),
            text_arguments=choice.text_arguments() if has_tagged_arguments(calls) else {},
        )

    def _framed(self, asked: AskedForm | None, choice: ToolChoice, state: ReasoningState) -> AskedForm | None:
        """Return the form of the whole answer: reasoning, calls of tools, and the form that was asked for."""
        calls = choice.calls()
        key = "tool_choice" if choice.mode != "auto" else "tools"
        if asked is not None and calls is not None and calls.is_required:
            message = f"{asked.key}: {key} asks for calls, and an answer of calls has no other form"
            raise invalid(message, param=asked.key)
        try:
            frame = frame_of(self._parsers, state, self._tags, calls=calls, has_form=asked is not None)
            if frame is None:
                return asked
            if asked is not None:
                return AskedForm(asked.key, msgspec.structs.replace(asked.form, frame=frame))
            return AskedForm(key, msgspec.convert({"frame": frame}, StructuredOutputs))
        except (InvalidRequest, msgspec.ValidationError) as error:
            raise invalid(f"{key}: {error}", param=key) from None

    def _completion(self, data: bytes, policy: ReadPolicy) -> ReadBody:
        body, num_unknown = _decode(data, CompletionBody, policy)
        check_sampled_ids(body, self._vocab_size)
        policy.check_model(body.model)
        prompts = [self._prompt(given, body, policy) for given in list_prompts(body.prompt)]
        form = self._form(body)
        rest = msgspec.structs.replace(body, prompt=None, **WITHOUT_FORM)
        return ReadBody(
            num_unknown=num_unknown,
            completion=rest,
            prompts=prompts,
            asked_form=form,
            bad_words_token_ids=self._bad_words(body),
        )

    def _bad_words(self, body: Body) -> tuple[tuple[int, ...], ...]:
        if not body.bad_words:
            return ()
        if not all(word.strip() for word in body.bad_words):
            raise invalid("bad_words: each of them needs a character that is no space", param="bad_words")
        return self._needed_tokenizer.encode_bad_words(body.bad_words)

    def _form(self, body: FormKeys) -> AskedForm | None:
        form = body.form()
        if form is not None:
            _ = self._needed_tokenizer
        return form

    def _prompt(self, given: GivenPrompt, body: CompletionBody, policy: ReadPolicy) -> Prompt:
        if isinstance(given, str):
            adds_special = body.add_special_tokens is not False
            token_ids = self.encode(given, max_tokens=policy.longest(), add_special_tokens=adds_special)
            policy.check_length(len(token_ids))
            return Prompt(given if body.echo else None, TokenIds.of(token_ids))
        if body.add_special_tokens is not None:
            message = "add_special_tokens: it is about text, and the prompt is token ids"
            raise invalid(message, param="add_special_tokens")
        policy.check_length(len(given))
        check_token_ids(given, self._vocab_size, "prompt")
        return Prompt(self._needed_tokenizer.decode(given) if body.echo else None, TokenIds.of(given))

    def _tokenize(self, data: bytes, policy: ReadPolicy) -> ReadBody:
        body, num_unknown = _decode(data, TokenizeBody, policy)
        policy.check_model(body.model)
        longest = policy.longest()
        if (body.messages is None) == (body.prompt is None):
            raise invalid("one of prompt and messages is needed", param="prompt")
        if body.prompt is not None:
            token_ids = self.encode(
                body.prompt, max_tokens=longest, add_special_tokens=body.add_special_tokens is not False
            )
        else:
            tools = read_tool_choice(body.tools).tools
            text = self._chat_text(body, policy, tools, body.chat_template_kwargs)
            token_ids = self._needed_tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
        answer = {"count": len(token_ids), "max_model_len": longest, "tokens": token_ids}
        if body.return_token_strs:
            token_bytes = self._needed_tokenizer.token_bytes
            answer["token_strs"] = [token_bytes(each).decode("utf-8", "replace") for each in token_ids]
        return ReadBody(num_unknown=num_unknown, answer=_written(answer))

    def _detokenize(self, data: bytes, policy: ReadPolicy) -> ReadBody:
        body, num_unknown = _decode(data, DetokenizeBody, policy)
        policy.check_model(body.model)
        longest, num_tokens = policy.longest(), len(body.tokens)
        if num_tokens > longest:
            message = f"tokens: at most {longest}, which the model takes, got {num_tokens}"
            raise invalid(message, param="tokens")
        check_token_ids(body.tokens, self._vocab_size, "tokens")
        answer = _written({"prompt": self._needed_tokenizer.decode(body.tokens)})
        return ReadBody(num_unknown=num_unknown, answer=answer)


def _decode(data: bytes, kind: type[AnyBody], policy: ReadPolicy) -> tuple[AnyBody, int]:
    """Return the body and how many of its keys are unknown."""
    body, unknown = decode_body(data, kind)
    if unknown and policy.is_strict:
        raise invalid(f"unknown key {unknown[0][:64]!r}", param=unknown[0][:64])
    return body, len(unknown)


def _check_length(num_chars: int, max_tokens: int) -> None:
    if num_chars > max_tokens * MAX_CHARS_PER_TOKEN:
        raise InvalidRequest(
            f"the prompt has {num_chars} characters, which can't fit the model's {max_tokens} tokens"
        )


def _written(answer: Mapping[str, object]) -> bytes:
    data = orjson.dumps(answer)
    if len(data) > MAX_TEXT_ANSWER_BYTES:
        raise invalid(f"the answer has {len(data)} bytes; at most {MAX_TEXT_ANSWER_BYTES} are written")
    return data


class PublicPrefixes:
    """The texts of `public_prefixes`: prompts of several tenants begin with them and share their pages.

    A text is known in two forms: as a prompt that begins with it, and as the system message of a chat in the
    model's own template. Only the tokens of a public text are ever shared, never the tokens after them. Each
    text is tokenised once, in a thread.
    """

    def __init__(self, reader: PromptReader) -> None:
        self._reader = reader
        self._forms: dict[str, asyncio.Future[PublicForms]] = {}

    async def num_tokens(self, texts: Sequence[str], token_ids: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens belong to one of the texts."""
        longest = 0
        for text in texts:
            for form in await asyncio.shield(self._forms_of(text)):
                pairs = zip(form, token_ids[: len(form)], strict=False)
                longest = max(longest, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return longest

    def _forms_of(self, text: str) -> asyncio.Future[PublicForms]:
        forms = self._forms.get(text)
        if forms is None:
            if len(self._forms) >= MAX_PUBLIC_TEXTS:
                self._forms.clear()
            forms = self._forms[text] = asyncio.ensure_future(asyncio.to_thread(self._encode, text))
        return forms

    def _encode(self, text: str) -> PublicForms:
        forms = list[tuple[int, ...]]()
        for encode in (self._as_prompt, self._as_system_message):
            try:
                forms.append(tuple(encode(text)))
            # No tokenizer, no template, one without system messages, or a damaged one.
            except (InvalidRequest, ModelError) as error:
                told = {"form": encode.__name__, "num_chars": len(text), "error": str(error)}
                logger.info("a public text lacks a form", extra=told)
        return tuple(forms)

    def _as_prompt(self, text: str) -> list[int]:
        return self._reader.encode(text, max_tokens=MAX_PUBLIC_TOKENS)

    def _as_system_message(self, text: str) -> list[int]:
        messages = [{"role": "system", "content": text}]
        return self._reader.encode_chat(messages, max_tokens=MAX_PUBLIC_TOKENS, add_generation_prompt=False)


class ReadJob(msgspec.Struct, frozen=True):
    """A body for a helper to read."""

    kind: BodyKind
    policy: ReadPolicy
    num_bytes: int  # of the body, which follows


class ReadFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The fields of an ApiError. With a status of 500 the message is for the log, not for the client."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


ReadResult: TypeAlias = ReadBody | ReadFailed
_JOBS: Final = msgspec.msgpack.Decoder(ReadJob)
_RESULTS: Final[msgspec.msgpack.Decoder[ReadResult]] = msgspec.msgpack.Decoder(ReadResult)


class BodyReader:
    """Reads the bodies of one gateway, on one event loop; `close` ends its helpers."""

    def __init__(self, reader: PromptReader, helper_arguments: Sequence[str] = ()) -> None:
        """helper_arguments: of a helper's program; none: every body is read on the event loop."""
        self.reader = reader
        self._forms = FormChecker()
        self._helpers = (_Helper(helper_arguments), _Helper(helper_arguments)) if helper_arguments else ()

    @classmethod
    def from_directory(cls, directory: Path, settings: TextSettings | None = None) -> "BodyReader":
        """Return the reader for the model of `PromptReader.from_directory`, with helpers."""
        settings = settings or TextSettings()
        reader = PromptReader.from_directory(directory, settings)
        return cls(reader, [str(directory), msgspec.json.encode(settings).decode()])

    async def start(self) -> None:
        """Start the helpers, so that no request waits for their start."""
        await asyncio.gather(*(helper.start() for helper in self._helpers))

    async def read(self, kind: BodyKind, data: bytes, policy: ReadPolicy, tenant: str = "") -> ReadBody:
        """Read one body.

        Raises InvalidRequest and ApiError for faults of the client, Overloaded when too many bodies wait or a
        helper fails, and ModelError for a fault of the model's files.
        """
        read = await self._read(kind, data, policy, tenant)
        if (asked := read.asked_form) is not None:
            try:
                await self._forms.check(tenant, asked.form)
            except InvalidRequest as error:
                raise invalid(f"{asked.key}: {error}", param=asked.key) from None
        return read

    async def _read(self, kind: BodyKind, data: bytes, policy: ReadPolicy, tenant: str) -> ReadBody:
        if not self._helpers:
            return self.reader.read(kind, data, policy)
        size = len(data)
        if size <= SMALL_BYTES:
            try:
                small = msgspec.structs.replace(policy, max_chars=SMALL_BYTES)
                return self.reader.read(kind, data, small)
            except LongText as found:
                size = found.num_chars
        express, largest = self._helpers
        is_express = size <= EXPRESS_BYTES and express.turns.num_taken <= largest.turns.num_taken
        helper = express if is_express else largest
        result = await helper.do(tenant, size, ReadJob(kind, policy, len(data)), data)
        if isinstance(result, ReadBody):
            return result
        if result.status == 500:
            raise ModelError(f"a text helper failed: {result.message}")
        raise ApiError(**msgspec.structs.asdict(result))

    async def close(self) -> None:
        """Kill the helpers; their jobs fail. May be called twice."""
        await self._forms.close()
        for helper in self._helpers:
            await helper.close()


class ServedModel(msgspec.Struct, kw_only=True):
    """The model that a gateway serves: its name, the reader of its bodies, its limits."""

    name: str
    bodies: BodyReader
    service: Service
    created_s: int  # start of serving, in seconds since 1970
    defaults: SamplingParams = SamplingParams(max_tokens=None)  # max_tokens caps every answer
    known_length: int | None = None  # the last known context length of the workers

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the weights; several while workers are being replaced."""
        return " ".join(sorted({worker.fingerprint for worker in self.service.workers}))

    @property
    def max_model_len(self) -> int | None:
        """The shortest context length of all workers, so that any worker may be chosen.

        While there are no workers the last known length holds: a restarted worker takes as many tokens.
        """
        lengths = (worker.max_model_len for worker in self.service.workers)
        self.known_length = min(lengths, default=self.known_length)
        return self.known_length

    def read_policy(self, tenant: Tenant, *, is_strict: bool = False) -> ReadPolicy:
        """Return the limits for a body of the tenant."""
        return ReadPolicy(
            model=self.name,
            may_use=tenant.may_use(self.name),
            max_model_len=self.max_model_len,
            is_strict=is_strict,
        )


class HelperQueue:
    """The jobs that wait for one helper: tenants take turns, by bytes."""

    def __init__(self) -> None:
        self._is_free = True
        self._num_waiting = 0
        self._share = FairShare()
        # By tenant, none empty: the turn of each job that waits, oldest first -> the job's bytes.
        self._lanes: dict[str, dict[asyncio.Future[None], int]] = {}

    @property
    def num_taken(self) -> int:
        """The job that has the helper, and the jobs that wait for it."""
        return self._num_waiting + (not self._is_free)

    async def take(self, tenant: str, num_bytes: int) -> None:
        """Wait for the helper; the caller must then call `leave`.

        Raises Overloaded when too many jobs wait, of the tenant or of all.
        """
        if self._is_free:
            self._is_free = False
            return
        lane = self._lanes.get(tenant, {})
        if not has_slots(tenant, 1, len(lane), MAX_WAITING - self._num_waiting):
            message = f"{self._num_waiting} texts wait for their turn, {len(lane)} of them the tenant's"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        turn = asyncio.get_running_loop().create_future()
        lane[turn] = num_bytes
        self._lanes[tenant] = lane
        self._num_waiting += 1
        self._share.join(tenant, 1.0)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave()  # the turn came in the same moment; the next job has it
            elif turn in self._lanes.get(tenant, ()):
                self._remove(tenant, turn)
            raise

    def leave(self) -> None:
        """Give the helper to the waiting tenant that has had least of it."""
        self._share.age()  # a tenant that was away may have its share of the last few turns
        while (tenant := self._share.first()) is not None:
            turn, num_bytes = next(iter(self._lanes[tenant].items()))
            is_there = not turn.cancelled()  # a cancelled job's task may not have run since
            if is_there:
                self._share.serve(tenant, num_bytes)
                turn.set_result(None)
            self._remove(tenant, turn)
            if is_there:
                return
        self._is_free = True

    def _remove(self, tenant: str, turn: asyncio.Future[None]) -> None:
        lane = self._lanes[tenant]
        del lane[turn]
        self._num_waiting -= 1
        if not lane:
            del self._lanes[tenant]
            self._share.leave(tenant)


class _Helper:
    """One helper process, started when it is first needed, and the jobs that wait for it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.turns = HelperQueue()
        self._arguments = arguments
        self._process: Process | None = None
        self._running: asyncio.Task[ReadResult] | None = None
        self._is_closed = False

    async def start(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            if self._is_closed:
                raise Overloaded("the gateway is being stopped", retry_after_s=RETRY_AFTER_S)
            command = (sys.executable, "-m", "baton.gateway.api.body_reader", *self._arguments)
            self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        return self._process

    async def do(self, tenant: str, size: int, job: ReadJob, data: bytes) -> ReadResult:
        """size: what the tenant is charged for the job: bytes, or the characters of a longer text."""
        await self.turns.take(tenant, size)
        self._running = task = asyncio.create_task(self._do(job, data))
        task.add_done_callback(lambda _: self.turns.leave())
        return await asyncio.shield(task)  # the helper is busy until the result is there

    async def close(self) -> None:
        self._is_closed = True
        await self._kill()

    async def _do(self, job: ReadJob, data: bytes) -> ReadResult:
        process = await self.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(MAX_JOB_S):
                process.stdin.writelines((frame(job), data))  # no copy of a large body
                await process.stdin.drain()
                head = await process.stdout.readexactly(LENGTH_BYTES)
                return _RESULTS.decode(await process.stdout.readexactly(int.from_bytes(head, "big")))
        except TimeoutError:
            await self._kill()
            raise InvalidRequest(f"the body takes longer than {MAX_JOB_S:g} s to be read") from None
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            await self._kill()
            logger.warning("a text helper failed: %r", error)
            raise Overloaded("a text helper failed", retry_after_s=RETRY_AFTER_S) from None

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


def serve_jobs(reader: PromptReader, jobs: BinaryIO, results: BinaryIO) -> None:
    """Read the bodies of `jobs` until it ends; a failure ends one job alone."""
    while len(head := jobs.read(LENGTH_BYTES)) == LENGTH_BYTES:
        job = _JOBS.decode(jobs.read(int.from_bytes(head, "big")))
        results.write(frame(_read(reader, job, jobs.read(job.num_bytes))))
        results.flush()


def _read(reader: PromptReader, job: ReadJob, data: bytes) -> ReadResult:
    try:
        return reader.read(job.kind, data, job.policy)
    except (RecursionError, MemoryError) as error:
        message = f"the body is too much to be read: {type(error).__name__}"
        return ReadFailed(status=400, message=message)
    except Exception as error:
        if not isinstance(error, BatonError):
            logger.exception("a body could not be read")
        answer = as_api_error(error)
        return ReadFailed(
            status=answer.status,
            message=str(error).encode("utf-8", "backslashreplace").decode(),
            code=answer.code,
            param=answer.param,
            retry_after_s=answer.retry_after_s,
        )


def _main(directory: str, settings: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the gateway ends a helper
    lower_priority()
    try:
        reader = PromptReader.from_directory(
            Path(directory), msgspec.json.decode(settings, type=TextSettings)
        )
        serve_jobs(reader, sys.stdin.buffer, sys.stdout.buffer)
    except (BrokenPipeError, BatonError) as error:
        sys.exit(f"text helper: {error}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
