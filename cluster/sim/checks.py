"""What must hold when a simulation has come to rest, whatever went wrong in it."""

from collections import Counter
from collections.abc import Iterator

from baton.cluster.sim.clients import Client
from baton.cluster.sim.deployment import Deployment
from baton.cluster.sim.lives import GatewayLife, RouterLife, WorkerLife
from baton.decode_worker.cancelled_attempts import CancelledAttempts
from baton.engine.pages import PageState
from baton.errors import InvalidRequest, Overloaded, WorkerLost
from baton.gateway.replay import MAX_STRIKES


def client_complaints(client: Client, deployment: Deployment) -> Iterator[str]:
    """Exactly one end, the right tokens, and no error without a reason."""
    yield from client.complaints
    name, network = client.request.request_id[:8], deployment.site.network
    if client.is_ill:
        if client.finish_reason is not None:
            yield f"{name} can't be answered, and ended with {client.finish_reason}"
        num_killed = deployment.site.killers[client.request.request_id]
        if num_killed > MAX_STRIKES + network.has_been_cut:  # one may die unseen while its wire is cut
            yield f"{name} has killed {num_killed} workers"
        return
    token_ids, reason = client.golden()
    if client.token_ids != token_ids[: len(client.token_ids)]:
        yield f"{name} got {client.token_ids}, an undisturbed run says {token_ids}"
    if client.finish_reason is not None and (client.token_ids, client.finish_reason) != (token_ids, reason):
        yield f"{name} ended with {client.finish_reason} after {len(client.token_ids)} of {len(token_ids)}"
    if client.error is not None and client.gateway is not None:
        yield from _error_complaints(client, deployment)


def _error_complaints(client: Client, deployment: Deployment) -> Iterator[str]:
    name, error = client.request.request_id[:8], client.error
    lasted_s = client.ended_s - client.opened_s
    match error:
        case Overloaded():
            if lasted_s < deployment.site.limits.max_wait_s:
                yield f"{name} was given up after {lasted_s:.2f} s: {error}"
        case WorkerLost():
            absences = [absence for slot in deployment.workers for absence in slot.absences]
            num_gone = sum(first <= client.ended_s and client.opened_s <= last for first, last in absences)
            if num_gone < 2:
                yield f"{name} was given up after {num_gone} deaths: {error}"
        case InvalidRequest() | _:
            yield f"{name} failed: {error!r}"


def rest_complaints(deployment: Deployment) -> Iterator[str]:
    """Nothing is held, nobody waits, every book is empty and adds up."""
    for slot in deployment.slots:
        life = slot.life
        if life.process.num_unheard:
            yield f"{slot.name} has {life.process.num_unheard} things to hear"
        match life:
            case RouterLife():
                yield from _router_complaints(life, deployment)
            case GatewayLife():
                if life.frontend.num_open:
                    yield f"{slot.name} has {life.frontend.num_open} open streams"
                if life.frontend.counters["contradictions"]:
                    yield f"{slot.name} has been told two things of one token"
            case WorkerLife():
                yield from _worker_complaints(life)


def _router_complaints(life: RouterLife, deployment: Deployment) -> Iterator[str]:
    router = life.router
    router.books.check_integrity()
    router.reception.check_integrity()
    if len(router.reception):
        yield f"{life.process.name}'s queue has {len(router.reception)} attempts"
    if len(router.books):
        yield f"{life.process.name}'s books have {len(router.books)} attempts"
    if len(router.members) != len(deployment.workers):
        yield f"{life.process.name} knows {len(router.members)} of {len(deployment.workers)} workers"
    for worker in router.status().workers:
        if worker.num_attempts:
            yield f"{life.process.name} counts {worker.num_attempts} attempts at {worker.worker.name}"


def _worker_complaints(life: WorkerLife) -> Iterator[str]:
    name, engine, worker = life.process.name, life.engine, life.worker
    if worker.attempts or not worker.is_idle:
        yield f"{name} still works on {worker.attempts}, {life.endpoint.num_open} transfers are open"
    if engine.has_work():
        yield f"{name}'s engine has {len(engine.scheduler.keys())} sequences"
    if engine.scheduler.outside.kept:
        yield f"{name} keeps pages of {list(engine.scheduler.outside.kept)}"
    engine.scheduler.check_integrity()
    pool = engine.pages
    num_there = pool.count(PageState.FREE) + pool.count(PageState.CACHED)
    if num_there != pool.num_pages:
        counts = {state.name: pool.count(state) for state in PageState}
        yield f"{name} has {counts} of {pool.num_pages} pages"
    if life.endpoint.landings.num_open() or life.endpoint.pieces.num_going:
        yield f"{name}: bytes may still be written"
    yield from _size_complaints(life)


def _size_complaints(life: WorkerLife) -> Iterator[str]:
    """Nothing that is over is remembered, but for what has a bound of its own."""
    parts = [part for part in vars(life.worker).values() if type(part).__module__.startswith(OF_WORKERS)]
    for owner in (life.worker, *parts):
        for name, value in vars(owner).items() if not isinstance(owner, CancelledAttempts) else ():
            if isinstance(value, dict | list | set) and value and not isinstance(value, Counter):
                yield f"{life.process.name} remembers {len(value)} in {type(owner).__name__}.{name}"


OF_WORKERS = ("baton.decode_worker", "baton.prefill_worker")


def quiet_complaints(deployment: Deployment) -> Iterator[str]:
    """Where nothing goes wrong nothing is done twice, but for what was rejected before the cluster stood."""
    for life in deployment.lives(GatewayLife):
        for name, number in life.frontend.counters.items():
            if name in UNNEEDED and number:
                yield f"{life.process.name} counts {number} {name}, and nothing went wrong"


UNNEEDED = frozenset({"replays_lost", "replays_router", "replays_unheard", "repeated_events"})


def is_whole(deployment: Deployment) -> bool:
    """Whether every process runs again."""
    return all(slot.is_whole for slot in deployment.slots)
