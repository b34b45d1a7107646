"""What is said to a router with a queue, and what it answers."""

from collections.abc import Iterator

from baton.messages.control import Ended, Rejected, Routed, Started, Submit
from baton.messages.operations import Status, StatusQuery
from baton.messages.status import TenantStatus
from baton.router.in_flight import MIN_COMPUTING
from tests.node_peers import TestPeer, id_of
from tests.unit.router.queue_cases import asked
from tests.unit.router.router_cluster import Cluster, cluster


def a_cluster() -> Iterator[Cluster]:
    made = cluster()
    for name in ("p0", "d0"):
        made.add(name, num_pages=10_000, max_num_seqs=64)
    yield made
    made.router.admission_queue.check_integrity()
    made.router.in_flight.check_integrity()


LONG = 3000  # tokens: so many keep a worker busy for longer than prompts are let out ahead


def submit(c: Cluster, *submits: Submit, gateway: str = "g") -> list[Routed | Rejected]:
    for each in submits:
        c[gateway].say(each)
    return answers(c, gateway)


def answers(c: Cluster, gateway: str = "g") -> list[Routed | Rejected]:
    """To what was submitted, in their order."""
    found = [message for message in c[gateway].received if isinstance(message, Routed | Rejected)]
    c[gateway].received.clear()
    return found


def route(c: Cluster, asked: Submit) -> str:
    """The decode worker that it went to, at once; its first token is there then."""
    (routed,) = submit(c, asked)
    assert isinstance(routed, Routed)
    c["g"].say(Started(attempts=((asked.request.request_id, asked.request.attempt),)))
    return routed.decode


def names(answered: list[Routed | Rejected]) -> list[str]:
    return [bytes.fromhex(each.request_id).decode().rstrip("\0") for each in answered]


def fill(c: Cluster, tenant: str = "a", **fields: object) -> None:
    """All places of the prefill worker are taken by this tenant's prompts."""
    filling = [asked(f"f{n}", tenant, num_tokens=LONG, **fields) for n in range(MIN_COMPUTING)]  # type: ignore[arg-type]
    assert all(isinstance(each, Routed) for each in submit(c, *filling))


def end(c: Cluster, *named: str, num_tokens: int = 5) -> None:
    keys = tuple((id_of(name), 0) for name in named)
    c["g"].say(Started(attempts=keys))
    c["g"].say(Ended(attempts=keys, num_tokens=(num_tokens,) * len(keys)))


def tenant_of(c: Cluster, tenant: str) -> TenantStatus:
    operator = TestPeer.operator(c.router)
    operator.say(StatusQuery())
    queue = operator.only(Status).queue
    return next(each for each in queue.tenants if each.tenant == tenant)
