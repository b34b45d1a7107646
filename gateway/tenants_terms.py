"""What a request may ask for beside its body, by headers; never more than its tenant's policy gives.

x-slo-ttft-ms, x-slo-tpot-ms    what it should keep (llm-d's x-llm-d-slo-* mean the same)
x-baton-priority                the class that it is served in: its tenant's own, or a lower one
"""

import difflib
import math
from typing import Final

import msgspec
from starlette.types import Scope

from baton.gateway.api_errors import invalid
from baton.gateway.asgi import header
from baton.gateway.tenants import Tenant
from baton.tenancy import Sla, Standing

TTFT_HEADERS: Final = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")  # the first that is there counts
TPOT_HEADERS: Final = (b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
PRIORITY_HEADER: Final = b"x-baton-priority"
MAX_SLO_MS: Final = 86_400_000.0


def sla_of(scope: Scope, tenant: Tenant) -> Sla:
    """The tenant's own, as far as the headers do not ask for less. Raises ApiError 400."""
    promised = tenant.policy.sla
    ttft_ms, tpot_ms = _milliseconds(scope, TTFT_HEADERS), _milliseconds(scope, TPOT_HEADERS)
    if ttft_ms is None and tpot_ms is None:
        return promised
    return Sla(
        ttft_ms=_looser(promised.ttft_ms, ttft_ms),
        tpot_ms=_looser(promised.tpot_ms, tpot_ms),
        deadline_ms=promised.deadline_ms,
    )


def standing_of(scope: Scope, tenant: Tenant) -> Standing:
    """In the class that is asked for, if it is not above the tenant's own. Raises ApiError 400."""
    standing = tenant.policy.standing(_rank_of(scope, tenant))
    return msgspec.structs.replace(standing, wishes=True) if _wishes(scope, tenant.policy.sla) else standing


def _rank_of(scope: Scope, tenant: Tenant) -> int:
    asked_for = header(scope, PRIORITY_HEADER)
    if asked_for is None:
        return tenant.rank
    if asked_for not in tenant.classes:
        nearest = difflib.get_close_matches(asked_for[:64], tenant.classes, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(tenant.classes)}"
        name = PRIORITY_HEADER.decode()
        raise invalid(f"the header {name}: there is no class {asked_for[:64]!r}; {hint}", param=name)
    return max(tenant.rank, tenant.classes.index(asked_for))


def _wishes(scope: Scope, promised: Sla) -> bool:
    """Whether an objective is asked for of a kind that the tenant is not promised."""
    kinds = ((promised.ttft_ms, TTFT_HEADERS), (promised.tpot_ms, TPOT_HEADERS))
    return any(own is None and header(scope, name) is not None for own, names in kinds for name in names)


def _looser(promised: float | None, asked_for: float | None) -> float | None:
    if promised is None or asked_for is None:
        return promised if asked_for is None else asked_for
    return max(promised, asked_for)


def _milliseconds(scope: Scope, names: tuple[bytes, ...]) -> float | None:
    name = next((name for name in names if header(scope, name) is not None), None)
    if name is None:
        return None
    text = header(scope, name) or ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_SLO_MS:
        raise invalid(
            f"the header {name.decode()}: expected milliseconds, got {text[:32]!r}", param=name.decode()
        )
    return value
