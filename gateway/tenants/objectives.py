"""The objectives that a request asks for by headers. They give no more than the tenant's policy does.

- x-slo-ttft-ms, x-slo-tpot-ms: latency objectives; llm-d's x-llm-d-slo-* mean the same
- x-baton-priority: the priority class, the tenant's own or a lower one
"""

import math
from typing import Final

import msgspec
from starlette.types import Scope

from baton.gateway.api.errors import invalid
from baton.gateway.http.protocol import header
from baton.gateway.tenants.file import unknown_name
from baton.gateway.tenants.tenants import Tenant
from baton.tenants import SchedulingKey, Sla

TTFT_HEADERS: Final = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")  # the first present one counts
TPOT_HEADERS: Final = (b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
PRIORITY_HEADER: Final = b"x-baton-priority"
MAX_SLO_MS: Final = 86_400_000.0


def read_objectives(scope: Scope, tenant: Tenant) -> tuple[Sla, SchedulingKey]:
    """Return the latency objectives and the scheduling key of a request.

    Both are the tenant's unless the headers ask for looser objectives, for objectives that the tenant is not
    promised, or for a lower class. Raises ApiError 400, which names the header.
    """
    promised = tenant.policy.sla
    ttft_ms, tpot_ms = _milliseconds(scope, TTFT_HEADERS), _milliseconds(scope, TPOT_HEADERS)
    sla = Sla(
        ttft_ms=_looser(promised.ttft_ms, ttft_ms),
        tpot_ms=_looser(promised.tpot_ms, tpot_ms),
        deadline_ms=promised.deadline_ms,
    )
    scheduling_key = tenant.policy.scheduling_key(_rank_of(scope, tenant))
    wishes = ((promised.ttft_ms, ttft_ms), (promised.tpot_ms, tpot_ms))
    if any(own is None and wish is not None for own, wish in wishes):
        scheduling_key = msgspec.structs.replace(scheduling_key, has_unpromised_sla=True)
    return sla, scheduling_key


def _rank_of(scope: Scope, tenant: Tenant) -> int:
    name = header(scope, PRIORITY_HEADER)
    if name is None:
        return tenant.rank
    if name not in tenant.classes:
        raise invalid(PRIORITY_HEADER.decode(), unknown_name("class", name[:64], tenant.classes))
    return max(tenant.rank, tenant.classes.index(name))


def _looser(promised: float | None, asked: float | None) -> float | None:
    if promised is None or asked is None:
        return promised if asked is None else asked
    return max(promised, asked)


def _milliseconds(scope: Scope, names: tuple[bytes, ...]) -> float | None:
    for name in names:
        text = header(scope, name)
        if text is None:
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value <= MAX_SLO_MS:
            raise invalid(name.decode(), f"expected milliseconds, got {text[:32]!r}")
        return value
    return None
