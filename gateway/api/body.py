"""The bodies and queries that clients send, as structs, and the checks that need no model.

Each key of a body is one of four kinds:

1. A field of the structs below. It changes the answer.
2. A key of WITHOUT_MEANING. It changes no answer, here or elsewhere; the table says why.
3. A key of UNSUPPORTED. It would change the answer and is not served: `decode_body` refuses it with 400.
4. An unknown key. It is ignored and counted, as in vLLM: clients send new keys every month. The setting
   `gateway.strict` refuses every unknown key, and so do bodies that set `refuses_unknown`.

A sampling parameter of the API is a field of `Body` with the name of its field in `SamplingParams`.
`FormKeys` has the keys that ask for a form of the answer, such as `response_format`.
"""

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from baton.errors import InvalidRequest, shown
from baton.gateway.api.errors import ApiError, invalid, misread, unsupported
from baton.request import (
    MAX_ALLOWED_TOKENS,
    MAX_EXTRA_ARGS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    ExtraArg,
    StructuredOutputs,
)

MAX_MESSAGES: Final = 2048
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_BAD_WORDS: Final = 1024
MAX_DEPTH: Final = 64  # of client JSON; no template or tool needs more
MAX_KWARGS: Final = 64
MAX_PROMPTS: Final = 1024  # as in vLLM
MAX_CHOICES_OF_FORM: Final = 4096
MAX_TOKEN_ID: Final = 2**31 - 1
# Type of a part of a message's content -> the key of its text, as in vLLM.
TEXT_KEYS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
DEFAULT_COMPLETION_TOKENS: Final = 16  # as in OpenAI's API; a chat ends where the model ends it

Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopString: TypeAlias = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
Stop: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None
ModelName: TypeAlias = Annotated[str, Meta(max_length=256)]
# Tokens that are kept of a longer prompt; -1: as many as leave the model room for the answer.
Truncation: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
TemplateKwargs: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], object], Meta(max_length=MAX_KWARGS)
]
NumLikeliest: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]  # tokens to show beside each token
AnswerTokens: TypeAlias = Annotated[int, Meta(ge=1, le=2**63 - 1)]
GivenPrompt: TypeAlias = str | list[int]
Choices: TypeAlias = Annotated[list[str], Meta(max_length=MAX_CHOICES_OF_FORM)]
# Keys of OpenAI and of other servers that change no answer -> why they are accepted.
WITHOUT_MEANING: Final = {
    "user": "a name of the end user, for OpenAI's abuse reports",
    "safety_identifier": "its successor",
    "metadata": "labels of stored answers",
    "store": "whether OpenAI keeps the answer; nothing is kept here",
    "service_tier": "what OpenAI bills; the tenant's class decides here",
    "prompt_cache_key": "a hint where a prompt may be cached; pages are found by their content here",
    "prompt_cache_retention": "how long OpenAI caches a prompt",
    "prompt_cache_options": "its successor",
}
Unsupported: TypeAlias = Mapping[str, frozenset[bytes]]
# An unsupported key with one of these values has no effect and is accepted.
NOTHING: Final = frozenset({b"null", b"false", b"[]", b"{}", b'""', b"0"})
# Keys that would change the answer and are not served -> further values that change nothing.
UNSUPPORTED: Final[dict[str, frozenset[bytes]]] = {
    # Structured output of SGLang
    **dict.fromkeys(("regex", "ebnf", "json_schema", "structural_tag"), frozenset()),
    # OpenAI
    **dict.fromkeys(("function_call", "functions", "audio", "verbosity", "prediction"), frozenset()),
    **dict.fromkeys(("web_search_options", "suffix"), frozenset()),
    "modalities": frozenset({b'["text"]'}),
    "best_of": frozenset(),  # the value of `n` asks for nothing, see decode_body
    # vLLM
    **dict.fromkeys(("chat_template", "documents"), frozenset()),
    **dict.fromkeys(("use_beam_search", "logits_processors", "prompt_embeds"), frozenset()),
    **dict.fromkeys(("thinking_token_budget", "mm_processor_kwargs"), frozenset()),
    **dict.fromkeys(
        ("guided_decoding_backend", "guided_whitespace_pattern", "logprob_token_ids"), frozenset()
    ),
    **dict.fromkeys(("request_id", "kv_transfer_params", "stream_interval"), frozenset()),
    **dict.fromkeys(("repetition_detection", "media_io_kwargs"), frozenset()),
    "length_penalty": frozenset({b"1.0", b"1"}),
    "spaces_between_special_tokens": frozenset({b"true"}),
    # SGLang
    **dict.fromkeys(("stop_regex", "no_stop_trim", "lora_path", "custom_logit_processor"), frozenset()),
    **dict.fromkeys(("return_hidden_states", "session_params"), frozenset()),
}


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options` of a body."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: the usage so far with every chunk
    resumable: bool | None = None  # Baton's: an id with every event, see gateway/streams/resume.py


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`response_format.json_schema`. A schema holds with and without `strict`."""

    schema: dict[str, object]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`response_format` of OpenAI, and vLLM's structural tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, object]] | None = None
    triggers: list[str] | None = None


class StructuredOutputsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`structured_outputs` of vLLM. The names are those of `StructuredOutputs`."""

    json: dict[str, object] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: dict[str, object] | str | None = None


class AskedForm(msgspec.Struct, frozen=True):
    """A form, and the key of the body that asks for it."""

    key: str
    form: StructuredOutputs


class AskedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that a response repeats, and the conversation to store."""

    echoed: dict[str, bytes]  # fields that the response repeats, as JSON
    items: bytes = b"[]"  # JSON of the conversation up to the answer; empty when nothing is stored
    is_stored: bool = False

    @property
    def num_bytes(self) -> int:
        """Memory of the fields."""
        return sum(map(len, self.echoed.values())) + len(self.items)


class ClientBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body that a client sends."""

    unsupported: ClassVar[Unsupported] = {}
    without_meaning: ClassVar[frozenset[str]] = frozenset()  # further keys that change no answer
    refuses_unknown: ClassVar[bool] = False


class FormKeys(ClientBody, frozen=True, kw_only=True):
    """The fields of a body that ask for a form. A body may ask for one form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    # vLLM's older keys
    guided_json: dict[str, object] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def form(self) -> AskedForm | None:
        """Return the form that the body asks for. ApiError 400 names the key of one that cannot be read."""
        asked = list(self._forms())
        if len(asked) > 1:
            raise invalid(asked[1][0], f"give one of {asked[0][0]} and {asked[1][0]}, not both")
        for key, fields in asked:
            try:
                return AskedForm(key, msgspec.convert(fields, StructuredOutputs))
            except (msgspec.ValidationError, InvalidRequest) as error:
                raise invalid(key, str(error).removeprefix("structured_outputs: ")) from None
        return None

    def _forms(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield each key that asks for a form, with the fields of `StructuredOutputs`."""
        wanted = self.response_format
        if wanted is not None and wanted.type != "text":
            yield "response_format", _of_response_format(wanted)
        if (given := self.structured_outputs) is not None:
            fields = msgspec.structs.asdict(given)
            texts = {name: _text(fields[name]) for name in ("json", "structural_tag")}
            yield "structured_outputs", {k: v for k, v in (fields | texts).items() if v is not None}
        if self.guided_json is not None:
            yield "guided_json", {"json": _text(self.guided_json)}
        for name in ("regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{name}")) is not None:
                yield f"guided_{name}", {name: value}


def _of_response_format(wanted: ResponseFormat) -> dict[str, object]:
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.type == "structural_tag":
        fields = {"type": wanted.type, "structures": wanted.structures, "triggers": wanted.triggers}
        return {"structural_tag": _text(fields)}
    if wanted.json_schema is None:
        raise invalid("response_format", "json_schema is needed for this type")
    return {"json": _text(wanted.json_schema.schema)}


def _text(value: object) -> str | None:
    """Return text unchanged, and any other value as JSON."""
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


class SamplingKeys(FormKeys, frozen=True, kw_only=True):
    """Fields of every body that asks for an answer; every optional field may be null.

    Names and meanings are OpenAI's, then vLLM's.
    """

    seed: Seed | None = None
    stop: Stop = None
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
    allowed_token_ids: Annotated[list[int], Meta(max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: NumLikeliest | None = None
    # For logits processors of the server's operator.
    vllm_xargs: Annotated[dict[str, ExtraArg], Meta(max_length=MAX_EXTRA_ARGS)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # pages are shared under it


def sampling_fields(body: SamplingKeys) -> dict[str, Any]:
    """Return the fields of SamplingKeys that a body of any kind gives."""
    fields = {name: getattr(body, name) for name in SamplingKeys.__struct_fields__}
    return {name: value for name, value in fields.items() if value is not None}


class Body(SamplingKeys, frozen=True, kw_only=True):
    """Fields that chats and completions share."""

    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    add_special_tokens: bool | None = None  # None: added to a completion's text, not to a rendered chat
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # log probabilities name tokens "token_id:7"
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None  # of the tokens that are cut off; None: left


class ChatBody(Body, frozen=True, kw_only=True):
    """The body of `/v1/chat/completions`."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED | {"echo": frozenset()}

    messages: Annotated[list[dict[str, object]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: AnswerTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLikeliest | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # vLLM's: the answer continues the last message
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None  # vLLM's: False leaves the reasoning out of the answer
    separate_reasoning: bool | None = None  # SGLang's: False leaves the reasoning in the text

    @property
    def num_asked_tokens(self) -> int | None:
        """The most tokens of each choice; None: as many as the model takes."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(Body, frozen=True, kw_only=True):
    """The body of `/v1/completions`."""

    # Fields that only a chat has are unsupported here.
    unsupported: ClassVar[Unsupported] = (
        UNSUPPORTED
        | dict.fromkeys(("chat_template_kwargs", "reasoning_effort", "tools", "tool_choice"), frozenset())
        | dict.fromkeys(("continue_final_message", "max_completion_tokens", "messages"), frozenset())
        | dict.fromkeys(("include_reasoning", "separate_reasoning"), frozenset({b"true"}))
    )

    prompt: object
    echo: bool | None = None
    logprobs: NumLikeliest | None = None

    @property
    def num_asked_tokens(self) -> int:
        """The most tokens of each choice."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class TokenizeBody(ClientBody, frozen=True, kw_only=True):
    """The body of `/tokenize`: either a prompt or messages."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, object]], Meta(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: list[dict[str, object]] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(ClientBody, frozen=True, kw_only=True):
    """The body of `/detokenize`."""

    model: ModelName | None = None
    tokens: list[Annotated[int, Meta(ge=0, lt=2**31)]]


AnyBody = TypeVar("AnyBody", bound=ClientBody)
AnyQuery = TypeVar("AnyQuery", bound=msgspec.Struct)

_KEYS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
NULL: Final = msgspec.Raw(b"null")


class _Kind(NamedTuple):
    """The keys of one kind of body."""

    decoder: msgspec.json.Decoder[Any]
    known: frozenset[str]
    unsupported: Unsupported


@functools.cache
def _kind(kind: type[ClientBody]) -> _Kind:
    known = WITHOUT_MEANING.keys() | kind.without_meaning | set(kind.__struct_fields__)
    return _Kind(msgspec.json.Decoder(kind), frozenset(known), kind.unsupported)


MAX_UNSUPPORTED_CHARS: Final = 80  # of a refused value in the error message
# The parts of JSON that matter for its depth: brackets, and strings, because brackets in them do not count.
_NESTING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)


def decode_body(data: bytes, kind: type[AnyBody]) -> tuple[AnyBody, list[str]]:
    """Return the body and its unknown keys. Raises ApiError 400, which names the field."""
    check_depth(data, "the body")
    try:
        body = _decoded(data, kind)
        keys = _KEYS.decode(data)
    except msgspec.ValidationError as error:
        raise misread(error, kind) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}"[:500], code="invalid_json") from None
    not_served = keys.keys() & _kind(kind).unsupported.keys()
    _check_supported(keys, not_served, kind)
    unknown = keys.keys() - _kind(kind).known - not_served
    return body, [key for key in keys if key in unknown]


def _decoded(data: bytes, kind: type[AnyBody]) -> AnyBody:
    """Return the body. A float such as 5.0 is an integer where one is expected, as in vLLM."""
    try:
        body = _kind(kind).decoder.decode(data)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        fields = {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in msgspec.json.decode(data, type=dict[str, object]).items()
        }
        body = msgspec.convert(fields, kind)
    assert isinstance(body, kind)
    return body


def read_query(params: Mapping[str, str], kind: type[AnyQuery]) -> AnyQuery:
    """Return the parameters of a query as a struct. Raises ApiError 400 that names a wrong parameter."""
    try:
        return msgspec.convert(dict(params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise misread(error, kind) from None


def raw_fields(data: bytes) -> dict[str, msgspec.Raw]:
    """Return the undecoded values of a JSON object by key; nothing for data that is no JSON object."""
    try:
        return _KEYS.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}


class _EarlyKeys(msgspec.Struct, frozen=True):
    """The keys that are needed before a body is read. The decoder makes no objects of other keys."""

    model: msgspec.Raw = NULL
    previous_response_id: msgspec.Raw = NULL


_EARLY_KEYS: Final = msgspec.json.Decoder(_EarlyKeys)


def early_text(data: bytes, key: Literal["model", "previous_response_id"]) -> str | None:
    """Return the text of a key of a JSON object; None for any other data, which the reader refuses."""
    try:
        return msgspec.json.decode(getattr(_EARLY_KEYS.decode(data), key), type=str | None)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _check_supported(keys: dict[str, msgspec.Raw], asked: set[str], kind: type[ClientBody]) -> None:
    for key in asked:
        value = bytes(keys[key])
        harmless = NOTHING | _kind(kind).unsupported[key]
        if key == "best_of":
            harmless |= {bytes(keys["n"]) if keys.get("n", b"null") != b"null" else b"1"}
        if value not in harmless and value.translate(None, b" \t\r\n") not in harmless:
            text = value[:MAX_UNSUPPORTED_CHARS].decode("utf-8", "replace")
            raise unsupported(key, text)


def check_depth(data: bytes, what: str, limit: int = MAX_DEPTH) -> None:
    """Raise InvalidRequest for JSON that is nested more than `limit` deep; `what` names the JSON there.

    Call this before anything walks client JSON: code in C and templates recurse and fail at some depth.
    """
    if data.count(b"[") + data.count(b"{") <= limit:
        return
    depth = 0
    for found in _NESTING.finditer(data):
        first = data[found.start()]
        if first in b"[{":
            depth += 1
            if depth > limit:
                raise InvalidRequest(f"{what} is nested more than {limit} deep")
        elif first in b"]}":
            depth -= 1


def text_of(item: Mapping[str, object], key: str, name: str) -> str:
    """Return the text of a key. name: of the item in the body, for the ApiError of another value."""
    text = item.get(key)
    if not isinstance(text, str):
        raise invalid(f"{name}.{key}", "expected text")
    return text


def text_content(content: object, name: str, keys: Mapping[str, str]) -> str | list[dict[str, object]]:
    """Return text, or parts with text, in the form of chats. Raises ApiError for parts of another type.

    keys: type of a part -> the key of its text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(name, "expected text or a list of parts")
    parts = list[dict[str, object]]()
    for index, part in enumerate(content):
        where, kind = f"{name}[{index}]", str(part.get("type") if isinstance(part, Mapping) else part)
        if not isinstance(part, Mapping) or kind not in keys:
            raise unsupported(f"{where}.type", repr(kind[:40]))
        parts.append({"type": "text", "text": text_of(part, keys[kind], where)})
    return parts


def list_prompts(prompt: object) -> list[GivenPrompt]:
    """Return the prompts of a completion from any of OpenAI's forms: text, token ids, or a list of these.

    prompt: decoded JSON. Raises InvalidRequest for any other form.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(f"prompt: expected text, token ids, or a list of these, got {shown(prompt)}")
    if _are_token_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} prompts, got {len(prompt)}")
    for index, item in enumerate(prompt):
        if not isinstance(item, str) and not (isinstance(item, list) and _are_token_ids(item)):
            raise InvalidRequest(f"prompt[{index}]: expected text or token ids, got {shown(item)}")
    return prompt


def _are_token_ids(items: list[Any]) -> bool:
    """Check a list; `set(map(type, ...))` runs in C, and True is no token id."""
    return bool(items) and set(map(type, items)) == {int} and min(items) >= 0 and max(items) <= MAX_TOKEN_ID


def check_token_ids(token_ids: Collection[int], vocab_size: int | None, what: str) -> None:
    """Raise InvalidRequest that names the first id outside the vocabulary. None: the size is not known."""
    if vocab_size is None or not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    bad = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise InvalidRequest(f"{what}: token id {bad} is outside the vocabulary of {vocab_size} tokens")


def check_sampled_ids(body: Body, vocab_size: int | None) -> None:
    """Raise InvalidRequest for an id of the body's sampling parameters outside the vocabulary."""
    check_token_ids(logit_bias(body), vocab_size, "logit_bias")
    check_token_ids(body.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    check_token_ids(body.stop_token_ids or (), vocab_size, "stop_token_ids")


def truncated(token_ids: list[int], body: ChatBody | CompletionBody, longest: int) -> list[int]:
    """Return the tokens of a prompt that `truncate_prompt_tokens` keeps. longest: the context length.

    Raises ApiError 400 that names the key.
    """
    kept, name = body.truncate_prompt_tokens, "truncate_prompt_tokens"
    if kept is None:
        if body.truncation_side is not None:
            raise invalid("truncation_side", f"{name} is not set")
        return token_ids
    if kept == 0 or kept >= longest:
        raise invalid(name, f"expected -1 or 1 to {longest - 1}, got {kept}")
    if kept < 0:
        kept = max(1, longest - max(1, body.num_asked_tokens or 0))
    return token_ids[:kept] if body.truncation_side == "right" else token_ids[-kept:]


def logit_bias(body: Body) -> dict[int, float]:
    """Return the bias of each token id. Raises ApiError 400 for a key that is no token id."""
    try:
        return {int(token_id): bias for token_id, bias in (body.logit_bias or {}).items()}
    except ValueError:
        raise invalid("logit_bias", "its keys must be token ids") from None
