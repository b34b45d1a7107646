"""The routing policies by name. `--router-policy package.module:Class` names one from outside this tree."""

import difflib
import importlib
from collections.abc import Callable
from typing import Any, Final

from baton.errors import ConfigError
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
    module, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, POLICIES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(POLICIES)
        raise ConfigError(
            f"router.policy: expected one of {known} or package.module:Class, got {name!r}{hint}"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"router.policy: {name!r} cannot be imported: {error}") from error
    missing = [each for each in ("choose", "expect", "forget") if not callable(getattr(found, each, None))]
    missing += [each for each in ("uses_prefix_index", "weighs_local_prefill") if not hasattr(found, each)]
    if missing:
        raise ConfigError(f"router.policy: {name!r} is no RoutingPolicy: it lacks {', '.join(missing)}")
    return found


def load_policy(policy: RoutingPolicy, context: PolicyContext) -> RoutingPolicy:
    """The policy for probes and for prompts that any decode worker may compute: `policy` itself when it goes
    by load.
    """
    return policy if isinstance(policy, LoadPolicy) else LeastLoaded(context)
