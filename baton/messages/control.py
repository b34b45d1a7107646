"""What gateways, the router and workers say to each other: a request's way through the cluster.

One attempt at a request, by messages (`->` names the connection it goes over):

1. gateway -> router   Submit. The router answers Routed, Rejected, or Queued and one of these later.
2. router -> decode    Dispatch, with the prefill worker that was chosen; none: decode computes it all.
3. decode -> prefill   Prefill. Pages follow over `kvtransfer`, under the transfer id that it names.
4. prefill -> gateway  Tokens: the first one. prefill -> decode: Prefilled, or PrefillFailed.
5. decode -> gateway   Tokens, one message a step for all of the gateway's requests, or AttemptFailed.
6. gateway -> router   Started at the first token, Ended at the end, whatever it was. Cancel goes gateway ->
   decode -> prefill, and may come before the Dispatch that it is about: they travel by different ways.

Beside requests: the first message on every connection is a Hello. A worker sends Beat every second between
two steps, and Alive every second also during a step; a router removes a worker after several missed Alives.
The router sends Members to all processes whenever the list of workers changes. Each process answers with
Reachable, the workers that it is connected to.

Request ids are minted by gateways, one a choice, 128 bit; attempts count from 0. Every list and every
integer has a bound in its type, so it is refused while it is decoded. Times are durations.
"""

from enum import StrEnum
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from baton.messages.bounds import (
    MAX_EVENTS,
    MAX_PULLED_PAGES,
    MAX_WORKERS,
    Attempt,
    Count,
    Generation,
    Id,
    Ids,
    Kind,
    PageId,
    Reason,
    Seconds,
    TransferId,
)
from baton.messages.status import OverloadLevel
from baton.messages.workers import Load, PrefillTimes, RunningStep, StepTimes, Tier, Worker
from baton.request import Request, TokenEvent
from baton.tenants import Refusal

# Where a router sends an attempt, out of what, and what came of it.


class PullSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that is thought to hold the first `num_tokens` tokens of a prompt: a hint, it knows better."""

    worker: Id
    num_tokens: Count
    pages: Annotated[tuple[PageId, ...], Meta(min_length=1, max_length=MAX_PULLED_PAGES)]
    generations: Annotated[tuple[Generation, ...], Meta(min_length=1, max_length=MAX_PULLED_PAGES)]


class Weighed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an attempt was expected to cost at a pair of workers, in seconds: router/policies/costs.py."""

    decode: Id
    prefill: Annotated[str, Meta(max_length=32)] = ""  # "": the decode worker computes the prompt
    source: Annotated[str, Meta(max_length=32)] = ""  # that a prefix is pulled from
    num_held_tokens: Count = 0  # that need not be computed
    terms: Annotated[dict[Annotated[str, Meta(max_length=16)], Seconds], Meta(max_length=16)] = {}


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a router has sent an attempt, out of what, and what came of it as far as is known."""

    request_id: Id
    attempt: Attempt
    age_s: Seconds
    reason: Reason
    num_tokens: Count  # of the prompt
    chosen: Weighed
    weighed: Annotated[tuple[Weighed, ...], Meta(max_length=64)] = ()  # the chosen one among them
    first_token_s: Seconds | None = None  # after the decision
    measured: PrefillTimes | None = None


MAX_AGE_S: Final = 86_400.0  # as Seconds allows


class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"
):
    """One of the classes below."""


class Hello(Message, frozen=True):
    """The first message each way on every control connection."""

    process: Kind
    id: Id
    worker: Worker | None = None  # of a worker


class Members(Message, frozen=True):
    """Router to all: the workers that are alive. What is not in it any more is dead, however it looks.

    A router that has just started does not know them all yet: until its list is complete, who is not in it
    may be well, and only a connection's end says that a worker is gone.
    """

    workers: Annotated[tuple[Worker, ...], Meta(max_length=MAX_WORKERS)]
    is_complete: bool = True
    draining: Ids = ()  # of these: they take nothing new, and will end in order


class Reachable(Message, frozen=True):
    """To the router: the workers that the sender could send a message, or pages, to."""

    workers: Ids


class Submit(Message, frozen=True):
    """Gateway to router: find a pair for this attempt."""

    request: Request
    sticky_worker: Annotated[str, Meta(max_length=32)] = ""  # a decode worker that holds the prompt already
    avoid: Ids = ()  # workers that failed this request
    age_s: Seconds = 0.0  # of the request; see `with_arrival`
    is_begun: bool = False  # workers had an earlier attempt: it was let in, and is not refused any more


class Routed(Message, frozen=True):
    """Router to gateway: the attempt is under way there."""

    request_id: Id
    attempt: Attempt
    decode: Id
    prefill: Annotated[str, Meta(max_length=32)] = ""
    reason: Reason = ""


class Queued(Message, frozen=True):
    """Router to gateway: the attempt waits in a queue. Routed or Rejected follows."""

    request_id: Id
    attempt: Attempt


class Rejected(Message, frozen=True):
    """Router to gateway: nobody can take the attempt now."""

    request_id: Id
    attempt: Attempt
    reason: Reason
    retry_after_s: Seconds
    refusal: Refusal = Refusal.NO_ROOM  # what is not NO_ROOM is the request's end: its client is told why
    may_return: bool = True  # the client, by itself; else only if somebody wants it to


class Started(Message, frozen=True):
    """Gateway to router: these attempts have their first token, the prefill worker is done with them."""

    attempts: Annotated[tuple[tuple[Id, Attempt], ...], Meta(max_length=MAX_EVENTS)]


class Ended(Message, frozen=True):
    """Gateway to router: these attempts take up no capacity any more."""

    attempts: Annotated[tuple[tuple[Id, Attempt], ...], Meta(max_length=MAX_EVENTS)]
    num_tokens: Annotated[tuple[Count, ...], Meta(max_length=MAX_EVENTS)] = ()  # that each answered


class Dispatch(Message, frozen=True):
    """Router to a decode worker."""

    request: Request
    gateway: Id  # that the tokens go to
    prefill: Annotated[str, Meta(max_length=32)] = ""  # a worker's id; "": compute the prompt here
    age_s: Seconds = 0.0
    source: PullSource | None = None  # for whoever computes the prompt to pull a prefix from


class Prefill(Message, frozen=True):
    """Decode to prefill worker: compute the prompt, send its pages, then the first token.

    The decode worker holds [0, num_held_tokens) of the prompt already, a whole number of pages of both.
    """

    request: Request
    gateway: Id
    transfer: TransferId
    num_held_tokens: Count = 0
    age_s: Seconds = 0.0
    source: PullSource | None = None


class Tokens(Message, frozen=True):
    """Worker to gateway: what a step has made for its requests, in order."""

    events: Annotated[tuple[TokenEvent, ...], Meta(max_length=MAX_EVENTS)]


class Prefilled(Message, frozen=True):
    """Prefill to decode worker: the first token, which the gateway has been sent as well."""

    event: TokenEvent


class Failure(StrEnum):
    """Why an attempt has ended without an answer, by what the gateway does about it."""

    INVALID = "invalid"  # the request can't run anywhere: tell the client
    LOST = "lost"  # a process died, or its pages did: replay elsewhere
    BUSY = "busy"  # no room now: replay elsewhere or later
    ERROR = "error"  # the request made a worker fail: never replay it without end


class PrefillFailed(Message, frozen=True):
    """Prefill to decode worker: there will be no first token."""

    request_id: Id
    attempt: Attempt
    failure: Failure
    reason: Reason


class AttemptFailed(Message, frozen=True):
    """Decode worker to gateway: nothing of this attempt will follow.

    Also router to gateway, of a decode worker that it lost before the first token: it may never have got the
    Dispatch.
    """

    request_id: Id
    attempt: Attempt
    failure: Failure
    reason: Reason
    worker: Annotated[str, Meta(max_length=32)] = ""  # whose fault it was, if another's than the sender's


class Cancel(Message, frozen=True):
    """Nobody wants the attempt any more. It is not answered."""

    request_id: Id
    attempt: Attempt


class Heartbeat(Message, frozen=True):
    """Worker to router, every second, between two steps of its engine."""

    load: Load
    is_draining: bool = False
    attempts: Annotated[tuple[tuple[Id, Attempt], ...], Meta(max_length=MAX_EVENTS)] = ()  # that it works on


class Alive(Message, frozen=True):
    """Worker to router, every second, from a thread that no step of its engine can delay.

    Beat carries the worker's load, and waits for the step to end.
    """

    step: RunningStep


class KvEventBatch(Message, frozen=True):
    """Worker to router: which pages others can find at it now, one change after another.

    Change i is about the page named `keys[16 * i : 16 * i + 16]` (see baton/pages.py): it is in page
    `pages[i]` of that generation, or nowhere any more where `pages[i]` is -1. Changes are numbered from 0 in
    each life of a worker, `first` is this message's first number: a gap means that some were lost.
    `is_afresh`: before these there is nothing, in any tier.
    """

    first: Count
    keys: Annotated[bytes, Meta(max_length=16 * MAX_EVENTS)]
    pages: Annotated[tuple[Annotated[int, Meta(ge=-1, le=2**31 - 1)], ...], Meta(max_length=MAX_EVENTS)]
    generations: Annotated[tuple[Generation, ...], Meta(max_length=MAX_EVENTS)]
    tier: Tier = Tier.DEVICE
    is_afresh: bool = False


class KvEventsWanted(Message, frozen=True):
    """Router to worker: tell all pages that you hold, afresh; changes follow as before."""


class Measured(Message, frozen=True):
    """Worker to router: what its work has taken, to predict what other work will take."""

    prefills: Annotated[tuple[PrefillTimes, ...], Meta(max_length=1024)] = ()
    steps: Annotated[tuple[StepTimes, ...], Meta(max_length=1024)] = ()


class Pressure(Message, frozen=True):
    """Router to workers: the rung that the cluster is on, when it changes and to each that joins."""

    level: OverloadLevel


def age_s(request: Request, now_s: float) -> float:
    """How long ago it arrived, by the clock that `arrival_s` is of; as messages carry it."""
    return min(MAX_AGE_S, max(0.0, now_s - request.arrival_s))


_Dated = TypeVar("_Dated", Dispatch, Prefill)


def with_arrival(message: _Dated, now_s: float) -> _Dated:
    """Its request has arrived when it has by the receiver's own clock: no two processes share one."""
    request = msgspec.structs.replace(message.request, arrival_s=now_s - message.age_s)
    return msgspec.structs.replace(message, request=request)
