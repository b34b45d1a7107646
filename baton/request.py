"""Requests, their packed token ids, and outputs of engines: the values that travel between the layers."""

import struct
import sys
from abc import ABCMeta
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any, NamedTuple, Self, SupportsIndex, TypeAlias, overload

import msgspec
from msgspec import Meta

from baton.adapters import Adapter
from baton.errors import InvalidRequest, nearest_hint, shown
from baton.messages.bounds import Attempt, Count, Id
from baton.messages.workers import WorkerTimes
from baton.tenants import SchedulingKey, Sla, without_public

TOKEN_ID_BYTES = 4


def pack(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian u32. Raises InvalidRequest for an id that does not fit 32 bits."""
    if type(token_ids) is TokenIds:  # isinstance is slow for a class with an ABC's metaclass
        return token_ids.packed
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError):
        bad = next(each for each in token_ids if not isinstance(each, SupportsIndex) or not 0 <= each < 2**32)
        raise InvalidRequest(f"token id {bad!r}: expected an integer from 0 to {2**32 - 1}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class _SequenceMeta(msgspec.StructMeta, ABCMeta):
    """Makes a struct that is a `collections.abc.Sequence`."""


class TokenIds(
    msgspec.Struct,
    Sequence[int],
    frozen=True,
    array_like=True,
    forbid_unknown_fields=True,
    gc=False,
    metaclass=_SequenceMeta,
):
    """An immutable sequence of token ids, packed as little-endian u32.

    A process that only forwards a long prompt copies its bytes: it creates no integers for its garbage
    collector to visit. An engine unpacks the prompt when a sequence starts.
    """

    packed: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.packed, bytes):
            raise TypeError("TokenIds.of packs a sequence of token ids")
        if len(self.packed) % TOKEN_ID_BYTES:
            raise ValueError(f"{len(self.packed)} bytes are not a whole number of token ids")

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> Self:
        """Pack token ids. Raises InvalidRequest for an id that does not fit 32 bits."""
        return token_ids if isinstance(token_ids, cls) else cls(pack(tuple(token_ids)))

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_ID_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(struct.unpack(f"<{len(self)}I", self.packed))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> int | Self:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return type(self)(self.packed[TOKEN_ID_BYTES * start : TOKEN_ID_BYTES * stop])
            return self.of(tuple(self)[index])
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} token ids")
        token_id: int
        (token_id,) = struct.unpack_from("<I", self.packed, TOKEN_ID_BYTES * position)
        return token_id

    def __add__(self, more: Sequence[int]) -> Self:
        return type(self)(self.packed + self.of(more).packed) if more else self

    def __repr__(self) -> str:
        return f"TokenIds.of({tuple(self)})"


TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 2**16  # of allowed_token_ids
MAX_BAD_WORD_TOKENS = 2**14  # of all bad_words_token_ids together
MAX_EXTRA_ARGS = 64
MAX_SEED = 2**63 - 1
# Fields of SamplingParams about the text.
TEXT_FIELDS = ("stop", "include_stop_str_in_output", "skip_special_tokens", "bad_words")
MAX_FORM_CHARS = 64 * 2**10  # of a schema, a regex or a grammar
MAX_FRAME_CHARS = 256 * 2**10  # which has the schemas of all tools
# In a form, between the parts of JSON: a model that likes white space could otherwise write nothing else.
JSON_WHITESPACE = r"[\x20\x09]?(\r?\n[\x20\x09]{0,32})?"
MAX_INTEGER = 2**63 - 1  # of any value, also of an integer given for a float: every message carries it
HEALTH_PRIORITY = -(2**31) - 1  # of a gateway's health checks: before the least that a client may give


class FinishReason(StrEnum):
    """The reason for which a choice has no more tokens."""

    STOP = "stop"  # an end token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens, or the model's limit
    ABORT = "abort"  # the caller ended the request
    ERROR = "error"  # a failure of this request alone; StepOutput.error has the message


class _NamesTheNearest(msgspec.StructMeta):
    """Adds the nearest field name to the error about an unknown one. Structs never call their `__init__`."""

    def __call__(self, *arguments: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*arguments, **fields)
        except TypeError as error:
            unknown = [name for name in fields if name not in self.__struct_fields__]
            if not unknown:
                raise
            known = self.__struct_fields__
            hint = nearest_hint(unknown[0], known) or f"; known are {', '.join(known)}"
            raise TypeError(f"{error}{hint}") from None


_ExtraInteger: TypeAlias = Annotated[int, Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
# A value that a logits processor from outside the tree gets with a request.
ExtraArg: TypeAlias = (
    bool
    | _ExtraInteger
    | float
    | Annotated[str, Meta(max_length=1024)]
    | Annotated[tuple[_ExtraInteger, ...], Meta(max_length=1024)]
)
FormText: TypeAlias = Annotated[str, Meta(max_length=MAX_FORM_CHARS)]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form that an answer must have: vLLM's `StructuredOutputsParams`. One field is set, beside `frame`.

    Tokens that would break the form are never sampled. The answer ends when the form is complete and cannot
    go on, or at an end token where the form allows one. `json` may be a mapping and `choice` a list.
    Raises InvalidRequest for none or several forms.
    """

    json: FormText | None = None  # a JSON schema, as JSON text
    json_object: bool = False  # any JSON object
    regex: FormText | None = None
    choice: tuple[FormText, ...] | None = None  # one of these texts
    grammar: FormText | None = None  # in Lark's syntax, or llama.cpp's GBNF
    structural_tag: FormText | None = None  # vLLM's: text with tags, of which each has a JSON schema
    # The whole answer in Lark's syntax, in which @form is the form above. It may stand alone.
    frame: Annotated[str, Meta(max_length=MAX_FRAME_CHARS)] | None = None

    def __post_init__(self) -> None:
        schema: object = self.json
        choice: object = self.choice
        if isinstance(schema, Mapping):  # vLLM takes a mapping and a list as well
            msgspec.structs.force_setattr(self, "json", msgspec.json.encode(schema).decode())
        if isinstance(choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(choice))
        chosen = self._chosen()
        if len(chosen) != 1 and not (self.frame is not None and not chosen):
            raise InvalidRequest(
                f"structured_outputs: exactly one of {', '.join(self.__struct_fields__[:-1])} is needed, "
                f"got {', '.join(chosen) or 'none'}"
            )
        if self.choice is not None and not 1 <= sum(map(len, self.choice)) <= MAX_FORM_CHARS:
            raise InvalidRequest(
                f"structured_outputs.choice: texts of 1 to {MAX_FORM_CHARS} characters together are needed"
            )

    @property
    def chosen(self) -> tuple[str, Any]:
        """The name and the value of the field that is set; of the frame if that is alone."""
        name = next(iter(self._chosen()), "frame")
        return name, getattr(self, name)

    def _chosen(self) -> list[str]:
        names = self.__struct_fields__[:-1]  # without the frame
        return [name for name in names if getattr(self, name) not in (None, False)]


class SamplingParams(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    metaclass=_NamesTheNearest,
):
    """The choice of each next token, and the text that it becomes: fields of vLLM's class, though not all.

    Gateways and `LLM` read the fields of TEXT_FIELDS; an engine knows no text and refuses them (`of_tokens`).
    Raises InvalidRequest when a value is outside its range. The engine checks the limits that depend on the
    model: top_k, token ids, context length.
    """

    n: int = 1  # number of choices for one prompt
    max_tokens: int | None = 16  # new tokens at most; None: until the model's limit
    min_tokens: int = 0  # new tokens at least: earlier no end token is sampled
    temperature: float = 1.0  # divides the logits; 0 is greedy
    top_p: float = 1.0  # sample from the likeliest tokens that have this probability together
    top_k: int = 0  # sample from so many of the likeliest tokens; 0 or -1: the whole vocabulary
    min_p: float = 0.0  # sample from tokens at least this times as likely as the likeliest
    repetition_penalty: float = 1.0  # divides positive logits of used tokens, multiplies negative ones
    presence_penalty: float = 0.0  # subtracted from the logit of each generated token
    frequency_penalty: float = 0.0  # subtracted from the logit of a token for each time it was generated
    logit_bias: Mapping[int, float] = {}  # token id -> amount added to its logit
    allowed_token_ids: tuple[int, ...] | None = None  # sample from these tokens alone
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # never complete one of these in the answer
    stop_token_ids: tuple[int, ...] = ()  # end a choice at any of these token ids
    ignore_eos: bool = False  # generate past the model's end token
    seed: int | None = None  # the same seed gives the same tokens; None: one is drawn
    logprobs: int | None = None  # number of likeliest tokens to report at each generated token
    prompt_logprobs: int | None = None  # number of likeliest tokens to report at each prompt token
    structured_outputs: StructuredOutputs | None = None  # the form that the answer must have
    extra_args: Mapping[str, ExtraArg] = {}  # for logits processors from outside the tree
    stop: str | Sequence[str] | None = None  # end a choice before the first of these texts
    include_stop_str_in_output: bool = False  # the text ends with the stop string, or with the stop token's
    skip_special_tokens: bool = True  # leave the text of special tokens out
    bad_words: Sequence[str] | None = None  # never complete one of these words

    def __post_init__(self) -> None:
        self._check_texts()
        self._check_flags()
        self._check_counts()
        self._check_tokens()
        self._check_reals()
        form: object = self.structured_outputs
        if form is None:
            return
        if not isinstance(form, StructuredOutputs):
            expected = "baton.StructuredOutputs(...), which has the fields of vLLM's StructuredOutputsParams"
            raise InvalidRequest(f"structured_outputs: expected {expected}, got {shown(form)}")
        if self.ignore_eos or self.min_tokens:
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise InvalidRequest(f"{name} and structured_outputs: an answer ends where it is complete")

    def _check_texts(self) -> None:
        if self.stop is not None and not all(_texts("stop", self.stop)):
            raise InvalidRequest("stop: a stop string must not be empty")
        words = () if self.bad_words is None else _texts("bad_words", self.bad_words)
        if not all(word.strip() for word in words):
            raise InvalidRequest("bad_words: each of them needs a character that is no space")

    def _check_flags(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidRequest(f"{name}: expected True or False, got {shown(value)}")

    def _check_counts(self) -> None:
        _check_integer("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1)
        _check_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_integer("top_k", self.top_k, -1)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)

    def _check_tokens(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(f"logit_bias must map token ids to biases, got {self.logit_bias!r}")
        if self.logit_bias:
            _check_integer("len(logit_bias)", len(self.logit_bias), 0, MAX_LOGIT_BIAS)
        stops: object = self.stop_token_ids
        if not isinstance(stops, tuple | list):
            raise InvalidRequest(f"stop_token_ids must be token ids, got {self.stop_token_ids!r}")
        allowed, words = self.allowed_token_ids, self.bad_words_token_ids
        if allowed is not None:
            if not isinstance(allowed, tuple | list):
                raise InvalidRequest(f"allowed_token_ids must be token ids, got {allowed!r}")
            _check_integer("len(allowed_token_ids)", len(allowed), 1, MAX_ALLOWED_TOKENS)
        self._check_words(words)
        for token_id in chain(self.logit_bias, self.stop_token_ids, allowed or (), *words):
            _check_integer("a token id", token_id)
        extra = self.extra_args
        if not isinstance(extra, Mapping) or len(extra) > MAX_EXTRA_ARGS:
            raise InvalidRequest(f"extra_args must map at most {MAX_EXTRA_ARGS} names to values")

    def _check_words(self, words: object) -> None:
        if not isinstance(words, tuple | list) or not all(isinstance(each, tuple | list) for each in words):
            raise InvalidRequest(f"bad_words_token_ids must be lists of token ids, got {words!r}")
        if not all(words):
            raise InvalidRequest("bad_words_token_ids: each of them needs a token id")
        _check_integer("tokens of bad_words_token_ids", sum(map(len, words)), 0, MAX_BAD_WORD_TOKENS)

    def _check_reals(self) -> None:
        _check_real("temperature", self.temperature, 0.0, None)
        _check_real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be greater than 0, got 0.0")
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real("repetition_penalty", self.repetition_penalty, 0.0, None)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty must be greater than 0, got 0.0")
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias.items():
            _check_real(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return _texts("stop", self.stop)

    def of_tokens(self) -> "SamplingParams":
        """Return the parameters without those of the text, as an engine takes them."""
        if all(getattr(self, name) == default for name, default in _TEXT_DEFAULTS.items()):
            return self
        return msgspec.structs.replace(self, **_TEXT_DEFAULTS)

    @property
    def has_penalties(self) -> bool:
        """Any of the three penalties has an effect."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_TEXT_DEFAULTS = {
    each.name: each.default for each in msgspec.structs.fields(SamplingParams) if each.name in TEXT_FIELDS
}


def _texts(name: str, value: object) -> tuple[str, ...]:
    """Return the texts of a field that may be one text, several or None. Raises InvalidRequest."""
    listed = [value] if isinstance(value, str) else () if value is None else value
    texts = [text for text in listed if isinstance(text, str)] if isinstance(listed, Sequence) else []
    if not isinstance(listed, Sequence) or len(texts) < len(listed):
        raise InvalidRequest(f"{name}: expected text or a list of texts, got {shown(value)}")
    return tuple(texts)


def _check_integer(name: str, value: object, low: int = -MAX_INTEGER, high: int | None = None) -> None:
    if type(value) is int and low <= value <= (MAX_INTEGER if high is None else high):
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}")
    if not -MAX_INTEGER <= value <= MAX_INTEGER:
        raise InvalidRequest(f"{name} must fit 64 bits and a sign, got {value.bit_length()} bits")
    if value < low or (high is not None and value > high):
        raise InvalidRequest(f"{name} must be {_bound(value, low, high)}, got {value}")


def _check_real(name: str, value: object, low: float, high: float | None) -> None:
    if not isinstance(value, float):
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidRequest(f"{name} must be a number, got {value!r}")
        _check_integer(name, value)
    # Written so that NaN fails: every comparison with NaN is false.
    if not low <= value <= (sys.float_info.max if high is None else high):
        raise InvalidRequest(f"{name} must be {_bound(value, low, high)}, got {value}")


def _bound(value: float, low: float, high: float | None) -> str:
    if high is not None:
        return f"between {low} and {high}"
    return "finite" if value > low else f"at least {low}"


AttemptKey: TypeAlias = tuple[str, int]  # request id, attempt


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One accepted request. `request_id` and `attempt` are minted inside Baton, never by a client.

    A later attempt has the tokens of earlier attempts in `generated_token_ids`; with the same seed the answer
    continues with the same tokens. One choice of a client's request with several choices is a request with
    `n` 1, the same seed, and the number of the choice in `choice`. InvalidRequest: `n` is not 1 in one of
    these cases, or the answer has all its `max_tokens` already.
    """

    request_id: Id
    token_ids: TokenIds
    sampling: SamplingParams = SamplingParams()
    tenant: str = ""
    cache_salt: bytes = b""  # derived from the tenant by the gateway; only requests of one salt share pages
    model: str = ""  # that shall answer, by `Worker.model`; "": the model of a cluster that has one
    adapter: Adapter | None = None  # that changes the model; workers read it when they first meet it
    priority: int = 0  # lower values are served first, as in vLLM
    sla: Sla = Sla()
    scheduling_key: SchedulingKey = SchedulingKey()  # of the tenant; written by the gateway
    arrival_s: float = 0.0
    attempt: Attempt = 0
    generated_token_ids: tuple[TokenId, ...] = ()
    choice: int = 0
    # Of a health check: a prefill worker computes the prompt and its pages are transferred, or the request
    # fails; its decode worker never computes the prompt.
    is_probe: bool = False

    def __post_init__(self) -> None:
        _check_integer("priority", self.priority)
        _check_integer("choice", self.choice, 0, MAX_CHOICES - 1)
        num_generated, sampling = len(self.generated_token_ids), self.sampling
        if sampling.n > 1 and (num_generated or self.choice):
            raise InvalidRequest(f"a single choice is requested or continued: n must be 1, got {sampling.n}")
        if sampling.max_tokens is not None and num_generated >= sampling.max_tokens:
            raise InvalidRequest(
                f"generated_token_ids: {num_generated} tokens fill max_tokens {sampling.max_tokens} already"
            )

    @property
    def is_health_check(self) -> bool:
        """The request comes from a gateway's health check, never from a client."""
        return self.priority == HEALTH_PRIORITY

    @property
    def key(self) -> AttemptKey:
        """The attempt that this request is."""
        return self.request_id, self.attempt

    @property
    def page_salt(self) -> bytes:
        """The salt of the page keys: no page of one adapter serves another one, or the bare model."""
        return self.cache_salt if self.adapter is None else self.adapter.salt(without_public(self.cache_salt))

    @property
    def all_token_ids(self) -> TokenIds:
        """The prompt and the tokens of earlier attempts: the next token attends to them."""
        return self.token_ids + self.generated_token_ids

    @property
    def num_tokens(self) -> int:
        """The length of `all_token_ids`."""
        return len(self.token_ids) + len(self.generated_token_ids)

    @property
    def choices(self) -> range:
        """The numbers of the requested choices."""
        return range(self.choice, self.choice + self.sampling.n)


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Natural-log probabilities at one position, before temperature."""

    token_id: int  # of the token at this position
    logprob: float  # of that token
    rank: int  # of that token; 1: the most likely one
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of the likeliest tokens, likeliest first


class StepOutput(msgspec.Struct, frozen=True, gc=False):
    """One token of one choice of one request, the last one if it has a `finish_reason`.

    `token_id` is None only when a sequence ended without sampling (abort, error).
    """

    request_id: str
    choice: int
    index: int  # 0 is the first generated token of the first attempt
    token_id: int | None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # prompt tokens with KV that was cached, or came from another worker
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # with index 0 of choice 0 only
    error: str | None = None  # with FinishReason.ERROR
    is_invalid: bool = False  # with an error: another replica would fail likewise


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One token of one attempt on its way to a client; `index` counts the tokens of earlier attempts too.

    The last event has a finish reason; `token_id` is None only where the attempt ended without a token.
    """

    request_id: Id
    attempt: Attempt
    index: Count
    token_id: TokenId | None
    finish_reason: FinishReason | None = None
    num_cached_tokens: Count = 0  # of the prompt; in the first event of an attempt
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # with index 0
    times: WorkerTimes | None = None  # of the sender, with the first token that it computed and the last one

    @classmethod
    def of(
        cls,
        request: Request,
        output: StepOutput,
        finish_reason: FinishReason | None,
        times: WorkerTimes | None = None,
    ) -> Self:
        """Return the event of an engine's output. The finish reason may differ from the engine's."""
        return cls(
            request.request_id,
            request.attempt,
            output.index,
            output.token_id,
            finish_reason,
            output.num_cached_tokens,
            output.logprobs,
            output.prompt_logprobs,
            times,
        )


class FilledPages(NamedTuple):
    """The KV of the first `num_tokens` tokens of a request, in pages that `owner` holds in the page ledger.

    The last page may be filled in part.
    """

    pages: tuple[int, ...]
    num_tokens: int
    owner: Hashable
