"""One call of the API in the one form that is served: prompts of token ids, and how to answer them."""

import hashlib
from collections.abc import Collection
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from baton.errors import InvalidRequest, shown
from baton.gateway.api.errors import invalid, unsupported
from baton.gateway.api.types import Body, ChatBody, CompletionBody
from baton.gateway.streams.resume import DIGEST_BYTES, ResumePoint
from baton.gateway.tenants.tenants import Tenant
from baton.gateway.text.model_files import SamplingDefaults
from baton.gateway.text.tools import ToolForm
from baton.request import MAX_CHOICES, MAX_LOGPROBS, MAX_SEED, SamplingParams
from baton.tenants import SchedulingKey, Sla

# The prompts of a completion, in OpenAI's four forms: text, texts, token ids, several of these.

MAX_PROMPTS: Final = 128
MAX_TOKEN_ID: Final = 2**31 - 1
GivenPrompt: TypeAlias = str | list[int]


def list_prompts(prompt: object) -> list[GivenPrompt]:
    """Raises InvalidRequest for anything else; decoded JSON is expected."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(f"prompt: expected text, token ids, or a list of these, got {shown(prompt)}")
    if _are_token_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} prompts, got {len(prompt)}")
    return [_one(item, index) for index, item in enumerate(prompt)]


def _one(item: object, index: int) -> GivenPrompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _are_token_ids(item):
        return item
    raise InvalidRequest(f"prompt[{index}]: expected text or token ids, got {shown(item)}")


def check_token_ids(token_ids: Collection[int], vocab_size: int | None, what: str) -> None:
    """Raises InvalidRequest that names the first id outside the vocabulary. None: the size is not known."""
    if vocab_size is None or not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    bad = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise InvalidRequest(f"{what}: token id {bad} is outside the vocabulary of {vocab_size} tokens")


def _are_token_ids(items: list[object]) -> bool:
    """Decoded JSON has no other number types; `set(map(type, ...))` runs in C. True is no token id."""
    return bool(items) and set(map(type, items)) == {int} and _are_between(items)


def _are_between(items: list[Any]) -> bool:
    return bool(min(items) >= 0 and max(items) <= MAX_TOKEN_ID)


DEFAULT_COMPLETION_TOKENS: Final = 16  # as OpenAI's; a chat ends where the model ends it
BYTES_PER_TOKEN_ID: Final = 36  # of a tuple: the integer, and a pointer to it
BYTES_PER_LOGPROB: Final = 150  # of one alternative, as it comes: a tuple, an integer and a float
SAMPLING_FIELDS: Final = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)
# Fields that change when and for whom a call is answered, not the answer.
NOT_OF_THE_ANSWER: Final = frozenset(
    {"prompts", "priority", "sla", "scheduling_key", "arrival_s", "tenant", "resumed"}
)


class Prompt(NamedTuple):
    """`text` is None when token ids were given, until somebody wants it back."""

    text: str | None
    token_ids: tuple[int, ...]
    num_public_tokens: int = 0  # the first of them, see gateway/tenants/public_prefixes.py


class Call(msgspec.Struct, frozen=True, kw_only=True):
    model: str  # as the client named it
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams  # of each choice; its n is 1
    num_choices: int  # a prompt
    stops: tuple[str, ...] = ()
    is_chat: bool = False
    tool_form: ToolForm | None = None  # in which tools may be called; None: there are none
    has_parallel_calls: bool = True  # of tools, in one answer
    is_streamed: bool = False
    has_usage: bool = False  # in a last chunk of the stream
    has_running_usage: bool = False  # in every chunk
    is_resumable: bool = False  # its events have ids
    resumed: ResumePoint | None = None  # the stream goes on there
    has_echo: bool = False
    hides_tokens: bool = False  # max_tokens was 0: the prompt alone is asked about
    returns_token_ids: bool = False
    skips_special_tokens: bool = True
    priority: int = 0
    sla: Sla = Sla()
    scheduling_key: SchedulingKey = SchedulingKey()
    arrival_s: float = 0.0
    tenant: Tenant


class RequestPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a call brings beside its body."""

    tenant: Tenant
    model: str
    seed: int  # where the client gave none; choices differ by their number, not by their seed
    arrival_s: float = 0.0  # by the gateway's clock
    sla: Sla = Sla()
    scheduling_key: SchedulingKey = SchedulingKey()
    tool_form: ToolForm | None = None  # of the model
    resumed: ResumePoint | None = None
    defaults: SamplingDefaults = SamplingDefaults()  # of the model, for what the body does not give


