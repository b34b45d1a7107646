"""What goes wrong in a simulation: faults at random times, each of which ends by itself."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from random import Random
from typing import Final

from baton.messages.workers import WorkerRole
from baton.sim.clients import START_S
from baton.sim.deployment import Deployment, Slot
from baton.sim.lives import RouterLife, WorkerLife
from baton.sim.process import Call

MAX_NUM_FAULTS: Final = 8
PAUSES_S: Final = (0.05, 1.0, 2.0, 4.0, 8.0)
ROLLING_S: Final = 2.0  # between two workers of a rolling restart
WAIT_S: Final = 2.0
LOOK_S: Final = 0.003
PARTED_S: Final = (0.2, 1.0, 4.0)
STALL_S: Final = (0.01, 3.0)
SWALLOWED_S: Final = (1.0, 5.0, 12.0, 30.0, 60.0)
STOPPED_S: Final = (12.0, 30.0)
SLOW_RESTARTS_S: Final = (20.0, 60.0, 150.0)
SLOW_STEPS_S: Final = (1.0, 6.0)  # each step takes so much longer
SLOW_FOR_S: Final = (10.0, 60.0)
HOUR_S: Final = 3600.0

Fault = Callable[[], str]  # does it, and says what it was


class Trouble(StrEnum):
    """What a simulation is about."""

    ANY = "any"  # clients that can't be answered, and all faults there are
    SILENCE = "silence"  # what closes nothing: black holes, stopped processes, slow steps, slow restarts
    SLOW_STEPS = "slow-steps"
    ROLLING_RESTART = "rolling-restart"
    NONE = "none"


class Faults:
    """`say` is told what is done."""

    def __init__(self, deployment: Deployment, random: Random, say: Callable[[str], None]) -> None:
        self.num_faults = 0
        self.last_s = 0.0  # when the last one begins
        self.over_s = 0.0  # when the last of those that have begun, and close nothing, is over
        self._deployment = deployment
        self._events = deployment.site.events
        self._random = random
        self._say = say
        self._kinds: list[Fault] = [
            self._kill_worker,
            self._kill_worker,
            self._kill_router,
            self._kill_gateway,
            self._pause,
            self._pause,
            self._cut,
            self._cut,
            self._stall,
            self._damage,
            self._damage,
            self._damage,
            self._break,
            self._slow_down,
            self._drain,
            self._lie_in_wait,
            self._lie_in_wait,
            self._part,
            self._replace,
        ]
        self._silent_kinds: list[Fault] = [
            self._swallow,
            self._swallow,
            self._swallow_one_way,
            self._swallow_wire,
            self._stop,
            self._stop,
            self._slow_steps,
            self._kill_for_long,
            self._jump,
            self._fill_disk,
            self._kill_worker,
            self._lie_in_wait,
        ]

    def schedule(self, trouble: Trouble, end_s: float) -> None:
        """Faults that begin by then; a rolling restart takes as long as it takes."""
        if trouble is Trouble.ANY:
            self._schedule_any(self._kinds, end_s)
        elif trouble is Trouble.SILENCE:
            self._schedule_any(self._silent_kinds, end_s)
        elif trouble is Trouble.SLOW_STEPS:
            self._schedule_slow_steps()
        elif trouble is Trouble.ROLLING_RESTART:
            self._schedule_rolling_restart()

    def _schedule_any(self, kinds: Sequence[Fault], end_s: float) -> None:
        for _ in range(self._random.choice((0, 1, 2, 4, MAX_NUM_FAULTS))):
            self._schedule(self._random.uniform(START_S, end_s), self._random.choice(kinds))

    def _schedule_slow_steps(self) -> None:
        """Every worker's steps take SLOW_STEPS_S[-1] longer, for the longest time; nothing else happens."""
        for slot in self._deployment.workers:
            slow = partial(self._slow_slot, slot, SLOW_STEPS_S[-1], SLOW_FOR_S[-1])
            self._schedule(self._random.uniform(0.0, START_S), slow)

    def _schedule_rolling_restart(self) -> None:
        """Each worker is asked to end, one after the other."""
        for number, slot in enumerate(self._deployment.workers):
            self._schedule(START_S + number * ROLLING_S, partial(self._drain_slot, slot))

    # Faults.

    def _schedule(self, time_s: float, fault: Fault) -> None:
        self.num_faults += 1
        self.last_s = max(self.last_s, time_s)
        self._events.at(time_s, lambda: self._say(fault()))

    def _any(self, slots: list[Slot]) -> Slot:
        return self._random.choice(slots)

    def _worker(self, *roles: WorkerRole) -> tuple[Slot, WorkerLife]:
        slot = self._any([slot for slot in self._deployment.workers if _is_of(slot, roles or WorkerRole)])
        assert isinstance(slot.life, WorkerLife)
        return slot, slot.life

    def _kill_worker(self) -> str:
        slot, _ = self._worker()
        slot.kill()
        return f"SIGKILL {slot.name}"

    def _kill_router(self) -> str:
        slot = self._any(self._deployment.routers)
        slot.kill()
        return f"SIGKILL {slot.name}"

    def _kill_gateway(self) -> str:
        slot = self._any(self._deployment.gateways)
        slot.kill()
        return f"SIGKILL {slot.name}"

    def _pause(self) -> str:
        slot = self._any(self._deployment.slots)
        seconds = self._random.choice(PAUSES_S)
        slot.pause(seconds)
        return f"SIGSTOP {slot.name} for {seconds:g} s"

    def _cut(self) -> str:
        wires = list(self._deployment.site.network.wires)
        if not wires:
            return "there is no wire to cut"
        wire = self._random.choice(wires)
        wire.cut()
        return f"the wire {_names(wire.ends[0].owner.name, wire.ends[1].owner.name)} is cut"

    def _stall(self) -> str:
        wires = list(self._deployment.site.network.wires)
        if not wires:
            return "there is no wire to stall"
        wire, seconds = self._random.choice(wires), self._random.uniform(*STALL_S)
        wire.stalled_until_s = self._events.now_s + seconds
        return f"{_names(wire.ends[0].owner.name, wire.ends[1].owner.name)} stalls for {seconds:.2f} s"

    def _damage(self) -> str:
        return self._with_pieces("flip_chance", self._random.choice((0.05, 0.5, 1.0)))

    def _break(self) -> str:
        return self._with_pieces("break_chance", self._random.choice((0.2, 1.0)))

    def _slow_down(self) -> str:
        return self._with_pieces("delay_s", self._random.choice((0.05, 0.5, 2.0)))

    def _with_pieces(self, name: str, value: float) -> str:
        slot, life = self._worker(WorkerRole.PREFILL)
        faults, seconds = life.endpoint.pieces.faults, self._random.uniform(0.2, 3.0)
        setattr(faults, name, value)
        self._events.after(seconds, lambda: setattr(faults, name, 0.0))
        return f"pages that leave {slot.name}: {name} is {value:g} for {seconds:.2f} s"

    def _drain(self) -> str:
        return self._drain_slot(self._worker()[0])

    def _drain_slot(self, slot: Slot) -> str:
        assert isinstance(slot.life, WorkerLife)
        slot.life.drain()
        return f"SIGTERM {slot.name}"

    def _part(self) -> str:
        one, other = self._random.sample(self._deployment.slots, 2)
        seconds = self._random.choice(PARTED_S)
        self._deployment.site.network.part(one.name, other.name, seconds)
        for slot in (one, other):
            slot.seems_gone(seconds)
        return f"{one.name} and {other.name} are parted for {seconds:g} s"

    def _replace(self) -> str:
        slot, _ = self._worker()
        slot.replace(self._random.choice(PAUSES_S))
        return f"{slot.name} stands still and is replaced; the old one wakes up later"

    # Faults that close nothing.

    def _lasts(self, choices: Sequence[float]) -> float:
        """How long a fault lasts that begins now."""
        seconds = self._random.choice(choices)
        self.over_s = max(self.over_s, self._events.now_s + seconds)
        return seconds

    def _swallow(self) -> str:
        one, other = self._random.sample(self._deployment.slots, 2)
        seconds = self._lasts(SWALLOWED_S)
        for sender, receiver in ((one, other), (other, one)):
            self._swallow_from(sender, receiver, seconds)
        return f"{_names(one.name, other.name)} is swallowed for {seconds:g} s"

    def _swallow_one_way(self) -> str:
        one, other = self._random.sample(self._deployment.slots, 2)
        seconds = self._lasts(SWALLOWED_S)
        self._swallow_from(one, other, seconds)
        return f"what {one.name} sends {other.name} is swallowed for {seconds:g} s"

    def _swallow_from(self, sender: Slot, receiver: Slot, seconds: float) -> None:
        self._deployment.site.network.swallow(sender.name, receiver.name, seconds)
        for slot in (sender, receiver):
            slot.seems_gone(seconds)

    def _swallow_wire(self) -> str:
        network = self._deployment.site.network
        wires = list(network.wires)
        if not wires:
            return "there is no wire to swallow"
        wire, seconds = self._random.choice(wires), self._lasts(SWALLOWED_S)
        ends = self._random.choice((wire.ends, wire.ends[:1], wire.ends[1:]))
        network.swallow_wire(wire, ends, seconds)
        owners = {end.owner.name for end in wire.ends}
        for slot in self._deployment.slots:
            if slot.name in owners:
                slot.seems_gone(seconds)
        senders = " and ".join(end.owner.name for end in ends)
        return f"what {senders} sends over one wire is swallowed for {seconds:g} s"

    def _stop(self) -> str:
        slot, seconds = self._any(self._deployment.slots), self._lasts(STOPPED_S)
        slot.pause(seconds)
        return f"SIGSTOP {slot.name} for {seconds:g} s"

    def _kill_for_long(self) -> str:
        slot, seconds = self._any(self._deployment.slots), self._random.choice(SLOW_RESTARTS_S)
        slot.kill(restart_s=seconds)
        return f"SIGKILL {slot.name}, which takes {seconds:g} s to start"

    def _slow_steps(self) -> str:
        slot, _ = self._worker()
        return self._slow_slot(slot, self._random.choice(SLOW_STEPS_S), self._lasts(SLOW_FOR_S))

    def _slow_slot(self, slot: Slot, more_s: float, seconds: float) -> str:
        assert isinstance(slot.life, WorkerLife)
        engine = slot.life.engine
        engine.more_s = more_s
        self._events.after(seconds, lambda: setattr(engine, "more_s", 0.0))
        return f"each step of {slot.name} takes {more_s:g} s more, for {seconds:g} s"

    def _jump(self) -> str:
        seconds = self._random.choice((HOUR_S, -HOUR_S))
        self._deployment.site.calendar.jump(seconds)
        return f"the calendar of all hosts jumps by {seconds:g} s"

    def _fill_disk(self) -> str:
        slot = self._any(self._deployment.routers)
        assert isinstance(slot.life, RouterLife)
        slot.life.fill_disk()
        return f"the disk of {slot.name}'s decision log is full"

    def _lie_in_wait(self) -> str:
        """A worker is hit in the middle of a transfer, if one comes."""
        slot, _ = self._worker()
        act = self._random.choice((slot.kill, partial(slot.pause, 2.0), partial(slot.pause, 8.0)))
        self._strike(slot, act, self._events.now_s + WAIT_S)
        return f"somebody lies in wait for pages of {slot.name}"

    def _strike(self, slot: Slot, act: Call, until_s: float) -> None:
        life, events = slot.life, self._events
        assert isinstance(life, WorkerLife)
        if (
            life.endpoint.pieces.num_going or life.endpoint.registrations.num_open()
        ) and not life.process.is_dead:
            self._say(f"{slot.name} is hit, its pages are under way")
            act()
        elif events.now_s < until_s:
            events.after(LOOK_S, lambda: self._strike(slot, act, until_s))


def _is_of(slot: Slot, roles: Iterable[WorkerRole]) -> bool:
    return isinstance(slot.life, WorkerLife) and slot.life.plan.role in roles


def _names(one: str, other: str) -> str:
    return f"{one} - {other}"
