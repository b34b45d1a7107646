"""Simulated connections: each carries bodies both ways, in order, with random delays.

1. `connect` joins two living processes. `on_body` of an end takes the bodies that the other end sends.
2. A body takes a random time, and never overtakes an earlier body of the same direction.
3. A closed connection delivers the bodies sent before. A connection cut by a fault or a death delivers some
   of the bodies that are under way, in order, and loses the others.
4. Each end gets `on_end` once, some time later; nothing comes after it.
5. A stall delays everything sent on a connection, both ways. Two partitioned processes cannot connect.
6. A black hole swallows the messages from one process to another, and closes nothing. TCP sends them again
   when the hole has closed. Links ping: an end that hears nothing, or gets nothing acknowledged, for
   LINK_TIMEOUT_S gives the connection up, as does an end with a paused peer. Swallowed bodies
   are lost then. Pings are not simulated one by one: a peer is silent from the moment when none would come.

`Host` is the end of a node: it listens, dials and carries messages as baton/rpc/server.py does with sockets.
`Recorder` writes the trace of a simulation: one line for each message, fault and death.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Final, NamedTuple, TypeAlias

from baton.errors import WireError
from baton.messages import control, operations
from baton.messages.bounds import LINK_TIMEOUT_S, Kind
from baton.messages.codec import AnyMessage, decode, encode
from baton.messages.control import Hello
from baton.messages.workers import Address
from baton.request import TokenEvent
from baton.rpc.liveness import PING_S
from baton.rpc.peer_clock import SAME_CLOCK, ClockOffset
from baton.rpc.peers import TICK_S, Node
from baton.rpc.session import HANDSHAKE_TIMEOUT_S
from baton.sim.process import Call, Events, SimProcess

SHOWN: Final = 8  # characters of an id
HIDDEN: Final = (control.Alive, control.Heartbeat, operations.Status, operations.StatusQuery)


class Recorder:
    """Writes the trace, and keeps the dropped peers."""

    def __init__(self, events: Events, write: Callable[[str], None] | None = None) -> None:
        """write: takes the lines; None: only drops are kept."""
        self.names: dict[str, str] = {}  # id of a process -> its name
        self.drops: list[tuple[str, WireError]] = []  # name of the dropping process, reason
        self._events = events
        self._write = write

    def say(self, text: str) -> None:
        """Write one line, with the time."""
        if self._write is not None:
            self._write(f"{self._events.now_s:8.4f}  {text}")

    def message(self, sender: str, receiver: str, message: AnyMessage) -> None:
        """Record a message that is heard. sender: the id of a process; receiver: the name of one."""
        if self._write is not None and not isinstance(message, HIDDEN):
            kind = type(message).__name__
            self.say(f"{self._name(sender):>10} -> {receiver:<10} {kind:<13} {self._text(message)}")

    def dropped(self, host: str, error: WireError) -> None:
        """Record a dropped peer: honest processes drop each other rarely."""
        self.drops.append((host, error))
        self.say(f"{host} drops a peer, {error.reason}: {error}")

    def _name(self, id_: str) -> str:
        return self.names.get(id_, id_[:SHOWN])

    def _text(self, message: AnyMessage) -> str:
        match message:
            case control.Members(workers=workers, is_complete=is_complete):
                names = " ".join(worker.name for worker in workers)
                return names if is_complete else f"{names} and perhaps others"
            case control.Reachable(workers=workers):
                return " ".join(map(self._name, workers))
            case control.Submit(request=request, sticky_worker=sticky_worker, avoid=avoid):
                wishes = [f"beside {self._name(sticky_worker)}"] * bool(sticky_worker)
                wishes += [f"not {self._name(worker)}" for worker in avoid]
                key = _key(request.request_id, request.attempt)
                return f"{key} {len(request.token_ids)}+{len(request.generated_token_ids)} {' '.join(wishes)}"
            case control.Routed(decode=decode, prefill=prefill, reason=reason):
                where = f"{self._name(prefill) or '-'} {self._name(decode)}"
                return f"{_key(message.request_id, message.attempt)} {where}: {reason}"
            case control.Dispatch(request=request) | control.Prefill(request=request):
                return _key(request.request_id, request.attempt)
            case control.Tokens(events=events):
                return ", ".join(map(_token, events))
            case control.Prefilled(event=event):
                return _token(event)
            case control.Started(attempts=attempts) | control.Ended(attempts=attempts):
                return " ".join(_key(*attempt) for attempt in attempts)
            case control.Rejected() | control.PrefillFailed() | control.AttemptFailed():
                return f"{_key(message.request_id, message.attempt)} {message.reason}"
        request_id = getattr(message, "request_id", "")
        return _key(request_id, getattr(message, "attempt", 0)) if request_id else ""


def _key(request_id: str, attempt: int) -> str:
    return f"{request_id[:SHOWN]}.{attempt}"


def _token(event: TokenEvent) -> str:
    end = f" {event.finish_reason}" if event.finish_reason else ""
    return f"{_key(event.request_id, event.attempt)}[{event.index}]={event.token_id}{end}"


NOTICE_S: Final = PING_S + TICK_S  # at most, from LINK_TIMEOUT_S of silence until an end drops the link
MIN_DELAY_S: Final = 0.0001
MAX_DELAYS_S: Final = (0.002, 0.01, 0.1)  # one of these in each simulation
NAPS_S: Final = (0.0, 0.0, 0.0, 0.0, 0.3)
MAX_DEATH_DELAY_S: Final = 0.05  # until the other end notices a death


class Silence(NamedTuple):
    """A span of virtual time in which nothing that a process sends arrives."""

    since_s: float
    until_s: float


class End:
    """One process's end of a wire. Turns of `owner` call `on_body` and `on_end`."""

    def __init__(self, owner: SimProcess, network: "Network") -> None:
        self.owner = owner
        self.on_body: Callable[[bytes], None] = lambda body: None
        self.on_end: Callable[[], None] = lambda: None
        self.is_over = False  # `on_end` was called
        self.has_gap = False  # a body was lost on its way here, and with it all later bodies
        self.wire: Wire | None = None
        self.quiet_since_s: float | None = None  # once the wire is cut: when the last ping came
        self.last_s = 0.0  # arrival of the last body under way to this end
        self._network = network

    @property
    def quiet_s(self) -> float:
        """Return for how long no ping of the other end has come."""
        if self.quiet_since_s is not None:
            return self._network.now_s - self.quiet_since_s
        return 0.0 if self.wire is None else self._network.silent_for_s(self.wire.other(self), self)

    @property
    def silence_s(self) -> float:
        """Return the longer of `quiet_s` and the silence that the other end's last ping told of."""
        if self.wire is None:
            return 0.0
        quiet_s = self.quiet_s  # the last ping is as old
        return max(quiet_s, self._network.silent_for_s(self, self.wire.other(self)) - quiet_s)

    def send(self, body: bytes) -> None:
        """Send a body when the owner's turn is over."""
        self.owner.send(lambda: self.carry(body))

    def close(self) -> None:
        """Close the wire when the owner's turn is over."""
        if self.wire is not None:
            self.owner.send(self.wire.close)

    def abort(self) -> None:
        """Cut the wire now."""
        if self.wire is not None:
            self.wire.cut()

    def carry(self, body: bytes) -> None:
        """Send a body now, during the owner's turn."""
        wire = self.wire
        if wire is None or wire.is_cut:
            return
        other = wire.other(self)
        heals_s = self._network.swallowed_until_s(self, other)
        hear = other.hear_late if heals_s else other.hear
        self._network.deliver(other, lambda: hear(body), max(heals_s, wire.stalled_until_s))

    def hear(self, body: bytes) -> None:
        """Deliver a body to the owner."""
        if not self.is_over and not self.has_gap:
            self.on_body(body)

    def hear_late(self, body: bytes) -> None:
        """Deliver a body that was sent again after a black hole, unless the sender has given up."""
        if self.wire is None or self.wire.is_cut:
            self.has_gap = True
        else:
            self.hear(body)

    def hear_end(self) -> None:
        """Tell the owner, once, that the wire has ended."""
        if not self.is_over:
            self.is_over = True
            self.on_end()


