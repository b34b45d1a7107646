"""The settings of a router."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from baton.errors import ConfigError
from baton.messages.bounds import LINK_TIMEOUT_S, LinkTimeout, Port

REDIS_SCHEMES: Final = ("redis://", "rediss://", "unix://", "sentinel://")


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one router process."""

    # How workers are chosen: round-robin, least-loaded, prefix, cost (by predicted seconds), or
    # package.module:Class, a RoutingPolicy of your own.
    policy: str = "cost"
    # Prompts of at most this many tokens are prefilled on their decode worker; the policy "cost" decides by
    # cost instead. The default is one page: a shorter prompt has no full page to transfer, and costs
    # a decode batch no more than one step.
    local_prefill_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 16
    # Attempts under way at once in the whole cluster; more are rejected.
    max_attempts: Annotated[int, Meta(ge=1, le=2**20)] = 8192
    # Redis that shares the prefix index between routers, for the policies cost and prefix: "none", a URL, or
    # "auto": `baton serve` starts one where redis-server is installed.
    redis: str = "auto"
    # Seconds of inputs that the router keeps in memory for `baton bundle`; 0: none are kept.
    recording_s: Annotated[float, Meta(ge=0, le=86_400)] = 900.0
    recording_memory_bytes: Annotated[int, Meta(ge=2**20, le=2**40)] = 2**26  # that they take at most
    decision_log: str | None = None  # file that gets one line for each attempt sent out and each that ended
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # of the choice between equally loaded workers
    host: str = "127.0.0.1"  # address to listen on for the cluster's processes
    port: Port = 0  # to listen on for them; 0: any that is free
    # Seconds without a sign of life after which a connection is dropped. `baton serve` sets this from its own
    # link_timeout_s.
    link_timeout_s: LinkTimeout = LINK_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.redis not in ("auto", "none") and not self.redis.startswith(REDIS_SCHEMES):
            kinds = ", ".join(REDIS_SCHEMES)
            raise ConfigError(f"router.redis: expected auto, none or a URL ({kinds}), got {self.redis!r}")
