"""Reads one body of a request: decodes and checks the body, renders its chat, tokenises its prompts.

`PromptReader` is pure, and may take long for a large body: gateway/api/body_reader.py says where it runs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Literal, TypeAlias

import msgspec
import orjson

from baton.config.gateway import TextSettings
from baton.errors import InvalidRequest
from baton.gateway.api.body import (
    AskedForm,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    FormKeys,
    GivenPrompt,
    TokenizeBody,
    check_sampled_ids,
    check_token_ids,
    decode_body,
    list_prompts,
    raw_fields,
    truncated,
)
from baton.gateway.api.call import AskedCall, Prompt, read_call
from baton.gateway.api.dialects import messages, responses
from baton.gateway.api.errors import ApiError, invalid
from baton.gateway.api.tool_choice import Tool, read_tool_choice
from baton.gateway.text.answer_grammar import AskedCalls, Tags
from baton.gateway.text.answer_parsing import REASONING_PARSERS, ModelParsers, frame_of
from baton.gateway.text.answer_reader import AnswerParsing, ReasoningState
from baton.gateway.text.chat_template import REASONING_EFFORT, ChatTemplate, Message, read_messages
from baton.gateway.text.tokenizer import Tokenizer
from baton.gateway.text.tool_calls import has_tagged_arguments
from baton.request import MAX_BAD_WORD_TOKENS, SamplingParams, StructuredOutputs, TokenIds
from baton.tokenizer_file import read_vocab_size

MAX_CHARS_PER_TOKEN: Final = 16  # on average; a longer prompt cannot fit the model and is not tokenised
MAX_TEXT_ANSWER_BYTES: Final = 8 * 2**20  # of /tokenize and /detokenize
NO_WORKERS_RETRY_S: Final = 2.0

BodyKind: TypeAlias = Literal[
    "chat", "completion", "either", "response", "message", "tokenize", "detokenize", "count_tokens"
]
BODIES: Final[dict[BodyKind, type[Any]]] = {
    "chat": ChatBody,
    "completion": CompletionBody,
    "response": responses.ResponsesBody,
    "message": messages.MessageBody,
    "count_tokens": messages.CountBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
}
# Path -> the kind of its bodies, and a summary.
POSTS: Final[dict[str, tuple[BodyKind, str]]] = {
    "/v1/chat/completions": ("chat", "The next turn of a chat, whole or as server-sent events."),
    "/v1/completions": ("completion", "The continuation of a prompt, whole or as server-sent events."),
    "/v1/responses": ("response", "The next turn of a conversation, in the form of OpenAI's Responses."),
    "/v1/messages": ("message", "The next turn of a chat, in Anthropic's form."),
    "/v1/messages/count_tokens": ("count_tokens", "The number of tokens of a chat in Anthropic's form."),
    "/tokenize": ("tokenize", "Text, or a chat, as token ids."),
    "/detokenize": ("detokenize", "Token ids as text."),
}


class TextAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a body that asks about tokens."""

    num_unknown: int = 0  # keys of the body
    json: bytes


class ReadPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that a body is checked against."""

    model: str  # the served name
    may_use: bool  # the tenant may use the model
    adapters: dict[str, bool] = {}  # the served name of each adapter -> the tenant may use it
    max_model_len: int | None  # None: no worker has joined yet
    is_strict: bool = False  # unknown keys are refused
    max_chars: int | None = None  # of a chat's text; see `LongText`
    may_store: bool = False  # responses are stored
    defaults: SamplingParams = SamplingParams(max_tokens=None)  # max_tokens caps every answer

    def longest(self) -> int:
        """Return the model's context length in tokens. Raises ApiError 503 while it is not known."""
        if self.max_model_len is None:
            message = "no worker has joined yet: the cluster is starting"
            raise ApiError(503, message, code="no_worker", retry_after_s=NO_WORKERS_RETRY_S)
        return self.max_model_len

    def check_model(self, asked_for: str | None) -> None:
        """Raise ApiError 404 for another model, 403 for one that the tenant may not use. None: any model."""
        name = self.model if asked_for is None else asked_for
        may_use = self.may_use if name == self.model else self.adapters.get(name)
        if may_use is None:
            # No other name: the tenant may not know it.
            message = f"The model `{name[:80]}` does not exist. GET /v1/models lists the models."
            raise ApiError(404, message, code="model_not_found", param="model")
        if not may_use:
            named = "first model, and the request names none" if asked_for is None else f"model {name!r}"
            raise ApiError(403, f"this key may not use the {named}", code="model_forbidden")

    def check_length(self, num_tokens: int) -> None:
        """Raise ApiError 400 for a prompt length that the model cannot take, 503 while no length is known."""
        longest = self.longest()
        if not num_tokens:
            message = "the prompt is empty: at least one token is needed"
            raise ApiError(400, message, code="invalid_value", param="prompt")
        if num_tokens >= longest:
            raise _too_long(f"{num_tokens} tokens > {longest - 1} maximum", longest)


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
            ChatTemplate.from_directory(
                directory, settings.chat_template, settings.default_chat_template_kwargs
            ),
            read_vocab_size(directory),
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
        )

    @property
    def _needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: prompts are token ids")
        return self.tokenizer

    def read(
        self, kind: BodyKind, data: bytes, policy: ReadPolicy, history: bytes = b""
    ) -> AskedCall | TextAnswer:
        """Read a body. kind: "either" is a chat when the body has messages, else a completion; both stream.

        history: the conversation before the body of a response. Raises LongText for a chat with a text that
        is longer than the policy's `max_chars`.
        """
        is_streamed = kind == "either"
        if kind == "either":
            kind = "chat" if "messages" in raw_fields(data) else "completion"
        reads: dict[BodyKind, Callable[[Any, ReadPolicy], AskedCall | TextAnswer]] = {
            "chat": self._chat,
            "completion": self._completion,
            "response": partial(self._response, history),
            "message": self._message,
            "count_tokens": self._count_tokens,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
        }
        struct = BODIES[kind]
        body, unknown = decode_body(data, struct)
        if unknown and (policy.is_strict or struct.refuses_unknown):
            key = unknown[0][:64]  # `renamed` leaves a message alone that does not begin with the key
            raise ApiError(400, f"unknown key {key!r}", code="invalid_value", param=key)
        policy.check_model(body.model)
        if is_streamed:
            body = msgspec.structs.replace(body, stream=True)
        return msgspec.structs.replace(reads[kind](body, policy), num_unknown=len(unknown))

    def encode(self, text: str, *, max_tokens: int | None, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Text that cannot fit `max_tokens` raises before it is tokenised.

        max_tokens: None for a text that is cut to fit, in tokens.
        """
        tokenizer = self._needed_tokenizer
        _check_length(len(text), max_tokens)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self, messages: Sequence[Message], *, max_tokens: int, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the token ids of a conversation as the model's template renders it."""
        body = TokenizeBody(messages=list(map(dict, messages)), add_generation_prompt=add_generation_prompt)
        text = self._chat_text(body, max_tokens=max_tokens)
        return self._needed_tokenizer.encode(text, add_special_tokens=False)

    def _chat_text(
        self,
        body: ChatBody | TokenizeBody,
        *,
        max_tokens: int | None,
        max_chars: int | None = None,
        tools: Sequence[Tool] = (),
        kwargs: Message | None = None,
    ) -> str:
        """Return the text of a body's messages. Raises LongText for more than `max_chars`."""
        _, template = self._needed_tokenizer, self._chat_template
        if template is None:
            raise InvalidRequest("the model has no chat template: it completes text and cannot chat")
        if tools and self._parsers.tool_call_parser is None:
            message = (
                "tools: this model's chat template has none that can be read: "
                "leave them out, or give the model a chat template that has them"
            )
            raise ApiError(400, message, code="unsupported", param="tools")
        read = read_messages(body.messages or ())
        _check_length(sum(len(str(message.get("content"))) for message in read), max_tokens)
        text = template.render(
            read,
            tools=tools or None,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            kwargs=kwargs,
        )
        _check_length(len(text), max_tokens)
        if max_chars is not None and len(text) > max_chars:
            raise LongText(len(text))
        return text

    def _response(self, history: bytes, body: responses.ResponsesBody, policy: ReadPolicy) -> AskedCall:
        chat, asked = responses.as_chat(body, history, may_store=policy.may_store)
        return msgspec.structs.replace(self._chat(chat, policy), dialect="responses", response=asked)

    def _message(self, body: messages.PromptBody, policy: ReadPolicy) -> AskedCall:
        chat = messages.as_chat(
            body,
            has_thinking_switch=self._chat_template is not None
            and self._chat_template.reads("enable_thinking", has_tools=bool(body.tools)),
            has_reasoning=self._parsers.reasoning_parser is not None,
        )
        return msgspec.structs.replace(self._chat(chat, policy), dialect="messages")

    def _count_tokens(self, body: messages.CountBody, policy: ReadPolicy) -> TextAnswer:
        (prompt,) = self._message(body, policy).prompts
        return TextAnswer(json=orjson.dumps({"input_tokens": len(prompt.token_ids)}))

    def _chat(self, body: ChatBody, policy: ReadPolicy) -> AskedCall:
        check_sampled_ids(body, self._vocab_size)
        calls = read_tool_choice(body.tools, body.tool_choice, body.parallel_tool_calls)
        kwargs = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            kwargs[REASONING_EFFORT] = body.reasoning_effort
        text = self._chat_text(
            body,
            max_tokens=_max_text_tokens(body, policy),
            max_chars=policy.max_chars,
            tools=_shown(calls),
            kwargs=kwargs,
        )
        began_s = perf_counter()
        token_ids = self._needed_tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
        tokenised_s = perf_counter() - began_s
        token_ids = truncated(token_ids, body, policy.longest())
        policy.check_length(len(token_ids))
        state = self._reasoning_state(text)
        return read_call(
            body,
            policy.defaults,
            form=self._framed(self._form(body), calls, state),
            bad_words_token_ids=self._bad_words(body),
            parsing=self._parsing(body, calls, state),
            prompts=(Prompt(None, TokenIds.of(token_ids)),),
            tokenised_s=tokenised_s,
        )

    def _reasoning_state(self, prompt: str) -> ReasoningState:
        parser = REASONING_PARSERS.get(self._parsers.reasoning_parser or "")
        return ReasoningState.AFTER if parser is None else parser.state(prompt)

    def _parsing(self, body: ChatBody, calls: AskedCalls | None, state: ReasoningState) -> AnswerParsing:
        parser = None if calls is None else self._parsers.tool_call_parser
        reasoning = None if body.separate_reasoning is False else self._parsers.reasoning_parser
        tags = self._tags.split("" if reasoning is None else REASONING_PARSERS[reasoning].tags)
        return AnswerParsing(
            tool_call_parser=parser,
            reasoning_parser=reasoning,
            reasoning_state=state,
            is_parallel=calls is None or calls.is_parallel,
            is_named=calls is not None and calls.is_named,
            # The tags of calls are special tokens in some vocabularies.
            keeps_special_tokens=parser is not None or not self._special_tokens.isdisjoint(tags),
            text_arguments=calls.text_arguments if calls and has_tagged_arguments(parser) else {},
        )

    def _framed(
        self, asked: AskedForm | None, calls: AskedCalls | None, state: ReasoningState
    ) -> AskedForm | None:
        """Return the form of the whole answer: reasoning, calls of tools, and the form that was asked for."""
        key = "tool_choice" if calls is not None and calls.is_required else "tools"
        if asked is not None and calls is not None and calls.is_required:
            raise invalid(asked.key, f"{key} asks for calls, and an answer of calls has no other form")
        try:
            frame = frame_of(self._parsers, state, self._tags, calls=calls, has_form=asked is not None)
            if frame is None:
                return asked
            if asked is not None:
                return AskedForm(asked.key, msgspec.structs.replace(asked.form, frame=frame))
            return AskedForm(key, msgspec.convert({"frame": frame}, StructuredOutputs))
        except (InvalidRequest, msgspec.ValidationError) as error:
            raise invalid(key, str(error)) from None

    def _completion(self, body: CompletionBody, policy: ReadPolicy) -> AskedCall:
        check_sampled_ids(body, self._vocab_size)
        began_s = perf_counter()
        prompts = tuple(self._prompt(given, body, policy) for given in list_prompts(body.prompt))
        tokenised_s = perf_counter() - began_s
        return read_call(
            body,
            policy.defaults,
            form=self._form(body),
            bad_words_token_ids=self._bad_words(body),
            parsing=AnswerParsing(),
            prompts=prompts,
            tokenised_s=tokenised_s,
        )

    def _bad_words(self, body: Body) -> tuple[tuple[int, ...], ...]:
        if not body.bad_words:
            return ()
        token_ids = self._needed_tokenizer.encode_bad_words(body.bad_words)
        if sum(map(len, token_ids)) > MAX_BAD_WORD_TOKENS:
            raise invalid("bad_words", f"at most {MAX_BAD_WORD_TOKENS} tokens together")
        return token_ids

    def _form(self, body: FormKeys) -> AskedForm | None:
        form = body.form()
        if form is not None:
            _ = self._needed_tokenizer
        return form

    def _prompt(self, given: GivenPrompt, body: CompletionBody, policy: ReadPolicy) -> Prompt:
        if isinstance(given, str):
            adds_special = body.add_special_tokens is not False
            most = _max_text_tokens(body, policy)
            all_ids = self.encode(given, max_tokens=most, add_special_tokens=adds_special)
            token_ids = truncated(all_ids, body, policy.longest())
            policy.check_length(len(token_ids))
            is_whole = len(token_ids) == len(all_ids)
            return Prompt(self._echo(token_ids, given if is_whole else None, body), TokenIds.of(token_ids))
        if body.add_special_tokens is not None:
            raise invalid("add_special_tokens", "it is about text, and the prompt is token ids")
        token_ids = truncated(given, body, policy.longest())
        policy.check_length(len(token_ids))
        check_token_ids(given, self._vocab_size, "prompt")
        return Prompt(self._echo(token_ids, None, body), TokenIds.of(token_ids))

    def _echo(self, token_ids: list[int], text: str | None, body: CompletionBody) -> str | None:
        """Return the text to echo: the given text, or the tokens decoded as `text_offset` counts them."""
        if not body.echo or text is not None:
            return text if body.echo else None
        return self._needed_tokenizer.decode(token_ids, skip_special_tokens=False)

    def _tokenize(self, body: TokenizeBody, policy: ReadPolicy) -> TextAnswer:
        longest = policy.longest()
        if (body.messages is None) == (body.prompt is None):
            raise invalid("prompt", "one of prompt and messages is needed")
        if body.prompt is not None:
            token_ids = self.encode(
                body.prompt, max_tokens=longest, add_special_tokens=body.add_special_tokens is not False
            )
        else:
            tools = _shown(read_tool_choice(body.tools))
            text = self._chat_text(
                body,
                max_tokens=longest,
                max_chars=policy.max_chars,
                tools=tools,
                kwargs=body.chat_template_kwargs,
            )
            token_ids = self._needed_tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
        answer = {"count": len(token_ids), "max_model_len": longest, "tokens": token_ids}
        if body.return_token_strs:
            answer["token_strs"] = [self._needed_tokenizer.token(each) for each in token_ids]
        return _written(answer)

    def _detokenize(self, body: DetokenizeBody, policy: ReadPolicy) -> TextAnswer:
        longest, num_tokens = policy.longest(), len(body.tokens)
        if num_tokens > longest:
            raise invalid("tokens", f"at most {longest}, which the model takes, got {num_tokens}")
        check_token_ids(body.tokens, self._vocab_size, "tokens")
        text = self._needed_tokenizer.decode(body.tokens, skip_special_tokens=False)
        return _written({"prompt": text})


def _shown(calls: AskedCalls | None) -> list[Tool]:
    return [] if calls is None else calls.shown


def _max_text_tokens(body: Body, policy: ReadPolicy) -> int | None:
    """Return the tokens that a prompt's text may have; None when its tokens are cut to fit."""
    return policy.longest() if body.truncate_prompt_tokens is None else None


def _check_length(num_chars: int, max_tokens: int | None) -> None:
    if max_tokens is not None and num_chars > max_tokens * MAX_CHARS_PER_TOKEN:
        raise _too_long(f"{num_chars} characters cannot fit", max_tokens)


def _too_long(problem: str, max_model_len: int) -> ApiError:
    """Return the error for a prompt that exceeds the context length.

    Clients that shorten the conversation and try again know the code, or the words: Anthropic's are
    "prompt is too long", those of OpenAI and vLLM "maximum context length".
    """
    message = (
        f"prompt is too long: {problem}. "
        f"This model's maximum context length is {max_model_len} tokens, one of them for the answer."
    )
    return ApiError(400, message, code="context_length_exceeded", param="prompt")


def _written(answer: Mapping[str, object]) -> TextAnswer:
    data = orjson.dumps(answer)
    if len(data) > MAX_TEXT_ANSWER_BYTES:
        raise InvalidRequest(f"the answer has {len(data)} bytes; at most {MAX_TEXT_ANSWER_BYTES} are written")
    return TextAnswer(json=data)
