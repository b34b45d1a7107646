"""The router's knobs."""

from typing import Final, Literal, TypeAlias, get_args

import msgspec

from baton.config_tree import check_between
from baton.errors import ConfigError

PolicyName: TypeAlias = Literal["round-robin", "least-loaded", "prefix", "cost"]
MAX_ATTEMPTS: Final = 2**20
REDIS_SCHEMES: Final = ("redis://", "rediss://", "unix://", "sentinel://")


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator sets."""

    policy: PolicyName = "cost"
    # Prompts up to here are computed where they are decoded; the policy "cost" weighs that instead. One page
    # of the default size: less than that has no full page to hand over, and computing it costs a decode batch
    # no more than a step does anyway.
    local_prefill_tokens: int = 16
    max_attempts: int = 8192  # under way at once, in the whole cluster; more are rejected
    # Keeps what workers hold and tells routers of each other, for the policies that look at prompts:
    # "none", a URL, or "auto": one that `baton serve` starts, where there is a program for it.
    redis: str = "auto"
    # A file: a line is appended for each attempt that is sent out, and for each that ends.
    decision_log: str | None = None
    seed: int = 0  # of the choice between workers that are loaded alike

    @property
    def looks_at_prompts(self) -> bool:
        """Whether the policy asks who holds what of them."""
        return self.policy in ("prefix", "cost")

    def __post_init__(self) -> None:
        check_between("router.local_prefill_tokens", self.local_prefill_tokens, 0, 2**31)
        check_between("router.max_attempts", self.max_attempts, 1, MAX_ATTEMPTS)
        check_between("router.seed", self.seed, 0, 2**63 - 1)
        if self.redis not in ("auto", "none") and not self.redis.startswith(REDIS_SCHEMES):
            kinds = ", ".join(REDIS_SCHEMES)
            raise ConfigError(f"router.redis: expected auto, none or a URL ({kinds}), got {self.redis!r}")
        names = get_args(PolicyName)
        if self.policy not in names:
            raise ConfigError(f"router.policy: expected one of {', '.join(names)}, got {self.policy!r}")


class RouterConfig(RouterSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """And where one runs."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("router.port", self.port, 0, 65_535)
