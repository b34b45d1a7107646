"""From the bytes of a body to its prompts as token ids: what takes long of a large body, in one pure part.

Small bodies are read on the event loop. Large ones are read by a helper process (gateway/text/helper.py),
which has a PromptReader of its own: decoding JSON and rendering templates hold the interpreter's lock, so
that a thread would hold the loop as well.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import orjson

from baton.errors import InvalidRequest, shown
from baton.gateway.api.call import (
    GivenPrompt,
    Prompt,
    check_sampled_ids,
    check_token_ids,
    list_prompts,
    refuse_unsupported_chat,
    refuse_unsupported_completion,
)
from baton.gateway.api.errors import ApiError, invalid
from baton.gateway.api.types import (
    AnyBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    check_depth,
    decode_body,
)
from baton.gateway.text.chat_template import ChatTemplate, Message
from baton.gateway.text.tokenizer import Tokenizer
from baton.gateway.text.tools import Tool, usable_tools

# Chat messages as clients write them, checked and in the one form that chat templates read.
#
# `content` is text, or parts such as `{"type": "text", "text": "Hi"}` whose texts become lines, as in vLLM.

EXAMPLE: Final = '{"role": "user", "content": "Hi"}'


def read_messages(messages: object) -> list[Message]:
    """One conversation; raises InvalidRequest that names the message and its key."""
    if isinstance(messages, Mapping):
        raise InvalidRequest(f"messages: expected a list of messages such as [{EXAMPLE}], got one message")
    if isinstance(messages, str | bytes) or not isinstance(messages, Iterable):
        raise InvalidRequest(f"messages: expected a list such as [{EXAMPLE}], got {shown(messages)}")
    read = [_read(message, f"message {index}") for index, message in enumerate(messages)]
    if not read:
        raise InvalidRequest("messages: expected at least one message, got none")
    return read


def _read(message: object, name: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{name}: expected a dict such as {EXAMPLE}, got {shown(message)}")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{name}: role: expected text such as 'user', got {_value(message, 'role')}")
    message = _with_read_calls(message, name)
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            f"{name}: content: expected text or a list of text parts, got {_value(message, 'content')}"
        )
    texts = [_text(part, f"{name}: content[{index}]") for index, part in enumerate(content)]
    return {**message, "content": "\n".join(texts)}


def _with_read_calls(message: Message, name: str) -> Message:
    """Templates write arguments as JSON; clients send them as text, which would come out in quotes."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {
        **message,
        "tool_calls": [_read_call(call, f"{name}: tool_calls[{at}]") for at, call in enumerate(calls)],
    }


def _read_call(call: object, name: str) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        read = msgspec.json.decode(arguments or "{}", type=dict[str, object])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise InvalidRequest(
            f"{name}: arguments: expected the JSON of an object, got {shown(arguments)}"
        ) from None
    check_depth(arguments.encode("utf-8", "replace"), f"{name}: arguments: the JSON")
    return {**call, "function": {**function, "arguments": read}}


