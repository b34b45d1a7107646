"""Wires between processes of the simulation: each carries bytes both ways, in order, at its own pace.

1. `connect` joins two living processes. Each end is told by `on_body` what the other has sent.
2. A body takes a random time, and never overtakes one that was sent before it over the same end.
3. An end that is closed: what was sent before arrives. A wire that is cut, by a fault or by a death: some of
   what is under way may arrive, in order, the rest is lost.
4. Each end is told by `on_end`, once, in its own time; nothing comes after it.
5. A stall holds up what is sent, both ways, for a while. Two processes that are parted can't connect.
6. A black hole swallows what one process sends another, and closes nothing. TCP sends it again when the hole
   has closed. Links ping: an end that hears nothing for LINK_TIMEOUT_S, or whose bytes nobody acknowledges
   for so long, gives the wire up by itself, as one does whose other end's process stands still. What the
   hole still holds is lost then.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from baton.sim.process import Events, SimProcess

LINK_TIMEOUT_S: Final = 8.0  # without a sign of the other end: its process's hub gives the link up
PING_S: Final = 2.0  # at most, until an idle link would have been used
MIN_DELAY_S: Final = 0.0001
MAX_DELAYS_S: Final = (0.002, 0.01, 0.1)  # in one simulation it is one of these
MAX_DEATH_DELAY_S: Final = 0.05  # until the other end hears that a process is gone


class End:
    """One process's end of a wire. `on_body` and `on_end` are called by its owner's turns."""

    def __init__(self, owner: SimProcess, network: "Network") -> None:
        self.owner = owner
        self.on_body: Callable[[bytes], None] = lambda body: None
        self.on_end: Callable[[], None] = lambda: None
        self.is_over = False  # `on_end` has been called, or its owner is dead
        self.has_gap = False  # a body was lost on its way here, and with it all that follows
        self.wire: Wire | None = None
        self._network = network
        self.last_s = 0.0  # when the last of what comes here arrives

    def send(self, body: bytes) -> None:
        self.owner.send(lambda: self.carry(body))

    def close(self) -> None:
        self.owner.send(self._close)

    def abort(self) -> None:
        if self.wire is not None:
            self.wire.cut()

    def carry(self, body: bytes) -> None:
        """Put it on the wire now, though a turn of its owner lasts."""
        wire = self.wire
        if wire is None or wire.is_cut:
            return
        other = wire.other(self)
        heals_s = self._network.swallowed_until_s(self, other)
        if heals_s:
            self._network.deliver(other, lambda: other.hear_late(body), max(heals_s, wire.stalled_until_s))
        else:
            self._network.deliver(other, lambda: other.hear(body), wire.stalled_until_s)

    def _close(self) -> None:
        if self.wire is not None:
            self.wire.close()

    def hear(self, body: bytes) -> None:
        if not self.is_over and not self.has_gap:
            self.on_body(body)

    def hear_late(self, body: bytes) -> None:
        """Hear a body that was sent again after a black hole closed, unless the sender has given up."""
        if self.wire is None or self.wire.is_cut:
            self.has_gap = True
        else:
            self.hear(body)

    def hear_end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.on_end()


class Wire:
    def __init__(self, ends: tuple[End, End], network: "Network") -> None:
        self.ends = ends
        self.is_cut = False
        self.stalled_until_s = 0.0
        self.swallows_until_s: dict[End, float] = {}  # of this end's bytes, on this wire alone
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
            heals_s = self._network.swallowed_until_s(self.other(end), end)
            self._network.deliver(end, end.hear_end, max(heals_s, self.stalled_until_s))
        self._network.forget(self)

    def give_up(self) -> None:
        """As either end does it that has waited LINK_TIMEOUT_S, each by its own pings."""
        if self.is_cut:
            return
        self.is_cut = self._network.has_been_cut = True
        for end in self.ends:
            self._network.end_within(end, PING_S)
        self._network.forget(self)

    def cut(self) -> None:
        """As a fault does it."""
        if self.is_cut:
            return
        self.is_cut = True
        self._network.has_been_cut |= not any(end.owner.is_dead for end in self.ends)
        for end in self.ends:
            self._network.end_somewhen(end, self.other(end))
        self._network.forget(self)


class Network:
    """Chance is in `random` alone."""

    def __init__(self, events: Events, random: Random) -> None:
        self.wires: dict[Wire, None] = {}  # that are whole, oldest first
        self.has_been_cut = False  # a wire between two living processes, or nobody can tell
        self._parted_until_s: dict[frozenset[str], float] = {}
        self._swallows_until_s: dict[tuple[str, str], float] = {}  # (sender, receiver)
        self._events = events
        self._random = random
        self._max_delay_s = random.choice(MAX_DELAYS_S)

    def connect(self, caller: SimProcess, callee: SimProcess) -> tuple[End, End]:
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

    def is_parted(self, caller: SimProcess, callee: SimProcess) -> bool:
        until_s = self._parted_until_s.get(frozenset((caller.name, callee.name)), 0.0)
        return self._events.now_s < until_s

    def swallow(self, sender: str, receiver: str, seconds: float) -> None:
        """Nothing that the one sends reaches the other for so long, and neither is told."""
        self.has_been_cut = True  # whoever dies behind it dies unseen
        until_s = self._events.now_s + seconds
        self._swallows_until_s[sender, receiver] = max(
            until_s, self._swallows_until_s.get((sender, receiver), 0.0)
        )
        for wire in self.wires:
            if {end.owner.name for end in wire.ends} == {sender, receiver}:
                self._watch_silence(wire, until_s)

    def swallow_wire(self, wire: Wire, ends: Sequence[End], seconds: float) -> None:
        """As `swallow`, of what these ends send over one wire: others between the two processes work."""
        self.has_been_cut = True
        until_s = self._events.now_s + seconds
        for end in ends:
            wire.swallows_until_s[end] = max(until_s, wire.swallows_until_s.get(end, 0.0))
        self._watch_silence(wire, until_s)

    def stands_still(self, process: SimProcess, until_s: float) -> None:
        """It is stopped until then: the others' links to it end when it has not answered for too long."""
        for wire in self.wires:
            if any(end.owner is process for end in wire.ends):
                self._watch_silence(wire, until_s)

    def swallowed_until_s(self, sender: End, receiver: End) -> float:
        """When what is sent now can arrive at the earliest; 0 when nothing swallows it."""
        until_s = self._swallows_until_s.get((sender.owner.name, receiver.owner.name), 0.0)
        if sender.wire is not None:
            until_s = max(until_s, sender.wire.swallows_until_s.get(sender, 0.0))
        return until_s if until_s > self._events.now_s else 0.0

    def connects_in_s(self, caller: SimProcess, callee: SimProcess) -> float:
        """How long a connection waits that is asked for now: its packets must get through both ways."""
        pairs = (caller.name, callee.name), (callee.name, caller.name)
        until_s = max(self._swallows_until_s.get(pair, 0.0) for pair in pairs)
        return max(0.0, until_s - self._events.now_s)

    def _watch_silence(self, wire: Wire, until_s: float) -> None:
        """End it once an end has heard nothing for LINK_TIMEOUT_S, if the silence lasts so long."""
        delay_s = LINK_TIMEOUT_S + self._random.uniform(0.0, PING_S)
        if self._events.now_s + delay_s < until_s:
            self._events.after(delay_s, wire.give_up)

    def close_all(self, process: SimProcess) -> None:
        """As a process does that ends in order."""
        for wire in [wire for wire in self.wires if any(end.owner is process for end in wire.ends)]:
            wire.close()

    def delay_s(self) -> float:
        return self._random.uniform(MIN_DELAY_S, self._max_delay_s)

    def deliver(self, end: End, call: Callable[[], None], not_before_s: float) -> None:
        """After whatever else is on its way there."""
        end.last_s = max(end.last_s, not_before_s, self._events.now_s + self.delay_s())
        self._events.at(end.last_s, lambda: end.owner.post(call))

    def end_somewhen(self, end: End, other: End) -> None:
        """Before, after or between the bodies that are on their way there from the other."""
        heals_s = self.swallowed_until_s(other, end)
        if heals_s:  # it is not told, and finds out
            self._end_at(end, min(heals_s, self._events.now_s + LINK_TIMEOUT_S), PING_S)
        else:
            self.end_within(end, MAX_DEATH_DELAY_S)

    def end_within(self, end: End, seconds: float) -> None:
        self._end_at(end, self._events.now_s, seconds)

    def _end_at(self, end: End, time_s: float, within_s: float) -> None:
        time_s += self._random.uniform(0.0, within_s)
        self._events.at(time_s, lambda: end.owner.post(end.hear_end))

    def forget(self, wire: Wire) -> None:
        self.wires.pop(wire, None)
