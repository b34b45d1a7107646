from baton.messages.status import MAX_TENANTS, OverloadLevel, QueueStatus, TenantStatus, joined
from baton.tenants import Refusal


def a_tenant(name: str, count: int) -> TenantStatus:
    return TenantStatus(
        tenant=name,
        weight=2.0,
        num_queued=count,
        num_active=count + 1,
        oldest_wait_s=float(count),
        work_tokens=10 * count,
        num_dispatched=count,
        waited_s=count / 2,
        num_met=count,
        num_missed=count,
        num_degraded=count,
        refused={Refusal.SHED: count},
    )


def test_of_several_routers_tenants_are_added_up() -> None:
    one = QueueStatus(
        level=OverloadLevel.CLIP,
        num_queued=3,
        oldest_wait_s=9.0,
        escalations={"clip": 2},
        tenants=(a_tenant("a", 3),),
    )
    other = QueueStatus(
        level=OverloadLevel.QUEUE,
        num_queued=6,
        oldest_wait_s=4.0,
        escalations={"clip": 1, "queue": 5},
        tenants=(a_tenant("b", 4), a_tenant("a", 2)),
    )
    both = joined((one, other))
    assert (both.level, both.num_queued, both.oldest_wait_s) == (OverloadLevel.CLIP, 9, 9.0)
    assert both.escalations == {"clip": 3, "queue": 5}
    assert both.tenants == (
        TenantStatus(
            tenant="a",
            weight=2.0,
            num_queued=5,
            num_active=7,
            oldest_wait_s=3.0,
            work_tokens=50,
            num_dispatched=5,
            waited_s=2.5,
            num_met=5,
            num_missed=5,
            num_degraded=5,
            refused={Refusal.SHED: 5},
        ),
        a_tenant("b", 4),
    )


def test_of_one_router_it_is_what_that_one_says() -> None:
    one = QueueStatus(level=OverloadLevel.SHED, num_queued=1, oldest_wait_s=1.0, tenants=(a_tenant("a", 1),))
    assert joined([one]) == one
    assert joined([]) == QueueStatus()


def test_tenants_that_are_not_told_of_are_counted() -> None:
    many = tuple(a_tenant(f"t{number}", 1) for number in range(MAX_TENANTS))
    both = joined((QueueStatus(tenants=many, num_left_out=5), QueueStatus(tenants=(a_tenant("a", 1),))))
    assert len(both.tenants) == MAX_TENANTS and both.num_left_out == 6


def test_every_count_of_a_tenant_is_added() -> None:
    """A field that is new in TenantStatus is not left out."""
    one, both = a_tenant("a", 1), joined([QueueStatus(tenants=(a_tenant("a", 1),))] * 2).tenants[0]
    for field in set(TenantStatus.__struct_fields__) - {"tenant", "weight", "oldest_wait_s"}:
        assert getattr(both, field) != getattr(one, field), field
