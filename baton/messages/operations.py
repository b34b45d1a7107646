"""Messages of operators: status, routing decisions, and the drain and restart of workers."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

import msgspec
from msgspec import Meta

from baton.messages.bounds import (
    MAX_ROUTERS,
    MAX_SECONDS,
    MAX_WORKERS,
    Count,
    Id,
    Message,
    Name,
    Reason,
    Seconds,
)
from baton.messages.control import Decision
from baton.messages.orders import Sleep, Wake
from baton.messages.status import MAX_STREAMS, QueueStatus, RouterStatus, StreamCounts, joined
from baton.messages.timeline import RequestTimeline
from baton.messages.workers import Address, WorkerRole, WorkerStatus

MAX_REPORTED_GATEWAYS: Final = 1024
MAX_PART_BYTES: Final = 2**19  # of a recording, in one message
MAX_PLANS: Final = 32  # of the planner, in a status
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
MAX_TENANTS_TOLD: Final = 64  # in the status of one gateway
Refusals: TypeAlias = Annotated[dict[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=64)]


class Drain(Message, frozen=True):
    """Operator to router, router to the worker and to operators that watch: take no new attempts, finish the
    running ones, then end.
    """

    worker: Name  # its name or id


class Undrain(Message, frozen=True):
    """Operator to router, router to operators that watch: start a worker that was drained again.

    A worker that still drains is started when it has ended; a worker that was not drained is not changed.
    The router answers with its Status, as for Drain; `num_watchers` is the number of `baton serve` processes
    that got the message.
    """

    worker: Name


class RestartWorker(Message, frozen=True):
    """Operator to router, router to operators that watch: let a worker drain and end, then start it again.

    A worker that has drained is started. The router answers with its Status, as for Undrain.
    """

    worker: Name


class Flip(Message, frozen=True):
    """Operator to router, router to the worker and to operators that watch: take the other role.

    The worker drains, and joins again under another id, with the weights and the pages that it has. The
    router answers with its Status, as for Drain.
    """

    worker: Name  # its name or id
    role: WorkerRole


class Scale(Message, frozen=True):
    """Operator to router, router to operators that watch: have so many workers of each role.

    Workers that are too many drain; missing ones are started. The router answers with its Status, as for
    Undrain.
    """

    num_prefill: Annotated[int, Meta(ge=0, le=MAX_WORKERS // 2)]
    num_decode: Annotated[int, Meta(ge=1, le=MAX_WORKERS // 2)]
    model: Name = ""  # of the workers; "": the model of a cluster that has one


class Numbered(Message, frozen=True):
    """A question or an order with a number, or an answer, which repeats these fields.

    A router that relays one to all gateways sets `asker` and `num_asked`.
    """

    question: Count = 0  # a number of the asker's
    asker: Annotated[str, Meta(max_length=32)] = ""
    num_asked: Count = 0  # processes

    @classmethod
    def answer_to(cls, asked: "Numbered", **fields: Any) -> Self:
        """Return the answer to a question or an order. fields: of this class."""
        return cls(question=asked.question, asker=asked.asker, num_asked=asked.num_asked, **fields)


class Migrate(Numbered, frozen=True):
    """Operator to router, router to every gateway: move running requests to other decode workers.

    The router puts ids for names of workers; a gateway answers with Migrated when all its moves have ended.
    """

    request_id: Annotated[str, Meta(max_length=64)] = ""  # this one
    worker: Name = ""  # or all requests of this decode worker; its name or id
    to: Name = ""  # the decode worker to move them to; "": the router chooses


class Migrated(Numbered, frozen=True):
    """Gateway to router, router to the asker: the moves of one gateway."""

    num_moved: Count = 0
    num_left: Count = 0  # requests that stay at their worker
    reason: Reason = ""  # why the last of these stays
    is_lost: bool = False  # the router answers: the gateway's connection ended before its answer


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One gateway process, and the calls that it has refused since its start."""

    id: Id
    node: Name = ""  # the machine, by the name that operators know
    pid: Count = 0
    address: Address | None = None  # for clients
    num_open: Count = 0  # calls being answered
    num_refused: Count = 0  # calls, by this gateway or by a router; each is counted once
    # Tenant -> reason -> calls, of the tenants with most refusals; a cluster without tenants has the name "".
    refused: Annotated[dict[Name, Refusals], Meta(max_length=MAX_TENANTS_TOLD)] = {}
    demand: Annotated[tuple[StreamCounts, ...], Meta(max_length=MAX_STREAMS + 1)] = ()  # for the planner


class GatewayReport(Message, frozen=True):
    """Gateway to every router, each second."""

    status: GatewayStatus


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the latest plans of the planner, for operators. Shares are of the requests."""

    id: Name
    before_s: Seconds  # the latest plan
    outcome: Name
    workers: Name  # of both roles, that the plan wants
    actions: Reason = ""
    reason: Reason = ""
    predicted: Share | None = None  # that meet the objectives
    came: Share | None = None  # that met them; None: not known yet


class OrderedWorkers(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The number of workers that `baton serve` is to run, drained ones included."""

    model: Name
    role: WorkerRole
    number: Count


Ordered: TypeAlias = Annotated[tuple[OrderedWorkers, ...], Meta(max_length=MAX_WORKERS)]


