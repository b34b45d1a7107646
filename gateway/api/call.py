"""One call: `read_call` makes an `AskedCall` from a body, and a `Call` adds the gateway's side to it."""

import hashlib
from typing import Any, Final, Literal, TypeAlias

import msgspec

from baton.adapters import Adapter
from baton.errors import InvalidRequest
from baton.gateway.api.body import (
    AskedForm,
    AskedResponse,
    Body,
    ChatBody,
    CompletionBody,
    StreamOptions,
    logit_bias,
)
from baton.gateway.api.errors import invalid
from baton.gateway.metrics.tracing import TraceContext
from baton.gateway.streams.resume import DIGEST_BYTES, ResumePoint
from baton.gateway.tenants.tenants import Tenant
from baton.gateway.text.answer_reader import AnswerParsing
from baton.request import MAX_CHOICES, MAX_SEED, TOKEN_ID_BYTES, SamplingParams, TokenIds
from baton.tenants import SchedulingKey, Sla

BYTES_PER_LOGPROB: Final = 150  # of one alternative: a tuple, an integer and a float
Dialect: TypeAlias = Literal["openai", "responses", "messages"]


class Prompt(msgspec.Struct):
    """One prompt of a call. `text` is None unless the call asks for its prompt back."""

    text: str | None
    token_ids: TokenIds
    num_public_tokens: int = 0  # the first of them, see PublicPrefixes of gateway/api/body_reader.py


class AskedCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The call that a body asks for, in a form that is quick to send between processes.

    It has prompts of token ids, and how to answer each of them.
    """

    model: str = ""  # the name in the body; of a Call, the name in the answer
    num_unknown: int = 0  # keys of the body
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams  # of each choice; n is 1
    form_key: str = ""  # of the body, which asks for the form in `sampling`
    num_choices: int  # a prompt
    is_chat: bool = False
    dialect: Dialect = "openai"  # the wire format of the answer
    response: AskedResponse | None = None  # of the dialect "responses"
    parsing: AnswerParsing = AnswerParsing()  # of reasoning and calls of tools out of the text
    shows_reasoning: bool = True  # False: it is left out
    is_streamed: bool = False
    has_usage: bool = False  # in a last chunk of the stream
    has_running_usage: bool = False  # in every chunk
    is_resumable: bool = False  # the events of the stream have ids
    has_echo: bool = False
    num_prompt_logprobs: int | None = None  # likeliest tokens to show at each token of the prompt
    hides_tokens: bool = False  # max_tokens was 0: only the prompt is asked about
    returns_token_ids: bool = False
    names_tokens_by_id: bool = False  # in log probabilities
    cache_salt: str = ""  # of the caller: only calls of one salt share pages
    priority: int = 0
    tokenised_s: float = 0.0  # seconds of tokenising the prompts


class Call(AskedCall, frozen=True, kw_only=True):
    """One call as the gateway serves it. The seed of `sampling` is set."""

    served: str = ""  # `ServedModel.key` of the model that answers
    adapter: Adapter | None = None  # of the model with this name
    resumed: ResumePoint | None = None  # the event after which the stream resumes
    sla: Sla = Sla()
    scheduling_key: SchedulingKey = SchedulingKey()
    arrival_s: float = 0.0  # of the last byte of the body, by the gateway's clock
    received_s: float = 0.0  # of the first byte of the head; 0: unknown
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
    | {"arrival_s", "received_s", "tokenised_s", "trace", "num_unknown", "form_key"}
)
# `read_call` converts these fields of a body; SamplingParams takes the others unchanged.
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
    "skip_special_tokens",
}
SAMPLING_FIELDS: Final = set(Body.__struct_fields__) & set(SamplingParams.__struct_fields__) - _CONVERTED


def read_call(
    body: ChatBody | CompletionBody,
    defaults: SamplingParams,
    *,
    form: AskedForm | None,
    bad_words_token_ids: tuple[tuple[int, ...], ...],
    parsing: AnswerParsing,
    **fields: Any,
) -> AskedCall:
    """Return the call that a chat or a completion asks for; its seed is None unless the body has one.

    defaults: the model's; their max_tokens caps every answer. fields: of AskedCall, the prompts among them.
    Raises InvalidRequest or ApiError, which name the field.
    """
    options, num_choices = body.stream_options or StreamOptions(), 1 if body.n is None else body.n
    if not 1 <= num_choices <= MAX_CHOICES:
        raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}, got {num_choices}")
    if body.stream_options is not None and not body.stream:
        key = "stream_options.resumable" if options.resumable else "stream_options"
        raise invalid(key, "needs stream = true")
    is_chat = isinstance(body, ChatBody)
    max_tokens, logprobs = body.num_asked_tokens, _num_logprobs(body)
    return AskedCall(
        model=body.model or "",
        sampling=msgspec.structs.replace(
            _sampling(body, defaults, max_tokens, logprobs),
            structured_outputs=None if form is None else form.form,
            bad_words_token_ids=bad_words_token_ids,
            skip_special_tokens=body.skip_special_tokens is not False and not parsing.keeps_special_tokens,
        ),
        form_key="" if form is None else form.key,
        num_choices=num_choices,
        is_chat=is_chat,
        parsing=parsing,
        shows_reasoning=not isinstance(body, ChatBody) or body.include_reasoning is not False,
        is_streamed=bool(body.stream),
        has_usage=bool(options.include_usage),
        has_running_usage=bool(options.include_usage and options.continuous_usage_stats),
        is_resumable=bool(options.resumable),
        has_echo=_has_echo(body),
        num_prompt_logprobs=body.prompt_logprobs,
        hides_tokens=not is_chat and max_tokens == 0,
        returns_token_ids=bool(body.return_token_ids),
        cache_salt=body.cache_salt or "",
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        priority=body.priority or 0,
        **fields,
    )


def _has_echo(body: ChatBody | CompletionBody) -> bool:
    return isinstance(body, CompletionBody) and bool(body.echo)


def _num_logprobs(body: ChatBody | CompletionBody) -> int | None:
    """Return how many likeliest tokens to show at each token of the answer; None: no log probabilities."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "logprobs must be true as well")
    return (body.top_logprobs or 0) if body.logprobs else None


def _sampling(
    body: ChatBody | CompletionBody, defaults: SamplingParams, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Return the sampling parameters that a body asks for, but for those that need the model's files."""
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "not available in a stream")
    if isinstance(body, CompletionBody):
        max_tokens = max_tokens or 1  # the token is not shown
    of_prompt = (body.prompt_logprobs, logprobs if _has_echo(body) else None)
    caps = [each for each in (max_tokens, defaults.max_tokens) if each is not None]
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    return msgspec.structs.replace(
        defaults,
        max_tokens=min(caps, default=None),
        logprobs=logprobs,
        prompt_logprobs=max((each for each in of_prompt if each is not None), default=None),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        extra_args=body.vllm_xargs or {},
        logit_bias=logit_bias(body),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        seed=None if body.seed is None else body.seed & MAX_SEED,  # a negative number is a seed as well
        **given,
    )
