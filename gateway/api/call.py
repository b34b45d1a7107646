"""One call of the API: the body that a client sends, and the `Call` that the gateway serves.

Each key of a body is one of four kinds:

1. A field of the structs below. It changes the answer.
2. A key of WITHOUT_MEANING. It changes no answer, here or elsewhere; the table says why.
3. A key of UNSUPPORTED. It would change the answer and is not served: `decode_body` refuses it with 400.
4. An unknown key. It is ignored and counted, as in vLLM: clients send new keys every month. The setting
   `gateway.strict` refuses every unknown key, and so do bodies that set `refuses_unknown`.

A sampling parameter of the API is a field of `Body` with the name of its field in `SamplingParams`.
"""

import functools
import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from baton.errors import InvalidRequest, shown
from baton.gateway.api.dialects.response_store import AskedResponse
from baton.gateway.api.errors import ApiError, invalid, unsupported
from baton.gateway.api.structured_output import FormKeys
from baton.gateway.http.trace_context import TraceContext
from baton.gateway.streams.resume import DIGEST_BYTES, ResumePoint
from baton.gateway.tenants.tenants import Tenant
from baton.gateway.text.answer_parsing import AnswerParsing
from baton.request import (
    MAX_ALLOWED_TOKENS,
    MAX_CHOICES,
    MAX_EXTRA_ARGS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    ExtraArg,
    SamplingParams,
    StructuredOutputs,
)
from baton.tenants import SchedulingKey, Sla
from baton.token_ids import TOKEN_ID_BYTES, TokenIds

MAX_MESSAGES: Final = 2048
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_BAD_WORDS: Final = 1024
MAX_DEPTH: Final = 64  # of client JSON; no template or tool needs more
MAX_KWARGS: Final = 64
MAX_PROMPTS: Final = 1024  # as in vLLM
MAX_TOKEN_ID: Final = 2**31 - 1
DEFAULT_COMPLETION_TOKENS: Final = 16  # as in OpenAI's API; a chat ends where the model ends it
BYTES_PER_LOGPROB: Final = 150  # of one alternative: a tuple, an integer and a float

Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopString: TypeAlias = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
Stop: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None
ModelName: TypeAlias = Annotated[str, Meta(max_length=256)]
# Tokens that are kept of a longer prompt; -1: as many as leave the model room for the answer.
Truncation: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
TemplateKwargs: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], object], Meta(max_length=MAX_KWARGS)
]
GivenPrompt: TypeAlias = str | list[int]
Dialect: TypeAlias = Literal["openai", "responses", "messages"]
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
    prompt_logprobs: int | None = None
    # For logits processors of the server's operator.
    vllm_xargs: Annotated[dict[str, ExtraArg], Meta(max_length=MAX_EXTRA_ARGS)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # pages are shared under it


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
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # vLLM's: the answer goes on with the last message
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None  # vLLM's: False leaves the reasoning out of the answer
    separate_reasoning: bool | None = None  # SGLang's: False leaves the reasoning in the text


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
    logprobs: int | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
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


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/detokenize`."""

    model: ModelName | None = None
    tokens: list[Annotated[int, Meta(ge=0, lt=2**31)]]


AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)

_KEYS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Kind(NamedTuple):
    """The keys of one kind of body."""

    decoder: msgspec.json.Decoder[Any]
    known: frozenset[str]
    unsupported: Unsupported


@functools.cache
def _kind(kind: type[msgspec.Struct]) -> _Kind:
    """Read the class attributes `unsupported` and `without_meaning` of a body, which may be absent."""
    own = getattr(kind, "without_meaning", frozenset[str]())
    known = WITHOUT_MEANING.keys() | own | set(kind.__struct_fields__)
    return _Kind(msgspec.json.Decoder(kind), frozenset(known), getattr(kind, "unsupported", {}))


MAX_UNSUPPORTED_CHARS: Final = 80  # of a refused value in the error message
# The parts of JSON that matter for its depth: brackets, and strings, because brackets in them do not count.
_NESTING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
MISSING: Final = "missing required field `"  # the wording of msgspec


def decode_body(data: bytes, kind: type[AnyBody]) -> tuple[AnyBody, list[str]]:
    """Return the body and its unknown keys. Raises ApiError 400, which names the field."""
    try:
        check_depth(data, "the body")
        body = _decoded(data, kind)
        keys = _KEYS.decode(data)
    except InvalidRequest as error:
        raise invalid(str(error)) from None
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        missing = message.partition(MISSING)[2].rstrip("`")
        param = path.rstrip("`").lstrip(".") or missing or None
        raise invalid(f"{param}: {message}" if param else message, param=param) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}"[:500], code="invalid_json") from None
    unknown = keys.keys() - _kind(kind).known
    _check_supported(keys, unknown & _kind(kind).unsupported.keys(), kind)
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


