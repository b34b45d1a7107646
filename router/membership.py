"""The workers that are alive, as the router sees it.

The life of a member:

1. It joins with its Hello. A name has one owner, the process that started last: a worker of the same name
   that joined before, connected or not, is fenced, dropped and its id never let in again; one that started
   before the one that is connected, such as one that stood still for long, is not let in.
2. It gives a sign of life every second, whatever its engine does, with the age of the step that runs; and
   between steps it says what it has, and whom it reaches.
3. It is dead when its connection ends, and when nothing has come from it for BEAT_TIMEOUT_S. It is hung when
   its step is older than that step's bound (baton/rpc/liveness.py); a slow step within its bound changes
   nothing. Then the router ends the connection. A process that was only held up may join again: whoever else
   was connected to it has been told to drop it, so what it did before is lost by then.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from baton.clock import Clock
from baton.errors import ProtocolError, WireError
from baton.messages.bounds import MAX_WORKERS
from baton.messages.control import Alive, Heartbeat
from baton.messages.workers import Load, RunningStep, Worker, WorkerRole
from baton.rpc.peers import Peer

BEAT_TIMEOUT_S: Final = 3.0
LATE_TICK_S: Final = 1.0
MAX_FENCED: Final = 4096
MAX_LATEST: Final = 4096  # names; more than there can be workers


class Member:
    """One worker's connection to the router, and what came over it."""

    def __init__(self, worker: Worker, peer: Peer, now_s: float) -> None:
        self.worker = worker
        self.id = worker.id
        self.peer = peer
        self.beat_s = now_s
        self.step: RunningStep | None = None  # as it said last
        self.load = Load()
        self.reached: frozenset[str] = frozenset()
        self.is_asked_to_drain = False
        self._says_it_drains = False

    @property
    def is_draining(self) -> bool:
        return self.is_asked_to_drain or self._says_it_drains

    def beat(self, beat: Heartbeat, now_s: float) -> bool:
        """Whether this changes who may be given work."""
        was_draining = self.is_draining
        self.beat_s = now_s
        self.load = beat.load
        self._says_it_drains = beat.is_draining
        return self.is_draining != was_draining


class Removed(NamedTuple):
    """A member that was given up."""

    member: Member
    reason: str
    is_hung: bool = False  # it gives signs of life


class Membership:
    """`version` changes whenever the answer to "who may take work" may have changed."""

    def __init__(self, clock: Clock) -> None:
        self.version = 0
        self._clock = clock
        self._members: dict[str, Member] = {}  # by id, in order of joining
        self._latest: dict[str, Worker] = {}  # that joined, by name; it may have left or died since
        self._fenced: dict[str, None] = {}  # ids, oldest first
        self._last_look_s = clock.now_s()

    def __len__(self) -> int:
        return len(self._members)

    def get(self, worker_id: str) -> Member | None:
        return self._members.get(worker_id)

    def find(self, name_or_id: str) -> Member | None:
        latest = self._latest.get(name_or_id)
        return self._members.get(name_or_id if latest is None else latest.id)

    def of_role(self, role: WorkerRole) -> Sequence[Member]:
        return [member for member in self._members.values() if member.worker.role is role]

    def all(self) -> Iterable[Member]:
        return self._members.values()

    def join(self, worker: Worker, peer: Peer) -> Member | None:
        """The member whose place it takes, if any: the caller ends that one's connection.

        WireError: it may not join.
        """
        if worker.id in self._fenced:
            message = f"{worker.name} {worker.id} has been replaced by a process that started later"
            raise WireError(message, reason="fenced")
        known = self._members.get(worker.id)
        if known is not None and known.worker.name != worker.name:
            raise ProtocolError(f"{worker.name} has the id of {known.worker.name}, {worker.id}")
        latest = self._latest.get(worker.name)
        former = None if latest is None else self._members.get(latest.id)
        if former is not None and former.worker.incarnation > worker.incarnation:
            message = f"{worker.name} {former.id}, which is here, has started after {worker.id}"
            raise WireError(message, reason="fenced")
        if former is None and len(self._members) >= MAX_WORKERS:
            raise WireError(f"there are {MAX_WORKERS} workers already", reason="full")
        if former is not None:
            self.remove(former)
        if latest is not None and latest.id != worker.id and latest.incarnation <= worker.incarnation:
            self._fence(latest.id)
        self._members[worker.id] = Member(worker, peer, self._clock.now_s())
        self._remember(worker)
        self.version += 1
        return former

    def remove(self, member: Member) -> None:
        del self._members[member.id]
        self.version += 1

    def beat(self, member: Member, beat: Heartbeat) -> None:
        self.version += member.beat(beat, self._clock.now_s())

    def hear(self, member: Member, alive: Alive) -> None:
        """A sign of life, with the step that runs."""
        member.beat_s = self._clock.now_s()
        member.step = alive.step

    def reach(self, member: Member, workers: Iterable[str]) -> None:
        member.reached = frozenset(workers)
        self.version += 1

    def drain(self, member: Member) -> None:
        member.is_asked_to_drain = True
        self.version += 1

    def remove_dead(self) -> list[Removed]:
        """Take out those that are silent or hung, with the reason; to be called in every tick.

        Time that this process itself was held up is nobody's silence: what was sent meanwhile is unread.
        """
        now_s = self._clock.now_s()
        held_up_s = now_s - self._last_look_s
        self._last_look_s = now_s
        if held_up_s > LATE_TICK_S:
            for member in self._members.values():
                member.beat_s = min(now_s, member.beat_s + held_up_s)
        dead = []
        for member in list(self._members.values()):
            if now_s - member.beat_s > BEAT_TIMEOUT_S:
                dead.append(Removed(member, f"it was silent for {BEAT_TIMEOUT_S:g} s"))
            elif member.step is not None and member.step.is_overdue:
                dead.append(Removed(member, member.step.complaint, is_hung=True))
        for removed in dead:
            self.remove(removed.member)
        return dead

    def _remember(self, worker: Worker) -> None:
        self._latest.pop(worker.name, None)
        self._latest[worker.name] = worker
        if len(self._latest) > MAX_LATEST:
            away = (name for name, latest in self._latest.items() if latest.id not in self._members)
            del self._latest[next(away)]

    def _fence(self, worker_id: str) -> None:
        self._fenced[worker_id] = None
        if len(self._fenced) > MAX_FENCED:
            del self._fenced[next(iter(self._fenced))]


# Which workers have met those that they need: only they are given work with others.

Reached: TypeAlias = tuple[frozenset[str], ...]  # by each gateway


class Readiness:
    """Counts anew only when the members, or what is reached, have changed: it compares all with all."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._counted: tuple[int, Reached] | None = None
        self._num_met = 0

    def num_met(self, reached: Reached) -> int:
        """Workers that each gateway could have answer now.

        A prefill worker needs every decode worker of its weights, as far as pages and words go, and they it.
        """
        present = (self._members.version, reached)
        if present != self._counted:
            self._counted = present
            self._num_met = _count(list(self._members.all()), reached)
        return self._num_met


def _count(members: Sequence[Member], reached: Reached) -> int:
    return sum(
        all(member.id in each for each in reached) and all(_meets(member, other) for other in members)
        for member in members
    )


def _meets(member: Member, other: Member) -> bool:
    if member.worker.role is other.worker.role or member.worker.fingerprint != other.worker.fingerprint:
        return True
    return member.id in other.reached and other.id in member.reached
