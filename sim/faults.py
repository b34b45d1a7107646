"""Faults of a simulation: they begin at random times, and each ends by itself."""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Final

from baton.messages.workers import WorkerRole
from baton.sim.deployment import START_S, Deployment, SimGateway, SimRouter, SimWorker, Slot
from baton.sim.network import Wire
from baton.sim.process import Call
from baton.sim.trouble import Trouble

MAX_NUM_FAULTS: Final = 8
PAUSES_S: Final = (0.05, 1.0, 2.0, 4.0, 8.0)
MIGRATIONS_S: Final = 0.15  # between two orders to migrate
ROLLING_S: Final = 2.0  # between two workers of a rolling restart
AMBUSH_S: Final = 2.0  # at most, until a transfer comes
LOOK_S: Final = 0.003
PARTED_S: Final = (0.2, 1.0, 4.0)
STALL_S: Final = (0.01, 3.0)
SWALLOWED_S: Final = (1.0, 5.0, 12.0, 30.0, 60.0)
STOPPED_S: Final = (12.0, 30.0)
SLOW_RESTARTS_S: Final = (20.0, 60.0, 150.0)
SLOW_STEPS_S: Final = (1.0, 6.0)  # that each step takes longer
SLOW_FOR_S: Final = (10.0, 60.0)
NODE_DEATHS_S: Final = 0.3  # from the first death on a lost node to the last
NODE_IS_AWAY_S: Final = (4.0, 15.0)  # until a lost worker is started again
HOUR_S: Final = 3600.0

Fault = Callable[[], str]  # makes the fault, and returns a line for the trace


