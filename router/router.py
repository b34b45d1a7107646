"""The router as a node: it tracks which workers are alive and loaded, and gives every attempt its workers.

The router persists nothing. A new router learns the workers from their Hello and Heartbeat, and the
connections of gateways from Reachable. It takes its list of workers for complete SETTLE_S after the first
worker has joined; a router that has lost all workers starts that wait again. Running attempts continue in
the meantime. Gateways resubmit the attempts that the earlier router has not answered.

`serve_router` runs a router in a process: an RPC server, the router and, if configured, a link to Redis, on
one event loop.
"""

import asyncio
import logging
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import AsyncExitStack, closing, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from msgspec.structs import replace

from baton.clock import Clock, SystemClock, TurnClock
from baton.config.environment import node_name
from baton.config.router import RouterConfig
from baton.errors import ConfigError, ProtocolError
from baton.messages.bounds import MAX_BODY_BYTES, Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import (
    Alive,
    Ended,
    Heartbeat,
    Hello,
    KvEventBatch,
    Measured,
    Members,
    Reachable,
    Started,
    Submit,
)
from baton.messages.operations import (
    Decisions,
    Drain,
    Explain,
    FindRequests,
    Flip,
    FoundRequests,
    GatewayReport,
    Migrate,
    Migrated,
    RecordingQuery,
    RestartWorker,
    Scale,
    Status,
    StatusQuery,
    SupervisorReport,
    Undrain,
    WatchWorkers,
    WorkerRemoved,
)
from baton.messages.orders import Sleep, Wake
from baton.messages.status import (
    RouterStatus,
    RoutingTimes,
    Sizes,
    snapshot,
)
from baton.messages.workers import Address, Load, WorkerStatus
from baton.router.checkpoint import attributes_of
from baton.router.cluster_state import ClusterState, SharingLink
from baton.router.decisions import DecisionLog
from baton.router.dispatcher import Dispatchers, GatewayPeer
from baton.router.in_flight import InFlight
from baton.router.index.prefix_index import MAX_PAGES, IndexChange, PrefixIndex
from baton.router.membership import BEAT_TIMEOUT_S, Member, Membership, Removed
from baton.router.pairing import Pairing
from baton.router.policies.base import PolicyContext
from baton.router.policies.cost_model import CostModel
from baton.router.policies.registry import load_policy, policy_class
from baton.router.queue.admission import AdmissionQueue
from baton.router.recording import (
    Input,
    Joined,
    Left,
    Linked,
    Logs,
    Recording,
    Tick,
    WorkTurn,
    no_recording,
)
from baton.router.redis.messages import AnyShared
from baton.router.sliced_work import PAGES_PER_SLICE, CallSoon, PromptKeys, SlicedWork
from baton.rpc import process
from baton.rpc.auth import REDIS_NAMES, REDIS_VALUES, ClusterKeys, KeyRing
from baton.rpc.connection import DroppedPeers
from baton.rpc.peers import TICK_S, Peer, new_router_id
from baton.rpc.server import RpcServer

if TYPE_CHECKING:
    from baton.router.redis.link import RedisLink

SETTLE_S: Final = BEAT_TIMEOUT_S  # after the first worker joins: by then every live one has connected
MIN_INDEX_PAGES: Final = 1024  # bound of the prefix index when the policy does not use the index
LEARN_S: Final = 0.5  # bounds the wait for Redis at a router's start
SLACK_BYTES: Final = 128  # more than the counts of the left-out entries take
# Attributes that belong to the process, not to the state of a checkpoint.
_NOT_SAVED: Final = frozenset(
    {"hello", "config", "recording", "redis", "sliced_work", "max_index_pages", "pages_per_slice"}
    | {"_clock", "_system_clock", "_askers"}
)
_ENCODER: Final = msgspec.msgpack.Encoder()
RelayedT = TypeVar("RelayedT", FindRequests, Migrate)

logger = logging.getLogger(__name__)


