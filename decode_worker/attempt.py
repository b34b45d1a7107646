"""Attempts at requests on the decode worker that answers them: their order, and the pages sent to them.

The life of an attempt:

1. WAITING: for pages. The attempt holds nothing but its Dispatch. Its prefill worker computes the prompt
   meanwhile, and may send the first token already.
2. PREFILLING: the cached prefix is claimed, pages for the rest are granted to the prefill worker. The pages
   and the first token arrive in any order.
3. PULLING, instead: this worker computes the prompt, once a prefix that another worker holds has arrived.
4. PREPARED, after PULLING, of an attempt that migrates here: the pages of the attempt that runs at another
   worker are here. The gateway sends the tokens that have come since, and this worker goes on after them.
5. RUNNING: the engine has the sequence and its pages.

An attempt may end in any stage; `DecodeWorker._drop` releases all that it holds. `DecodeAdmission` orders
the waiting attempts, and `IncomingPages` has the transfers to attempts.
"""

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from enum import Enum
from itertools import count
from math import inf
from typing import Final

import msgspec

from baton.engine.replica import Replica, SoughtPrefix
from baton.engine.scheduler.sequence import Sequence, due_s
from baton.errors import InvalidRequest
from baton.kvtransfer.endpoint import PageEndpoint
from baton.kvtransfer.links import Link
from baton.kvtransfer.prefixes import PulledPrefixes
from baton.kvtransfer.protocol.handoff import HandoffOutcome, TransferEnded
from baton.messages.bounds import MAX_REASON_CHARS
from baton.messages.control import AttemptFailed, Cancel, Dispatch, Failure, PullSource
from baton.messages.workers import WorkerTimes
from baton.request import AttemptKey, FilledPages, FinishReason, Request, TokenEvent
from baton.rpc.worker_node import PromptTimer, check_one_choice

# From the grant on; the time that the prompt waits in the prefill worker counts too.
TRANSFER_TIMEOUT_S: Final = 600.0
# Most tokens that a migrating attempt may lack: one step computes them while the client waits.
MAX_MISSING_TOKENS: Final = 512


class AttemptStage(Enum):
    """The stages of an attempt; see the top of this module."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    PULLING = "pulling"
    PREPARED = "prepared"
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a request, and what it holds on this worker."""

    request: Request  # as dispatched
    gateway: str
    prefill: str  # the worker that computes the prompt; "": this one
    timer: PromptTimer  # knows of the prompt only when it is computed here
    transfer: bytes = b""  # the id of the pages that the prefill worker sends
    source: PullSource | None = None  # without a prefill worker: a peer that holds a prefix
    migrates_from: str = ""  # the decode worker that runs the attempt before this one
    stage: AttemptStage = AttemptStage.WAITING
    is_receiving: bool = False  # pages are granted, and their transfer has not ended
    filled: FilledPages | None = None  # leading pages that the attempt owns until the engine has them
    serial: int = 0  # unique; of attempts that are equal otherwise, the lowest starts first
    retry_above_pages: int = -1  # it found no room, and is tried again once more pages than these are free
    retry_below_pages: float = inf  # its quota was full: once its tenant holds fewer pages than these
    num_expected_pages: int = 0  # granted, and not here yet
    first: TokenEvent | None = None
    sequence: Sequence | None = None  # once the engine has the sequence
    granted_s: float = 0.0  # the prefill worker was told of the pages
    pages_s: float = 0.0  # these pages had arrived
    prepared_s: float = 0.0  # the gateway was told

    @classmethod
    def of(cls, dispatch: Dispatch, now_s: float) -> "Attempt":
        """now_s: the arrival of the message."""
        request, timer = dispatch.request, PromptTimer(dispatch.request, now_s)
        transfer, source = dispatch.transfer, dispatch.source
        return cls(
            request, dispatch.gateway, dispatch.prefill, timer, transfer, source, dispatch.migrates_from
        )

    def check(self, engine: Replica) -> None:
        """Raise InvalidRequest for a request that the engine could not run as one attempt."""
        check_one_choice(self.request)
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
    def key(self) -> AttemptKey:
        return self.request.key

    @property
    def is_complete(self) -> bool:
        """True when all KV of the prompt is here, and the token that follows."""
        filled = self.filled
        return self.first is not None and filled is not None and filled.num_tokens == self.request.num_tokens

    @property
    def is_prepared(self) -> bool:
        """True when so little KV is missing that a step computes it."""
        num_held = self.filled.num_tokens if self.filled is not None else 0
        return self.request.num_tokens - num_held <= MAX_MISSING_TOKENS

    def take_over(self, token_ids: Ordered[int], now_s: float) -> None:
        """Go on after these further tokens, from now on. Raises InvalidRequest when they end the answer."""
        generated = (*self.request.generated_token_ids, *token_ids)
        self.request = msgspec.structs.replace(self.request, generated_token_ids=generated)
        self.timer = PromptTimer(self.request, now_s)

    @property
    def engine_request(self) -> Request:
        """The request that the engine continues: after the first token, if that is known."""
        request = msgspec.structs.replace(self.request, request_id=self.engine_id)
        if self.first is None or self.first.token_id is None:
            return request
        generated = (*request.generated_token_ids, self.first.token_id)
        return msgspec.structs.replace(request, generated_token_ids=generated)

    @property
    def engine_id(self) -> str:
        """The attempt's name in the engine and the ledger, different for each attempt at a request."""
        return f"{self.request_id}.{self.number}"

    def prefix(self, engine: Replica) -> SoughtPrefix:
        """Return the prefix that the attempt may claim here, or pull."""
        return SoughtPrefix(engine, self.request, self.engine_id)

    @property
    def cancel(self) -> Cancel:
        return Cancel(request_id=self.request_id, attempt=self.number)

    def times(self, ended_s: float) -> WorkerTimes:
        """Return the attempt's phases. ended_s: its last token."""
        return self.timer.phases(
            self.sequence, ended_s=ended_s, granted_s=self.granted_s, pages_s=self.pages_s
        )

    def aborted(self, ended_s: float) -> TokenEvent:
        """Return the last event of a cancelled attempt, which only tells its phases."""
        times = self.times(ended_s)
        return TokenEvent(self.request_id, self.number, 0, None, FinishReason.ABORT, times=times)

    def failed(self, failure: Failure, reason: str, worker: str = "") -> AttemptFailed:
        return AttemptFailed(
            request_id=self.request_id,
            attempt=self.number,
            failure=failure,
            reason=reason[:MAX_REASON_CHARS],
            worker=worker,
        )


