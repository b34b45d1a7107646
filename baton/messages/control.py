"""Messages between gateways, routers and workers: the way of a request through the cluster.

One attempt at a request, by messages (`->` names the connection):

1. gateway -> router   Submit. The router answers Routed, Rejected, or Queued and one of these later.
2. router -> prefill   Prefill, and router -> decode Dispatch, at once. Both name one transfer. Without a
   prefill worker only Dispatch is sent, and the decode worker computes the prompt.
3. decode -> prefill   The grant of that transfer, over `kvtransfer`; the pages come back there.
4. prefill -> gateway  Tokens: the first one. prefill -> decode: Prefilled, or PrefillFailed. Each may come
   before the Dispatch.
5. decode -> gateway   Tokens, one message a step for all of the gateway's requests, or AttemptFailed.
6. gateway -> router   Started at the first token, Ended at the end of any kind. Cancel goes gateway ->
   decode -> prefill, and may come before the Dispatch or Prefill that it cancels.

A migration makes the next attempt while the present one runs: Submit and Dispatch name the worker of the
present one, in `migrates_from`. The new decode worker fetches the pages from there and sends Prepared. The
gateway answers TakeOver, with the tokens that have come since the Submit, and cancels the former attempt.

Beside requests: the first message on every connection is a Hello. A worker sends Heartbeat every second
between two steps, and Alive every second also during a step; a router removes a worker after several missed
Alives. The router sends Members to all processes whenever the list of workers changes. Each process answers
with Reachable, the workers that it is connected to.

Request ids are minted by gateways, one a choice, 128 bit; attempts count from 0. Every list and every
integer has a bound in its type, so it is refused while it is decoded. Times are durations.
"""

from enum import StrEnum
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from baton.messages.bounds import (
    MAX_EVENTS,
    MAX_SECONDS,
    MAX_WORKERS,
    SHORT_KEY_BYTES,
    Attempt,
    Count,
    Id,
    Ids,
    Kind,
    Message,
    Moment,
    Name,
    Reason,
    Seconds,
    TransferId,
)
from baton.messages.status import OverloadLevel
from baton.messages.workers import Load, PrefillTimes, RunningStep, StepTimes, Tier, Worker
from baton.request import AttemptKey, Request, TokenEvent, TokenId
from baton.tenants import Refusal


class PullSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hint: a worker that probably holds the KV of the first `num_tokens` tokens of a prompt."""

    worker: Id
    num_tokens: Count


class Weighed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The expected cost of an attempt at a pair of workers, by the terms of router/policies/candidates.py."""

    decode: Id
    prefill: Annotated[str, Meta(max_length=32)] = ""  # "": the decode worker computes the prompt
    source: Annotated[str, Meta(max_length=32)] = ""  # the worker that a prefix is pulled from
    num_held_tokens: Count = 0  # with KV that need not be computed
    terms: Annotated[dict[Annotated[str, Meta(max_length=16)], Seconds], Meta(max_length=16)] = {}

    @property
    def total_s(self) -> float:
        """The predicted cost of the pair."""
        return sum(self.terms.values())

    @property
    def ttft_s(self) -> float:
        """The predicted time to the first token."""
        return sum(self.terms.get(name, 0.0) for name in ("queue_s", "pull_s", "compute_s"))


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A routing decision: the chosen pair, the alternatives, and the outcome as far as known."""

    request_id: Id
    attempt: Attempt
    age_s: Seconds
    reason: Reason
    num_tokens: Count  # of the prompt
    chosen: Weighed
    weighed: Annotated[tuple[Weighed, ...], Meta(max_length=64)] = ()  # the alternatives, with the chosen one
    first_token_s: Seconds | None = None  # after the decision
    measured: PrefillTimes | None = None

    @property
    def measured_s(self) -> float | None:
        """The cost of the chosen pair with the measured wait, computation and hand-off.

        The other terms are delays of other requests, and stay as predicted. None: not measured.
        """
        times, terms = self.measured, self.chosen.terms
        if times is None or not terms:
            return None
        others_s = self.chosen.total_s - self.chosen.ttft_s - terms.get("handoff_s", 0.0)
        return others_s + times.queued_s + times.used_s + times.exposed_s

    @property
    def regret_s(self) -> float | None:
        """The measured cost of the chosen pair less the predicted cost of the best other pair.

        Negative: the choice was right. None: not measured, or no other pair was compared.
        """
        others = [each.total_s for each in self.weighed if each != self.chosen]
        return self.measured_s - min(others) if self.measured_s is not None and others else None


class Hello(Message, frozen=True):
    """The first message each way on every control connection."""

    process: Kind
    id: Id
    worker: Worker | None = None  # of a worker


class Members(Message, frozen=True):
    """Router to all: the workers that are alive. A worker that leaves the list counts as dead.

    A router that has just started, or has lost all its connections, does not know all workers: until its list
    is complete, a worker that is not listed may live, and only the end of its connection shows that it is
    gone.
    """

    workers: Annotated[tuple[Worker, ...], Meta(max_length=MAX_WORKERS)]
    is_complete: bool = True
    draining: Ids = ()  # workers of the list that take no new attempts, and will end in order


class Reachable(Message, frozen=True):
    """To routers: the workers that the sender could send messages, or pages, to.

    A gateway also names the sleeping workers that it knows.
    """

    workers: Ids


class Submit(Message, frozen=True):
    """Gateway to router: find a pair for this attempt."""

    request: Request
    sticky_worker: Annotated[str, Meta(max_length=32)] = ""  # a decode worker that holds the prompt
    avoid: Ids = ()  # workers that failed this request
    age_s: Seconds = 0.0  # of the request; see `with_arrival`
    is_begun: bool = False  # an earlier attempt was dispatched: the request is not refused any more
    # The decode worker where the present attempt runs on: another one, `sticky_worker` if it is set, prepares
    # this attempt at once, or the attempt is rejected.
    migrates_from: Annotated[str, Meta(max_length=32)] = ""


class AttemptMessage(Message, frozen=True):
    """The base of messages about one attempt."""

    request_id: Id
    attempt: Attempt

    @property
    def key(self) -> AttemptKey:
        """The attempt."""
        return self.request_id, self.attempt


class Routed(AttemptMessage, frozen=True):
    """Router to gateway: the attempt was dispatched to these workers."""

    decode: Id
    prefill: Annotated[str, Meta(max_length=32)] = ""
    reason: Reason = ""
    # The wait in the router's queue, by the router's clock.
    received_s: Moment = 0.0
    dispatched_s: Moment = 0.0
    num_ahead: Count = 0  # attempts that were queued when this one came
    ahead_tenant: Name = ""  # with the most of these


class Queued(AttemptMessage, frozen=True):
    """Router to gateway: the attempt waits in a queue. Routed or Rejected follows."""


class Rejected(AttemptMessage, frozen=True):
    """Router to gateway: no worker can take the attempt now."""

    reason: Reason
    retry_after_s: Seconds
    refusal: Refusal = Refusal.NO_ROOM  # any other refusal ends the request, and its client is told why
    should_retry: bool = True  # the client may retry by itself after `retry_after_s`


class Started(Message, frozen=True):
    """Gateway to router, and router to router: these attempts have their first token.

    Their prefill workers compute no more for them.
    """

    attempts: Annotated[tuple[tuple[Id, Attempt], ...], Meta(max_length=MAX_EVENTS)]


class Ended(Message, frozen=True):
    """Gateway to router, and router to router: these attempts have ended and take no capacity."""

    attempts: Annotated[tuple[tuple[Id, Attempt], ...], Meta(max_length=MAX_EVENTS)]
    # Generated by each attempt; () from another router.
    num_tokens: Annotated[tuple[Count, ...], Meta(max_length=MAX_EVENTS)] = ()


class Dispatch(Message, frozen=True):
    """Router to a decode worker."""

    request: Request
    gateway: Id  # that the tokens go to
    prefill: Annotated[str, Meta(max_length=32)] = ""  # a worker's id; "": compute the prompt here
    transfer: Annotated[bytes, Meta(max_length=16)] = b""  # of the pages from the prefill worker, if any
    age_s: Seconds = 0.0
    source: PullSource | None = None  # without a prefill worker: to pull a prefix from
    # The decode worker where the present attempt runs: fetch its pages, and wait for the gateway's TakeOver.
    migrates_from: Annotated[str, Meta(max_length=32)] = ""


class Prefill(Message, frozen=True):
    """Router to a prefill worker: compute the prompt, send its first token and the pages that are granted."""

    request: Request
    gateway: Id  # that the first token goes to
    decode: Id  # the worker that grants pages and answers the rest
    transfer: TransferId
    age_s: Seconds = 0.0
    source: PullSource | None = None  # to pull a prefix from


class Tokens(Message, frozen=True):
    """Worker to gateway: the tokens of a step for the gateway's requests, in order."""

    events: Annotated[tuple[TokenEvent, ...], Meta(max_length=MAX_EVENTS)]