def _text(part: object, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequest(f'{name}: expected {{"type": "text", "text": "..."}}, got {shown(part)}')
    return str(part["text"])


def _value(message: Mapping[str, object], key: str) -> str:
    return shown(message[key]) if key in message else "nothing"


MAX_CHARS_PER_TOKEN: Final = 16  # on average: a prompt with more for what the model takes is not tokenised
MAX_TEXT_ANSWER_BYTES: Final = 8 * 2**20  # of /tokenize and /detokenize
NO_WORKERS_RETRY_S: Final = 2.0
Kind: TypeAlias = Literal["chat", "completion", "either", "tokenize", "detokenize"]


class ReadTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a body is checked against."""

    model: str  # as it is served
    may_use: bool  # the tenant, this model
    max_model_len: int | None  # None: no worker has been there yet
    is_strict: bool = False  # refuse keys that are not known

    def longest(self) -> int:
        """Tokens that the model takes. Raises ApiError 503 while nobody knows."""
        if self.max_model_len is None:
            message = "no worker has been there yet: the cluster is being started"
            raise ApiError(503, message, code="no_worker", retry_after_s=NO_WORKERS_RETRY_S)
        return self.max_model_len

    def check_model(self, asked_for: str | None) -> None:
        """None asks for whatever there is. Raises ApiError 404 and 403."""
        if asked_for is not None and asked_for != self.model:
            message = f"the model {asked_for[:80]!r} does not exist; {self.model!r} does"
            raise ApiError(404, message, code="model_not_found", param="model")
        if not self.may_use:
            raise ApiError(403, f"this key may not use the model {self.model!r}", code="model_forbidden")

    def check_length(self, num_tokens: int) -> None:
        """Raises ApiError, or InvalidRequest, for a prompt that the model cannot take."""
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


class ReadCall(NamedTuple):
    """A chat or a completion: its body without what has been read of it, and its prompts."""

    body: ChatBody | CompletionBody
    prompts: tuple[Prompt, ...]
    has_tools: bool  # that the model was told of
    num_unknown: int  # keys of the body


class TextAnswer(NamedTuple):
    """The answer of `/tokenize` or `/detokenize`, as JSON."""

    body: bytes
    num_unknown: int


class Chat(NamedTuple):
    messages: Sequence[Message]
    tools: Sequence[Tool] | None = None


class PromptReader:
    """Pure; each method raises InvalidRequest and ApiError, which say what the client should change."""

    def __init__(
        self, tokenizer: Tokenizer | None, chat_template: ChatTemplate | None, vocab_size: int | None = None
    ) -> None:
        """vocab_size: of the model; None where it is not known."""
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.vocab_size = vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequest when the model has none."""
        if self._tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: prompts are token ids")
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises InvalidRequest when the model has none."""
        if self._chat_template is None:
            raise InvalidRequest("the model has no chat template: it completes text and cannot chat")
        return self._chat_template

    def read(self, kind: Kind, data: bytes, request_policy: ReadTerms) -> ReadCall | TextAnswer:
        """`either`: a chat where the body has messages, else a completion."""
        match kind:
            case "chat":
                return self.chat(data, request_policy)
            case "completion":
                return self.completion(data, request_policy)
            case "either":
                return (self.chat if has_messages(data) else self.completion)(data, request_policy)
            case "tokenize":
                return self.tokenize(data, request_policy)
            case "detokenize":
                return self.detokenize(data, request_policy)

    def chat(self, data: bytes, request_policy: ReadTerms) -> ReadCall:
        body, num_unknown = _decode(data, ChatBody, request_policy)
        refuse_unsupported_chat(body)
        check_sampled_ids(body, self.vocab_size)
        tools = usable_tools(body.tools, body.tool_choice)
        request_policy.check_model(body.model)
        text, token_ids = self.encode_chat(
            Chat(body.messages, tools),
            max_tokens=request_policy.longest(),
            add_generation_prompt=body.add_generation_prompt is not False,
            add_special_tokens=bool(body.add_special_tokens),
            kwargs=_template_kwargs(body),
        )
        request_policy.check_length(len(token_ids))
        rest = msgspec.structs.replace(
            body, messages=[{}], tools=None, tool_choice=None, functions=None, chat_template_kwargs=None
        )
        return ReadCall(rest, (Prompt(text, tuple(token_ids)),), bool(tools), num_unknown)

    def completion(self, data: bytes, request_policy: ReadTerms) -> ReadCall:
        body, num_unknown = _decode(data, CompletionBody, request_policy)
        refuse_unsupported_completion(body)
        check_sampled_ids(body, self.vocab_size)
        request_policy.check_model(body.model)
        prompts = [self._prompt(given, body, request_policy) for given in list_prompts(body.prompt)]
        return ReadCall(msgspec.structs.replace(body, prompt=None), tuple(prompts), False, num_unknown)

    def tokenize(self, data: bytes, request_policy: ReadTerms) -> TextAnswer:
        body, num_unknown = _decode(data, TokenizeBody, request_policy)
        request_policy.check_model(body.model)
        token_ids = self._tokens_of(body, request_policy)
        answer = {"count": len(token_ids), "max_model_len": request_policy.longest(), "tokens": token_ids}
        if body.return_token_strs:
            token_bytes = self.tokenizer.token_bytes
            answer["token_strs"] = [token_bytes(each).decode("utf-8", "replace") for each in token_ids]
        return TextAnswer(_bounded(orjson.dumps(answer)), num_unknown)

    def detokenize(self, data: bytes, request_policy: ReadTerms) -> TextAnswer:
        body, num_unknown = _decode(data, DetokenizeBody, request_policy)
        request_policy.check_model(body.model)
        longest = request_policy.longest()
        if len(body.tokens) > longest:
            raise invalid(
                f"tokens: at most {longest}, which the model takes, got {len(body.tokens)}", param="tokens"
            )
        check_token_ids(body.tokens, self.vocab_size, "tokens")
        return TextAnswer(_bounded(orjson.dumps({"prompt": self.tokenizer.decode(body.tokens)})), num_unknown)

    def encode(self, text: str, *, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequest for what cannot be within `max_tokens`, before it is tokenised."""
        tokenizer = self.tokenizer
        _check_length(len(text), max_tokens)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        chat: Chat,
        *,
        max_tokens: int,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        kwargs: Message | None = None,
    ) -> tuple[str, list[int]]:
        """The conversation as the model's template writes it, and its token ids."""
        tokenizer, template = self.tokenizer, self.chat_template
        if chat.tools and template.tool_form is None:
            message = "tools: this model's chat template has none; leave them out"
            raise ApiError(400, message, code="unsupported", param="tools")
        read = read_messages(chat.messages)
        _check_length(sum(len(str(message.get("content"))) for message in read), max_tokens)
        text = template.render(
            read, tools=chat.tools, add_generation_prompt=add_generation_prompt, kwargs=kwargs
        )
        _check_length(len(text), max_tokens)
        return text, tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _prompt(self, given: GivenPrompt, body: CompletionBody, request_policy: ReadTerms) -> Prompt:
        if isinstance(given, str):
            adds_special = body.add_special_tokens is not False
            token_ids = self.encode(
                given, max_tokens=request_policy.longest(), add_special_tokens=adds_special
            )
            request_policy.check_length(len(token_ids))
            return Prompt(given, tuple(token_ids))
        if body.add_special_tokens is not None:
            message = "add_special_tokens: it is about text, and the prompt is token ids"
            raise invalid(message, param="add_special_tokens")
        request_policy.check_length(len(given))
        check_token_ids(given, self.vocab_size, "prompt")
        return Prompt(self.tokenizer.decode(given) if body.echo else None, tuple(given))

    def _tokens_of(self, body: TokenizeBody, request_policy: ReadTerms) -> list[int]:
        """A prompt may have any number of tokens here: nothing is computed from it."""
        longest = request_policy.longest()
        if body.messages is not None and body.prompt is None:
            _, token_ids = self.encode_chat(
                Chat(body.messages, usable_tools(body.tools, None)),
                max_tokens=longest,
                add_generation_prompt=body.add_generation_prompt is not False,
                add_special_tokens=bool(body.add_special_tokens),
                kwargs=body.chat_template_kwargs,
            )
            return token_ids
        if body.prompt is None or body.messages is not None:
            raise invalid("one of prompt and messages is needed", param="prompt")
        return self.encode(
            body.prompt, max_tokens=longest, add_special_tokens=body.add_special_tokens is not False
        )


_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def has_messages(data: bytes) -> bool:
    """Whether a body is one of a chat; False for what is no object: that is refused where it is read."""
    try:
        return "messages" in _FIELDS.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def _decode(data: bytes, kind: type[AnyBody], request_policy: ReadTerms) -> tuple[AnyBody, int]:
    """The body, and how many of its keys are not known."""
    body, unknown = decode_body(data, kind)
    if unknown and request_policy.is_strict:
        raise invalid(f"unknown key {unknown[0][:64]!r}", param=unknown[0][:64])
    return body, len(unknown)


def _template_kwargs(body: ChatBody) -> Message:
    """The caller's variables of the chat template; `reasoning_effort` is one of them, as in vLLM."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
    return kwargs


def _check_length(num_chars: int, max_tokens: int) -> None:
    if num_chars > max_tokens * MAX_CHARS_PER_TOKEN:
        raise InvalidRequest(
            f"the prompt has {num_chars} characters, which can't fit the model's {max_tokens} tokens"
        )


def _bounded(answer: bytes) -> bytes:
    if len(answer) > MAX_TEXT_ANSWER_BYTES:
        raise invalid(f"the answer has {len(answer)} bytes; at most {MAX_TEXT_ANSWER_BYTES} are written")
    return answer