def chat_call(
    body: ChatBody, prompt: Prompt, request_policy: RequestPolicy, *, has_tools: bool = False
) -> Call:
    """Raises InvalidRequest or ApiError naming the field.

    has_tools: that the model was told of, see gateway/text/tools.py.
    """
    refuse_unsupported_chat(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs: logprobs must be true as well", param="top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = _sampling(body, request_policy, max_tokens=max_tokens, logprobs=logprobs)
    return _call(
        body,
        (prompt,),
        sampling,
        request_policy,
        is_chat=True,
        tool_form=request_policy.tool_form if has_tools else None,
        has_parallel_calls=body.parallel_tool_calls is not False,
    )


def completion_call(body: CompletionBody, prompts: tuple[Prompt, ...], request_policy: RequestPolicy) -> Call:
    """Raises InvalidRequest or ApiError naming the field."""
    refuse_unsupported_completion(body)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    has_echo = bool(body.echo)
    sampling = _sampling(
        body,
        request_policy,
        max_tokens=max_tokens or 1,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if has_echo else None,
    )
    return _call(body, prompts, sampling, request_policy, has_echo=has_echo, hides_tokens=max_tokens == 0)


def num_answer_entries(call: Call, max_model_len: int) -> int:
    """How much its answer may show at most: echoed tokens, and those that come with log probabilities, each
    as often as there are choices, with its alternatives.
    """
    sampling, num_tokens = call.sampling, 0
    for prompt in call.prompts:
        num_prompt_tokens = len(prompt.token_ids)
        if call.has_echo:
            num_tokens += num_prompt_tokens
        if sampling.logprobs is not None:
            room = max_model_len - num_prompt_tokens
            num_tokens += room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    return num_tokens * call.num_choices * ((sampling.logprobs or 0) + 1)


def digest_of(call: Call, fingerprint: str) -> bytes:
    """A digest of everything that the answer's content depends on. fingerprint: of the model's weights."""
    fields = msgspec.structs.asdict(call)
    answered = {name: value for name, value in fields.items() if name not in NOT_OF_THE_ANSWER}
    prompts = [(prompt.text if call.has_echo else None, prompt.token_ids) for prompt in call.prompts]
    content = msgspec.msgpack.encode([fingerprint, prompts, answered], order="deterministic")
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def held_bytes(call: Call) -> int:
    """Memory that the prompts of a call take while it is answered, about."""
    return sum(
        len(prompt.token_ids) * BYTES_PER_TOKEN_ID + len(prompt.text or "") * 2 for prompt in call.prompts
    )


def unpacked_bytes(call: Call) -> int:
    """Memory that log probabilities of its prompts take, which come in one piece, about."""
    asked = call.sampling.prompt_logprobs
    if asked is None:
        return 0
    return sum(len(prompt.token_ids) for prompt in call.prompts) * (asked + 1) * BYTES_PER_LOGPROB


def check_sampled_ids(body: Body, vocab_size: int | None) -> None:
    """Raises InvalidRequest for an id of `logit_bias` or `stop_token_ids` outside the vocabulary."""
    check_token_ids(_logit_bias(body), vocab_size, "logit_bias")
    check_token_ids(body.stop_token_ids or (), vocab_size, "stop_token_ids")


def refuse_unsupported_chat(body: ChatBody) -> None:
    if body.functions:
        raise unsupported("calling functions by their former name", param="functions")
    if body.response_format is not None and body.response_format.type != "text":
        raise unsupported(
            f"response_format of type {body.response_format.type[:40]!r}", param="response_format"
        )


def refuse_unsupported_completion(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of other than n", param="best_of")
    if body.suffix:
        raise unsupported("suffix", param="suffix")


def _call(
    body: Body,
    prompts: tuple[Prompt, ...],
    sampling: SamplingParams,
    request_policy: RequestPolicy,
    **particulars: Any,
) -> Call:
    options = body.stream_options
    has_usage = bool(options and options.include_usage)
    return Call(
        model=request_policy.model,
        prompts=prompts,
        sampling=sampling,
        num_choices=_num_choices(body),
        stops=_stops(body),
        is_streamed=bool(body.stream),
        has_usage=has_usage,
        has_running_usage=has_usage and bool(options and options.continuous_usage_stats),
        is_resumable=bool(options and options.resumable),
        resumed=request_policy.resumed,
        returns_token_ids=bool(body.return_token_ids),
        # The tags of a tool call are special tokens in some vocabularies.
        skips_special_tokens=body.skip_special_tokens is not False and not particulars.get("tool_form"),
        priority=body.priority or 0,
        sla=request_policy.sla,
        scheduling_key=request_policy.scheduling_key,
        arrival_s=request_policy.arrival_s,
        tenant=request_policy.tenant,
        **particulars,
    )


def _num_choices(body: Body) -> int:
    num_choices = 1 if body.n is None else body.n
    if not 1 <= num_choices <= MAX_CHOICES:
        raise invalid(f"n must be between 1 and {MAX_CHOICES}, got {num_choices}", param="n")
    return num_choices


def _sampling(
    body: Body,
    request_policy: RequestPolicy,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise invalid(f"logprobs: at most {MAX_LOGPROBS} alternatives, got {logprobs}", param="logprobs")
    return SamplingParams(
        max_tokens=request_policy.defaults.capped(max_tokens),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(body),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        seed=request_policy.seed
        if body.seed is None
        else body.seed & MAX_SEED,  # negative ones are seeds as well
        **(request_policy.defaults.given() | given),
    )


def _logit_bias(body: Body) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in (body.logit_bias or {}).items()}
    except ValueError:
        raise invalid("logit_bias: its keys must be token ids", param="logit_bias") from None


def _stops(body: Body) -> tuple[str, ...]:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if not all(stops):
        raise InvalidRequest("stop: a stop string must not be empty")
    return stops
