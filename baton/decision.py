"""Where a router sends an attempt, out of what, and what came of it."""

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.times import PrefillTimes
from baton.wire_types import MAX_PULLED_PAGES, Attempt, Count, Generation, Id, PageId, Reason, Seconds


class PullSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that is thought to hold the first `num_tokens` tokens of a prompt: a hint, it knows better."""

    worker: Id
    num_tokens: Count
    pages: Annotated[tuple[PageId, ...], Meta(min_length=1, max_length=MAX_PULLED_PAGES)]
    generations: Annotated[tuple[Generation, ...], Meta(min_length=1, max_length=MAX_PULLED_PAGES)]


class Weighed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an attempt was expected to cost at a pair of workers, in seconds (see router/costs.py)."""

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
