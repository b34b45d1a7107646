"""The processes of one simulated cluster, and their supervisor, which starts again what has died."""

from collections.abc import Callable
from random import Random
from typing import Final, TypeVar

from baton.config.router import RouterSettings
from baton.messages.workers import WorkerRole
from baton.sim.engine import TokenMachine
from baton.sim.lives import GatewayLife, Life, RouterLife, SimSite, WorkerLife, WorkerPlan
from baton.sim.network import MAX_DEATH_DELAY_S
from baton.sim.process import SimProcess

MAX_MODEL_LEN: Final = 96
SEEMS_DEAD_S: Final = 2.0  # without a sign of life; some of it may have passed before
ZOMBIE_S: Final = 2.0
REQUEST_ID_LENGTH: Final = 32  # what follows in an engine's name is the attempt
RESTART_S: Final = (0.05, 1.5)

_Life = TypeVar("_Life", bound=Life)


class Slot:
    """A name that one process at a time has."""

    def __init__(self, name: str, start: Callable[[], Life], site: SimSite) -> None:
        self.name = name
        self.life = start()
        self.absences: list[tuple[float, float]] = []  # from when to when it was dead, or seemed so
        self.former: list[SimProcess] = []  # that were replaced, and may live
        self._start = start
        self._site = site
        self._restart_s: float | None = None
        self._watch()

    def kill(self, restart_s: float | None = None) -> None:
        """restart_s: how long its supervisor takes to start it again; None: as long as it happens to."""
        self._restart_s = restart_s
        self.life.process.die()

    def pause(self, seconds: float) -> None:
        """Nothing happens when it is paused already."""
        process, events = self.life.process, self._site.events
        if process.is_paused:
            return
        process.pause()
        self._site.network.stands_still(process, events.now_s + seconds)
        events.after(seconds, process.resume)
        if seconds >= SEEMS_DEAD_S:
            self.seems_gone(seconds)

    def seems_gone(self, seconds: float) -> None:
        """To somebody, for so long from now on."""
        now_s = self._site.events.now_s
        self.absences.append((now_s, now_s + seconds))

    @property
    def is_whole(self) -> bool:
        """Whether its one process runs."""
        process = self.life.process
        is_alone = all(former.is_dead for former in self.former)
        return is_alone and not process.is_dead and not process.is_paused

    def replace(self, seconds: float) -> None:
        """Start another in its place, as one does whose host does not answer. It wakes up again, and dies."""
        process, events = self.life.process, self._site.events
        if process.is_paused:
            return
        process.pause()
        self._site.network.stands_still(process, events.now_s + seconds)
        self.seems_gone(seconds + ZOMBIE_S)
        self.former.append(process)
        self._restart()
        events.after(seconds, process.resume)
        events.after(seconds + ZOMBIE_S, process.die)

    def _watch(self) -> None:
        life = self.life
        life.process.on_death.append(lambda: self._died(life))

    def _died(self, life: Life) -> None:
        self._site.trace.died(self.name)
        self._site.killers[life.process.killed_by[:REQUEST_ID_LENGTH]] += 1
        if life is not self.life:
            return
        restart_s, self._restart_s = self._restart_s, None
        if restart_s is None:
            restart_s = self._site.random.uniform(*RESTART_S)
        self.seems_gone(max(restart_s, MAX_DEATH_DELAY_S))
        self._site.events.after(restart_s, self._restart)

    def _restart(self) -> None:
        self.life = self._start()
        self._watch()


class Deployment:
    def __init__(self, site: SimSite, random: Random) -> None:
        self.site = site
        settings = RouterSettings(
            policy=random.choice(("least-loaded", "round-robin", "cost")),
            local_prefill_tokens=random.choice((0, 4, 8, 16)),
            seed=random.getrandbits(32),
        )
        plans = [
            _worker_plan(role, number, random)
            for role in WorkerRole
            for number in range(random.randint(1, 3))
        ]
        self.routers = [self._router(number, settings) for number in range(len(site.routers))]
        self.gateways = [self._gateway(f"gateway-{number}") for number in range(random.randint(1, 2))]
        self.workers = [self._worker(plan) for plan in plans]

    @property
    def slots(self) -> list[Slot]:
        return [*self.routers, *self.gateways, *self.workers]

    def lives(self, kind: type[_Life]) -> list[_Life]:
        return [slot.life for slot in self.slots if isinstance(slot.life, kind)]

    def _router(self, number: int, settings: RouterSettings) -> Slot:
        name, address = f"router-{number}", self.site.routers[number]
        return Slot(name, lambda: RouterLife(self.site, name, settings, address), self.site)

    def _gateway(self, name: str) -> Slot:
        return Slot(name, lambda: GatewayLife(self.site, name), self.site)

    def _worker(self, plan: WorkerPlan) -> Slot:
        return Slot(plan.name, lambda: WorkerLife(self.site, plan), self.site)


def _worker_plan(role: WorkerRole, number: int, random: Random) -> WorkerPlan:
    page_size = random.choice((4, 4, 8, 16))
    machine = TokenMachine(
        page_size=page_size,
        num_pages=random.choice((2, 2, 3, 8)) * MAX_MODEL_LEN // page_size,
        max_num_seqs=random.choice((2, 4, 16)),
        max_num_batched_tokens=random.choice((16, 32, 128)),
        max_model_len=MAX_MODEL_LEN,
        step_s=random.uniform(0.01, 0.06),
        token_s=random.uniform(0.0001, 0.003),
    )
    return WorkerPlan(f"{role.value}-{number}", role, machine, random.choice((0, 2, 8)))