class Prefilled(Message, frozen=True):
    """Prefill to decode worker: the first token, which goes to the gateway as well."""

    event: TokenEvent


class Failure(StrEnum):
    """The reason for which an attempt failed, by the gateway's remedy."""

    INVALID = "invalid"  # no worker can run the request: tell the client
    LOST = "lost"  # a process died, or its pages did: replay elsewhere
    BUSY = "busy"  # no room now: replay elsewhere or later
    ERROR = "error"  # the request made a worker fail: replay it a few times at most


class PrefillFailed(AttemptMessage, frozen=True):
    """Prefill to decode worker: no first token will come."""

    failure: Failure
    reason: Reason


class AttemptFailed(AttemptMessage, frozen=True):
    """Decode worker to gateway: no more tokens of this attempt will come.

    Also router to gateway, for a decode worker that the router lost before the first token: the Dispatch may
    never have arrived.
    """

    failure: Failure
    reason: Reason
    worker: Annotated[str, Meta(max_length=32)] = ""  # the worker at fault, if it is not the sender


class Prepared(AttemptMessage, frozen=True):
    """Decode worker to gateway: the pages of an attempt that migrates here are here, up to the last ones."""


class TakeOver(AttemptMessage, frozen=True):
    """Gateway to decode worker: answer the prepared attempt from here on."""

    token_ids: tuple[TokenId, ...]  # that have followed the tokens of the attempt's Dispatch


class Cancel(AttemptMessage, frozen=True):
    """End the attempt. A decode worker that was decoding answers with the attempt's phases alone."""


class Heartbeat(Message, frozen=True):
    """Worker to router, every second, between two steps of its engine."""

    load: Load
    is_draining: bool = False
    attempts: Annotated[tuple[tuple[Id, Attempt], ...], Meta(max_length=MAX_EVENTS)] = ()  # that it works on


class Alive(Message, frozen=True):
    """Worker to router, every second, from a thread that no step of its engine can delay.

    A Heartbeat carries the load, and waits for the step to end.
    """

    step: RunningStep


class PageChanges(NamedTuple):
    """The keys of a worker's pages that have changed, each once."""

    is_snapshot: bool  # all pages: a key that is not here is in no tier
    keys: dict[Tier | None, list[bytes]]  # by the tier of the pages now; None, which is first: in no tier


class KvEventBatch(Message, frozen=True):
    """Worker to router: pages that peers now find in one tier, or do not find any more.

    `keys` are the pages' `short_keys` (baton/pages.py). Changes are numbered from 0 in each life of a worker,
    and `first` is this message's first number: a gap means that some were lost. `is_snapshot`: before these
    there is nothing, in any tier.
    """

    first: Count
    keys: Annotated[bytes, Meta(max_length=SHORT_KEY_BYTES * MAX_EVENTS)]
    tier: Tier | None = Tier.DEVICE  # of the pages now; None: the worker does not have them any more
    is_snapshot: bool = False

    @property
    def num_changes(self) -> int:
        """The number of pages."""
        return len(self.keys) // SHORT_KEY_BYTES


class KvEventsWanted(Message, frozen=True):
    """Router to worker: send all pages that you hold, then the changes."""


class Measured(Message, frozen=True):
    """Worker to router: measured times, from which the cost model predicts others."""

    prefills: Annotated[tuple[PrefillTimes, ...], Meta(max_length=1024)] = ()
    steps: Annotated[tuple[StepTimes, ...], Meta(max_length=1024)] = ()


class Pressure(Message, frozen=True):
    """Router to workers: the overload level, when it changes and to each worker that joins."""

    level: OverloadLevel


def age_s(request: Request, now_s: float) -> float:
    """Return the age of a request, as messages carry it. now_s: by the clock of `arrival_s`."""
    return min(MAX_SECONDS, max(0.0, now_s - request.arrival_s))


_Dated = TypeVar("_Dated", Dispatch, Prefill)


def with_arrival(message: _Dated, now_s: float) -> _Dated:
    """Return the message with the request's arrival by the receiver's clock.

    No two processes share a clock.
    """
    request = msgspec.structs.replace(message.request, arrival_s=now_s - message.age_s)
    return msgspec.structs.replace(message, request=request)