class Wire:
    """One connection."""

    def __init__(self, ends: tuple[End, End], network: "Network") -> None:
        self.ends = ends
        self.is_cut = False
        self.stalled_until_s = 0.0
        self._network = network
        for end in ends:
            end.wire = self

    @property
    def name(self) -> str:
        """The names of both processes."""
        return f"{self.ends[0].owner.name} - {self.ends[1].owner.name}"

    def joins(self, names: set[str]) -> bool:
        """Return whether the ends belong to the processes of these names."""
        return {end.owner.name for end in self.ends} == names

    def other(self, end: End) -> End:
        """Return the opposite end."""
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def close(self) -> None:
        """Close in order: bodies under way arrive first."""
        if self._cut_now():
            for end in self.ends:
                heals_s = self._network.swallowed_until_s(self.other(end), end)
                self._network.deliver(end, end.hear_end, max(heals_s, self.stalled_until_s))

    def give_up(self) -> None:
        """End a silent wire: each end drops it at a time of its own, within NOTICE_S."""
        if self._cut_now():
            self._network.has_been_cut = True
            for end in self.ends:
                self._network.end_within(end, NOTICE_S)

    def cut(self) -> None:
        """End as by a fault."""
        if self._cut_now():
            self._network.has_been_cut |= not any(end.owner.is_dead for end in self.ends)
            for end in self.ends:
                self._network.end_somewhen(end, self.other(end))

    def _cut_now(self) -> bool:
        """Return whether the wire was whole until now."""
        if self.is_cut:
            return False
        self.is_cut = True
        for end in self.ends:
            end.quiet_since_s = self._network.now_s - self._network.silent_for_s(self.other(end), end)
        del self._network.wires[self]
        return True


