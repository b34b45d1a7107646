"""Prompts of which other workers send pages: all of them, with a first token, or a prefix that they hold.

1. `ask` sends Prefill with the id of a transfer to come; the known prefix is the attempt's already.
2. The endpoint asks `admit` when the prefill worker reserves; the attempt's name in the engine is who adopts.
3. `pull` instead has a prefix fetched that another worker holds, of a prompt that is computed here.
4. `poll` says whose pages have come, or will not. `drop` ends it from outside: pages that come all the same
   are let go of.
"""

import secrets
from typing import Final

from baton.clock import Clock
from baton.decode_worker.attempt import Attempt, AttemptStage, DecodeAdmission
from baton.engine.replica import Replica, SoughtPrefix
from baton.kvtransfer.page_endpoint import PageEndpoint
from baton.kvtransfer.prefixes import PulledPrefixes
from baton.kvtransfer.protocol.handoff import HandoffOutcome, TransferEnded
from baton.kvtransfer.protocol.messages import Reserve
from baton.messages.control import Prefill, age_s
from baton.request import FilledPages
from baton.rpc.peers import PeerRegistry

TRANSFER_BYTES: Final = 16


class RemotePrompts:
    def __init__(
        self,
        engine: Replica,
        endpoint: PageEndpoint,
        peer_registry: PeerRegistry,
        admission: DecodeAdmission,
        prefixes: PulledPrefixes[Attempt],
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._peer_registry = peer_registry
        self._admission = admission
        self._prefixes = prefixes
        self._clock = clock
        # By transfer: until the endpoint says that it has ended, or it is clear that it will never begin.
        self._attempts: dict[bytes, Attempt] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def ask(self, attempt: Attempt, claim: FilledPages) -> None:
        """claim: what is known of the prompt here, a whole number of pages of both workers."""
        attempt.filled = claim
        attempt.stage, attempt.transfer = AttemptStage.PREFILLING, secrets.token_bytes(TRANSFER_BYTES)
        self._attempts[attempt.transfer] = attempt
        prefill = Prefill(
            request=attempt.request,
            gateway=attempt.gateway,
            transfer=attempt.transfer,
            num_held_tokens=claim.num_tokens,
            age_s=age_s(attempt.request, self._clock.now_s()),
            source=attempt.source,
        )
        self._peer_registry.tell(attempt.prefill, prefill)

    def pull(self, attempt: Attempt) -> bool:
        """Have what the router's source holds of it fetched first; False: nothing comes."""
        prefix = SoughtPrefix(self._engine, attempt.request, attempt.engine_id)
        if not self._prefixes.begin(attempt, attempt.source, prefix):
            return False
        attempt.stage = AttemptStage.PULLING
        return True

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
        """Attempts whose transfer has ended: all their pages are here, or the reason why they are not.

        Those that are PULLING have what has come, perhaps nothing: they can be computed.
        """
        ended = [self._take(each) for each in self._endpoint.poll()]
        return [each for each in ended if each is not None]

    def drop(self, attempt: Attempt) -> None:
        """Let go of all that it holds."""
        self._prefixes.drop(attempt)
        transfer, attempt.transfer = attempt.transfer, b""
        if transfer:
            self._endpoint.abort(transfer, "not wanted any more")
        if attempt.num_promised_pages:  # nobody has asked for them, and who asks now is refused
            self._attempts.pop(transfer, None)
        self._admission.end_promise(attempt)
        self._admission.end_expectation(attempt)
        filled, attempt.filled = attempt.filled, None
        if filled is not None:
            self._engine.release(filled)

    def _take(self, ended: TransferEnded) -> tuple[Attempt, str | None] | None:
        pulled = self._prefixes.take(ended)
        if pulled is not None:
            pulled.waiter.filled, pulled.waiter.pull = pulled.filled, pulled.pull
            return pulled.waiter, None
        attempt = self._attempts.pop(ended.transfer, None)
        if attempt is None:
            return None
        is_wanted, has_come = attempt.transfer == ended.transfer, ended.outcome is HandoffOutcome.ADOPTED
        num_tokens, owner = len(attempt.token_ids), attempt.engine_id
        if not is_wanted:
            if has_come:
                self._engine.release(FilledPages(ended.pages, num_tokens, owner))
            return None
        attempt.transfer = b""
        self._admission.end_expectation(attempt)
        if not has_come:
            return attempt, ended.reason
        assert attempt.filled is not None, "an attempt with a transfer has claimed a prefix before"
        attempt.filled = FilledPages(attempt.filled.pages + ended.pages, num_tokens, owner)
        return attempt, None