class DecodeAdmission:
    """The order in which waiting attempts start, and the pages that are on their way to them.

    The next attempt is of the best scheduling class; within a class, of the tenant that holds the fewest
    pages for its weight; within a tenant, by priority and due time. An attempt beyond its tenant's page quota
    blocks that tenant only; an attempt that finds no free pages blocks all later ones, so that short prompts
    do not starve a long one.
    """

    def __init__(self, engine: Replica) -> None:
        self._engine = engine
        self._waiting: dict[str, list[Attempt]] = {}  # tenant -> attempts in order; no list is empty
        self._serials = count(1)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def wait(self, attempt: Attempt) -> None:
        """Have the attempt wait for its turn."""
        attempt.serial = next(self._serials)
        insort(self._waiting.setdefault(attempt.request.tenant, []), attempt, key=_turn)

    def first(self) -> Attempt | None:
        """Return the next attempt to start."""
        heads = [lane[0] for lane in self._waiting.values()]
        may_start = [each for each in heads if self._num_held(each) < each.retry_below_pages]
        return min(may_start, key=self._priority, default=None)

    def leave(self, attempt: Attempt) -> None:
        """Remove the attempt; nothing happens if it does not wait."""
        tenant = attempt.request.tenant
        left = [each for each in self._waiting.pop(tenant, []) if each is not attempt]
        if left:
            self._waiting[tenant] = left

    def claim(self, attempt: Attempt, multiple_of: int) -> FilledPages | None:
        """Hold the cached prefix of the prompt, and free pages for the rest, which are granted at once.

        The prefix has a multiple of `multiple_of` tokens; the other pages count as the tenant's until
        `arrived`. None, with nothing held, when there is no room or the quota is full. The prompt is not
        looked up again before there is more room than at the last try.
        """
        engine, request = self._engine, attempt.request
        if engine.num_available_pages <= attempt.retry_above_pages:
            return None
        claim = attempt.prefix(engine).claim(multiple_of)
        num_pages = engine.pages.pages_for(request.num_tokens - claim.num_tokens)
        quota = request.scheduling_key.quotas.max_kv_pages
        is_within_quota = quota is None or self._num_held(attempt) + num_pages <= quota
        if is_within_quota and engine.make_room(num_pages):
            attempt.num_expected_pages = num_pages
            engine.pages.accounts.expect(request.tenant, num_pages)
            return claim
        engine.release(claim)
        if is_within_quota:
            attempt.retry_above_pages = engine.num_available_pages
        else:
            attempt.retry_below_pages = self._num_held(attempt)
        return None

    def arrived(self, attempt: Attempt) -> None:
        """End the expectation of `claim`: the pages are here, or do not come."""
        self._engine.pages.accounts.expect(attempt.request.tenant, -attempt.num_expected_pages)
        attempt.num_expected_pages = 0

    def _num_held(self, attempt: Attempt) -> int:
        """Pages that the attempt's tenant holds or expects."""
        return self._engine.pages.accounts.held(attempt.request.tenant)

    def _priority(self, attempt: Attempt) -> tuple[int, float, int, float, int]:
        request, (rank, priority, due, serial) = attempt.request, _turn(attempt)
        return rank, self._num_held(attempt) / request.scheduling_key.weight, priority, due, serial


