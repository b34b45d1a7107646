"""Reads a body: decodes and checks it, renders its chat, tokenises its prompts.

Reading is pure, so that helper processes can do it (gateway/text/work.py). A large body takes long, and
decoding JSON and rendering templates hold the interpreter's lock.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import orjson

from baton.errors import InvalidRequest, shown
from baton.gateway.api.call import (
    AnyBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GivenPrompt,
    TokenizeBody,
    check_depth,
    check_sampled_ids,
    check_token_ids,
    decode_body,
    list_prompts,
)
from baton.gateway.api.errors import ApiError, invalid
from baton.gateway.text.chat_template import ChatTemplate, Message
from baton.gateway.text.tokenizer import Tokenizer
from baton.gateway.text.tools import Tool, usable_tools

EXAMPLE: Final = '{"role": "user", "content": "Hi"}'
MAX_CHARS_PER_TOKEN: Final = 16  # on average; a longer prompt cannot fit the model and is not tokenised
MAX_TEXT_ANSWER_BYTES: Final = 8 * 2**20  # of /tokenize and /detokenize
NO_WORKERS_RETRY_S: Final = 2.0
TOKEN_ID_TYPE: Final = "i"  # of array: four bytes
BodyKind: TypeAlias = Literal["chat", "completion", "either", "tokenize", "detokenize"]


class ReadPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that a body is checked against."""

    model: str  # the served name
    may_use: bool  # the tenant may use the model
    max_model_len: int | None  # None: no worker has joined yet
    is_strict: bool = False  # unknown keys are refused

    def longest(self) -> int:
        """Return the model's context length in tokens. Raises ApiError 503 while it is not known."""
        if self.max_model_len is None:
            message = "no worker has been there yet: the cluster is being started"
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
    prompts: list[tuple[str | None, bytes]] = []  # text where the call echoes it, and packed token ids
    has_tools: bool = False  # the model was told of tools


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return the ids as four bytes each."""
    return array(TOKEN_ID_TYPE, token_ids).tobytes()


def unpack_token_ids(data: bytes) -> tuple[int, ...]:
    """Return the ids that `pack_token_ids` has packed."""
    token_ids = array(TOKEN_ID_TYPE)
    token_ids.frombytes(data)
    return tuple(token_ids)


class PromptReader:
    """Reads bodies for one model. Raises InvalidRequest and ApiError for what the client can mend."""

    def __init__(
        self, tokenizer: Tokenizer | None, chat_template: ChatTemplate | None, vocab_size: int | None = None
    ) -> None:
        """vocab_size: of the model; None when it is not known."""
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.vocab_size = vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises InvalidRequest when the model has none."""
        if self._tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: prompts are token ids")
        return self._tokenizer

    def read(self, kind: BodyKind, data: bytes, policy: ReadPolicy) -> ReadBody:
        """Read a body. kind: "either" is a chat when the body has messages, else a completion."""
        if kind == "either":
            kind = "chat" if _has_messages(data) else "completion"
        read = {
            "chat": self._chat,
            "completion": self._completion,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
        }[kind]
        return read(data, policy)

    def encode(self, text: str, *, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Text that cannot fit `max_tokens` raises before it is tokenised."""
        tokenizer = self.tokenizer
        _check_length(len(text), max_tokens)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        kwargs: Message | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation as the model's template renders it."""
        tokenizer, template = self.tokenizer, self._chat_template
        if template is None:
            raise InvalidRequest("the model has no chat template: it completes text and cannot chat")
        if tools and template.tool_form is None:
            message = "tools: this model's chat template has none; leave them out"
            raise ApiError(400, message, code="unsupported", param="tools")
        read = read_messages(messages)
        _check_length(sum(len(str(message.get("content"))) for message in read), max_tokens)
        text = template.render(read, tools=tools, add_generation_prompt=add_generation_prompt, kwargs=kwargs)
        _check_length(len(text), max_tokens)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _chat(self, data: bytes, policy: ReadPolicy) -> ReadBody:
        body, num_unknown = _decode(data, ChatBody, policy)
        check_sampled_ids(body, self.vocab_size)
        tools = usable_tools(body.tools, body.tool_choice)
        policy.check_model(body.model)
        kwargs = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            kwargs["reasoning_effort"] = body.reasoning_effort  # a variable of the template, as in vLLM
        token_ids = self.encode_chat(
            body.messages,
            max_tokens=policy.longest(),
            tools=tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            add_special_tokens=bool(body.add_special_tokens),
            kwargs=kwargs,
        )
        policy.check_length(len(token_ids))
        rest = msgspec.structs.replace(
            body, messages=[{}], tools=None, tool_choice=None, chat_template_kwargs=None
        )
        prompt = (None, pack_token_ids(token_ids))
        return ReadBody(num_unknown=num_unknown, chat=rest, prompts=[prompt], has_tools=bool(tools))

    def _completion(self, data: bytes, policy: ReadPolicy) -> ReadBody:
        body, num_unknown = _decode(data, CompletionBody, policy)
        check_sampled_ids(body, self.vocab_size)
        policy.check_model(body.model)
        prompts = [self._prompt(given, body, policy) for given in list_prompts(body.prompt)]
        rest = msgspec.structs.replace(body, prompt=None)
        return ReadBody(num_unknown=num_unknown, completion=rest, prompts=prompts)

    def _prompt(
        self, given: GivenPrompt, body: CompletionBody, policy: ReadPolicy
    ) -> tuple[str | None, bytes]:
        """Return the text where the call echoes it, and the packed token ids."""
        if isinstance(given, str):
            adds_special = body.add_special_tokens is not False
            token_ids = self.encode(given, max_tokens=policy.longest(), add_special_tokens=adds_special)
            policy.check_length(len(token_ids))
            return (given if body.echo else None), pack_token_ids(token_ids)
        if body.add_special_tokens is not None:
            message = "add_special_tokens: it is about text, and the prompt is token ids"
            raise invalid(message, param="add_special_tokens")
        policy.check_length(len(given))
        check_token_ids(given, self.vocab_size, "prompt")
        return (self.tokenizer.decode(given) if body.echo else None), pack_token_ids(given)

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
            token_ids = self.encode_chat(
                body.messages or (),
                max_tokens=longest,
                tools=usable_tools(body.tools, None),
                add_generation_prompt=body.add_generation_prompt is not False,
                add_special_tokens=bool(body.add_special_tokens),
                kwargs=body.chat_template_kwargs,
            )
        answer = {"count": len(token_ids), "max_model_len": longest, "tokens": token_ids}
        if body.return_token_strs:
            token_bytes = self.tokenizer.token_bytes
            answer["token_strs"] = [token_bytes(each).decode("utf-8", "replace") for each in token_ids]
        return ReadBody(num_unknown=num_unknown, answer=_written(answer))

    def _detokenize(self, data: bytes, policy: ReadPolicy) -> ReadBody:
        body, num_unknown = _decode(data, DetokenizeBody, policy)
        policy.check_model(body.model)
        longest, num_tokens = policy.longest(), len(body.tokens)
        if num_tokens > longest:
            message = f"tokens: at most {longest}, which the model takes, got {num_tokens}"
            raise invalid(message, param="tokens")
        check_token_ids(body.tokens, self.vocab_size, "tokens")
        answer = _written({"prompt": self.tokenizer.decode(body.tokens)})
        return ReadBody(num_unknown=num_unknown, answer=answer)


_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _has_messages(data: bytes) -> bool:
    """Tell a chat from a completion; a body that is no object counts as a completion, which refuses it."""
    try:
        return "messages" in _FIELDS.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


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


def read_messages(messages: object) -> list[Message]:
    """Check one conversation and return it in the form that chat templates read.

    `content` becomes text: of parts such as `{"type": "text", "text": "Hi"}` each text becomes a line, as in
    vLLM. Raises InvalidRequest that names the message and its key.
    """
    if isinstance(messages, Mapping):
        raise InvalidRequest(f"messages: expected a list of messages such as [{EXAMPLE}], got one message")
    if isinstance(messages, str | bytes) or not isinstance(messages, Iterable):
        raise InvalidRequest(f"messages: expected a list such as [{EXAMPLE}], got {shown(messages)}")
    read = [_read_message(message, f"message {index}") for index, message in enumerate(messages)]
    if not read:
        raise InvalidRequest("messages: expected at least one message, got none")
    return read


def _read_message(message: object, name: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{name}: expected a dict such as {EXAMPLE}, got {shown(message)}")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{name}: role: expected text such as 'user', got {_value(message, 'role')}")
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        read = [_read_tool_call(call, f"{name}: tool_calls[{index}]") for index, call in enumerate(calls)]
        message = {**message, "tool_calls": read}
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            f"{name}: content: expected text or a list of text parts, got {_value(message, 'content')}"
        )
    texts = [_text(part, f"{name}: content[{index}]") for index, part in enumerate(content)]
    return {**message, "content": "\n".join(texts)}


def _read_tool_call(call: object, name: str) -> object:
    """Decode the arguments: templates write them as JSON, and text would come out in quotes."""
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
