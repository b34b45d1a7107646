"""Wires between processes of the simulation: each carries bytes both ways, in order, at its own pace.

1. `connect` joins two living processes. Each end is told by `on_body` what the other has sent.
2. A body takes a random time, and never overtakes one that was sent before it over the same end.
3. An end that is closed: what was sent before arrives. A wire that is cut, by a fault or by a death: some of
   what is under way may arrive, in order, the rest is lost.
4. Each end is told by `on_end`, once, in its own time; nothing comes after it.
5. A stall holds up what is sent, both ways, for a while. Two processes that are parted can't connect.
"""

from collections.abc import Callable
from random import Random
from typing import Final

from baton.cluster.sim.events import Events
from baton.cluster.sim.process import Process

MIN_DELAY_S: Final = 0.0001
MAX_DELAYS_S: Final = (0.002, 0.01, 0.1)  # in one simulation it is one of these
MAX_DEATH_DELAY_S: Final = 0.05  # until the other end hears that a process is gone


class End:
    """One process's end of a wire. `on_body` and `on_end` are called by its owner's turns."""

    def __init__(self, owner: Process, network: "Network") -> None:
        self.owner = owner
        self.on_body: Callable[[bytes], None] = lambda body: None
        self.on_end: Callable[[], None] = lambda: None
        self.is_over = False  # `on_end` has been called, or its owner is dead
        self.wire: Wire | None = None
        self._network = network
        self.last_s = 0.0  # when the last of what comes here arrives

    def send(self, body: bytes) -> None:
        self.owner.send(lambda: self._carry(body))

    def close(self) -> None:
        self.owner.send(self._close)

    def abort(self) -> None:
        if self.wire is not None:
            self.wire.cut()

    def _carry(self, body: bytes) -> None:
        wire = self.wire
        if wire is None or wire.is_cut:
            return
        other = wire.other(self)
        self._network.deliver(other, lambda: other.hear(body), wire.stalled_until_s)

    def _close(self) -> None:
        if self.wire is not None:
            self.wire.close()

    def hear(self, body: bytes) -> None:
        if not self.is_over:
            self.on_body(body)

    def hear_end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.on_end()


class Wire:
    def __init__(self, ends: tuple[End, End], network: "Network") -> None:
        self.ends = ends
        self.is_cut = False
        self.stalled_until_s = 0.0
        self._network = network
        for end in ends:
            end.wire = self

    def other(self, end: End) -> End:
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def close(self) -> None:
        """As a process does it: what is on its way arrives first."""
        if self.is_cut:
            return
        self.is_cut = True
        for end in self.ends:
            self._network.deliver(end, end.hear_end, self.stalled_until_s)
        self._network.forget(self)

    def cut(self) -> None:
        """As a fault does it."""
        if self.is_cut:
            return
        self.is_cut = True
        self._network.has_been_cut |= not any(end.owner.is_dead for end in self.ends)
        for end in self.ends:
            self._network.end_somewhen(end)
        self._network.forget(self)


class Network:
    """Chance is in `random` alone."""

    def __init__(self, events: Events, random: Random) -> None:
        self.wires: dict[Wire, None] = {}  # that are whole, oldest first
        self.has_been_cut = False  # a wire between two living processes
        self._parted_until_s: dict[frozenset[str], float] = {}
        self._events = events
        self._random = random
        self._max_delay_s = random.choice(MAX_DELAYS_S)

    def connect(self, caller: Process, callee: Process) -> tuple[End, End]:
        ends = End(caller, self), End(callee, self)
        wire = Wire(ends, self)
        self.wires[wire] = None
        caller.on_death.append(wire.cut)
        callee.on_death.append(wire.cut)
        return ends

    def part(self, one: str, other: str, seconds: float) -> None:
        """Processes of these names hear nothing of each other for so long; their wires are cut."""
        self._parted_until_s[frozenset((one, other))] = self._events.now_s + seconds
        for wire in [wire for wire in self.wires if {end.owner.name for end in wire.ends} == {one, other}]:
            wire.cut()

    def is_parted(self, caller: Process, callee: Process) -> bool:
        until_s = self._parted_until_s.get(frozenset((caller.name, callee.name)), 0.0)
        return self._events.now_s < until_s

    def close_all(self, process: Process) -> None:
        """As a process does that ends in order."""
        for wire in [wire for wire in self.wires if any(end.owner is process for end in wire.ends)]:
            wire.close()

    def delay_s(self) -> float:
        return self._random.uniform(MIN_DELAY_S, self._max_delay_s)

    def deliver(self, end: End, call: Callable[[], None], not_before_s: float) -> None:
        """After whatever else is on its way there."""
        end.last_s = max(end.last_s, not_before_s, self._events.now_s + self.delay_s())
        self._events.at(end.last_s, lambda: end.owner.post(call))

    def end_somewhen(self, end: End) -> None:
        """Before, after or between the bodies that are on their way there."""
        delay_s = self._random.uniform(0.0, MAX_DEATH_DELAY_S)
        self._events.after(delay_s, lambda: end.owner.post(end.hear_end))

    def forget(self, wire: Wire) -> None:
        self.wires.pop(wire, None)