class Faults:
    """Draws and makes the faults of one simulation."""

    def __init__(self, deployment: Deployment, random: Random, say: Callable[[str], None]) -> None:
        """say: takes a line for each fault."""
        self.num_faults = 0
        self.last_s = 0.0  # when the last fault begins
        self.over_s = 0.0  # when the last of the begun faults that close nothing ends
        self._deployment = deployment
        self._network = deployment.context.network
        self._events = deployment.context.events
        self._random = random
        self._say = say

    def schedule(self, trouble: Trouble, end_s: float) -> None:
        """Schedule faults that begin by `end_s`; a rolling restart takes as long as it needs."""
        if trouble is Trouble.ANY:
            self._schedule_any(self._loud_faults(), end_s)
        elif trouble is Trouble.MIGRATION:
            self._schedule_any(self._loud_faults(), end_s)
            for number in range(round((end_s - START_S) / MIGRATIONS_S)):
                self._events.at(START_S + number * MIGRATIONS_S, lambda: self._say(self._migrate()))
        elif trouble is Trouble.SILENCE:
            self._schedule_any(self._silent_faults(), end_s)
        elif trouble is Trouble.SLOW_STEPS:
            for slot in self._deployment.workers:
                slow = partial(self._slow_slot, slot, SLOW_STEPS_S[-1], SLOW_FOR_S[-1])
                self._schedule(self._random.uniform(0.0, START_S), slow)
        elif trouble is Trouble.LOST_NODE:
            self._schedule(self._random.uniform(START_S, end_s), self._lose_node)
        elif trouble is Trouble.ROLLING_RESTART:
            for number, slot in enumerate(self._deployment.workers):
                self._schedule(START_S + number * ROLLING_S, partial(self._drain, slot))

    def _schedule_any(self, faults: Sequence[Fault], end_s: float) -> None:
        for _ in range(self._random.choice((0, 1, 2, 4, MAX_NUM_FAULTS))):
            self._schedule(self._random.uniform(START_S, end_s), self._random.choice(faults))

    def _schedule(self, time_s: float, fault: Fault) -> None:
        self.num_faults += 1
        self.last_s = max(self.last_s, time_s)
        self._events.at(time_s, lambda: self._say(fault()))

    def _loud_faults(self) -> list[Fault]:
        deployment = self._deployment
        return _by_weight(
            (lambda: self._kill(self._worker()), 2),
            (lambda: self._kill(self._any(deployment.routers)), 1),
            (lambda: self._kill(self._any(deployment.gateways)), 1),
            (self._pause, 2),
            (self._cut, 2),
            (self._stall, 1),
            (lambda: self._with_pieces("flip_chance", (0.05, 0.5, 1.0)), 3),
            (lambda: self._with_pieces("break_chance", (0.2, 1.0)), 1),
            (lambda: self._with_pieces("delay_s", (0.05, 0.5, 2.0)), 1),
            (lambda: self._drain(self._worker()), 1),
            (self._ambush, 2),
            (self._migrate, 4),
            (self._flip, 1),
            (self._part, 1),
            (self._replace, 1),
        )

    def _silent_faults(self) -> list[Fault]:
        return _by_weight(
            (lambda: self._swallow(both_ways=True), 2),
            (lambda: self._swallow(both_ways=False), 1),
            (self._swallow_wire, 1),
            (self._stop, 2),
            (self._slow_steps, 1),
            (self._kill_for_long, 1),
            (self._jump, 1),
            (self._fill_disk, 1),
            (lambda: self._kill(self._worker()), 1),
            (self._ambush, 1),
            (self._migrate, 2),
        )

    def _any(self, slots: list[Slot]) -> Slot:
        return self._random.choice(slots)

    def _worker(self, *roles: WorkerRole) -> Slot:
        wanted = roles or tuple(WorkerRole)
        return self._any([slot for slot in self._deployment.workers if _role_of(slot) in wanted])

    def _wire(self) -> Wire | None:
        wires = list(self._network.wires)
        return self._random.choice(wires) if wires else None

    # Faults that kill, close or damage.

    def _kill(self, slot: Slot) -> str:
        slot.kill()
        return f"SIGKILL {slot.name}"

    def _pause(self) -> str:
        slot = self._any(self._deployment.slots)
        seconds = self._random.choice(PAUSES_S)
        slot.pause(seconds)
        return f"SIGSTOP {slot.name} for {seconds:g} s"

    def _cut(self) -> str:
        wire = self._wire()
        if wire is None:
            return "there is no wire to cut"
        wire.cut()
        return f"the wire {wire.name} is cut"

    def _stall(self) -> str:
        wire = self._wire()
        if wire is None:
            return "there is no wire to stall"
        seconds = self._random.uniform(*STALL_S)
        wire.stalled_until_s = self._events.now_s + seconds
        return f"{wire.name} stalls for {seconds:.2f} s"

    def _with_pieces(self, name: str, values: Sequence[float]) -> str:
        """Set a fault of the pieces that leave a worker to one of these values for a while."""
        value, slot = self._random.choice(values), self._worker(WorkerRole.PREFILL)
        rank, seconds = _worker_of(slot).endpoint.ranks[0], self._random.uniform(0.2, 3.0)
        setattr(rank, name, value)
        self._events.after(seconds, lambda: setattr(rank, name, 0.0))
        return f"pages that leave {slot.name}: {name} is {value:g} for {seconds:.2f} s"

    def _drain(self, slot: Slot) -> str:
        _worker_of(slot).drain()
        return f"SIGTERM {slot.name}"

    def _migrate(self) -> str:
        """Order all streams of a decode worker, or of none in particular, to another one."""
        slot, to = self._worker(WorkerRole.DECODE), self._worker(WorkerRole.DECODE)
        target = self._random.choice(("", _worker_of(to).worker.hello.id))
        for gateway in self._deployment.lives(SimGateway):
            gateway.migrate(_worker_of(slot).worker.hello.id, target)
        return f"streams of {slot.name} shall move to {to.name if target else 'another worker'}"

    def _flip(self) -> str:
        """Have a worker take the other role, if another worker of its role is there."""
        slot, roles = self._worker(), self._deployment.context.roles
        role = _role_of(slot)
        others = [
            other.name
            for other in self._deployment.workers
            if other is not slot and _role_of(other) is role is roles.get(other.name, role)
        ]
        if not others or roles.get(slot.name, role) is not role:
            return f"{slot.name} is the last {role} worker and does not flip"
        other_role = next(each for each in WorkerRole if each is not role)
        _worker_of(slot).flip(other_role)
        return f"{slot.name} shall become a {other_role} worker"

    def _lose_node(self) -> str:
        node = self._random.choice(self._deployment.nodes)
        return self._random.choice((self._freeze_node, self._end_node))(node)

    def _freeze_node(self, node: str) -> str:
        seconds = self._lasts(STOPPED_S)
        for slot in self._deployment.workers_of(node):
            slot.pause(seconds, cause=node)
        return f"{node} freezes for {seconds:g} s"

    def _end_node(self, node: str) -> str:
        self._lasts((NODE_DEATHS_S,))
        for slot in self._deployment.workers_of(node):
            kill = partial(slot.kill, self._random.uniform(*NODE_IS_AWAY_S), cause=node)
            self._events.after(self._random.uniform(0.0, NODE_DEATHS_S), kill)
        return f"{node} ends"

    def _part(self) -> str:
        one, other = self._random.sample(self._deployment.slots, 2)
        seconds = self._random.choice(PARTED_S)
        self._network.part(one.name, other.name, seconds)
        for slot in (one, other):
            slot.seems_gone(seconds)
        return f"{one.name} and {other.name} are parted for {seconds:g} s"

    def _replace(self) -> str:
        slot = self._worker()
        slot.replace(self._random.choice(PAUSES_S))
        return f"{slot.name} stands still and is replaced; the old process resumes later"

    def _ambush(self) -> str:
        """Hit a worker in the middle of a transfer, if one comes in time."""
        slot = self._worker()
        act = self._random.choice((slot.kill, partial(slot.pause, 2.0), partial(slot.pause, 8.0)))
        self._strike(slot, act, self._events.now_s + AMBUSH_S)
        return f"an ambush waits for pages of {slot.name}"

    def _strike(self, slot: Slot, act: Call, until_s: float) -> None:
        worker, events = _worker_of(slot), self._events
        if worker.endpoint.has_writers and not worker.process.is_dead:
            self._say(f"{slot.name} is hit, its pages are under way")
            act()
        elif events.now_s < until_s:
            events.after(LOOK_S, lambda: self._strike(slot, act, until_s))

    # Faults that close nothing.

    def _lasts(self, choices: Sequence[float]) -> float:
        """Draw how long a fault lasts that begins now."""
        seconds = self._random.choice(choices)
        self.over_s = max(self.over_s, self._events.now_s + seconds)
        return seconds

    def _swallow(self, *, both_ways: bool) -> str:
        one, other = self._random.sample(self._deployment.slots, 2)
        seconds = self._lasts(SWALLOWED_S)
        for sender, receiver in ((one, other), (other, one))[: 1 + both_ways]:
            self._network.swallow(sender.name, receiver.name, seconds)
            one.seems_gone(seconds)
            other.seems_gone(seconds)
        way = "-" if both_ways else "->"
        return f"{one.name} {way} {other.name} is swallowed for {seconds:g} s"

    def _swallow_wire(self) -> str:
        wire = self._wire()
        if wire is None:
            return "there is no wire to swallow"
        seconds = self._lasts(SWALLOWED_S)
        ends = self._random.choice((wire.ends, wire.ends[:1], wire.ends[1:]))
        self._network.swallow_wire(wire, ends, seconds)
        for slot in self._deployment.slots:
            if slot.name in {end.owner.name for end in wire.ends}:
                slot.seems_gone(seconds)
        senders = " and ".join(end.owner.name for end in ends)
        return f"messages from {senders} over one wire are swallowed for {seconds:g} s"

    def _stop(self) -> str:
        slot, seconds = self._any(self._deployment.slots), self._lasts(STOPPED_S)
        slot.pause(seconds)
        return f"SIGSTOP {slot.name} for {seconds:g} s"

    def _kill_for_long(self) -> str:
        slot, seconds = self._any(self._deployment.slots), self._random.choice(SLOW_RESTARTS_S)
        slot.kill(restart_s=seconds)
        return f"SIGKILL {slot.name}, which takes {seconds:g} s to start"

    def _slow_steps(self) -> str:
        return self._slow_slot(self._worker(), self._random.choice(SLOW_STEPS_S), self._lasts(SLOW_FOR_S))

    def _slow_slot(self, slot: Slot, more_s: float, seconds: float) -> str:
        engine = _worker_of(slot).engine
        engine.more_s = more_s
        self._events.after(seconds, lambda: setattr(engine, "more_s", 0.0))
        return f"each step of {slot.name} takes {more_s:g} s more, for {seconds:g} s"

    def _jump(self) -> str:
        seconds = self._random.choice((HOUR_S, -HOUR_S))
        self._deployment.context.calendar.jump(seconds)
        return f"the calendar of all hosts jumps by {seconds:g} s"

    def _fill_disk(self) -> str:
        slot = self._any(self._deployment.routers)
        assert isinstance(slot.life, SimRouter)
        slot.life.fill_disk()
        return f"the disk of {slot.name}'s decision log is full"


def _by_weight(*faults: tuple[Fault, int]) -> list[Fault]:
    return [fault for fault, weight in faults for _ in range(weight)]


def _worker_of(slot: Slot) -> SimWorker:
    assert isinstance(slot.life, SimWorker)
    return slot.life


def _role_of(slot: Slot) -> WorkerRole:
    return _worker_of(slot).described.role