class Router:
    """The router of a cluster; see `Node` for the methods that its host calls."""

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        id: str,
        *,
        max_index_pages: int = MAX_PAGES,
        call_soon: CallSoon | None = None,
        pages_per_slice: int = PAGES_PER_SLICE,
    ) -> None:
        """id: identifies this run of the process; 32 hex digits.

        max_index_pages: bound of the prefix index when the policy uses the index. call_soon: has the host
        make a call in its next turn, for long work (router/sliced_work.py); None: no work is deferred.
        pages_per_slice: one slice computes or expects the keys of this many pages.
        """
        self.hello = Hello(process=Kind.ROUTER, id=id)
        self.config = config
        self.recording: Recording | None = None
        self._system_clock, self._clock = clock, TurnClock(clock)
        clock = self._clock
        self.counters: Counter[str] = Counter()
        self.redis: RedisLink | None = None
        self.in_flight = InFlight(clock)
        self.members = Membership(clock)
        policy_type = policy_class(config.policy)
        num_pages = max_index_pages if policy_type.uses_prefix_index else MIN_INDEX_PAGES
        # Expected pages have a queue of their own, so that no dispatch waits behind them.
        expectations, dispatches = (SlicedWork(self._turns(work, call_soon)) for work in range(2))
        self.sliced_work = expectations, dispatches
        index = PrefixIndex(
            clock, num_pages, seed=config.seed, sliced_work=expectations, pages_per_slice=pages_per_slice
        )
        random, keys = Random(config.seed), PromptKeys(None if call_soon is None else pages_per_slice)
        context = PolicyContext(clock, self.in_flight, index, CostModel(), keys, random)
        policy = policy_type(context)
        self.cluster_state = ClusterState(context, policy, self.counters)
        self._routing_times = RoutingTimes()
        self.pairing = Pairing(config, self.members, policy, load_policy(policy, context))
        self.max_index_pages, self.pages_per_slice = max_index_pages, pages_per_slice
        self._gateways: dict[str, GatewayPeer] = {}
        # Operators that start workers -> seconds since Ray's head became unreachable.
        self._watchers: dict[Peer, SupervisorReport] = {}
        self._askers: dict[str, Peer] = {}  # connected processes that have asked gateways, by id
        self.dispatchers = Dispatchers(
            config,
            clock,
            self.members,
            self.pairing,
            self.cluster_state,
            self._gateways,
            sliced_work=dispatches,
            decoders_compute=policy.weighs_local_prefill,
        )
        self._first_joined_s = math.inf  # when the first of the present workers joined
        self._announced_s = clock.now_s() - TICK_S
        self._announced: Members | None = None

    def record(self, recording: Recording) -> None:
        """Record all inputs and outcomes from now on; call it once, when no work is deferred."""
        self.recording = recording
        self.cluster_state.on_outcome = recording.decided
        self.cluster_state.keys.on_keys = recording.keys_computed
        recording.begin(self)

    @property
    def admission_queue(self) -> AdmissionQueue:
        """The queue of a cluster of one model."""
        return self.dispatchers.of_one_model.admission_queue

    @property
    def peers(self) -> list[Peer]:
        """All connected processes that the router knows."""
        gateways = [each.peer for each in self._gateways.values()]
        return [*gateways, *(member.peer for member in self.members.all()), *self._watchers]

    @property
    def now_s(self) -> float:
        """The time at which the present input is handled."""
        return self._clock.now_s()

    @property
    def outside(self) -> dict[str, object]:
        """The parts that a checkpoint leaves out, by name."""
        parts: dict[str, object] = {f"work {number}": work for number, work in enumerate(self.sliced_work)}
        state = self.cluster_state
        parts["config"] = self.config  # its URL of Redis may have a password
        return {"clock": self._clock, "sharing": state.sharing, "log": state.log, **parts}

    def __getstate__(self) -> dict[str, object]:
        """The parts of a checkpoint."""
        return {name: part for name, part in attributes_of(self).items() if name not in _NOT_SAVED}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, part in state.items():
            setattr(self, name, part)

    def link(self, link: SharingLink) -> None:
        """Share dispatches, and workers' pages, with other routers from now on."""
        self._begin(Linked())
        self.cluster_state.sharing = link

    def log_to(self, write: Callable[[bytes], object]) -> None:
        """Write a line for each dispatch and each end, from now on."""
        self._begin(Logs())
        self.cluster_state.log = write

    def change_index(self, change: IndexChange) -> bool:
        """Make a change of the link to other routers; see `PrefixIndex.change`."""
        self._begin(change)
        return self.cluster_state.index.change(change)

    def _begin(self, input: Input, peer: Peer | None = None) -> None:
        """Begin to handle an input: the clock stands still until the next one."""
        now_s = self._clock.turn()
        if self.recording is not None:
            self.recording.add(now_s, peer, input)

    def _turns(self, work: int, call_soon: CallSoon | None) -> CallSoon | None:
        """Make each turn of deferred work an input. work: its number in `sliced_work`."""

        def turn(call: Callable[[], None]) -> None:
            self._begin(WorkTurn(work=work))
            call()

        return None if call_soon is None else lambda call: call_soon(partial(turn, call))

    def joined(self, peer: Peer) -> None:
        """A process has connected. Raises ProtocolError or WireError when the process must not connect."""
        self._begin(Joined(), peer)
        hello = peer.hello
        if hello.process is Kind.WORKER:
            self._worker_joined(peer)
        elif hello.process is Kind.GATEWAY:
            former = self._gateways.get(hello.id)
            self._gateways[hello.id] = GatewayPeer(peer)
            if former is not None:
                self._gateway_left(former)
                former.peer.close()
            peer.send(self._list_members())
        elif hello.process is Kind.ROUTER:
            raise ProtocolError("a router must not connect to another router")

    def left(self, peer: Peer) -> None:
        """A connection has ended."""
        self._begin(Left(), peer)
        self._watchers.pop(peer, None)
        if self._askers.get(peer.hello.id) is peer:
            del self._askers[peer.hello.id]
        gateway = self._gateways.get(peer.hello.id)
        if gateway is not None and gateway.peer is peer:
            del self._gateways[peer.hello.id]
            self._gateway_left(gateway)
        member = self.members.get(peer.hello.id)
        if member is not None and member.peer is peer:
            self.members.remove(member)
            self._gone(member, "its connection ended")
            self._begin_list_if_cut_off([Removed(member, "its connection ended")])
            self._announce()

    def received(self, peer: Peer, message: AnyMessage) -> None:
        """Handle a message. Raises ProtocolError for one that this process may not send."""
        self._begin(message, peer)
        process = peer.hello.process
        if process is Kind.GATEWAY:
            self._from_gateway(peer, message)
        elif process is Kind.WORKER:
            self._from_worker(peer, message)
        elif isinstance(message, (StatusQuery, Explain, FindRequests)):
            self._answer(peer, message)
        elif isinstance(message, (Drain, Flip)):
            self._drain(message)
            peer.send(self.status())
        elif isinstance(message, (Sleep, Wake)):
            self._pass_on_order(message)
            peer.send(self.status())
        elif isinstance(message, Migrate):
            self._migrate(peer, message)
        elif isinstance(message, RecordingQuery):
            peer.send(no_recording() if self.recording is None else self.recording.part(message))
        elif isinstance(message, WatchWorkers):
            self._watchers[peer] = SupervisorReport()
            peer.send(self._list_members())
        elif isinstance(message, SupervisorReport) and peer in self._watchers:
            self._watchers[peer] = message
        elif isinstance(message, (Undrain, RestartWorker, Scale)):
            if not isinstance(message, Undrain) or self._has_left(message.worker):
                for watcher in self._watchers:
                    watcher.send(message)
            peer.send(self.status())
        else:
            raise ProtocolError(f"a {type(message).__name__} from a {process}")

    def heard(self, message: AnyShared) -> None:
        """Apply a message of another router; it may have freed room."""
        self._begin(message)
        self.cluster_state.heard(message)
        if self.dispatchers.num_queued:
            self.dispatchers.dispatch_queued(slots_freed=False)

    def tick(self) -> None:
        """Do the periodic work; call every TICK_S."""
        self._begin(Tick())
        all_removed = self.members.remove_dead()
        for removed in all_removed:
            self._remove(removed)
        self._begin_list_if_cut_off(all_removed)
        gone = [worker_id for worker_id in self.in_flight.workers() if self.members.get(worker_id) is None]
        if gone:
            self.in_flight.forget(gone)
        self.cluster_state.index.tick()
        self.dispatchers.tick()
        self.dispatchers.send_overload_levels()
        self._announce(is_tick=True)
        if self.recording is not None:
            self.recording.tick(self)

    def status(self) -> Status:
        """The status of the cluster as this router sees it."""
        status = Status(
            workers=worker_statuses(self.members, self.in_flight, self._clock.now_s()),
            num_gateways=len(self._gateways),
            gateways=tuple(each.status for each in self._gateways.values() if each.status is not None),
            num_ready=self.members.num_ready(tuple(each.reached for each in self._gateways.values())),
            num_attempts=self.in_flight.num_own,
            num_watchers=len(self._watchers),
            orders=tuple(self.members.orders),
            head_away_s=max((each.head_away_s for each in self._watchers.values()), default=0.0),
            ordered=next((each.ordered for each in self._watchers.values() if each.ordered), ()),
            plans=next((each.plans for each in self._watchers.values() if each.plans), ()),
            routers=(self._own_status(),),
        )
        return fitted(status)

    def _own_status(self) -> RouterStatus:
        redis = self.redis
        return RouterStatus(
            id=self.hello.id,
            node=node_name(),
            pid=os.getpid(),
            num_attempts=self.in_flight.num_own,
            redis="none" if redis is None else "up" if redis.is_up else "down",
            routing=deepcopy(self._routing_times),
            counters={**self.counters, **({} if redis is None else redis.counters)},
            times=snapshot({"queue": self.dispatchers.shared.waits, **self.cluster_state.hindsight.times}),
            queue=self.dispatchers.status(),
        )

    # Gateways.

    def _from_gateway(self, peer: Peer, message: AnyMessage) -> None:
        gateway = self._gateways.get(peer.hello.id)
        if gateway is None or gateway.peer is not peer:
            return  # the gateway has connected again, and this connection is being closed
        match message:
            case Submit():
                begun_s = self._clock.now_s()
                if self.dispatchers.submit(gateway, message):
                    self._routing_times.observe(max(0.0, self._system_clock.now_s() - begun_s))
            case Started():
                self.dispatchers.started(message.attempts)
            case Ended():
                self.dispatchers.ended(message.attempts, message.num_tokens)
            case Reachable():
                gateway.reached = frozenset(message.workers)
                self.pairing.forget()
                self.dispatchers.dispatch_queued()
            case StatusQuery() | Explain() | FindRequests():
                self._answer(peer, message)
            case Sleep() | Wake():
                self._pass_on_order(message)
            case FoundRequests():
                self._pass_back(message)
            case Migrated():
                gateway.orders.pop((message.asker, message.question), None)
                self._pass_back(message)
            case GatewayReport():
                gateway.status = message.status
            case _:
                raise ProtocolError(f"a {type(message).__name__} from a gateway")

    def _answer(self, peer: Peer, question: StatusQuery | Explain | FindRequests) -> None:
        """Answer a question of a gateway or an operator; the gateways know the ended requests."""
        match question:
            case StatusQuery():
                peer.send(self.status())
            case Explain():
                decisions = tuple(self.cluster_state.decisions.of(question.request_id))
                peer.send(Decisions.answer_to(question, decisions=decisions))
            case FindRequests():
                relayed = self._relay(peer, question)
                if not self._gateways:
                    peer.send(FoundRequests.answer_to(relayed))

    def _migrate(self, peer: Peer, order: Migrate) -> None:
        """Pass an order on to every gateway, with the ids of the workers that it names."""
        workers = {name: self.members.find(name) for name in (order.worker, order.to) if name}
        missing = [name for name, member in workers.items() if member is None]
        ids = {name: member.id for name, member in workers.items() if member is not None}
        if not missing and self._gateways:
            ordered = replace(order, worker=ids.get(order.worker, ""), to=ids.get(order.to, ""))
            ordered = self._relay(peer, ordered)
            for gateway in self._gateways.values():
                gateway.orders[ordered.asker, ordered.question] = ordered
        else:
            reason = f"there is no worker {missing[0]!r}" if missing else "no gateway is connected"
            peer.send(Migrated.answer_to(replace(order, asker=peer.hello.id, num_asked=1), reason=reason))

    def _relay(self, peer: Peer, asked: RelayedT) -> RelayedT:
        """Pass a question or an order on to every gateway; the answers name the asker."""
        self._askers[peer.hello.id] = peer
        asked = replace(asked, asker=peer.hello.id, num_asked=len(self._gateways))
        for gateway in self._gateways.values():
            gateway.peer.send(asked)
        return asked

    def _gateway_left(self, gateway: GatewayPeer) -> None:
        """End the attempts of a gateway, and answer its open orders."""
        self.dispatchers.gateway_left(gateway.id)
        for order in gateway.orders.values():
            self._pass_back(Migrated.answer_to(order, is_lost=True))

    def _pass_back(self, answer: FoundRequests | Migrated) -> None:
        """Give a gateway's answer to the asker."""
        asker = self._askers.get(answer.asker)
        if asker is not None:
            asker.send(answer)

    # Workers.

    def _worker_joined(self, peer: Peer) -> None:
        worker = peer.hello.worker
        if worker is None or worker.id != peer.hello.id:
            raise ProtocolError("a worker's Hello must describe it")
        orders = tuple(self.members.orders)
        former = self.members.join(worker, peer)
        self._first_joined_s = min(self._first_joined_s, self._clock.now_s())
        logger.info("%s joined", worker.name, extra={"worker": worker.id, "role": worker.role})
        if former is not None:
            self._gone(former, f"{worker.id} has replaced it")
            former.peer.close()
        self.cluster_state.joined(worker, peer)
        # The worker's description may name an order that other members have missed.
        is_news = tuple(self.members.orders) != orders
        for member in [each for each in self.members.all() if is_news or each.peer is peer]:
            order = self.members.missed_order(member.worker)
            if order is not None:
                self._give(member, order)
        self.dispatchers.send_overload_levels()
        # The new worker needs the list even if the list has not changed.
        self._announced = None
        self._announce()

    def _from_worker(self, peer: Peer, message: AnyMessage) -> None:
        member = self.members.get(peer.hello.id)
        if member is None or member.peer is not peer:
            return  # the worker was given up, and this connection is being closed
        match message:
            case Heartbeat():
                self.members.beat(member, message)
                self.cluster_state.model.learn_tiers(member.id, message.load.tier_token_ns)
                self.dispatchers.worker_beat(member, message)
            case Alive():
                self.members.hear(member, message)
            case Reachable():
                self.members.reach(member, message.workers)
                self.dispatchers.dispatch_queued()
            case KvEventBatch():
                self.cluster_state.pages(peer, message)
            case Measured():
                self.cluster_state.measured(member.id, message)
                self.dispatchers.computed(message.prefills)
            case _:
                raise ProtocolError(f"a {type(message).__name__} from a worker")

    def _remove(self, removed: Removed) -> None:
        """Give up a silent or hung worker that has left `members`, and report it to operators."""
        member, reason, is_hung = removed
        self._gone(member, reason)
        member.peer.close()
        report = WorkerRemoved(worker=member.id, name=member.worker.name, reason=reason, is_hung=is_hung)
        for watcher in self._watchers:
            watcher.send(report)

    def _gone(self, member: Member, reason: str) -> None:
        self.counters["workers_gone"] += 1
        self.cluster_state.gone(member.id)
        level = logging.INFO if member.is_draining else logging.WARNING
        logger.log(level, "%s is gone: %s", member.worker.name, reason, extra={"worker": member.id})
        self.dispatchers.worker_left(member, reason)

    def _drain(self, order: Drain | Flip) -> None:
        """Drain a worker, to take the other role then if it flips.

        The status tells the operator whether the worker was found.
        """
        member = self.members.find(order.worker)
        if member is None:
            return
        self.members.drain(member)
        member.peer.send(replace(order, worker=member.id))
        self._announce()
        for watcher in self._watchers:
            watcher.send(replace(order, worker=member.worker.name))

    def _pass_on_order(self, order: Sleep | Wake) -> None:
        """Pass an order on to the workers of its model, unless a later one holds."""
        for member in self.members.take_order(order):
            self._give(member, order)
        self._announce()

    def _has_left(self, worker: str) -> bool:
        """Return whether a worker drains or is gone. The supervisor of one that serves would take Undrain for
        its next drain.
        """
        member = self.members.find(worker)
        return member is None or member.is_draining

    def _give(self, member: Member, order: Sleep | Wake) -> None:
        """Pass an order on to a worker, which gets no new work if it is to sleep.

        A worker that got Wake first, from another router, ignores an earlier Sleep.
        """
        if isinstance(order, Sleep):
            self.members.drain(member)
        else:
            self.members.resume(member)
        member.peer.send(order)

    # Members.

    def _begin_list_if_cut_off(self, removed: Collection[Removed]) -> None:
        """Mark the list incomplete when the last members have fallen silent: a partition may separate this
        router from them.
        """
        was_told = any(each.is_hung or each.member.is_draining for each in removed)
        if removed and not was_told and not len(self.members):
            self._first_joined_s = math.inf

    def _list_members(self) -> Members:
        is_complete = self._clock.now_s() - self._first_joined_s >= SETTLE_S
        workers = tuple(member.worker for member in self.members.all())
        draining = tuple(member.id for member in self.members.all() if member.is_draining)
        return Members(workers=workers, is_complete=is_complete, draining=draining)

    def _announce(self, is_tick: bool = False) -> None:
        """Send everyone a changed list of members: at once, or in the next tick if a list was just sent."""
        now_s = self._clock.now_s()
        if now_s - self._announced_s < TICK_S and not is_tick:
            return
        members = self._list_members()
        if members == self._announced:
            return
        self._announced, self._announced_s = members, now_s
        for gateway in self._gateways.values():
            gateway.peer.send(members)
        for member in self.members.all():
            member.peer.send(members)
        for watcher in self._watchers:
            watcher.send(members)


