"""Variables of the environment that set something, and those that were meant to.

The environment's name of `engine.cache.page_size` is BATON_ENGINE_CACHE_PAGE_SIZE.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Final

from baton.config import PREFIX, VARIABLES
from baton.config_tree import leaves
from baton.errors import ConfigError
from baton.gateway_config import GatewayConfig
from baton.router_config import RouterConfig
from baton.serve_config import ServeConfig
from baton.worker_config import WorkerConfig

OF_COMPOSE: Final = ("BATON_UID", "BATON_GID")  # read by deploy/compose.yaml
# What Kubernetes tells every container of a service whose name begins with baton.
OF_KUBERNETES: Final = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP)(_|$)")
OF_KUBERNETES_VALUE: Final = ("tcp://", "udp://")


def variable(key: str) -> str:
    return PREFIX + key.upper().replace(".", "_")


def check_variables(environment: Mapping[str, str]) -> None:
    """ConfigError for a variable that sets nothing and is named nearly as one that does.

    One may stand there for another command than the one that looks.
    """
    structs = (ServeConfig, WorkerConfig, GatewayConfig, RouterConfig)
    known = [variable(key) for struct in structs for key in leaves(struct)] + [*VARIABLES, *OF_COMPOSE]
    for name, value in environment.items():
        if name in known or OF_KUBERNETES.search(name) or value.startswith(OF_KUBERNETES_VALUE):
            continue
        nearest = _nearest(name, known)
        if nearest is not None:
            raise ConfigError(f"unknown variable {name}; did you mean {nearest}?")


def _nearest(name: str, known: list[str]) -> str | None:
    """By what follows the prefix, which would make any two look alike. A part of a name means its first."""
    stem = name.removeprefix(PREFIX)
    stems = [other.removeprefix(PREFIX) for other in known]
    parts = [other for other in stems if other.startswith(f"{stem}_") or other.endswith(f"_{stem}")]
    alike = parts or difflib.get_close_matches(stem, stems, n=1)
    return PREFIX + alike[0] if alike else None
