"""The counts of one gateway process, as values: they are shown and sent to the gateways of the same port.

They are plain integers and lists, written on the event loop alone: docs/decisions/0021 says why they are no
metric objects of prometheus-client. Labels have few values, and no client chooses them.
"""

from collections import Counter
from collections.abc import Collection
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from baton.messages.bounds import MAX_NAME_CHARS
from baton.messages.status import Histogram
from baton.tenants import Refusal

MAX_TENANTS: Final = 256  # that are counted by name; the others are counted together
OTHERS: Final = "(others)"  # no tenant can have this name
MAX_SERIES: Final = 4096
REFUSALS: Final = frozenset(refusal.value for refusal in Refusal)
ROUTES: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"}
    | {"/v1/models", "/tokenize", "/detokenize", "/sleep", "/wake_up", "/is_sleeping"}
    | {"/health", "/ping", "/metrics", "/version", "/v1/stream", "/ui"}
)

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name: TypeAlias = Annotated[str, Meta(max_length=64)]
ByName: TypeAlias = Annotated[dict[Name, Count], Meta(max_length=MAX_SERIES)]
ByAdapter: TypeAlias = dict[Annotated[str, Meta(max_length=MAX_NAME_CHARS)], Count]


class FirstTokenTimes(Histogram):
    """Seconds to the first token of a call."""

    BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class TokenTimes(Histogram):
    """Seconds between batches of tokens of a choice."""

    BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.2, 0.5, 1.0, 5.0)


class CallTimes(Histogram):
    """Seconds of whole calls."""

    BOUNDS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 600.0)


class CheckTimes(Histogram):
    """Seconds to check a form of structured output."""

    BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class UnaccountedTimes(Histogram):
    """Seconds of a request that no part of its timeline explains."""

    BOUNDS = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


def counted_name(tenant: str, known: Collection[str]) -> str:
    """Return the name under which a tenant is counted: beyond MAX_TENANTS known ones, OTHERS."""
    return tenant if tenant in known or len(known) < MAX_TENANTS else OTHERS


class TenantCounts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The counts of one tenant at one gateway since the gateway started."""

    num_open: Count = 0  # choices that are being answered
    prompt_tokens: Count = 0
    generated_tokens: Count = 0
    # By the end of the call: "answered", "gone" (the client left), "failed", or a Refusal.
    calls: ByName = msgspec.field(default_factory=Counter)
    # By objective ("ttft", "tpot", "deadline"), of the calls that had the objective.
    met: ByName = msgspec.field(default_factory=Counter)
    missed: ByName = msgspec.field(default_factory=Counter)


class ModelCounts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The counts of one of several models; Metrics has them over all models."""

    prompt_tokens: Count = 0
    generated_tokens: Count = 0
    ttft: FirstTokenTimes = msgspec.field(default_factory=FirstTokenTimes)
    itl: TokenTimes = msgspec.field(default_factory=TokenTimes)
    decode: CallTimes = msgspec.field(default_factory=CallTimes)
    duration: CallTimes = msgspec.field(default_factory=CallTimes)


class CountsQuery(msgspec.Struct, frozen=True):
    """Asks another gateway of the port for its Metrics."""


class Metrics(ModelCounts, kw_only=True):
    """The counts of one gateway since it started."""

    gateway: Name = ""  # its name, a new one in each life of the process
    # By route and status.
    requests: Annotated[dict[tuple[Name, Count], Count], Meta(max_length=MAX_SERIES)] = msgspec.field(
        default_factory=Counter
    )
    refused: ByName = msgspec.field(default_factory=Counter)  # connections, before any route, by reason
    events: ByName = msgspec.field(default_factory=Counter)  # of the Service
    num_open: Count = 0  # calls that are being answered
    # Of these, calls with a LoRA adapter, by its name: before and after their first token.
    waiting_adapters: ByAdapter = msgspec.field(default_factory=Counter)
    running_adapters: ByAdapter = msgspec.field(default_factory=Counter)
    cached_tokens: Count = 0
    clients_gone: Count = 0  # before the end of their answer
    clients_given_up: Count = 0  # they read too slowly
    unknown_keys: Count = 0  # of bodies
    forms: ByName = msgspec.field(default_factory=Counter)  # checks of structured outputs, by outcome
    tenants: Annotated[dict[Name, TenantCounts], Meta(max_length=MAX_TENANTS + 1)] = {}
    # Of a gateway that serves several models, by name.
    models: Annotated[dict[Name, ModelCounts], Meta(max_length=MAX_SERIES)] = {}
    worker_us: ByName = msgspec.field(default_factory=Counter)  # by tenant: step time of workers
    tenants_file: ByName = msgspec.field(default_factory=Counter)  # its changes, by outcome
    form_check: CheckTimes = msgspec.field(default_factory=CheckTimes)
    parts_us: ByName = msgspec.field(default_factory=Counter)  # of the timelines of ended calls
    unaccounted: UnaccountedTimes = msgspec.field(default_factory=UnaccountedTimes)

    def answered(self, path: str, status: int) -> None:
        """Count an answered request."""
        self.requests[path if path in ROUTES else "other", status] += 1

    def tenant(self, name: str) -> TenantCounts:
        """Return the counts of a tenant; beyond MAX_TENANTS tenants share theirs."""
        return self.tenants.setdefault(counted_name(name, self.tenants), TenantCounts())

    def of_call(self, model: str) -> list[ModelCounts]:
        """Return the counts that a call is counted in. model: as in Request.model."""
        if not model:
            return [self]
        counts = self.models.get(model)
        if counts is None:
            counts = self.models[model] = ModelCounts()
        return [self, counts]

    def refused_calls(self) -> dict[str, dict[str, int]]:
        """Return tenant -> reason -> refused calls, of the tenants that had any."""
        found = {
            name: {reason: count for reason, count in counts.calls.items() if reason in REFUSALS}
            for name, counts in self.tenants.items()
        }
        return {name: reasons for name, reasons in found.items() if reasons}
