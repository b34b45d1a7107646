"""A clock that jumps, as of a machine that was asleep or set anew: nobody is lost, nothing given away."""

from collections.abc import Iterator

import msgspec
import pytest

from baton.messages.control import Rejected, Routed
from baton.messages.operations import Status
from baton.tenants import Quotas, Refusal, Sla
from tests.node_peers import id_of
from tests.unit.router.queue_cases import asked
from tests.unit.router.reception_cases import LONG, a_cluster, answers, end, fill, names, submit
from tests.unit.router.router_cluster import Cluster

AT_WORK = tuple((id_of(name), 0) for name in ("f0", "f1"))
BUCKET = Quotas(tokens_per_s=10, burst_tokens=2000)


@pytest.fixture
def c() -> Iterator[Cluster]:
    yield from a_cluster()


def jump(c: Cluster, seconds: float) -> None:
    c.clock._now_s += seconds


def tick(c: Cluster, times: int = 8) -> None:
    for _ in range(times):
        c.beat("p0", "d0", attempts=AT_WORK)
        c.tick(0.5)


def test_back_it_gives_away_no_tokens_and_loses_nobody(c: Cluster) -> None:
    assert isinstance(submit(c, asked("spends", "t", num_tokens=1990, quotas=BUCKET))[0], Routed)
    end(c, "spends", num_tokens=10)
    fill(c)
    sla = Sla(ttft_ms=60_000, deadline_ms=80_000)
    assert submit(c, asked("waits", num_tokens=LONG, sla=sla)) == []
    jump(c, -5000.0)
    tick(c)
    assert answers(c) == []
    (refused,) = submit(c, asked("more", "t", num_tokens=1990, quotas=BUCKET))
    assert isinstance(refused, Rejected) and refused.refusal is Refusal.TOKENS_PER_S
    assert 100 < refused.retry_after_s < 250
    status = msgspec.msgpack.encode(c.router.status())
    assert msgspec.msgpack.decode(status, type=Status).queue.num_queued == 1
    end(c, "f0")
    assert names(answers(c)) == ["waits"]


def test_on_it_ends_what_is_over_by_then_and_lets_the_others_out(c: Cluster) -> None:
    fill(c)
    waiting = [asked("due", num_tokens=LONG, sla=Sla(deadline_ms=1000)), asked("patient", num_tokens=LONG)]
    assert submit(c, *waiting) == []
    jump(c, 4.0)
    tick(c, times=1)
    (expired,) = answers(c)
    assert isinstance(expired, Rejected) and expired.refusal is Refusal.DEADLINE
    end(c, "f0", "f1")
    assert names(answers(c)) == ["patient"]


def test_who_is_refused_after_a_jump_is_told_a_time_within_bounds(c: Cluster) -> None:
    fill(c)
    told = []
    for seconds in (0.0, -1000.0, 4.0, -50.0):
        jump(c, seconds)
        tick(c, times=1)
        sla = Sla(ttft_ms=1)
        found = submit(c, asked(f"r{seconds}", num_tokens=LONG, sla=sla))
        tick(c, times=2)
        told += [each.retry_after_s for each in (*found, *answers(c)) if isinstance(each, Rejected)]
    assert len(told) == 4 and all(0 < each <= 60 for each in told)
