"""One simulated cluster from its start to its rest, all of it from one seed.

1. A cluster, a load and faults are drawn by chance. The cluster starts while the first requests come.
2. Requests and faults happen; whatever dies is started again.
3. When the last request has ended, everything comes to rest. Then nothing may be held anywhere, and every
   client must have been given what an undisturbed run gives, or one error that its fate explains.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

from baton.beats import BEAT_S
from baton.cluster.sim.checks import client_complaints, is_whole, quiet_complaints, rest_complaints
from baton.cluster.sim.clients import ILL_CHANCE, Client, Load, Visit
from baton.cluster.sim.deployment import Deployment
from baton.cluster.sim.events import Events
from baton.cluster.sim.faults import Faults, Trouble
from baton.cluster.sim.lives import GatewayLife, Site
from baton.cluster.sim.network import Network
from baton.cluster.sim.trace import Recorder
from baton.gateway.replay import Limits
from baton.router.books import SILENCE_S

LIMITS: Final = Limits(max_wait_s=20.0, max_begun_wait_s=20.0, max_silence_s=80.0)
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
        self.site = Site(self.events, network, draw["ids"], self.recorder, LIMITS, num_routers)
        self.recorder.names = self.site.names
        self.deployment = Deployment(self.site, draw["cluster"])
        self.faults = Faults(self.deployment, draw["faults"], self.recorder.say)
        self._trouble = trouble
        load = Load(
            self.events, draw["load"], ILL_CHANCE if trouble in (Trouble.ANY, Trouble.SILENCE) else 0.0
        )
        self.visits = load.visits(len(self.deployment.gateways))
        self.faults.schedule(trouble, load.ends_s + 1.0)
        self._busy_until_s = max(self.faults.last_s, load.ends_s)

    @property
    def clients(self) -> list[Client]:
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

    def _come(self, visit: Visit) -> None:
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
    return f"python -m baton.cluster.cli sim --seed {seed}{which}"


def _has_ended(client: Client) -> bool:
    return client.gateway is not None and client.is_over


def _asked_for(visit: Visit) -> list[Client]:
    """The first, and the others once it has its first token."""
    first, *others = visit.clients
    return [first, *(client for client in others if client.gateway is not None)]


def _fate(client: Client) -> str:
    if client.error is not None:
        return type(client.error).__name__
    if client.finish_reason is not None:
        return str(client.finish_reason)
    if client.has_cancelled:
        return "cancelled"
    return "gone with its gateway" if client.gateway is not None else "never asked for"
