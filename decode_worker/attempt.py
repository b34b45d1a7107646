"""One attempt at a request, as the decode worker that answers it sees it.

1. WAITING: for pages. Nothing is held but the words of the Dispatch.
2. PREFILLING: another worker computes the prompt. What is known of it here is claimed, pages for the rest are
   reserved once that worker asks, and two things come, in any order: those pages and the first token.
3. PULLING, instead: it is computed here, once a prefix of it that another worker holds has come.
4. RUNNING: the engine has it, and the pages with it.

It may end in any of these; what it holds then is let go of in one place (`DecodeWorker._let_go`).
"""

from bisect import insort
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import NamedTuple

import msgspec

from baton.engine.replica import Replica
from baton.engine.scheduler.sequence import due_s
from baton.errors import InvalidRequest
from baton.kvtransfer.prefixes import PrefixPull
from baton.messages.control import AttemptFailed, Cancel, Dispatch, Failure, PullSource
from baton.request import FilledPages, Request, TokenEvent


class AttemptStage(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    PULLING = "pulling"
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Attempt:
    request: Request  # as it was dispatched
    gateway: str
    prefill: str  # the worker to compute the prompt; "": this one
    source: PullSource | None = None  # for whoever computes the prompt
    stage: AttemptStage = AttemptStage.WAITING
    transfer: bytes = b""  # while its pages are under way
    filled: FilledPages | None = None  # leading pages that it owns before the engine has it
    num_wanted_pages: int = 0  # that there was no room for
    num_promised_pages: int = 0  # that the prefill worker has yet to ask for
    num_expected_pages: int = 0  # that have yet to come
    first: TokenEvent | None = None
    pull: PrefixPull | None = None  # of a prefix, once that has ended

    @classmethod
    def of(cls, dispatch: Dispatch) -> "Attempt":
        return cls(dispatch.request, dispatch.gateway, dispatch.prefill, dispatch.source)

    def check(self, engine: Replica) -> None:
        """InvalidRequest for what that engine could not run as one attempt."""
        if self.request.sampling.n != 1:
            raise InvalidRequest(f"an attempt is at one choice, got n {self.request.sampling.n}")
        quota, num_pages = (
            self.request.scheduling_key.quotas.max_kv_pages,
            engine.pages.pages_for(1 + self.request.num_tokens),
        )
        if quota is not None and num_pages > quota:
            raise InvalidRequest(
                f"it needs {num_pages} pages of KV, its tenant's quota max_kv_pages is {quota}"
            )
        engine.check(self.request)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def number(self) -> int:
        return self.request.attempt

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What must have its KV before the next token is sampled."""
        return self.request.all_token_ids

    @property
    def is_complete(self) -> bool:
        """All its KV is here, and the token that follows it."""
        filled = self.filled
        return self.first is not None and filled is not None and filled.num_tokens == len(self.token_ids)

    @property
    def engine_request(self) -> Request:
        """What the engine goes on with: after the first token, if that is known."""
        request = msgspec.structs.replace(self.request, request_id=self.engine_id)
        if self.first is None or self.first.token_id is None:
            return request
        generated = (*request.generated_token_ids, self.first.token_id)
        return msgspec.structs.replace(request, generated_token_ids=generated)

    @property
    def engine_id(self) -> str:
        """Its name in the engine and the ledger: two attempts at one request never meet there."""
        return f"{self.request_id}.{self.number}"

    @property
    def cancel(self) -> Cancel:
        return Cancel(request_id=self.request_id, attempt=self.number)

    def failed(self, failure: Failure, reason: str, worker: str = "") -> AttemptFailed:
        return AttemptFailed(
            request_id=self.request_id,
            attempt=self.number,
            failure=failure,
            reason=reason[:512],
            worker=worker,
        )


class _Waiting(NamedTuple):
    rank: int  # of its class
    priority: int
    due_s: float
    serial: int
    attempt: Attempt

    @property
    def order(self) -> tuple[int, int, float, int]:
        """On its tenant's account."""
        return self[:4]


class DecodeAdmission:
    """Who of those that wait may begin, and the pages that are promised to prefill workers meanwhile.

    The next is of the best class; in it of the tenant that holds fewest pages here for its weight; a tenant's
    own come by priority and by when they are due. One that finds no room in its tenant's quota of pages holds
    up its tenant's others; any other that finds no room holds up all that come after it.

    A promise is made before a prefill worker is asked, and ends when that worker has reserved the pages or
    will not come for them. So a prompt that has been computed never waits for memory.
    """

    def __init__(self, engine: Replica) -> None:
        self._engine = engine
        self._waiting: dict[str, list[_Waiting]] = {}  # by tenant, in order; no list is empty
        self._serials = count()
        self._num_promised_pages = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def wait(self, attempt: Attempt) -> None:
        request = attempt.request
        waiting = _Waiting(
            request.scheduling_key.rank, request.priority, due_s(request), next(self._serials), attempt
        )
        insort(self._waiting.setdefault(request.tenant, []), waiting, key=_order)

    def first(self) -> Attempt | None:
        """The next to begin."""
        heads = [lane[0] for lane in self._waiting.values() if self._is_within_quota(lane[0].attempt)]
        return min(heads, key=self._turn).attempt if heads else None

    def leave(self, attempt: Attempt) -> None:
        """It waits no longer, for whatever reason."""
        tenant = attempt.request.tenant
        left = [each for each in self._waiting.pop(tenant, []) if each.attempt is not attempt]
        if left:
            self._waiting[tenant] = left

    def may_have_room(self, attempt: Attempt) -> bool:
        """Whether what it found no room for when it was last tried would fit now; True before that."""
        num_pages = attempt.num_wanted_pages
        return not num_pages or num_pages + self._num_promised_pages <= self._engine.num_available_pages

    def promise(self, attempt: Attempt, num_pages: int) -> bool:
        """Whether the pages will be there when the prefill worker asks for them. They are expected until
        `end_expectation`."""
        attempt.num_wanted_pages = num_pages
        if not self._is_within_quota(attempt) or not self.may_have_room(attempt):
            return False
        self._num_promised_pages += num_pages
        attempt.num_promised_pages = attempt.num_expected_pages = num_pages
        self._engine.pages.accounts.expect(attempt.request.tenant, num_pages)
        return True

    def end_promise(self, attempt: Attempt) -> None:
        self._num_promised_pages -= attempt.num_promised_pages
        attempt.num_promised_pages = 0

    def end_expectation(self, attempt: Attempt) -> None:
        """The pages are there, or will not come."""
        self._engine.pages.accounts.expect(attempt.request.tenant, -attempt.num_expected_pages)
        attempt.num_expected_pages = 0

    def _is_within_quota(self, attempt: Attempt) -> bool:
        """Whether what it was found to lack when it was last tried is; True before that."""
        request = attempt.request
        quota = request.scheduling_key.quotas.max_kv_pages
        held = self._engine.pages.accounts.held(request.tenant)
        return quota is None or attempt.num_wanted_pages + held <= quota

    def _turn(self, waiting: _Waiting) -> tuple[int, float, tuple[int, int, float, int]]:
        request = waiting.attempt.request
        num_pages = self._engine.pages.accounts.held(request.tenant)
        return waiting.rank, num_pages / request.scheduling_key.weight, waiting.order


def _order(waiting: _Waiting) -> tuple[int, int, float, int]:
    return waiting.order
