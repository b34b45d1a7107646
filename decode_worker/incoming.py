"""Pages that other workers send to attempts: of a whole prompt, or of a prefix that they hold.

1. `grant` tells the prefill worker which pages to write. The caller has claimed the cached prefix and made
   room.
2. `pull` instead fetches a prefix that another worker holds, of a prompt that this worker computes.
3. `poll` returns the attempts whose transfer has ended. `drop` ends a transfer; pages that arrive after it
   are released.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from baton.decode_worker.attempt import Attempt, AttemptStage, DecodeAdmission
from baton.engine.replica import Replica, SoughtPrefix
from baton.kvtransfer.links import Link
from baton.kvtransfer.page_endpoint import PageEndpoint
from baton.kvtransfer.prefixes import PulledPrefixes
from baton.kvtransfer.protocol.handoff import HandoffOutcome, TransferEnded
from baton.request import FilledPages

# From the grant on; the time that the prompt waits in the prefill worker counts too.
TRANSFER_TIMEOUT_S: Final = 600.0


class ReceivedPages(NamedTuple):
    """The end of a transfer to an attempt, with the pages or without."""

    attempt: Attempt
    reason: str | None = None  # why the pages have not come; None: they are in `attempt.filled`
    is_refused: bool = False  # the source lives, and does not send them


class IncomingPages:
    """Transfers to this worker's attempts."""

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

    def __len__(self) -> int:
        return len(self._attempts)

    def grant(self, attempt: Attempt, link: Link, claim: FilledPages) -> None:
        """Tell the prefill worker which pages to write.

        claim: the cached prefix, a whole number of pages of both workers; the attempt owns it from now on.
        Raises ValueError for a prompt that no transfer can carry.
        """
        attempt.filled, attempt.stage = claim, AttemptStage.PREFILLING
        unit_tokens = min(self._engine.pages.page_size, link.hello.layout.page_size)
        num_missing_tokens = len(attempt.token_ids) - claim.num_tokens
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
        prefix = SoughtPrefix(self._engine, attempt.request, attempt.engine_id)
        if not self._prefixes.begin(attempt, attempt.source, prefix):
            return False
        attempt.stage = AttemptStage.PULLING
        return True

    def poll(self) -> Iterator[ReceivedPages]:
        """Yield the transfers that have ended since the last call."""
        for ended in self._endpoint.poll():
            pulled = self._prefixes.take(ended)
            if pulled is not None:
                pulled.waiter.filled, pulled.waiter.pull = pulled.filled, pulled.pull
                yield ReceivedPages(pulled.waiter)
            elif (attempt := self._attempts.pop(ended.transfer, None)) is not None:
                yield from self._take(attempt, ended)

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

    def _take(self, attempt: Attempt, ended: TransferEnded) -> Iterator[ReceivedPages]:
        has_come = ended.outcome is HandoffOutcome.ADOPTED
        num_tokens, owner = len(attempt.token_ids), attempt.engine_id
        if not attempt.is_receiving:  # dropped meanwhile
            if has_come:
                self._engine.release(FilledPages(ended.pages, num_tokens, owner))
            return
        attempt.is_receiving = False
        self._admission.arrived(attempt)
        if not has_come:
            yield ReceivedPages(attempt, ended.reason, ended.outcome is HandoffOutcome.REFUSED)
            return
        assert attempt.filled is not None, "an attempt that receives pages has claimed a prefix"
        attempt.filled = FilledPages(attempt.filled.pages + ended.pages, num_tokens, owner)
        yield ReceivedPages(attempt)
