"""The bodies that clients send, as they may be written: every optional field may be null.

Unknown keys are ignored and counted: clients send new ones monthly, and what is meant for the inside of a
cluster (`kv_transfer_params`, `cache_salt` ...) must come to nothing. Keys that are known to change an answer
in a way that is not served are refused.
"""

from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from baton.gateway.api_errors import ApiError, invalid, unsupported

MISSING: Final = "missing required field `"  # as msgspec says it
MAX_MESSAGES: Final = 2048
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 1024

StopString: TypeAlias = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
Stop: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Name: TypeAlias = Annotated[str, Meta(max_length=256)]
# Of OpenAI's, and of other servers': they change nothing here, and are no misspelling either.
WITHOUT_MEANING: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "modalities"}
    | {
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "reasoning_effort",
        "spaces_between_special_tokens",
    }
)

# vLLM's and OpenAI's, which would change what is answered: to ignore them would be to answer something else.
UNSUPPORTED: Final = frozenset(
    {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "function_call"}
    | {"chat_template", "continue_final_message", "documents", "truncate_prompt_tokens", "prompt_logprobs"}
    | {"include_stop_str_in_output", "bad_words", "use_beam_search", "logits_processors", "audio"}
    | {"allowed_token_ids", "prompt_embeds"}
)
NOTHING: Final = frozenset({b"null", b"false", b"[]", b"{}", b'""', b"0"})


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far, with every chunk
    resumable: bool | None = None  # Baton's: an id with every event, see event_ids.py


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
    logit_bias: dict[Annotated[str, Meta(max_length=20)], float] | None = None
    # vLLM's
    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
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


def decode_body(data: bytes, kind: type[AnyBody]) -> tuple[AnyBody, list[str]]:
    """The body, and which of its keys are not known. Raises ApiError 400 which names the field."""
    known = _KNOWN[kind]
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
    for key in UNSUPPORTED.intersection(unknown):
        if bytes(unknown[key]) not in NOTHING:
            raise unsupported(key, param=key)
    return body, list(unknown)


_KNOWN: Final = {kind: WITHOUT_MEANING | set(kind.__struct_fields__) for kind in _DECODERS}
