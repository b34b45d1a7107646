"""The settings of a router."""

from typing import Final

import msgspec

from baton.config.loader import check_between
from baton.errors import ConfigError
from baton.messages.bounds import LINK_TIMEOUT_S, LinkTimeout

MAX_ATTEMPTS: Final = 2**20
REDIS_SCHEMES: Final = ("redis://", "rediss://", "unix://", "sentinel://")


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that an operator chooses."""

    # How workers are chosen: round-robin, least-loaded, prefix, cost (by predicted seconds), or
    # package.module:Class, a RoutingPolicy of your own.
    policy: str = "cost"
    # Prompts of at most this many tokens are prefilled on their decode worker; the policy "cost" decides by
    # cost instead. The default is one page: a shorter prompt has no full page to transfer, and costs
    # a decode batch no more than one step.
    local_prefill_tokens: int = 16
    max_attempts: int = 8192  # attempts under way at once in the whole cluster; more are rejected
    # Redis that shares the prefix index between routers, for the policies cost and prefix: "none", a URL, or
    # "auto": `baton serve` starts one where redis-server is installed.
    redis: str = "auto"
    decision_log: str | None = None  # file that gets one line for each attempt sent out and each that ended
    seed: int = 0  # of the choice between equally loaded workers

    def __post_init__(self) -> None:
        check_between("router.local_prefill_tokens", self.local_prefill_tokens, 0, 2**31)
        check_between("router.max_attempts", self.max_attempts, 1, MAX_ATTEMPTS)
        check_between("router.seed", self.seed, 0, 2**63 - 1)
        if self.redis not in ("auto", "none") and not self.redis.startswith(REDIS_SCHEMES):
            kinds = ", ".join(REDIS_SCHEMES)
            raise ConfigError(f"router.redis: expected auto, none or a URL ({kinds}), got {self.redis!r}")


class RouterConfig(RouterSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one router process."""

    host: str = "127.0.0.1"  # address to listen on for the cluster's processes
    port: int = 0  # to listen on for them; 0: any that is free
    # Seconds without a sign of life after which a connection is dropped. `baton serve` sets this from its own
    # link_timeout_s.
    link_timeout_s: LinkTimeout = LINK_TIMEOUT_S

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("router.port", self.port, 0, 65_535)
