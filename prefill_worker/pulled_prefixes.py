"""Prefixes of prompts that another worker holds, fetched from there before the rest is computed.

1. `begin` takes hold of what is known of the prompt here, makes room, and asks the worker that the router
   named for the pages that follow. It does nothing where that is not possible, or brings nothing.
2. `take` is told of the transfer's end: the pages go to the prompt, or all is let go of and it is computed.
3. `drop` ends it from outside; pages that come all the same are let go of.

What the router said of the holder is a hint: the holder compares page and generation before it sends any.
"""

import logging
from collections import Counter
from typing import Final, NamedTuple

from baton.decision import PullSource
from baton.engine.replica import Replica
from baton.engine.sequence import FilledPages
from baton.kvtransfer.ended import Ended
from baton.kvtransfer.kv_links import KvLinks
from baton.kvtransfer.link import Link
from baton.kvtransfer.page_endpoint import PageEndpoint
from baton.kvtransfer.pulls import PlannedPull, Pull, Pulls, plan_pull
from baton.prefill_worker.departure import Departure

MAX_PULLS: Final = 64  # at a time; who comes then computes

logger = logging.getLogger(__name__)


class Pulled(NamedTuple):
    """The end of a pull: `filled` None where all is to be computed."""

    departure: Departure
    filled: FilledPages | None
    pull: Pull


class _Fetch(NamedTuple):
    departure: Departure
    claim: FilledPages
    plan: PlannedPull


class PulledPrefixes:
    """`counters`: pulls that ended well, or not, and bytes."""

    def __init__(self, engine: Replica, endpoint: PageEndpoint, links: KvLinks, pulls: Pulls) -> None:
        self.counters: Counter[str] = Counter()
        self._engine = engine
        self._endpoint = endpoint
        self._links = links
        self._pulls = pulls
        self._fetches: dict[bytes, _Fetch] = {}  # by transfer, until that has ended
        self._dropped: set[bytes] = set()

    def begin(self, departure: Departure) -> bool:
        """Whether a transfer has begun, of which `take` will tell."""
        source = departure.prefill.source
        if source is None:
            return False
        link = self._links.to(source.worker)
        may_begin = link is not None and len(self._fetches) < MAX_PULLS
        has_begun = link is not None and may_begin and self._fetch(departure, source, link)
        self.counters["pulls_not_begun"] += not has_begun
        return has_begun

    def _fetch(self, departure: Departure, source: PullSource, link: Link) -> bool:
        request, owner = departure.request, departure.engine_id
        token_ids = request.all_token_ids
        page_sizes = self._engine.pages.page_size, link.hello.layout.page_size
        if request.sampling.prompt_logprobs is not None:
            return False  # every position has to be computed
        claim = self._engine.claim_prefix(token_ids, request.cache_salt, owner, multiple_of=max(page_sizes))
        held = list(zip(source.pages, source.generations, strict=False))
        stop = min(source.num_tokens, len(token_ids) - 1)  # one is left to compute
        plan = plan_pull(held, page_sizes, claim.num_tokens, stop)
        transfer = None if plan is None else self._ask(link, plan, owner)
        if plan is None or transfer is None:
            self._engine.release(claim)
            return False
        self._fetches[transfer] = _Fetch(departure, claim, plan)
        return True

    def _ask(self, link: Link, plan: PlannedPull, owner: str) -> bytes | None:
        if not self._engine.make_room(plan.num_pages):
            return None
        try:
            return self._pulls.begin(link, plan, owner)
        except ValueError as error:
            logger.warning("request %s: its prefix can't be pulled: %s", owner, error)
            return None

    def take(self, ended: Ended) -> Pulled | None:
        """None where it was no pull, or one that nobody waits for any more."""
        pull = self._pulls.take(ended)
        if pull is None:
            return None
        departure, claim, plan = self._fetches.pop(ended.transfer)
        owner = departure.engine_id
        pages = pull.pages or ()
        if ended.transfer in self._dropped:
            self._dropped.remove(ended.transfer)
            self._engine.release(FilledPages(pages, plan.num_tokens, owner))
            return None
        if pull.pages is None:
            logger.info("request %s: its prefix is computed here: %s", owner, pull.reason)
            self.counters["pulls_failed"] += 1
            self._engine.release(claim)
            return Pulled(departure, None, pull)
        self.counters["pulls"] += 1
        self.counters["pulled_bytes"] += pull.num_bytes
        filled = FilledPages(claim.pages + pages, claim.num_tokens + plan.num_tokens, owner)
        return Pulled(departure, filled, pull)

    def drop(self, departure: Departure) -> None:
        """Nobody wants it any more; nothing happens where none has begun."""
        for transfer, fetch in self._fetches.items():
            if fetch.departure is departure and transfer not in self._dropped:
                self._dropped.add(transfer)
                self._engine.release(fetch.claim)
                self._endpoint.abort(transfer, "not wanted any more")