class SupervisorReport(Message, frozen=True):
    """Watching operator to router, when one of these figures has changed.

    While Ray's head does not answer, running workers go on, and workers that end are not started again.
    """

    head_away_s: Seconds = 0.0  # since Ray's head last answered; 0: the head answers
    ordered: Ordered = ()  # by model and role
    plans: Annotated[tuple[PlanSummary, ...], Meta(max_length=MAX_PLANS)] = ()  # the latest first


class StatusQuery(Message, frozen=True):
    """Operator to router."""


class Status(Message, frozen=True):
    """Router to operator or gateway."""

    workers: Annotated[tuple[WorkerStatus, ...], Meta(max_length=MAX_WORKERS)] = ()
    num_gateways: Count = 0
    # Gateways that have reported.
    gateways: Annotated[tuple[GatewayStatus, ...], Meta(max_length=MAX_REPORTED_GATEWAYS)] = ()
    num_ready: Count = 0  # workers that are ready: all gateways and all workers of the other role reach them
    num_attempts: Count = 0
    num_watchers: Count = 0  # `baton serve` processes, which restart workers
    # The latest order about each model, of each router that is joined.
    orders: Annotated[tuple[Sleep | Wake, ...], Meta(max_length=MAX_WORKERS)] = ()
    routers: Annotated[tuple[RouterStatus, ...], Meta(max_length=MAX_ROUTERS)] = ()  # the sender, or all
    # Since Ray's head last answered `baton serve`; no process can be started meanwhile. 0: the head answers.
    head_away_s: Seconds = 0.0
    ordered: Ordered = ()  # by model and role; none: no `baton serve` has reported
    plans: Annotated[tuple[PlanSummary, ...], Meta(max_length=MAX_PLANS)] = ()  # the latest first
    # Left out for lack of room: the number of "workers", and of workers without "counters", times and pairs.
    left_out: Annotated[dict[Annotated[str, Meta(max_length=16)], Count], Meta(max_length=8)] = msgspec.field(
        default_factory=dict
    )

    @classmethod
    def joined(cls, statuses: Sequence["Status"], first: "Status") -> "Status":
        """Return the status of several routers as one. first: its workers are shown."""
        return msgspec.structs.replace(
            first,
            head_away_s=max(status.head_away_s for status in statuses),
            num_gateways=min(status.num_gateways for status in statuses),
            gateways=_latest([gateway for status in statuses for gateway in status.gateways]),
            num_ready=min(status.num_ready for status in statuses),
            num_attempts=sum(status.num_attempts for status in statuses),
            orders=tuple(order for status in statuses for order in status.orders),
            routers=tuple(router for status in statuses for router in status.routers),
        )

    @property
    def queue(self) -> QueueStatus:
        """The queues of all these routers together."""
        return joined(router.queue for router in self.routers)


def _latest(gateways: Sequence[GatewayStatus]) -> tuple[GatewayStatus, ...]:
    """Return each gateway once, from the router with the newest counts: counts only grow."""
    latest: dict[str, GatewayStatus] = {}
    for gateway in sorted(gateways, key=lambda gateway: gateway.num_refused):
        latest[gateway.id] = gateway
    return tuple(sorted(latest.values(), key=lambda gateway: (gateway.node, gateway.pid)))


class Explain(Numbered, frozen=True, kw_only=True):
    """Operator or gateway to router: how was this request routed? The router answers with Decisions."""

    request_id: Id


class Decisions(Numbered, frozen=True):
    """The decisions about one request, one an attempt; none: the router does not know the request."""

    decisions: Annotated[tuple[Decision, ...], Meta(max_length=64)] = ()


MAX_FOUND: Final = 100  # timelines in one message


class FindRequests(Numbered, frozen=True):
    """Operator or gateway to router, router to every gateway: which ended requests do you have?"""

    request_id: Id | None = None  # this one; None: the latest or slowest ones
    order: Literal["latest", "slowest"] = "latest"
    limit: Annotated[int, Meta(ge=1, le=MAX_FOUND)] = MAX_FOUND
    tenant: Name | None = None  # of this tenant alone


class FoundRequests(Numbered, frozen=True):
    """Gateway to router, router to the asker: the requests of one gateway."""

    timelines: Annotated[tuple[RequestTimeline, ...], Meta(max_length=MAX_FOUND)] = ()


class RecordingQuery(Message, frozen=True):
    """Operator to router: send the chunk `number` of your recording, from byte `first` on.

    number: 0 asks for the chunk with which the last `last_s` seconds can be replayed. The router answers with
    RecordingPart.
    """

    last_s: Seconds = MAX_SECONDS
    number: Count = 0
    first: Count = 0


class RecordingPart(Message, frozen=True):
    """A part of one chunk of a router's recording: see router/recording.py."""

    number: Count = 0  # of the chunk; 0: there is none, or it is no longer kept
    body: Annotated[bytes, Meta(max_length=MAX_PART_BYTES)] = b""
    num_bytes: Count = 0  # of the whole chunk
    next_number: Count = 0  # of the chunk after this one; 0: this is the last


class WatchWorkers(Message, frozen=True):
    """Operator to router: report each worker that the router removes from now on, on this connection.

    A watching operator restarts workers. It also gets Members as gateways do, Undrain and RestartWorker.
    """


class WorkerRemoved(Message, frozen=True):
    """Router to watching operators: a worker was removed because it is silent, or its step takes too long.

    A worker with an ended connection, or replaced by another process, is not reported. The removed process
    may still run, and another router may still reach it.
    """

    worker: Id
    name: Name
    reason: Reason
    is_hung: bool  # its step takes too long; it gives signs of life
