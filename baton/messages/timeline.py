"""The timeline of one request: the parts of the time from its first byte to the last byte of its answer.

The parts follow each other without a gap or an overlap, except for the time that no process accounts for,
which is `unaccounted_s`. gateway/metrics/requests.py makes timelines; docs/observe.md explains the parts.
"""

from collections import defaultdict
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from baton.messages.bounds import Attempt, Count, Id, Name, Seconds

MAX_ATTEMPTS = 16  # of one request, the latest
MAX_PARTS = 128
PartName: TypeAlias = Annotated[str, Meta(max_length=32)]


class TimelinePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a request's time. A phase that alternates with others, such as computing, is one part."""

    name: PartName
    begin_s: Seconds  # after the beginning of the request
    seconds: Seconds
    process: Name = ""  # that spent the time, or that the request waited for


class TimelineAttempt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attempt at a request. Times are seconds after the beginning of the request."""

    number: Attempt
    begin_s: Seconds
    end_s: Seconds
    decode: Name = ""  # worker; "": the attempt was never dispatched
    prefill: Name = ""  # worker; "": the decode worker computed the prompt
    num_tokens: Count = 0  # that it answered
    end: Name = ""  # "finished", "cancelled", or the reason why another attempt followed


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One ended request. Of several choices, the times are those of the choice that ended last."""

    request_id: Id  # that the `id` of the answer contains
    tenant: Name = ""
    outcome: Name  # "answered", "gone" (the client left), "failed", or the reason of a refusal
    gateway: Name = ""
    began_s: float  # seconds since 1970
    total_s: Seconds
    first_token_s: Seconds | None = None
    num_choices: Count = 1
    num_prompt_tokens: Count = 0
    num_cached_tokens: Count = 0
    num_tokens: Count = 0
    num_draft_tokens: Count = 0  # checked drafts, by the workers' reports of ended attempts
    num_accepted_tokens: Count = 0  # accepted drafts, by the same reports
    is_streamed: bool = False
    num_ahead: Count = 0  # attempts in the router's queue when this one came
    ahead_tenant: Name = ""  # with the most of these
    hidden_transfer_s: Seconds = 0.0  # of sending pages while the prompt was computed; in no part
    clock_error_s: Seconds = 0.0  # bound of the error of the measured clock offsets
    unaccounted_s: Seconds = 0.0


class RequestSummary(RequestFacts, frozen=True, kw_only=True):
    """An ended request in a list of many, such as that of `/admin/requests`."""

    num_attempts: Count = 0
    seconds: dict[str, float] = {}  # see RequestTimeline.seconds


class RequestTimeline(RequestFacts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An ended request with the parts of its time."""

    parts: Annotated[tuple[TimelinePart, ...], Meta(max_length=MAX_PARTS)] = ()
    attempts: Annotated[tuple[TimelineAttempt, ...], Meta(max_length=MAX_ATTEMPTS)] = ()

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each part by name, with `unaccounted`; their sum is total_s."""
        sums: defaultdict[str, float] = defaultdict(float)
        for part in self.parts:
            sums[part.name] += part.seconds
        return {**sums, "unaccounted": self.unaccounted_s}

    def summary(self) -> RequestSummary:
        """Return the request without its parts and its attempts."""
        facts = {name: getattr(self, name) for name in RequestFacts.__struct_fields__}
        return RequestSummary(**facts, num_attempts=len(self.attempts), seconds=self.seconds)