# A paused process, an end that loses its bodies in a black hole, or a pair (sender, receiver) of names.
Silent: TypeAlias = SimProcess | End | tuple[str, str]


class Network:
    """All wires of a simulation, and the faults between processes. `random` is the only source of chance."""

    def __init__(self, events: Events, random: Random) -> None:
        self.wires: dict[Wire, None] = {}  # that are whole, oldest first
        self.has_been_cut = False  # between two living processes, perhaps unnoticed
        self._parted_until_s: dict[frozenset[str], float] = {}
        self._silences: dict[Silent, Silence] = {}  # the last of each
        self._events = events
        self._random = random
        self._max_delay_s = random.choice(MAX_DELAYS_S)

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self._events.now_s

    def connect(self, caller: SimProcess, callee: SimProcess) -> tuple[End, End]:
        """Join two processes; returns the caller's end and the callee's end."""
        ends = End(caller, self), End(callee, self)
        wire = Wire(ends, self)
        self.wires[wire] = None
        caller.on_death.append(wire.cut)
        callee.on_death.append(wire.cut)
        return ends

    def part(self, one: str, other: str, seconds: float) -> None:
        """Partition two processes: their wires are cut, and they cannot connect."""
        self._parted_until_s[frozenset((one, other))] = self._events.now_s + seconds
        for wire in [wire for wire in self.wires if wire.joins({one, other})]:
            wire.cut()

    def is_parted(self, caller: SimProcess, callee: SimProcess) -> bool:
        """Return whether two processes are partitioned now."""
        until_s = self._parted_until_s.get(frozenset((caller.name, callee.name)), 0.0)
        return self._events.now_s < until_s

    def swallow(self, sender: str, receiver: str, seconds: float) -> None:
        """Open a black hole for everything that one process sends the other."""
        self.has_been_cut = True  # a process that dies behind the hole dies unseen
        wires = [wire for wire in self.wires if wire.joins({sender, receiver})]
        self._fall_silent((sender, receiver), wires, self._events.now_s + seconds)

    def swallow_wire(self, wire: Wire, ends: Sequence[End], seconds: float) -> None:
        """Open a black hole for bodies that these ends send over one wire; other wires work."""
        self.has_been_cut = True
        for end in ends:
            self._fall_silent(end, [wire], self._events.now_s + seconds)

    def stands_still(self, process: SimProcess, until_s: float) -> None:
        """A process is paused until then: its links end when it has not answered for too long."""
        self._fall_silent(process, self._wires_of(process), until_s)

    def swallowed_until_s(self, sender: End, receiver: End) -> float:
        """Return the earliest arrival of a body sent now; 0 without a black hole."""
        holes = self._present(_names(sender, receiver), sender)
        return max((each.until_s for each in holes), default=0.0)

    def silent_for_s(self, sender: End, receiver: End) -> float:
        """Return for how long no ping of the sender has come to the receiver; 0 when they come."""
        silences = self._present(_names(sender, receiver), sender, sender.owner)
        now_s = self._events.now_s
        return now_s - min((each.since_s for each in silences), default=now_s)

    def connects_in_s(self, caller: SimProcess, callee: SimProcess) -> float:
        """Return how long a new connection waits for black holes in either direction."""
        holes = self._present((caller.name, callee.name), (callee.name, caller.name))
        return max((each.until_s - self._events.now_s for each in holes), default=0.0)

    def close_all(self, process: SimProcess) -> None:
        """Close a process's wires in order."""
        for wire in self._wires_of(process):
            wire.close()

    def delay_s(self) -> float:
        """Draw the delay of one body."""
        return self._random.uniform(MIN_DELAY_S, self._max_delay_s)

    def nap_s(self, random: Random) -> float:
        """Draw the time between a writer's check and its write: a thread may be held up there."""
        return random.choice(NAPS_S) + self.delay_s()

    def moves_s(self, num_tokens: int, num_transfers: int) -> float:
        """Return how long the pages of so many tokens take, beside the delay of a body.

        num_transfers: pieces of their source that are under way, this one included.
        """
        return 0.0

    def deliver(self, end: End, call: Callable[[], None], not_before_s: float) -> None:
        """Post a call to an end's owner, after everything else that is under way to the end."""
        end.last_s = max(end.last_s, not_before_s, self._events.now_s + self.delay_s())
        self._events.at(end.last_s, lambda: end.owner.post(call))

    def end_somewhen(self, end: End, other: End) -> None:
        """Tell an end of the wire's end: before, after or between the bodies under way from the other end."""
        heals_s = self.swallowed_until_s(other, end)
        if heals_s:  # the end is not told, and finds out
            self._end_at(end, min(heals_s, self._events.now_s + LINK_TIMEOUT_S), NOTICE_S)
        else:
            self.end_within(end, MAX_DEATH_DELAY_S)

    def end_within(self, end: End, seconds: float) -> None:
        """Tell an end of the wire's end at a random time within `seconds`."""
        self._end_at(end, self._events.now_s, seconds)

    def _wires_of(self, process: SimProcess) -> list[Wire]:
        return [wire for wire in self.wires if any(end.owner is process for end in wire.ends)]

    def _fall_silent(self, key: Silent, wires: Sequence[Wire], until_s: float) -> None:
        """Begin a silence, or extend the present one. Silent wires end after LINK_TIMEOUT_S."""
        since_s = self._events.now_s
        for present in self._present(key):
            since_s, until_s = present.since_s, max(until_s, present.until_s)
        self._silences[key] = Silence(since_s, until_s)
        if since_s + LINK_TIMEOUT_S < until_s:
            for wire in wires:
                self._events.at(since_s + LINK_TIMEOUT_S, wire.give_up)

    def _present(self, *keys: Silent) -> Iterator[Silence]:
        """Yield the present silences of these keys."""
        for key in keys:
            silence = self._silences.get(key)
            if silence is not None and self._events.now_s < silence.until_s:
                yield silence

    def _end_at(self, end: End, time_s: float, within_s: float) -> None:
        time_s += self._random.uniform(0.0, within_s)
        self._events.at(time_s, lambda: end.owner.post(end.hear_end))


