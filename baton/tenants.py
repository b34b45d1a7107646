"""The policy of a tenant, and the part of the policy that travels with each request.

Only gateways read the tenants file. A gateway writes the tenant's `SchedulingKey` into every `Request` that
it accepts: routers and workers order, bound and degrade work by that key, need no file, and apply a changed
policy from the next request on. Where the keys of two requests of one tenant differ, the later one holds.

The defaults are those of a cluster without tenants: one tenant, one class, no limits.
"""

import struct
from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

MAX_CLASSES: Final = 16
BURST_S: Final = 10.0  # of tokens_per_s, where burst_tokens is not given
ONLY_CLASS: Final = "default"  # of a file without classes
OF_FREE: Final = 4  # one tenant may hold this many times the free slots
PUBLIC_SALT: Final = b"baton public:"  # the start of a salt with public tokens; their number follows, as u32

Milliseconds: TypeAlias = Annotated[float, Meta(gt=0, le=86_400_000)]
Weight: TypeAlias = Annotated[float, Meta(ge=1e-6, le=1e6)]  # finite, also in sums of ratios
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_CLASSES)]
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=2**40)]
Bytes: TypeAlias = Annotated[int, Meta(ge=1, le=2**50)]
Limit: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
ClassName: TypeAlias = Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")]
TenantName: TypeAlias = Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")]


def has_slots(tenant: str, num_asked: int, num_own: int, num_free: int) -> bool:
    """Return whether a tenant that holds `num_own` slots may take `num_asked` of the free ones.

    A tenant may hold OF_FREE times the free slots: one greedy tenant leaves a fifth of all slots free, two
    leave a ninth, so a tenant without slots always finds some. A cluster without a tenants file has one
    tenant, "", that may take all.
    """
    return num_asked <= num_free and (not tenant or num_own + num_asked <= OF_FREE * num_free)


class Refusal(StrEnum):
    """The reason for which a request is refused; reasons of quotas are named after the fields of `Quotas`."""

    NO_ROOM = "no_room"  # there may be room at any moment: the gateway submits again
    SLO = "slo"  # the request would miss its ttft_ms or tpot_ms
    DEADLINE = "deadline"  # the request's deadline_ms has passed, or cannot be met
    SHED = "shed"  # the cluster is overloaded, and the request is of the lowest class
    TOKENS_PER_S = "tokens_per_s"
    MAX_CONCURRENT_REQUESTS = "max_concurrent_requests"
    MAX_ACTIVE_SEQUENCES = "max_active_sequences"
    MAX_KV_PAGES = "max_kv_pages"
    MAX_QUEUED = "max_queued"
    MAX_INPUT_BYTES = "max_input_bytes"
    MAX_ANSWER_BYTES = "max_answer_bytes"

    @property
    def is_quota(self) -> bool:
        return self.value in Quotas.__struct_fields__


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of the values below; fields at their defaults take no room in a message."""


class Sla(Value, frozen=True):
    """Latency objectives of a request, from its arrival at the gateway. None: no objective."""

    ttft_ms: Milliseconds | None = None  # time to first token
    tpot_ms: Milliseconds | None = None  # mean time per output token after the first
    deadline_ms: Milliseconds | None = None  # a request without a token by then is refused


class Quotas(Value, frozen=True):
    """Limits of one tenant in the whole cluster; each choice counts as a request. None: no limit."""

    tokens_per_s: Annotated[float, Meta(gt=0, le=2**40)] | None = None  # prompt and answer tokens together
    burst_tokens: Tokens | None = None  # tokens that may be used at once; None: ten seconds' worth
    max_concurrent_requests: Limit | None = None  # accepted and not ended, queued or running
    max_active_sequences: Limit | None = None  # requests on workers at once; further ones queue
    max_kv_pages: Limit | None = None  # KV pages held at once, in each worker
    max_queued: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # requests queued at the router
    max_input_bytes: Bytes | None = None  # request bodies and prompts in memory at once, in each gateway
    max_answer_bytes: Bytes | None = None  # what is kept of answers at once, in each gateway

    @property
    def burst(self) -> float:
        """Tokens in a full token bucket; inf without `tokens_per_s`."""
        if self.tokens_per_s is None:
            return float("inf")
        return float(self.burst_tokens or max(1.0, self.tokens_per_s * BURST_S))


class Degradation(Value, frozen=True):
    """Measures that overload may take against a tenant's requests."""

    clip_max_tokens_to: Tokens | None = None  # cap of max_tokens under overload; None: never
    may_reduce_logprobs: bool = False  # under overload, at most one alternative for each token
    may_shed: bool = True  # under overload, refuse requests with Retry-After


class SchedulingKey(Value, frozen=True):
    """The scheduling class of one request, made from its tenant's policy."""

    weight: Weight = 1.0  # the tenant's share, among the tenants of its rank
    rank: Rank = 0  # of its class; 0 is served strictly before 1
    max_queue_delay_ms: Milliseconds | None = None  # due time of a request without a TTFT objective
    quotas: Quotas = Quotas()
    degradation: Degradation = Degradation()
    # The client named objectives that its tenant is not promised: no other request yields to it.
    has_unpromised_sla: bool = False


class TenantPolicy(Value, frozen=True):
    """One tenant's part of the tenants file, without its keys."""

    weight: Weight = 1.0  # share of the cluster, among the tenants of its class
    priority_class: ClassName | None = None  # one of `classes`; None: the lowest
    sla: Sla = Sla()  # default objectives of requests, and the tightest that a request may name
    quotas: Quotas = Quotas()  # limits over the whole cluster
    max_queue_delay_ms: Milliseconds | None = None  # a request without a TTFT objective is due after this
    degradation: Degradation = Degradation()  # what overload may do to this tenant's requests
    models: tuple[str, ...] | None = None  # that the tenant may use; None: every model
    # Names among the file's public_prefixes; tenants share the KV pages of these.
    public_prefixes: tuple[str, ...] = ()

    def scheduling_key(self, rank: int) -> SchedulingKey:
        """Return the scheduling key of the tenant's requests. rank: of their class."""
        return SchedulingKey(
            weight=self.weight,
            rank=rank,
            max_queue_delay_ms=self.max_queue_delay_ms,
            quotas=self.quotas,
            degradation=self.degradation,
        )


# The salt of a tenant's KV pages.


def with_public(salt: bytes, num_tokens: int) -> bytes:
    """Return the salt of a prompt that begins with `num_tokens` public tokens.

    All tenants share the full pages of public tokens; later pages are the tenant's own.
    """
    return PUBLIC_SALT + struct.pack("<I", num_tokens) + salt if num_tokens else salt


def without_public(salt: bytes) -> bytes:
    """Return the tenant's own salt in a salt of `with_public`."""
    return split_salt(salt)[1]


def split_salt(salt: bytes) -> tuple[int, bytes]:
    """Return the number of public tokens and the tenant's own salt."""
    start = len(PUBLIC_SALT)
    if not salt.startswith(PUBLIC_SALT) or len(salt) < start + 4:
        return 0, salt
    (num_tokens,) = struct.unpack_from("<I", salt, start)
    return num_tokens, salt[start + 4 :]
