"""One simulated cluster from its start to its rest, all of it from one seed.

1. A cluster, a load and faults are drawn by chance. The cluster starts while the first requests come.
2. Requests and faults happen; whatever dies is started again.
3. When the last request has ended, everything comes to rest. Then nothing may be held anywhere, and every
   client must have been given what an undisturbed run gives, or one error that its fate explains.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Final

from baton.decode_worker.worker import CancelledAttempts
from baton.engine.cache.page_pool import PageState
from baton.errors import InvalidRequest, Overloaded, WorkerLost
from baton.gateway.streams.request_stream import MAX_STRIKES, ReplayLimits
from baton.router.in_flight import SILENCE_S
from baton.rpc.reports import BEAT_S
from baton.sim.clients import ILL_CHANCE, ClientLoad, ClientVisit, SimClient
from baton.sim.deployment import Deployment
from baton.sim.faults import Faults, Trouble
from baton.sim.lives import GatewayLife, RouterLife, SimSite, WorkerLife
from baton.sim.network import Network
from baton.sim.process import Events
from baton.sim.trace import Recorder

# What must hold when a simulation has come to rest, whatever went wrong in it.


def client_complaints(client: SimClient, deployment: Deployment) -> Iterator[str]:
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


def _error_complaints(client: SimClient, deployment: Deployment) -> Iterator[str]:
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
    router.in_flight.check_integrity()
    router.admission_queue.check_integrity()
    if len(router.admission_queue):
        yield f"{life.process.name}'s queue has {len(router.admission_queue)} attempts"
    if len(router.in_flight):
        yield f"{life.process.name}'s books have {len(router.in_flight)} attempts"
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
    if life.endpoint.registrations.num_open() or life.endpoint.pieces.num_going:
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


LIMITS: Final = ReplayLimits(max_wait_s=20.0, max_begun_wait_s=20.0, max_silence_s=80.0)
QUIET_REST_S: Final = 1.0  # where nothing went wrong, that is time enough
REST_S: Final = 5.0  # after which nothing of the past may be felt: leases, heartbeats and ticks are over
FORGET_S: Final = SILENCE_S + BEAT_S + 1.0  # what a router was told of another's, and nobody ended
MAY_BE_DROPPED: Final = {"fenced"}  # a worker that wakes up after another has taken its place
MAX_LIFE_S: Final = 180.0
MAX_SILENT_LIFE_S: Final = 600.0  # where a process takes minutes to start, or a step seconds


class Violation(AssertionError):
    """Something that must hold did not."""


class World:
    def __init__(
        self,
        seed: int,
        write: Callable[[str], None] | None = None,
        trouble: Trouble = Trouble.ANY,
    ) -> None:
        """write: takes the trace, line by line."""
        self.seed = seed
        self.events = Events()
        self.recorder = Recorder(self.events, write)
        draws = ("cluster", "load", "faults", "network", "ids", "routers")
        draw = {name: Random(f"{seed} {name}") for name in draws}
        network = Network(self.events, draw["network"])
        num_routers = draw["routers"].choice((1, 1, 2))
        self.site = SimSite(self.events, network, draw["ids"], self.recorder, LIMITS, num_routers)
        self.recorder.names = self.site.names
        self.deployment = Deployment(self.site, draw["cluster"])
        self.faults = Faults(self.deployment, draw["faults"], self.recorder.say)
        self._trouble = trouble
        load = ClientLoad(
            self.events, draw["load"], ILL_CHANCE if trouble in (Trouble.ANY, Trouble.SILENCE) else 0.0
        )
        self.visits = load.visits(len(self.deployment.gateways))
        self.faults.schedule(trouble, load.ends_s + 1.0)
        self._busy_until_s = max(self.faults.last_s, load.ends_s)

    @property
    def clients(self) -> list[SimClient]:
        return [client for visit in self.visits for client in visit.clients]

    def run(self) -> Counter[str]:
        """How many clients ended how. AssertionError, noting how to replay it, when a rule did not hold."""
        try:
            return self._run()
        except Exception as error:
            error.add_note(f"replay: {replay_command(self.seed, self._trouble)}")
            raise
        finally:
            self.site.files.close()

    @property
    def summary(self) -> str:
        deployment = self.deployment
        return (
            f"{len(deployment.routers)} routers, {len(deployment.workers)} workers, "
            f"{len(deployment.gateways)} gateways, "
            f"{self.faults.num_faults} faults, {len(self.clients)} clients"
        )

    def _run(self) -> Counter[str]:
        for visit in self.visits:
            self.events.at(visit.at_s, lambda visit=visit: self._come(visit))  # type: ignore[misc]
        self.events.run_until(self._busy_until_s)
        self._run_until_all_have_ended()
        self.events.run_until(self.events.now_s + self._rest_s)
        self._check()
        return Counter(_fate(client) for client in self.clients)

    @property
    def was_troubled(self) -> bool:
        return bool(self.faults.num_faults or self.site.killers)

    @property
    def _rest_s(self) -> float:
        if len(self.deployment.routers) > 1 and (self.was_troubled or self.site.stream.may_lose):
            return FORGET_S
        return REST_S if self.was_troubled else QUIET_REST_S

    @property
    def _max_life_s(self) -> float:
        is_slow = self._trouble in (Trouble.SILENCE, Trouble.SLOW_STEPS)
        return MAX_SILENT_LIFE_S if is_slow else MAX_LIFE_S

    def _come(self, visit: ClientVisit) -> None:
        slot = self.deployment.gateways[visit.gateway]
        if slot.life.process.is_dead:  # it is refused a connection, and tries again
            self.events.after(0.1, lambda: self._come(visit))
            return
        assert isinstance(slot.life, GatewayLife)
        first = visit.clients[0]
        first.open(slot.life)
        if visit.cancel_s is not None:
            self.events.after(visit.cancel_s, first.cancel)

    def _run_until_all_have_ended(self) -> None:
        while not (
            self._has_ended() and is_whole(self.deployment) and self.events.now_s >= self.faults.over_s
        ):
            if self.events.now_s > self._max_life_s:
                left = [client.request.request_id[:8] for client in self.clients if not _has_ended(client)]
                raise Violation(f"{len(left)} requests never end: {' '.join(left)}")
            self.events.run_until(self.events.now_s + 0.5)

    @property
    def _is_well(self) -> bool:
        """Every process runs, and every fault is over."""
        return is_whole(self.deployment) and self.events.now_s >= self.faults.over_s

    def _has_ended(self) -> bool:
        return all(_has_ended(client) for visit in self.visits for client in _asked_for(visit))

    def _check(self) -> None:
        drops = [(host, error) for host, error in self.recorder.drops if error.reason not in MAY_BE_DROPPED]
        complaints = [f"{host} dropped a peer: {error}" for host, error in drops]
        for client in self.clients:
            complaints += client_complaints(client, self.deployment)
        complaints += rest_complaints(self.deployment)
        if not self.was_troubled:
            complaints += quiet_complaints(self.deployment)
        if complaints:
            raise Violation("\n".join(complaints))


def replay_command(seed: int, trouble: Trouble) -> str:
    which = "" if trouble is Trouble.ANY else f" --trouble {trouble}"
    return f"baton sim --seed {seed}{which}"


def _has_ended(client: SimClient) -> bool:
    return client.gateway is not None and client.is_over


def _asked_for(visit: ClientVisit) -> list[SimClient]:
    """The first, and the others once it has its first token."""
    first, *others = visit.clients
    return [first, *(client for client in others if client.gateway is not None)]


def _fate(client: SimClient) -> str:
    if client.error is not None:
        return type(client.error).__name__
    if client.finish_reason is not None:
        return str(client.finish_reason)
    if client.has_cancelled:
        return "cancelled"
    return "gone with its gateway" if client.gateway is not None else "never asked for"