def _turn(attempt: Attempt) -> tuple[int, int, float, int]:
    """The sort key of an attempt among those of its tenant."""
    request = attempt.request
    return request.scheduling_key.rank, request.priority, due_s(request), attempt.serial


class IncomingPages:
    """Pages that other workers send to attempts: of a whole prompt, or of a prefix that they hold.

    1. `grant` tells the prefill worker which pages to write. The caller has claimed the cached prefix and
       made room.
    2. `pull` instead fetches a prefix that another worker holds, of a prompt that this worker computes.
    3. `poll` returns the attempts with an ended transfer. `drop` ends a transfer; pages that arrive later are
       released.
    """

    def __init__(
        self,
        engine: Replica,
        endpoint: PageEndpoint,
        admission: DecodeAdmission,
        prefixes: PulledPrefixes[Attempt],
    ) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._admission = admission
        self._prefixes = prefixes
        self._attempts: dict[bytes, Attempt] = {}  # by transfer, until the endpoint says that it has ended

    def grant(self, attempt: Attempt, link: Link, claim: FilledPages) -> None:
        """Tell the prefill worker which pages to write.

        claim: the cached prefix, a whole number of pages of both workers; the attempt owns it from now on.
        Raises ValueError for a prompt that no transfer can carry.
        """
        attempt.filled, attempt.stage = claim, AttemptStage.PREFILLING
        unit_tokens = min(self._engine.pages.page_size, link.hello.layout.page_size)
        num_missing_tokens = attempt.request.num_tokens - claim.num_tokens
        self._endpoint.grant(
            link,
            attempt.transfer,
            -(-num_missing_tokens // unit_tokens),
            attempt.engine_id,
            deadline_s=TRANSFER_TIMEOUT_S,
            position=claim.num_tokens,
        )
        attempt.is_receiving = True
        self._attempts[attempt.transfer] = attempt

    def pull(self, attempt: Attempt) -> bool:
        """Fetch the prefix that the router's source holds; False: there is none to fetch."""
        if not self._prefixes.begin(attempt, attempt.source, attempt.prefix(self._engine)):
            return False
        attempt.stage = AttemptStage.PULLING
        return True

    def claim(self, attempt: Attempt) -> None:
        """Have the attempt own the cached prefix."""
        claim = attempt.prefix(self._engine).claim(1)
        if claim.pages:
            attempt.filled = claim
        else:
            self._engine.release(claim)

    def poll(self) -> Iterator[tuple[Attempt, TransferEnded]]:
        """Yield the transfers that have ended since the last call; the attempt has the pages that came."""
        for ended in self._endpoint.poll():
            pulled = self._prefixes.take(ended)
            if pulled is not None:
                attempt = pulled.waiter
                attempt.filled = pulled.filled
                attempt.timer.pulled(pulled.num_bytes, pulled.seconds)
                yield attempt, ended
            elif ended.transfer in self._attempts:
                attempt = self._attempts.pop(ended.transfer)
                if self._take(attempt, ended):
                    yield attempt, ended

    def drop(self, attempt: Attempt) -> None:
        """Release all that the attempt holds, and end its transfers."""
        self._prefixes.drop(attempt)
        if attempt.is_receiving:
            attempt.is_receiving = False
            self._endpoint.abort(attempt.transfer, "the attempt is over")
        self._admission.arrived(attempt)
        filled, attempt.filled = attempt.filled, None
        if filled is not None:
            self._engine.release(filled)

    def _take(self, attempt: Attempt, ended: TransferEnded) -> bool:
        """Give the pages, if they came, to the attempt; return False when it was dropped meanwhile."""
        has_come = ended.outcome is HandoffOutcome.ADOPTED
        num_tokens, owner = attempt.request.num_tokens, attempt.engine_id
        if not attempt.is_receiving:
            if has_come:
                self._engine.release(FilledPages(ended.pages, num_tokens, owner))
            return False
        attempt.is_receiving = False
        self._admission.arrived(attempt)
        if has_come:
            assert attempt.filled is not None, "an attempt that receives pages has claimed a prefix"
            attempt.filled = FilledPages(attempt.filled.pages + ended.pages, num_tokens, owner)
        return True
