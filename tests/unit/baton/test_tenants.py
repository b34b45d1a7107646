import math

import msgspec
import pytest

from baton.request import Request, TokenIds
from baton.tenants import Degradation, Quotas, Refusal, SchedulingKey, Sla, TenantPolicy, has_slots


def test_a_message_has_no_defaults_of_a_request() -> None:
    request = Request(request_id="r", token_ids=TokenIds.of((1,)))
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
    assert message.keys() <= {"request_id", "token_ids", "sampling", "sla", "scheduling_key"}
    assert all(message.get(name, {}) == {} for name in ("sampling", "sla", "scheduling_key"))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (SchedulingKey, "weight", 0.0),
        (SchedulingKey, "weight", math.nan),
        (SchedulingKey, "weight", math.inf),
        (SchedulingKey, "rank", 16),
        (Sla, "deadline_ms", math.inf),
        (Quotas, "tokens_per_s", 0.0),
        (Quotas, "max_queued", -1),
    ],
)
def test_values_out_of_bounds_are_refused_while_decoded(
    kind: type[msgspec.Struct], field: str, value: float
) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.msgpack.decode(msgspec.msgpack.encode({field: value}), type=kind)


def test_burst_of_a_rate_is_its_own_or_ten_seconds_of_it() -> None:
    assert Quotas().burst == math.inf
    assert Quotas(tokens_per_s=5.0).burst == 50.0
    assert Quotas(tokens_per_s=5.0, burst_tokens=7).burst == 7.0
    assert Quotas(tokens_per_s=0.001).burst == 1.0, "an empty bucket would never admit a request"


def test_refusals_of_quotas_have_the_names_of_the_quotas() -> None:
    names = {refusal.value for refusal in Refusal if refusal.is_quota}
    assert names == set(Quotas.__struct_fields__) - {"burst_tokens"}


def test_scheduling_key_is_the_policy_in_its_class() -> None:
    policy = TenantPolicy(
        weight=3.0,
        max_queue_delay_ms=9.0,
        quotas=Quotas(max_queued=1),
        degradation=Degradation(may_shed=False),
    )
    assert policy.scheduling_key(2) == SchedulingKey(
        weight=3.0,
        rank=2,
        max_queue_delay_ms=9.0,
        quotas=Quotas(max_queued=1),
        degradation=Degradation(may_shed=False),
    )


@pytest.mark.parametrize(
    ("tenant", "num_asked", "num_own", "num_free", "expected"),
    [
        ("a", 1, 0, 1, True),
        ("a", 1, 0, 0, False),
        ("a", 1, 79, 20, True),
        ("a", 1, 80, 20, False),
        ("a", 5, 0, 4, False),
        ("", 1, 99, 1, True),
        ("", 1, 99, 0, False),
    ],
)
def test_tenant_may_take_slots_while_it_leaves_some(
    tenant: str, num_asked: int, num_own: int, num_free: int, expected: bool
) -> None:
    assert has_slots(tenant, num_asked, num_own, num_free) is expected
