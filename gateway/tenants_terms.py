"""What a request may ask for beside its body, by headers; never more than its tenant's policy gives.

x-slo-ttft-ms, x-slo-tpot-ms    what it should keep (llm-d's x-llm-d-slo-* mean the same)
x-baton-priority                the class that it is served in: its tenant's own, or a lower one
"""

import difflib
import math
from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec
from starlette.types import Scope

from baton.gateway.api_errors import Headers, invalid
from baton.gateway.tenants import Tenant
from baton.tenancy import Sla, Standing

TTFT_HEADERS: Final = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")  # the first that is there counts
TPOT_HEADERS: Final = (b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
PRIORITY_HEADER: Final = b"x-baton-priority"
MAX_SLO_MS: Final = 86_400_000.0

_HEADERS: Final = frozenset({*TTFT_HEADERS, *TPOT_HEADERS, PRIORITY_HEADER})

AskedFor: TypeAlias = Mapping[bytes, str]  # name of a header above -> its value


def asked_for(scope: Scope) -> AskedFor:
    """The headers above; where one is there twice, the first counts."""
    headers: Headers = scope["headers"]
    return {name: value.decode("latin-1") for name, value in reversed(headers) if name in _HEADERS}


def sla_of(asked: AskedFor, tenant: Tenant) -> Sla:
    """The tenant's own, as far as the headers do not ask for less. Raises ApiError 400."""
    promised = tenant.policy.sla
    if not asked:
        return promised
    ttft_ms, tpot_ms = _milliseconds(asked, TTFT_HEADERS), _milliseconds(asked, TPOT_HEADERS)
    return Sla(
        ttft_ms=_looser(promised.ttft_ms, ttft_ms),
        tpot_ms=_looser(promised.tpot_ms, tpot_ms),
        deadline_ms=promised.deadline_ms,
    )


def standing_of(asked: AskedFor, tenant: Tenant) -> Standing:
    """In the class that is asked for, if it is not above the tenant's own. Raises ApiError 400."""
    standing = tenant.policy.standing(_rank_of(asked, tenant))
    return msgspec.structs.replace(standing, wishes=True) if _wishes(asked, tenant.policy.sla) else standing


def _rank_of(asked: AskedFor, tenant: Tenant) -> int:
    name = asked.get(PRIORITY_HEADER)
    if name is None:
        return tenant.rank
    if name not in tenant.classes:
        nearest = difflib.get_close_matches(name[:64], tenant.classes, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(tenant.classes)}"
        param = PRIORITY_HEADER.decode()
        raise invalid(f"the header {param}: there is no class {name[:64]!r}; {hint}", param=param)
    return max(tenant.rank, tenant.classes.index(name))


def _wishes(asked: AskedFor, promised: Sla) -> bool:
    """Whether an objective is asked for of a kind that the tenant is not promised."""
    kinds = ((promised.ttft_ms, TTFT_HEADERS), (promised.tpot_ms, TPOT_HEADERS))
    return bool(asked) and any(own is None and not asked.keys().isdisjoint(names) for own, names in kinds)


def _looser(promised: float | None, asked_for: float | None) -> float | None:
    if promised is None or asked_for is None:
        return promised if asked_for is None else asked_for
    return max(promised, asked_for)


def _milliseconds(asked: AskedFor, names: tuple[bytes, ...]) -> float | None:
    name = next((name for name in names if name in asked), None)
    if name is None:
        return None
    text = asked[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_SLO_MS:
        raise invalid(
            f"the header {name.decode()}: expected milliseconds, got {text[:32]!r}", param=name.decode()
        )
    return value
