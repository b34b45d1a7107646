"""The routing policies by name. `--router-policy package.module:Class` names one from outside this tree."""

from collections.abc import Callable
from typing import Any, Final

from baton.config.loader import import_class
from baton.router.policies.base import PolicyContext, RoutingPolicy
from baton.router.policies.cost import CostPolicy, PrefixPolicy
from baton.router.policies.load import LeastLoaded, LoadPolicy, RoundRobin

POLICIES: Final[dict[str, Callable[..., RoutingPolicy]]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix": PrefixPolicy,
    "cost": CostPolicy,
}


def policy_class(name: str) -> Any:
    """The RoutingPolicy class of this name, which takes a PolicyContext. ConfigError when there is none."""
    if name in POLICIES:
        return POLICIES[name]
    return import_class("router.policy", name, RoutingPolicy, POLICIES)


def load_policy(policy: RoutingPolicy, context: PolicyContext) -> RoutingPolicy:
    """The policy for probes and for prompts that any decode worker may compute: `policy` itself when it goes
    by load.
    """
    return policy if isinstance(policy, LoadPolicy) else LeastLoaded(context)