def worker_statuses(members: Membership, in_flight: InFlight, now_s: float) -> tuple[WorkerStatus, ...]:
    """The status of each member."""
    return tuple(
        WorkerStatus(
            worker=member.worker,
            load=member.load,
            num_attempts=in_flight.account(member.id).num_attempts,
            beat_age_s=max(0.0, now_s - member.beat_s),  # a clock may jump
            is_draining=member.is_draining,
        )
        for member in members.all()
    )


def fitted(status: Status, most_bytes: int = MAX_BODY_BYTES) -> Status:
    """The status of one router, cut down to the size of a message; what is left out is counted.

    First the gateways' refusals by tenant and the workers' bytes by destination are left out; their sums
    stay. Then, as far as needed: the last tenants, which are the least busy; the figures of the least busy
    workers (counters, times, pairs); those workers.

    A worker takes up to 1.7 KB, 1.2 KB of them its figures; a tenant with refusals 0.3 KB. Of 1024 each that
    is 2 MiB: all the tenants go, and the figures of two thirds of the workers.
    """
    if _size(status) <= most_bytes:
        return status
    status = replace(
        status,
        gateways=tuple(replace(gateway, refused={}) for gateway in status.gateways),
        workers=tuple(replace(each, load=replace(each.load, kv_bytes_to={})) for each in status.workers),
    )
    over_bytes = _size(status) - most_bytes
    if over_bytes <= 0:
        return status
    (router,) = status.routers
    tenants = router.queue.tenants
    workers = sorted(status.workers, key=lambda each: (each.num_attempts, each.worker.id))
    over_bytes += SLACK_BYTES
    num_tenants, over_bytes = _cut(map(_size, reversed(tenants)), over_bytes)
    num_counters, over_bytes = _cut((_size(_figures(each.load)) - BARE_BYTES for each in workers), over_bytes)
    workers[:num_counters] = map(_without_figures, workers[:num_counters])
    num_workers, _ = _cut(map(_size, workers), over_bytes)
    queue = replace(
        router.queue,
        tenants=tenants[: len(tenants) - num_tenants],
        num_left_out=router.queue.num_left_out + num_tenants,
    )
    left_out = {"counters": num_counters - num_workers, "workers": num_workers}
    return replace(
        status,
        workers=tuple(workers[num_workers:]),
        routers=(replace(router, queue=queue),),
        left_out={what: count for what, count in left_out.items() if count},
    )


