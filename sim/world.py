"""One simulated cluster from its start to its rest, all of it from one seed.

1. A cluster, a load and faults are drawn at random. The cluster starts while the first requests come.
2. Requests and faults happen; processes that die are started again.
3. After the last request the cluster comes to rest. Then no process may hold anything, and every client must
   have got the answer of an undisturbed run, or one error that the faults explain.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Final

from baton.decode_worker.worker import EarlyResults
from baton.engine.cache.page_pool import PageState
from baton.errors import Overloaded, WorkerLost
from baton.gateway.streams.request_stream import MAX_STRIKES, ReplayLimits
from baton.router.in_flight import SILENCE_S
from baton.router.recording import Recording
from baton.rpc.liveness import BEAT_S
from baton.rpc.worker_node import EndedAttempts
from baton.sim.clients import BAD_REQUEST_CHANCE, Arrival, ClientLoad, SimClient
from baton.sim.deployment import Deployment, SimContext, SimGateway, SimRouter, SimWorker
from baton.sim.faults import SLOW_STEPS_S, Faults
from baton.sim.network import Network, Recorder
from baton.sim.process import Events
from baton.sim.trouble import Trouble

LIMITS: Final = ReplayLimits(max_wait_s=20.0, max_begun_wait_s=20.0, max_silence_s=80.0)
QUIET_REST_S: Final = 1.0  # until rest after a run without faults
REST_S: Final = 5.0  # until leases, heartbeats and ticks of the past have no effect
FORGET_S: Final = SILENCE_S + BEAT_S + 1.0  # until a router forgets another router's attempts
MAY_BE_DROPPED: Final = {"fenced"}  # a worker that resumes after another has taken its name
MAX_LIFE_S: Final = 180.0
MAX_SLOW_LIFE_S: Final = 600.0  # where a process takes minutes to start, or a step seconds
UNNEEDED: Final = frozenset({"replays_lost", "replays_router", "replays_unheard", "repeated_events"})
WORKER_MODULES: Final = ("baton.decode_worker", "baton.prefill_worker")


class Violation(AssertionError):
    """A rule of the simulation does not hold."""


class World:
    """One simulation. It is deterministic: a seed always gives the same trace."""

    def __init__(
        self,
        seed: int,
        write: Callable[[str], None] | None = None,
        trouble: Trouble = Trouble.ANY,
        lasts_s: float = 0.0,
        models: Sequence[str] = ("",),
    ) -> None:
        """write: takes the trace, line by line. lasts_s: of the load, which then never pauses for long.

        0: how long the load lasts is drawn too: some seconds. models: names; "" is the only one.
        """
        self.events = Events()
        self.recordings: list[Recording] = []  # of each life of each router
        self._replay = f"baton sim --seed {seed}"
        if trouble is not Trouble.ANY:
            self._replay += f" --trouble {trouble}"
        self._is_slow = trouble in (Trouble.SILENCE, Trouble.SLOW_STEPS, Trouble.LOST_NODE)
        if len(models) > 1:
            self._replay += f" --models {len(models)}"
        draws = ("cluster", "load", "faults", "network", "ids", "routers", "placement", "models")
        draw = {name: Random(f"{seed} {name}") for name in draws}
        self._recorder = Recorder(self.events, write)
        self._context = SimContext(
            self.events,
            Network(self.events, draw["network"]),
            draw["ids"],
            self._recorder,
            LIMITS,
            draw["routers"].choice((1, 1, 2)),
            draw["placement"].randint(2 if trouble is Trouble.LOST_NODE else 1, 3),
            self.recordings,
        )
        self._deployment = Deployment(self._context, draw["cluster"], draw["placement"], models)
        self._faults = Faults(self._deployment, draw["faults"], self._recorder.say)
        may_be_bad = trouble in (Trouble.ANY, Trouble.SILENCE)
        bad_request_chance = BAD_REQUEST_CHANCE if may_be_bad else 0.0
        draw_model = partial(draw["models"].choice, models)
        load = ClientLoad(self.events, draw["load"], bad_request_chance, lasts_s, draw_model)
        self._arrivals = load.arrivals(len(self._deployment.gateways))
        self._faults.schedule(trouble, load.ends_s + 1.0)
        self._busy_until_s = max(self._faults.last_s, load.ends_s)

    def run(self) -> Counter[str]:
        """Return how many clients ended how.

        AssertionError, with a note how to replay it, when a rule is broken.
        """
        try:
            return self._run()
        except Exception as error:
            error.add_note(f"replay: {self._replay}")
            raise
        finally:
            self._context.files.close()

    @property
    def summary(self) -> str:
        """The size of the simulation, for a line of output."""
        deployment = self._deployment
        return (
            f"{len(deployment.routers)} routers, {len(deployment.workers)} workers, "
            f"{len(deployment.gateways)} gateways, "
            f"{self._faults.num_faults} faults, {len(self._clients)} clients, "
            f"{self.num_migrations} migrations"
        )

    @property
    def num_migrations(self) -> int:
        """The streams that have moved, by the present lives of the gateways."""
        return sum(life.frontend.counters["migrations"] for life in self._deployment.lives(SimGateway))

    @property
    def _clients(self) -> list[SimClient]:
        return [client for arrival in self._arrivals for client in arrival.clients]

    def _run(self) -> Counter[str]:
        for arrival in self._arrivals:
            self.events.at(arrival.at_s, lambda arrival=arrival: self._come(arrival))  # type: ignore[misc]
        self.events.run_until(self._busy_until_s)
        self._run_until_all_have_ended()
        self.events.run_until(self.events.now_s + self._rest_s)
        self._check()
        return Counter(client.fate for client in self._clients)

    def _come(self, arrival: Arrival) -> None:
        gateway = self._deployment.gateways[arrival.gateway].life
        assert isinstance(gateway, SimGateway)
        if gateway.process.is_dead:  # the connection is refused, and the client tries again
            self.events.after(0.1, lambda: self._come(arrival))
            return
        first = arrival.clients[0]
        first.open(gateway)
        if arrival.cancel_s is not None:
            self.events.after(arrival.cancel_s, first.cancel)

    def _run_until_all_have_ended(self) -> None:
        max_life_s = self._busy_until_s + (MAX_SLOW_LIFE_S if self._is_slow else MAX_LIFE_S)
        while not (
            all(arrival.has_ended for arrival in self._arrivals)
            and self._deployment.is_whole
            and self.events.now_s >= self._faults.over_s
        ):
            if self.events.now_s > max_life_s:
                left = [client.name for client in self._clients if not client.is_settled]
                raise Violation(f"{len(left)} requests never end: {' '.join(left)}")
            self.events.run_until(self.events.now_s + 0.5)

    @property
    def _was_troubled(self) -> bool:
        return bool(self._faults.num_faults or self._context.killers)

    @property
    def _rest_s(self) -> float:
        if len(self._deployment.routers) > 1 and (self._was_troubled or self._context.stream.may_lose):
            return FORGET_S
        if not self._was_troubled:
            return QUIET_REST_S
        # A slow step that began before the faults were over may still compute a cancelled attempt.
        return REST_S + SLOW_STEPS_S[-1] if self._is_slow else REST_S

    def _check(self) -> None:
        drops = [each for each in self._recorder.drops if each[1].reason not in MAY_BE_DROPPED]
        complaints = [f"{host} dropped a peer: {error}" for host, error in drops]
        for client in self._clients:
            complaints += _client_complaints(client, self._deployment)
        complaints += _rest_complaints(self._deployment)
        if not self._was_troubled:
            complaints += _quiet_complaints(self._deployment)
        if complaints:
            raise Violation("\n".join(complaints))


def _client_complaints(client: SimClient, deployment: Deployment) -> Iterator[str]:
    """A client gets exactly one end, the right tokens, and no error without a reason."""
    yield from client.complaints
    context = deployment.context
    if client.is_unanswerable:
        if client.finish_reason is not None:
            yield f"{client.name} can't be answered, and ended with {client.finish_reason}"
        num_killed = context.killers[client.request.request_id]
        if num_killed > MAX_STRIKES + context.network.has_been_cut:  # a death behind a cut wire is unseen
            yield f"{client.name} has killed {num_killed} workers"
        return
    token_ids, reason = client.golden()
    if client.token_ids != token_ids[: len(client.token_ids)]:
        yield f"{client.name} got {client.token_ids}, an undisturbed run says {token_ids}"
    if client.finish_reason is not None and (client.token_ids, client.finish_reason) != (token_ids, reason):
        num_tokens = f"{len(client.token_ids)} of {len(token_ids)}"
        yield f"{client.name} ended with {client.finish_reason} after {num_tokens}"
    if client.error is not None and client.gateway is not None:
        yield from _error_complaints(client, deployment)


def _error_complaints(client: SimClient, deployment: Deployment) -> Iterator[str]:
    error, lasted_s = client.error, client.ended_s - client.opened_s
    match error:
        case Overloaded():
            if lasted_s < deployment.context.limits.max_wait_s:
                yield f"{client.name} was given up after {lasted_s:.2f} s: {error}"
        case WorkerLost():
            absences = [each for slot in deployment.workers for each in slot.absences]
            causes = {
                each.cause
                for each in absences
                if each.since_s <= client.ended_s and client.opened_s <= each.until_s
            }
            if len(causes) < MAX_STRIKES:
                yield f"{client.name} was given up after {len(causes)} deaths: {error}"
        case _:
            yield f"{client.name} failed: {error!r}"


def _rest_complaints(deployment: Deployment) -> Iterator[str]:
    """At rest no process holds or awaits anything, and every count is zero."""
    for slot in deployment.slots:
        life = slot.life
        if life.process.num_unheard:
            yield f"{slot.name} has {life.process.num_unheard} calls in its inbox"
        match life:
            case SimRouter():
                yield from _router_complaints(life, deployment)
            case SimGateway():
                if life.frontend.num_open:
                    yield f"{slot.name} has {life.frontend.num_open} open streams"
                if life.num_orders:
                    yield f"{slot.name} has not answered {life.num_orders} orders to migrate"
                if life.frontend.counters["replays_silent"]:
                    yield f"{slot.name} has waited in vain for workers that lived"
                if life.frontend.counters["contradictions"]:
                    yield f"{slot.name} has been told two things of one token"
            case SimWorker():
                yield from _worker_complaints(life)


def _router_complaints(life: SimRouter, deployment: Deployment) -> Iterator[str]:
    router, name = life.router, life.process.name
    router.in_flight.check_integrity()
    router.dispatchers.check_integrity()
    if router.dispatchers.num_queued:
        yield f"{name}'s queues have {router.dispatchers.num_queued} attempts"
    if len(router.in_flight):
        yield f"{name} has {len(router.in_flight)} attempts in flight"
    if len(router.members) != len(deployment.workers):
        yield f"{name} knows {len(router.members)} of {len(deployment.workers)} workers"
    for worker in router.status().workers:
        if worker.num_attempts:
            yield f"{name} counts {worker.num_attempts} attempts at {worker.worker.name}"


def _worker_complaints(life: SimWorker) -> Iterator[str]:
    name, engine, worker = life.process.name, life.engine, life.worker
    if worker.attempts or not worker.is_idle:
        yield f"{name} still works on {worker.attempts}, {life.endpoint.num_open} transfers are open"
    if engine.has_work():
        yield f"{name}'s engine has {len(engine.scheduler.sequences())} sequences"
    if engine.scheduler.holds.kept:
        yield f"{name} keeps pages of {list(engine.scheduler.holds.kept)}"
    engine.scheduler.check_integrity()
    pool = engine.pages
    num_idle = pool.count(PageState.FREE) + pool.count(PageState.CACHED)
    if num_idle != pool.num_pages:
        counts = {state.name: pool.count(state) for state in PageState}
        yield f"{name} has {counts} of {pool.num_pages} pages"
    if pool.accounts.num_open:
        yield f"{name} still counts pages of {pool.accounts.num_open} owners or tenants"
    if life.endpoint.has_writers:
        yield f"{name}: bytes may still be written"
    yield from _memory_complaints(life)


def _memory_complaints(life: SimWorker) -> Iterator[str]:
    """Collections of a worker and its parts are empty, except those with a bound of their own."""
    parts = [part for part in vars(life.worker).values() if type(part).__module__.startswith(WORKER_MODULES)]
    for owner in (life.worker, *parts):
        for name, value in vars(owner).items() if not isinstance(owner, EarlyResults | EndedAttempts) else ():
            if isinstance(value, dict | list | set) and value and not isinstance(value, Counter):
                yield f"{life.process.name} remembers {len(value)} in {type(owner).__name__}.{name}"


def _quiet_complaints(deployment: Deployment) -> Iterator[str]:
    """Without faults nothing is done twice."""
    for life in deployment.lives(SimGateway):
        for name, number in life.frontend.counters.items():
            if name in UNNEEDED and number:
                yield f"{life.process.name} counts {number} {name}, and nothing went wrong"
