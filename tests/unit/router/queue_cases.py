"""Submissions of tenants to a router with a queue, and its answers."""

from collections.abc import Iterator
from typing import Any

from baton.clock import ManualClock
from baton.messages.control import Ended, Heartbeat, Rejected, Routed, Started, Submit
from baton.messages.operations import Status, StatusQuery
from baton.messages.status import TenantStatus
from baton.messages.workers import Load
from baton.request import Request, SamplingParams, TokenIds
from baton.router.in_flight import InFlight
from baton.router.membership import Membership
from baton.router.queue.admission import MIN_COMPUTING
from baton.tenants import Degradation, Quotas, SchedulingKey, Sla
from tests.node_peers import ListeningPeer, TestPeer, a_worker, hello_of, id_of, name_of
from tests.unit.router.router_cluster import Cluster, cluster

LONG = 3000  # tokens: MIN_COMPUTING prompts of this length take all slots of a worker


class Fleet:
    """Workers that have joined, and their load: what the parts of the queue read."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.members = Membership(self.clock)
        self.in_flight = InFlight(self.clock)

    def join(self, name: str, **changes: Any) -> None:
        worker = a_worker(name, **changes)
        self.members.join(worker, ListeningPeer(hello_of(worker)))

    def beat(self, name: str, *, is_draining: bool = False, **pages: int) -> None:
        member = self.members.get(id_of(name))
        assert member is not None
        self.members.beat(member, Heartbeat(load=Load(pages=pages), is_draining=is_draining))


def asked(
    name: str,
    tenant: str = "a",
    *,
    num_tokens: int = 100,
    max_tokens: int = 10,
    sla: Sla | None = None,
    attempt: int = 0,
    priority: int = 0,
    quotas: Quotas | None = None,
    degradation: Degradation | None = None,
    **scheduling_key: float,
) -> Submit:
    """A submission by a gateway. scheduling_key: weight, rank, max_queue_delay_ms."""
    request = Request(
        request_id=id_of(name),
        token_ids=TokenIds.of((1,) * num_tokens),
        sampling=SamplingParams(max_tokens=max_tokens),
        tenant=tenant,
        sla=sla or Sla(),
        attempt=attempt,
        priority=priority,
        scheduling_key=SchedulingKey(
            quotas=quotas or Quotas(),
            degradation=degradation or Degradation(),
            **scheduling_key,  # type: ignore[arg-type]
        ),
    )
    return Submit(request=request, is_begun=attempt > 0)


def a_cluster(**settings: Any) -> Iterator[Cluster]:
    """Yield a router with a prefill and a decode worker; then check the router's integrity."""
    made = cluster(**settings)
    for name in ("p0", "d0"):
        made.add(name, num_pages=10_000, max_num_seqs=64)
    yield made
    made.router.admission_queue.check_integrity()
    made.router.in_flight.check_integrity()


def submit(c: Cluster, *submits: Submit, gateway: str = "g") -> list[Routed | Rejected]:
    """Submit, and return the answers that came at once."""
    for each in submits:
        c[gateway].say(each)
    return answers(c, gateway)


def answers(c: Cluster, gateway: str = "g") -> list[Routed | Rejected]:
    """The answers to submissions since the last call."""
    found = [message for message in c[gateway].received if isinstance(message, Routed | Rejected)]
    c[gateway].received.clear()
    return found


def names(answered: list[Routed | Rejected]) -> list[str]:
    return [name_of(each.request_id) for each in answered]


def fill(c: Cluster, tenant: str = "a", **fields: Any) -> None:
    """Take all slots of the prefill worker with prompts f0, f1 ... of this tenant."""
    filling = [asked(f"f{n}", tenant, num_tokens=LONG, **fields) for n in range(MIN_COMPUTING)]
    assert all(isinstance(each, Routed) for each in submit(c, *filling))


def start(c: Cluster, *named: str) -> None:
    """Report the first tokens of these requests: their prompts take no slots any more."""
    c["g"].say(Started(attempts=tuple((id_of(name), 0) for name in named)))


def end(c: Cluster, *named: str, num_tokens: int = 5) -> None:
    """Report the first tokens and the ends of these requests."""
    start(c, *named)
    keys = tuple((id_of(name), 0) for name in named)
    c["g"].say(Ended(attempts=keys, num_tokens=(num_tokens,) * len(keys)))


def run_while_filled(c: Cluster, num_ticks: int, *more: str) -> None:
    """Let time pass while the prompts of `fill`, and `more`, are still being computed."""
    at_work = tuple((id_of(name), 0) for name in ("f0", "f1", *more))
    for _ in range(num_ticks):
        c.beat("p0", "d0", attempts=at_work)
        c.tick(0.5)


def tenant_of(c: Cluster, tenant: str) -> TenantStatus:
    """The tenant's part of the router's status."""
    operator = TestPeer.operator(c.router)
    operator.say(StatusQuery())
    queue = operator.only(Status).queue
    return next(each for each in queue.tenants if each.tenant == tenant)