def _cut(sizes: Iterable[int], over_bytes: int) -> tuple[int, int]:
    """The number of first entries to leave out, and the bytes that are still too many."""
    num_cut = 0
    for size in sizes:
        if over_bytes <= 0:
            break
        over_bytes -= size
        num_cut += 1
    return num_cut, over_bytes


def _figures(load: Load) -> tuple[object, ...]:
    return load.counters, load.times, load.step_tokens, load.pairs


BARE_BYTES: Final = len(_ENCODER.encode(_figures(Load())))


def _without_figures(entry: WorkerStatus) -> WorkerStatus:
    return replace(entry, load=replace(entry.load, counters={}, times={}, step_tokens=Sizes(), pairs=()))


def _size(value: object) -> int:
    return len(_ENCODER.encode(value))


async def serve_router(
    config: RouterConfig,
    keys: ClusterKeys,
    ready: Callable[[Address], None],
    stopping: asyncio.Event,
    incarnation: int = 0,
) -> None:
    """Run a router until `stopping` is set.

    keys: a router's keys, or the cluster key. ready: called with the address that the router listens on.
    incarnation: number of this start by a supervisor, 0 without one; see `new_router_id`.
    Raises OSError when the port is taken, ConfigError when the URL of Redis is not valid.
    """
    ring = KeyRing.of(keys, Kind.ROUTER)
    id = new_router_id(incarnation, time.time(), secrets.token_bytes(16))
    router = Router(config, SystemClock(), id, call_soon=asyncio.get_running_loop().call_soon)
    dropped = DroppedPeers(router.counters)
    rpc_server = RpcServer(keys, dropped=dropped, link_timeout_s=config.link_timeout_s)
    router.cluster_state.index.warm_up()
    async with AsyncExitStack() as ends:
        ends.push_async_callback(rpc_server.close)
        if config.redis == "auto":
            logger.info(
                "only `baton serve` starts a Redis: this router shares its prefix index with no other"
            )
        elif config.redis != "none" and router.cluster_state.policy.uses_prefix_index:
            await _link(router, config.redis, ring, ends)
        if config.decision_log is not None:
            log = ends.enter_context(closing(DecisionLog(Path(config.decision_log))))
            router.log_to(log.write)
        if config.recording_s:
            router.record(Recording(config.recording_s, config.recording_memory_bytes))
        address = await rpc_server.listen(config.host, config.port)
        rpc_server.serve(router)
        logger.info("the router listens on %s:%d", address.host, address.port)
        with process.freeze_gc():
            ready(address)
            await stopping.wait()


async def _link(router: Router, url: str, keys: KeyRing, ends: AsyncExitStack) -> None:
    """Link to Redis. Returns when the prefix index is loaded from Redis, or after LEARN_S.

    The cluster's key names the namespace; pages of different models have different keys there.
    """
    try:
        from baton.router.redis.link import RedisLink
        from baton.router.redis.messages import Codec
    except ModuleNotFoundError:
        message = "redis: its Python library is not installed: add it (redis, hiredis), or set redis to none"
        raise ConfigError(message) from None

    namespace = keys.derived(REDIS_NAMES)[:8].hex()
    codec = Codec(keys.derived(REDIS_VALUES))
    index = router.cluster_state.index
    link = RedisLink(url, namespace, codec, router.hello.id, index, router.change_index, router.heard)
    router.link(link)
    router.redis = link
    task = asyncio.create_task(link.run())

    async def stop() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    ends.push_async_callback(stop)
    with suppress(TimeoutError):
        async with asyncio.timeout(LEARN_S):
            await link.has_learned.wait()
