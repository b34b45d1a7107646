"""What one gateway process has counted, as a value: to be shown, and sent to the gateways beside it."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from baton.gateway.tenants_counts import MAX_TENANTS, TenantCounts

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name: TypeAlias = Annotated[str, Meta(max_length=64)]
MAX_SERIES = 4096


class HistogramCounts(msgspec.Struct, frozen=True, array_like=True):
    counts: Annotated[tuple[Count, ...], Meta(max_length=64)]  # the last is of what is above every bound
    sum: float


class Counts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gateway: Name  # its name, another in each life of the process
    requests: Annotated[tuple[tuple[Name, Count, Count], ...], Meta(max_length=MAX_SERIES)]  # route, status
    refused: Annotated[dict[Name, Count], Meta(max_length=MAX_SERIES)]  # connections, by reason
    events: Annotated[dict[Name, Count], Meta(max_length=MAX_SERIES)]  # of the service
    num_open: Count
    prompt_tokens: Count
    cached_tokens: Count
    generated_tokens: Count
    clients_gone: Count
    clients_given_up: Count
    unknown_keys: Count
    tenants: Annotated[dict[Name, TenantCounts], Meta(max_length=MAX_TENANTS + 1)]
    tenants_file: Annotated[dict[Name, Count], Meta(max_length=MAX_SERIES)]  # changes of it, by outcome
    ttft: HistogramCounts
    itl: HistogramCounts
    duration: HistogramCounts
