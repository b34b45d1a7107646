"""The bodies that clients send, as they may be written: every optional field may be null.

Each key of a body is one of four kinds:

1. A field of the structs below: it changes the answer.
2. A key of WITHOUT_MEANING: it changes no answer, here or elsewhere; the table says why.
3. A key of UNSUPPORTED: it would change the answer and is not served, so it is refused with 400.
4. An unknown key: ignored and counted, as in vLLM, since clients send new ones monthly and what is meant for
   the inside of a cluster (`kv_transfer_params`, `cache_salt` ...) must come to nothing. `--strict` refuses
   every unknown key.
"""

import re
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from baton.errors import InvalidRequest
from baton.gateway.api.errors import ApiError, invalid, unsupported
from baton.request import MAX_LOGIT_BIAS

MISSING: Final = "missing required field `"  # as msgspec says it
MAX_MESSAGES: Final = 2048
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_DEPTH: Final = 64  # of JSON that callers send; templates and tools have no use for more
MAX_KWARGS: Final = 64

StopString: TypeAlias = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
Stop: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Name: TypeAlias = Annotated[str, Meta(max_length=256)]
TemplateKwargs: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], object], Meta(max_length=MAX_KWARGS)
]
# OpenAI's and other servers' keys that change no answer -> the reason why they are accepted.
WITHOUT_MEANING: Final = {
    "user": "a name of the end user, for OpenAI's abuse reports",
    "safety_identifier": "its successor",
    "metadata": "labels of stored answers",
    "store": "whether OpenAI keeps the answer; nothing is kept here",
    "service_tier": "what OpenAI bills; the tenant's class decides here",
    "prompt_cache_key": "a hint where a prompt may be cached; pages are found by their content here",
    "prompt_cache_retention": "how long OpenAI caches a prompt",
}
# Keys that would change the answer in a way that is not served -> values that ask for what is served anyway.
# NOTHING asks for nothing, whatever the key.
UNSUPPORTED: Final[dict[str, frozenset[bytes]]] = {
    # vLLM's and SGLang's structured output
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), frozenset()),
    **dict.fromkeys(("structured_outputs", "regex", "ebnf", "json_schema", "structural_tag"), frozenset()),
    # OpenAI's
    **dict.fromkeys(("function_call", "audio", "verbosity", "prediction", "web_search_options"), frozenset()),
    "modalities": frozenset({b'["text"]'}),
    # vLLM's
    **dict.fromkeys(("chat_template", "continue_final_message", "documents"), frozenset()),
    **dict.fromkeys(("truncate_prompt_tokens", "prompt_logprobs", "include_stop_str_in_output"), frozenset()),
    **dict.fromkeys(("bad_words", "use_beam_search", "logits_processors"), frozenset()),
    **dict.fromkeys(("allowed_token_ids", "prompt_embeds", "return_tokens_as_token_ids"), frozenset()),
    **dict.fromkeys(("thinking_token_budget", "mm_processor_kwargs"), frozenset()),
    "length_penalty": frozenset({b"1.0", b"1"}),
    "spaces_between_special_tokens": frozenset({b"true"}),
    "include_reasoning": frozenset({b"true"}),
    # SGLang's
    **dict.fromkeys(("stop_regex", "no_stop_trim", "lora_path", "custom_logit_processor"), frozenset()),
    **dict.fromkeys(("return_hidden_states", "session_params"), frozenset()),
    "separate_reasoning": frozenset({b"true"}),
}
NOTHING: Final = frozenset({b"null", b"false", b"[]", b"{}", b'""', b"0"})


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far, with every chunk
    resumable: bool | None = None  # Baton's: an id with every event, see gateway/streams/resume.py


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both ways to ask share. Names and meanings are OpenAI's, then vLLM's."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    stop: Stop = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: (
        Annotated[dict[Annotated[str, Meta(max_length=20)], float], Meta(max_length=MAX_LOGIT_BIAS)] | None
    ) = None
    # vLLM's
    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None  # None: for a completion's text, not for what a template writes
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str


class ChatBody(Body, frozen=True, kw_only=True):
    messages: Annotated[list[dict[str, object]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    functions: list[object] | None = None
    response_format: ResponseFormat | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: object
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, object]], Meta(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: list[dict[str, object]] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: Name | None = None
    tokens: list[Annotated[int, Meta(ge=0, lt=2**31)]]


AnyBody = TypeVar("AnyBody", ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)

_KEYS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DECODERS: Final = {
    kind: msgspec.json.Decoder(kind) for kind in (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
}
_KNOWN: Final = {kind: {*WITHOUT_MEANING, *kind.__struct_fields__} for kind in _DECODERS}
# A key of the other way to ask: what it means there is not done here.
_UNSUPPORTED_OF: Final = {
    ChatBody: UNSUPPORTED | {"echo": frozenset(), "suffix": frozenset(), "best_of": frozenset({b"1"})},
    CompletionBody: UNSUPPORTED
    | dict.fromkeys(("chat_template_kwargs", "reasoning_effort", "tools", "tool_choice"), frozenset[bytes]())
    | {"response_format": frozenset({b'{"type":"text"}', b'{"type": "text"}'})},
}
# What matters for the depth of JSON: strings, whose brackets do not count, and brackets.
_NESTING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)


def decode_body(data: bytes, kind: type[AnyBody]) -> tuple[AnyBody, list[str]]:
    """The body, and which of its keys are not known. Raises ApiError 400 which names the field."""
    known = _KNOWN[kind]
    try:
        check_depth(data, "the body")
    except InvalidRequest as error:
        raise invalid(str(error)) from None
    try:
        body = _DECODERS[kind].decode(data)
        unknown = {key: value for key, value in _KEYS.decode(data).items() if key not in known}
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        missing = message.partition(MISSING)[2].rstrip("`")
        param = path.rstrip("`").lstrip(".") or missing or None
        raise invalid(f"{param}: {message}" if param else message, param=param) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}"[:500], code="invalid_json") from None
    assert isinstance(body, kind)
    unsupported_keys = _UNSUPPORTED_OF.get(kind, {})
    for key in unsupported_keys.keys() & unknown.keys():
        if bytes(unknown[key]) not in NOTHING | unsupported_keys[key]:
            raise unsupported(key, param=key)
    return body, list(unknown)


def check_depth(data: bytes, what: str) -> None:
    """Raises InvalidRequest for JSON that is nested more than MAX_DEPTH deep; `what` names the JSON there.

    Nothing that callers send is walked before: code in C and templates recurse, and fail at some depth.
    """
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for found in _NESTING.finditer(data):
        first = data[found.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise InvalidRequest(f"{what} is nested more than {MAX_DEPTH} deep")
        elif first in b"]}":
            depth -= 1
