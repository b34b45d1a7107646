"""What those who run a cluster ask of it: how it is, why a request went where, and that a worker ends."""

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from baton.messages.bounds import MAX_ROUTERS, MAX_WORKERS, Count, Id, Name, Reason, Seconds
from baton.messages.control import Decision, Message
from baton.messages.status import QueueStatus, RouterStatus, joined
from baton.messages.workers import Address, WorkerStatus

MAX_GATEWAYS: Final = 1024
MAX_TENANTS_TOLD: Final = 64  # that one gateway names in its status
Refusals: TypeAlias = Annotated[dict[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=64)]


class Drain(Message, frozen=True):
    """Operator to router, router to worker: take nothing new, finish what runs, then end."""

    worker: Name  # its name or id


class Undrain(Message, frozen=True):
    """Operator to router, router to operators that watch: start a worker that was drained again.

    A worker that still drains is started again when it has ended; one that was not drained is not changed.
    The router answers with its Status, as for Drain; `num_watchers` is the number of `baton serve` processes
    that got the message.
    """

    worker: Name


class RestartWorker(Message, frozen=True):
    """Operator to router, router to operators that watch: let a worker drain and end, then start it again.

    A worker that has drained is started. The router answers with its Status, as for Undrain.
    """

    worker: Name


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One gateway process, and the calls that it has refused since it began."""

    id: Id
    node: Name = ""  # the machine, by the name that operators know
    pid: Count = 0
    address: Address | None = None  # that clients connect to
    num_open: Count = 0  # calls being answered
    num_refused: Count = 0  # calls, by this gateway or by a router; each is counted once
    # Tenant -> reason -> calls, of the tenants with most refusals; a cluster without tenants has the name "".
    refused: Annotated[dict[Name, Refusals], Meta(max_length=MAX_TENANTS_TOLD)] = {}


class GatewayReport(Message, frozen=True):
    """Gateway to every router, each second."""

    status: GatewayStatus


class HeadAway(Message, frozen=True):
    """An operator that watches to router, every second: Ray's head has not answered it for so long.

    0: the head answers again. Workers that run go on; those that end are not started again meanwhile.
    """

    seconds: Seconds


class StatusQuery(Message, frozen=True):
    """Operator to router."""


class Status(Message, frozen=True):
    """Router to operator or gateway."""

    workers: Annotated[tuple[WorkerStatus, ...], Meta(max_length=MAX_WORKERS)] = ()
    num_gateways: Count = 0
    gateways: Annotated[tuple[GatewayStatus, ...], Meta(max_length=MAX_GATEWAYS)] = ()  # that have reported
    num_met: Count = 0  # workers that all gateways reach, and that have met all they would work with
    num_attempts: Count = 0
    num_watchers: Count = 0  # operators that start workers again: each a `baton serve`
    routers: Annotated[tuple[RouterStatus, ...], Meta(max_length=MAX_ROUTERS)] = ()  # itself, or all
    # Since Ray's head last answered `baton serve`; no process can be started meanwhile. 0: the head answers.
    head_away_s: Seconds = 0.0
    # For want of room: how many "workers", and of how many more the "counters".
    left_out: Annotated[dict[Annotated[str, Meta(max_length=16)], Count], Meta(max_length=8)] = msgspec.field(
        default_factory=dict
    )

    @property
    def queue(self) -> QueueStatus:
        """Of all these routers together."""
        return joined(router.queue for router in self.routers)


class Explain(Message, frozen=True):
    """Operator or gateway to router: how was this request routed? Answered by Decisions."""

    request_id: Id


class Decisions(Message, frozen=True):
    """Of one request, one an attempt; none: the router has forgotten it, or never knew."""

    decisions: Annotated[tuple[Decision, ...], Meta(max_length=64)] = ()


class WatchWorkers(Message, frozen=True):
    """Operator to router: from now on report each worker that the router removes, on this connection.

    Such an operator starts workers. It also gets Members as gateways do, Undrain and RestartWorker.
    """


class WorkerRemoved(Message, frozen=True):
    """Router to operators that watch: a worker was removed because it is silent, or its step takes too long.

    A worker whose connection ended, or whose place another process took, is not reported. The process may
    still run, and another router may still reach it.
    """

    worker: Id
    name: Name
    reason: Reason
    is_hung: bool  # its step takes too long, though it gives signs of life
