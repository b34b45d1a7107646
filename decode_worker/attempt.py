"""One attempt at a request, as the decode worker that answers it sees it.

1. WAITING: for pages. Nothing is held but the words of the Dispatch.
2. PREFILLING: another worker computes the prompt. What is known of it here is claimed, pages for the rest are
   reserved once that worker asks, and two things come, in any order: those pages and the first token.
3. PULLING, instead: it is computed here, once a prefix of it that another worker holds has come.
4. RUNNING: the engine has it, and the pages with it.

It may end in any of these; what it holds then is let go of in one place (`DecodeWorker._let_go`).
"""

from dataclasses import dataclass
from enum import Enum

import msgspec

from baton.control import AttemptFailed, Cancel, Dispatch, Failure
from baton.decision import PullSource
from baton.engine.replica import Replica
from baton.errors import InvalidRequest
from baton.filled_pages import FilledPages
from baton.kvtransfer.pulls import Pull
from baton.request import Request
from baton.token_event import TokenEvent


class Stage(Enum):
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
    stage: Stage = Stage.WAITING
    transfer: bytes = b""  # while its pages are under way
    filled: FilledPages | None = None  # leading pages that it owns before the engine has it
    num_wanted_pages: int = 0  # that there was no room for
    num_promised_pages: int = 0  # that the prefill worker has yet to ask for
    num_expected_pages: int = 0  # that have yet to come
    first: TokenEvent | None = None
    pull: Pull | None = None  # of a prefix, once that has ended

    @classmethod
    def of(cls, dispatch: Dispatch) -> "Attempt":
        return cls(dispatch.request, dispatch.gateway, dispatch.prefill, dispatch.source)

    def check(self, engine: Replica) -> None:
        """InvalidRequest for what that engine could not run as one attempt."""
        if self.request.sampling.n != 1:
            raise InvalidRequest(f"an attempt is at one choice, got n {self.request.sampling.n}")
        quota, num_pages = (
            self.request.standing.quotas.max_kv_pages,
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
