"""Prompts that prefill workers compute for this worker, while their pages and first tokens are under way.

1. `ask` sends Prefill with the id of a transfer to come; the known prefix is the attempt's already.
2. The endpoint asks `admit` when the prefill worker reserves; the attempt's name in the engine is who adopts.
3. `poll` says whose pages have come, or will not. `drop` ends it from outside: pages that come all the same
   are let go of.
"""

import secrets
from typing import Final

from baton.colleagues import Colleagues
from baton.control import Prefill
from baton.decode_worker.admission import Admission
from baton.decode_worker.attempt import Attempt, Stage
from baton.engine.replica import Replica
from baton.engine.sequence import FilledPages
from baton.kvtransfer.ended import Ended
from baton.kvtransfer.handoff import Outcome
from baton.kvtransfer.messages import Reserve
from baton.kvtransfer.page_endpoint import PageEndpoint

TRANSFER_BYTES: Final = 16


class RemotePrompts:
    def __init__(
        self, engine: Replica, endpoint: PageEndpoint, colleagues: Colleagues, admission: Admission
    ) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._colleagues = colleagues
        self._admission = admission
        # By transfer: until the endpoint says that it has ended, or it is clear that it will never begin.
        self._attempts: dict[bytes, Attempt] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def ask(self, attempt: Attempt, claim: FilledPages) -> None:
        """claim: what is known of the prompt here, a whole number of pages of both workers."""
        attempt.filled = claim
        attempt.stage, attempt.transfer = Stage.PREFILLING, secrets.token_bytes(TRANSFER_BYTES)
        self._attempts[attempt.transfer] = attempt
        prefill = Prefill(
            request=attempt.request,
            gateway=attempt.gateway,
            transfer=attempt.transfer,
            num_held_tokens=claim.num_tokens,
            source=attempt.source,
        )
        self._colleagues.tell(attempt.prefill, prefill)

    def admit(self, reserve: Reserve, num_pages: int) -> str | None:
        """Who adopts the pages of this reservation; None: nobody here has asked for them, or no room."""
        attempt = self._attempts.get(reserve.transfer)
        if attempt is None or attempt.num_promised_pages != num_pages:
            return None
        self._admission.end_promise(attempt)
        if self._engine.make_room(num_pages):
            return attempt.engine_id
        del self._attempts[reserve.transfer]
        return None

    def poll(self) -> list[tuple[Attempt, str | None]]:
        """Attempts whose transfer has ended: all their pages are here, or the reason why they are not."""
        ended = [self._take(each) for each in self._endpoint.poll()]
        return [each for each in ended if each is not None]

    def drop(self, attempt: Attempt) -> None:
        """Let go of all that it holds."""
        transfer, attempt.transfer = attempt.transfer, b""
        if transfer:
            self._endpoint.abort(transfer, "not wanted any more")
        if attempt.num_promised_pages:  # nobody has asked for them, and who asks now is refused
            self._attempts.pop(transfer, None)
        self._admission.end_promise(attempt)
        filled, attempt.filled = attempt.filled, None
        if filled is not None:
            self._engine.release(filled)

    def _take(self, ended: Ended) -> tuple[Attempt, str | None] | None:
        attempt = self._attempts.pop(ended.transfer, None)
        if attempt is None:
            return None
        is_wanted, has_come = attempt.transfer == ended.transfer, ended.outcome is Outcome.ADOPTED
        num_tokens, owner = len(attempt.token_ids), attempt.engine_id
        if not is_wanted:
            if has_come:
                self._engine.release(FilledPages(ended.pages, num_tokens, owner))
            return None
        attempt.transfer = b""
        if not has_come:
            return attempt, ended.reason
        assert attempt.filled is not None, "an attempt with a transfer has claimed a prefix before"
        attempt.filled = FilledPages(attempt.filled.pages + ended.pages, num_tokens, owner)
        return attempt, None