def _names(sender: End, receiver: End) -> tuple[str, str]:
    return sender.owner.name, receiver.owner.name


class Host:
    """One process's connections; call `serve` before anything comes."""

    def __init__(
        self, process: SimProcess, network: Network, listeners: "dict[Address, Host]", recorder: Recorder
    ) -> None:
        """listeners: the hosts of one simulation by address. A later process displaces an earlier one."""
        self.process = process
        self.recorder = recorder
        self._network = network
        self._listeners = listeners
        self._node: Node | None = None
        self._dialing: set[Address] = set()  # until its connection has ended
        self._known: dict[HostPeer, None] = {}  # that have said Hello, and have not left
        self._is_closed = False

    @property
    def node(self) -> Node:
        """The node that the host serves."""
        assert self._node is not None, f"{self.process.name} serves nothing yet"
        return self._node

    def serve(self, node: Node, address: Address | None = None) -> None:
        """Let peers in. address: where the node listens, if it does."""
        self._node = node
        if address is not None:
            self._listeners[address] = self
        self.process.later(TICK_S, self._tick)

    def close(self) -> None:
        """End every connection, and neither dial nor let anyone in any more; the process lives on."""
        self._is_closed = True
        for peer in list(self._known):
            peer.close()

    def dial(self, address: Address) -> None:
        """See Dial in baton/rpc/peers.py."""
        if address not in self._dialing and not self._is_closed:
            self._dialing.add(address)
            self.process.later(self._network.delay_s(), lambda: self._connect(address))

    def tell_routers(self, message: AnyMessage) -> None:
        """Send now, as the thread of an RpcThread does: a turn that lasts does not delay the message."""
        for peer in self._known:
            if peer.hello.process is Kind.ROUTER:
                peer.send_now(message)

    def greet(self, peer: "HostPeer") -> None:
        """Say Hello to a new peer, at once."""
        if self._is_closed:
            peer.abort()
            return
        peer.send_now(self.node.hello)
        self.process.later(HANDSHAKE_TIMEOUT_S, peer.end_unless_known)

    def heard(self, peer: "HostPeer", message: AnyMessage) -> None:
        """Take a message of a peer; its first is its Hello."""
        try:
            if self._is_closed and peer not in self._known:
                peer.abort()
            elif peer in self._known:
                self.recorder.message(peer.hello.id, self.process.name, message)
                self.node.received(peer, message)
            else:
                assert isinstance(message, Hello), message
                peer.hello = message
                self._known[peer] = None
                self.node.joined(peer)
        except WireError as error:
            self.recorder.dropped(self.process.name, error)
            peer.abort()

    def left(self, peer: "HostPeer") -> None:
        """Take the end of a peer's connection."""
        if peer in self._known:
            del self._known[peer]
            self.node.left(peer)

    def knows(self, peer: "HostPeer") -> bool:
        """Return whether the peer has said Hello and has not left."""
        return peer in self._known

    def _connect(self, address: Address) -> None:
        callee = self._listeners.get(address)
        if (
            self._is_closed
            or callee is None
            or callee.process.is_dead
            or self._network.is_parted(self.process, callee.process)
        ):
            self._dialing.discard(address)
            return
        wait_s = self._network.connects_in_s(self.process, callee.process)
        if wait_s > 0:  # TCP sends its request again
            gives_up = wait_s > HANDSHAKE_TIMEOUT_S
            call = partial(self._dialing.discard if gives_up else self._connect, address)
            self.process.later(min(wait_s, HANDSHAKE_TIMEOUT_S), call)
            return
        ours, theirs = self._network.connect(self.process, callee.process)
        callee.process.post(lambda: callee.greet(HostPeer(callee, theirs)))
        self.greet(HostPeer(self, ours, on_gone=lambda: self._dialing.discard(address)))

    def _tick(self) -> None:
        self.process.post(self._make_tick)

    def _make_tick(self) -> None:
        if self._is_closed:
            return
        self.process.later(TICK_S, self._tick)
        self.node.tick()


class HostPeer:
    """See Peer in baton/rpc/peers.py. The node knows a peer once the peer's Hello has come."""

    hello: Hello

    def __init__(self, host: Host, end: End, on_gone: Call = lambda: None) -> None:
        self._host = host
        self._end = end
        self._on_gone = on_gone
        end.on_body = lambda body: host.heard(self, decode(body))
        end.on_end = self._ended

    @property
    def silence_s(self) -> float:
        return self._end.silence_s

    @property
    def quiet_s(self) -> float:
        return self._end.quiet_s

    @property
    def clock_offset(self) -> ClockOffset | None:
        """See Peer. All processes have the virtual clock."""
        return SAME_CLOCK

    def send(self, message: AnyMessage) -> None:
        self._end.send(encode(message))

    def send_now(self, message: AnyMessage) -> None:
        """Send during a turn of the process."""
        self._end.carry(encode(message))

    def close(self) -> None:
        self._end.close()

    def abort(self) -> None:
        """End the connection without sending the rest."""
        self._end.abort()

    def end_unless_known(self) -> None:
        """End the connection to a paused process, which accepts connections and says nothing."""
        if not self._host.knows(self):
            self.abort()

    def _ended(self) -> None:
        self._on_gone()
        self._host.left(self)
