"""The workers that are alive, as the router sees it.

The life of a member:

1. It joins with its Hello. A name has one owner, the process that started last. An earlier process of the
   same name is fenced, whether connected or not: it is dropped, and its id is never admitted again. A process
   that started before the connected one, for example one that was suspended for long, is not admitted.
2. It gives a sign of life every second, whatever its engine does, with the age of the running step. Between
   steps it reports its load and the workers that it reaches.
3. It is dead when its connection ends, or when nothing has come from it for BEAT_TIMEOUT_S. It is hung when
   its step is older than the step's bound (`RunningStep`); a slow step within its bound changes nothing. The
   router ends the connection of a hung or silent worker. A process that was only suspended may join again:
   its peers were told to drop it, so its earlier work is lost by then.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from baton.clock import Clock, PauseDetector
from baton.errors import ProtocolError, WireError
from baton.messages.bounds import MAX_WORKERS
from baton.messages.control import Alive, Heartbeat
from baton.messages.orders import Sleep, Wake, followed_order, latest_order
from baton.messages.status import OverloadLevel
from baton.messages.workers import Load, RunningStep, Worker, WorkerRole
from baton.rpc.peers import Peer

BEAT_TIMEOUT_S: Final = 3.0
MAX_FENCED: Final = 4096
MAX_LATEST: Final = 4096  # names; more than there can be workers
Reached: TypeAlias = tuple[frozenset[str], ...]  # the workers that each gateway reaches


class Member:
    """A worker's connection to the router, and the worker's reports."""

    def __init__(self, worker: Worker, peer: Peer, now_s: float) -> None:
        self.worker = worker
        self.id = worker.id
        self.peer = peer
        self.beat_s = now_s  # the last sign of life
        self.step: RunningStep | None = None  # as last reported
        self.load = Load()
        self.reached: frozenset[str] = frozenset()
        self.sent_level = OverloadLevel.CALM  # the overload level that the worker knows
        self.is_asked_to_drain = False
        self.may_resume = False  # once it reports that it does not drain
        self.reports_draining = False

    @property
    def is_draining(self) -> bool:
        """True when the worker takes no new work."""
        return self.is_asked_to_drain or self.reports_draining or self.worker.is_asleep


class Removed(NamedTuple):
    """A member that was given up."""

    member: Member
    reason: str
    is_hung: bool = False  # it gives signs of life


class Membership:
    """The members by id. `version` changes whenever the workers that may take work may have changed."""

    def __init__(self, clock: Clock) -> None:
        self.version = 0
        self._clock = clock
        self._members: dict[str, Member] = {}  # by id, in order of joining
        self._latest: dict[str, Worker] = {}  # name -> the last worker that joined; it may have left
        self._fenced: dict[str, None] = {}  # ids, oldest first
        self._orders: dict[str, Sleep | Wake] = {}  # by model, as in ModelOrder: the latest
        self._pauses = PauseDetector(clock.now_s())
        self._counted: tuple[int, Reached] | None = None
        self._num_ready = 0

    def __len__(self) -> int:
        return len(self._members)

    def get(self, worker_id: str) -> Member | None:
        """The member with this id."""
        return self._members.get(worker_id)

    def find(self, name_or_id: str) -> Member | None:
        """The member with this name or id."""
        latest = self._latest.get(name_or_id)
        return self._members.get(name_or_id if latest is None else latest.id)

    def of_role(self, role: WorkerRole) -> Sequence[Member]:
        """The members of a role, in order of joining."""
        return [member for member in self._members.values() if member.worker.role is role]

    def all(self) -> Iterable[Member]:
        """All members, in order of joining."""
        return self._members.values()

    @property
    def orders(self) -> Iterable[Sleep | Wake]:
        """The latest order about each model."""
        return self._orders.values()

    def take_order(self, order: Sleep | Wake) -> list[Member]:
        """Keep an order unless a later one holds. Returns the members to send it to.

        An order for which there is no member is not kept.
        """
        members = [member for member in self._members.values() if member.worker.serves(order.model)]
        latest = latest_order(self.orders, order.model)
        if latest is not None and order.precedence < latest.precedence:
            return []
        if members and (latest is None or order.precedence > latest.precedence):
            self._orders[order.model] = order
        return members

    def missed_order(self, worker: Worker) -> Sleep | Wake | None:
        """Return the order that holds for the model of a worker; None if the worker has followed it."""
        latest = latest_order(self.orders, worker.model)
        if latest is None or latest.precedence <= followed_order(worker).precedence:
            return None
        return latest

    def join(self, worker: Worker, peer: Peer) -> Member | None:
        """Add a worker. Returns the member that it replaces; the caller closes that connection.

        Raises WireError when the worker may not join.
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
            message = f"{worker.name} {former.id}, which is connected, has started after {worker.id}"
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
        if worker.order_number:  # a router that has just started learns the orders so
            self.take_order(followed_order(worker))
        return former

    def remove(self, member: Member) -> None:
        """Remove a member."""
        del self._members[member.id]
        self.version += 1

    def beat(self, member: Member, beat: Heartbeat) -> None:
        """Take a member's report of its load."""
        was_draining = member.is_draining
        member.beat_s = self._clock.now_s()
        member.load = beat.load
        member.reports_draining = beat.is_draining
        if member.may_resume and not beat.is_draining:
            member.is_asked_to_drain = member.may_resume = False
        self.version += member.is_draining != was_draining

    def hear(self, member: Member, alive: Alive) -> None:
        """Take a member's sign of life, with the running step."""
        member.beat_s = self._clock.now_s()
        member.step = alive.step

    def reach(self, member: Member, workers: Iterable[str]) -> None:
        """Take a member's report of the workers that it reaches."""
        member.reached = frozenset(workers)
        self.version += 1

    def drain(self, member: Member) -> None:
        """Give a member no new work."""
        member.is_asked_to_drain, member.may_resume = True, False
        self.version += 1

    def resume(self, member: Member) -> None:
        """Give a member new work again once it reports that it does not drain."""
        member.may_resume = True

    def remove_dead(self) -> list[Removed]:
        """Remove the members that are silent or hung, and return them with the reasons. Call in every tick.

        Time in which this process itself did not run is not counted as silence.
        """
        now_s = self._clock.now_s()
        if pause_s := self._pauses.pause_s(now_s):
            for member in self._members.values():
                member.beat_s = min(now_s, member.beat_s + pause_s)
        dead = []
        for member in list(self._members.values()):
            if now_s - member.beat_s > BEAT_TIMEOUT_S:
                dead.append(Removed(member, f"it was silent for {BEAT_TIMEOUT_S:g} s"))
            elif member.step is not None and member.step.is_overdue:
                dead.append(Removed(member, member.step.complaint, is_hung=True))
        for removed in dead:
            self.remove(removed.member)
        return dead

    def num_ready(self, reached: Reached) -> int:
        """The number of members that every gateway reaches and that have links with all their partners.

        A prefill worker and a decode worker of the same weights are partners; they have a link when each
        reaches the other. A sleeping worker needs no link, and a gateway reaches it when it knows that the
        worker sleeps. The count is cached until the members or `reached` change.
        """
        present = (self.version, reached)
        if present != self._counted:
            self._counted = present
            self._num_ready = self._count_ready(reached)
        return self._num_ready

    def _count_ready(self, reached: Reached) -> int:
        ready = set[str]()
        awake = defaultdict[tuple[str, WorkerRole], list[Member]](list)  # by weights and role
        for member in self._members.values():
            if member.worker.is_asleep:
                ready.add(member.id)
            else:
                awake[member.worker.fingerprint, member.worker.role].append(member)
        for (fingerprint, role), members in awake.items():
            partners = WorkerRole.DECODE if role is WorkerRole.PREFILL else WorkerRole.PREFILL
            ready |= _linked(members, awake.get((fingerprint, partners), ()))
        return len(ready.intersection(*reached))

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


class ModelMembers:
    """The part of a Membership that serves one model."""

    def __init__(self, members: Membership, model: str) -> None:
        self._members = members
        self._model = model

    @property
    def version(self) -> int:
        return self._members.version

    def of_role(self, role: WorkerRole) -> Sequence[Member]:
        return [member for member in self._members.of_role(role) if member.worker.serves(self._model)]

    def all(self) -> Iterable[Member]:
        return (member for member in self._members.all() if member.worker.serves(self._model))


MemberView: TypeAlias = Membership | ModelMembers  # the members that one admission queue dispatches to


def _linked(members: Iterable[Member], partners: Sequence[Member]) -> set[str]:
    """Return the ids of the members that have a link with each partner."""
    ids = {partner.id for partner in partners}
    linked = {member.id for member in members if ids <= member.reached}
    return linked.intersection(*(partner.reached for partner in partners))