def raw_fields(data: bytes) -> dict[str, msgspec.Raw]:
    """Return the values of a JSON object as they stand, by key; none for data that is no JSON object."""
    try:
        return _KEYS.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}


def _check_supported(keys: dict[str, msgspec.Raw], asked: set[str], kind: type[msgspec.Struct]) -> None:
    for key in asked:
        value = bytes(keys[key])
        harmless = NOTHING | _kind(kind).unsupported[key]
        if key == "best_of":
            harmless |= {bytes(keys["n"]) if keys.get("n", b"null") != b"null" else b"1"}
        if value not in harmless and value.translate(None, b" \t\r\n") not in harmless:
            text = value[:MAX_UNSUPPORTED_CHARS].decode("utf-8", "replace")
            raise unsupported(f"{key} = {text}", param=key)


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
    check_token_ids(_logit_bias(body), vocab_size, "logit_bias")
    check_token_ids(body.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    check_token_ids(body.stop_token_ids or (), vocab_size, "stop_token_ids")


def truncated(token_ids: list[int], body: "Body", longest: int) -> list[int]:
    """Return the tokens of a prompt that `truncate_prompt_tokens` keeps. longest: the context length.

    Raises ApiError 400 that names the key.
    """
    kept, name = body.truncate_prompt_tokens, "truncate_prompt_tokens"
    if kept is None:
        if body.truncation_side is not None:
            raise invalid(f"truncation_side: {name} is not set", param="truncation_side")
        return token_ids
    if kept == 0 or kept >= longest:
        raise invalid(f"{name}: expected -1 or 1 to {longest - 1}, got {kept}", param=name)
    if kept < 0:
        completion_tokens = getattr(body, "max_completion_tokens", None)
        asked = body.max_tokens if completion_tokens is None else completion_tokens
        if asked is None and isinstance(body, CompletionBody):
            asked = DEFAULT_COMPLETION_TOKENS
        kept = max(1, longest - max(1, asked or 0))
    return token_ids[:kept] if body.truncation_side == "right" else token_ids[-kept:]


class Prompt(msgspec.Struct):
    """One prompt of a call. `text` is None unless the call asks for its prompt back."""

    text: str | None
    token_ids: TokenIds
    num_public_tokens: int = 0  # the first of them, see PublicPrefixes of gateway/api/body_reader.py


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call as the gateway serves it: prompts of token ids, and how to answer each of them."""

    model: str  # the name in the answer
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams  # of each choice; n is 1, the seed is set
    num_choices: int  # a prompt
    stops: tuple[str, ...] = ()
    is_chat: bool = False
    dialect: Dialect = "openai"  # the wire format of the answer
    response: AskedResponse | None = None  # of the dialect "responses"
    parsing: AnswerParsing = AnswerParsing()  # of reasoning and calls of tools out of the text
    shows_reasoning: bool = True  # False: it is left out
    is_streamed: bool = False
    has_usage: bool = False  # in a last chunk of the stream
    has_running_usage: bool = False  # in every chunk
    is_resumable: bool = False  # the events of the stream have ids
    resumed: ResumePoint | None = None  # the event after which the stream goes on
    has_echo: bool = False
    num_prompt_logprobs: int | None = None  # likeliest tokens to show at each token of the prompt
    hides_tokens: bool = False  # max_tokens was 0: only the prompt is asked about
    returns_token_ids: bool = False
    skips_special_tokens: bool = True
    includes_stop: bool = False  # the stop string, or the text of the stop token, is shown
    names_tokens_by_id: bool = False  # in log probabilities
    cache_salt: str = ""  # of the caller: only calls of one salt share pages
    priority: int = 0
    sla: Sla = Sla()
    scheduling_key: SchedulingKey = SchedulingKey()
    arrival_s: float = 0.0  # of the last byte of the body, by the gateway's clock
    received_s: float = 0.0  # of the first byte of the head; 0: unknown
    tokenised_s: float = 0.0  # seconds of tokenising the prompts
    trace: TraceContext | None = None  # that the caller or the gateway has begun
    tenant: Tenant

    @property
    def num_answers(self) -> int:
        """Choices over all prompts."""
        return self.num_choices * len(self.prompts)

    @property
    def tenant_salt(self) -> bytes:
        """The salt of the pages: the tenant's, narrowed by the caller's own."""
        salt = self.tenant.cache_salt
        if not self.cache_salt:
            return salt
        return hashlib.blake2b(self.cache_salt.encode(), key=salt, digest_size=len(salt)).digest()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens over all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def held_bytes(self) -> int:
        """Approximate memory of the prompts while the call is answered."""
        num_chars = sum(len(prompt.text or "") for prompt in self.prompts)
        num_kept_bytes = 0 if self.response is None else self.response.num_bytes
        return self.num_prompt_tokens * TOKEN_ID_BYTES + num_chars * 2 + num_kept_bytes

    @property
    def prompt_logprob_bytes(self) -> int:
        """Approximate memory of the prompts' log probabilities, which arrive in one message."""
        asked = self.sampling.prompt_logprobs
        return 0 if asked is None else self.num_prompt_tokens * (asked + 1) * BYTES_PER_LOGPROB

    def num_answer_entries(self, max_model_len: int) -> int:
        """Return the most entries that the answer may have: echoed tokens and tokens with log probabilities,
        each as often as there are choices, with its alternatives.
        """
        sampling = self.sampling
        num_tokens = self.num_prompt_tokens if self.has_echo or self.num_prompt_logprobs is not None else 0
        if sampling.logprobs is not None:
            for prompt in self.prompts:
                room = max_model_len - len(prompt.token_ids)
                num_tokens += room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        most = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
        return num_tokens * self.num_choices * (most + 1)

    def digest(self, fingerprint: str) -> bytes:
        """Return a digest of everything that the content of the answer depends on.

        fingerprint: of the model's weights.
        """
        fields = msgspec.structs.asdict(self)
        answered = {name: value for name, value in fields.items() if name not in _NOT_OF_THE_ANSWER}
        prompts = [(prompt.text, prompt.token_ids.packed) for prompt in self.prompts]
        content = msgspec.msgpack.encode([fingerprint, prompts, answered], order="deterministic")
        return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


# Fields that change when and for whom a call is answered, not the answer.
_NOT_OF_THE_ANSWER: Final = frozenset(
    {"prompts", "priority", "sla", "scheduling_key", "tenant", "resumed", "cache_salt"}
    | {"arrival_s", "received_s", "tokenised_s", "trace"}
)
# Fields that SamplingParams takes as they stand in the body; `make_call` converts the others.
_CONVERTED: Final = {
    "n",
    "seed",
    "max_tokens",
    "logprobs",
    "logit_bias",
    "stop_token_ids",
    "allowed_token_ids",
    "prompt_logprobs",
    "structured_outputs",
}
SAMPLING_FIELDS: Final = set(Body.__struct_fields__) & set(SamplingParams.__struct_fields__) - _CONVERTED


def make_call(
    body: ChatBody | CompletionBody,
    prompts: tuple[Prompt, ...],
    *,
    new_seed: int,
    defaults: SamplingParams,
    parsing: AnswerParsing | None = None,
    structured_outputs: StructuredOutputs | None = None,
    bad_words_token_ids: tuple[tuple[int, ...], ...] = (),
    **fields: Any,
) -> Call:
    """Return the call that a body asks for. Raises InvalidRequest or ApiError, which name the field.

    new_seed: for a body without a seed; choices differ by their number, not by their seed.
    defaults: the model's; their max_tokens caps every answer.
    parsing: of a chat's answer.
    structured_outputs: the form of the answer, read from the body.
    bad_words_token_ids: of the body's bad_words.
    fields: fields of Call that do not come from the body.
    """
    options, parsing = body.stream_options or StreamOptions(), parsing or AnswerParsing()
    num_choices = 1 if body.n is None else body.n
    if not 1 <= num_choices <= MAX_CHOICES:
        raise invalid(f"n must be between 1 and {MAX_CHOICES}, got {num_choices}", param="n")
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if not all(stops):
        raise invalid("stop: a stop string must not be empty", param="stop")
    has_echo = isinstance(body, CompletionBody) and bool(body.echo)
    max_tokens, logprobs = _num_asked(body)
    sampling = _sampling(body, defaults, max_tokens, logprobs, new_seed, has_echo)
    return Call(
        prompts=prompts,
        sampling=msgspec.structs.replace(
            sampling, structured_outputs=structured_outputs, bad_words_token_ids=bad_words_token_ids
        ),
        num_choices=num_choices,
        stops=stops,
        is_chat=isinstance(body, ChatBody),
        parsing=parsing,
        shows_reasoning=not isinstance(body, ChatBody) or body.include_reasoning is not False,
        is_streamed=bool(body.stream),
        has_usage=bool(options.include_usage),
        has_running_usage=bool(options.include_usage and options.continuous_usage_stats),
        is_resumable=bool(options.resumable),
        has_echo=has_echo,
        num_prompt_logprobs=body.prompt_logprobs,
        hides_tokens=isinstance(body, CompletionBody) and max_tokens == 0,
        returns_token_ids=bool(body.return_token_ids),
        skips_special_tokens=body.skip_special_tokens is not False and not parsing.keeps_special_tokens,
        includes_stop=bool(body.include_stop_str_in_output),
        cache_salt=body.cache_salt or "",
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        priority=body.priority or 0,
        **fields,
    )


def _num_asked(body: ChatBody | CompletionBody) -> tuple[int | None, int | None]:
    """Return the tokens of the answer and the log probabilities of each that the body asks for."""
    if isinstance(body, CompletionBody):
        return DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens, body.logprobs
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs: logprobs must be true as well", param="top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return max_tokens, (body.top_logprobs or 0) if body.logprobs else None


def _sampling(
    body: ChatBody | CompletionBody,
    defaults: SamplingParams,
    max_tokens: int | None,
    logprobs: int | None,
    new_seed: int,
    has_echo: bool,
) -> SamplingParams:
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise invalid(f"logprobs: at most {MAX_LOGPROBS} alternatives, got {logprobs}", param="logprobs")
    if body.prompt_logprobs is not None and not 0 <= body.prompt_logprobs <= MAX_LOGPROBS:
        message = f"at most {MAX_LOGPROBS} alternatives, got {body.prompt_logprobs}"
        raise invalid(f"prompt_logprobs: {message}", param="prompt_logprobs")
    if body.prompt_logprobs is not None and body.stream:
        message = "they come with a whole answer; leave stream out"
        raise invalid(f"prompt_logprobs: {message}", param="prompt_logprobs")
    if isinstance(body, CompletionBody):
        max_tokens = max_tokens or 1  # the token is not shown
    asked = [each for each in (body.prompt_logprobs, logprobs if has_echo else None) if each is not None]
    caps = [each for each in (max_tokens, defaults.max_tokens) if each is not None]
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    return msgspec.structs.replace(
        defaults,
        max_tokens=min(caps, default=None),
        logprobs=logprobs,
        prompt_logprobs=max(asked, default=None),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        extra_args=body.vllm_xargs or {},
        logit_bias=_logit_bias(body),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        seed=new_seed if body.seed is None else body.seed & MAX_SEED,  # a negative number is a seed as well
        **given,
    )


def _logit_bias(body: Body) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in (body.logit_bias or {}).items()}
    except ValueError:
        raise invalid("logit_bias: its keys must be token ids", param="logit_bias") from None
