"""How much a gateway asks of a router for one tenant before the router has answered.

A router handles the messages of a gateway in order, so a call with a thousand choices would delay every other
tenant by the time that the router takes for all of them. While other tenants are active, a gateway therefore
sends Submits of one tenant only until those that no Routed, Queued or Rejected has answered have
MAX_UNANSWERED_TOKENS. It holds the tenant's other streams, and submits them in the order in which they came.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Final

from baton.clock import Clock
from baton.gateway.stream_log import Key
from baton.request import Request

MAX_UNANSWERED_TOKENS: Final = 6_144
TOKENS_PER_SUBMIT: Final = 1024  # beside its prompt's: a router takes as long for them as for an empty prompt
ACTIVE_S: Final = 60.0  # since a tenant's last Submit


class SubmitWindow:
    """Of one gateway."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unanswered: dict[str, dict[Key, tuple[str, int]]] = {}  # router -> attempt -> tenant, tokens
        self._num_tokens: Counter[str] = Counter()  # of these, by tenant
        self._held: dict[str, dict[str, None]] = {}  # tenant -> request ids, first come first
        self._submitted_s: dict[str, float] = {}  # each tenant's last Submit, oldest first

    def is_full(self, tenant: str) -> bool:
        if self._num_tokens[tenant] < MAX_UNANSWERED_TOKENS:
            return False
        latest = islice(reversed(self._submitted_s.items()), 2)
        now_s = self._clock.now_s()
        return any(other != tenant and now_s - since_s < ACTIVE_S for other, since_s in latest)

    def submitted(self, router: str, request: Request) -> None:
        num_tokens = TOKENS_PER_SUBMIT + len(request.token_ids) + len(request.generated_token_ids)
        key = (request.request_id, request.attempt)
        self._unanswered.setdefault(router, {})[key] = (request.tenant, num_tokens)
        self._num_tokens[request.tenant] += num_tokens
        if not request.is_probe:
            self._submitted_s.pop(request.tenant, None)
            self._submitted_s[request.tenant] = self._clock.now_s()
        self.let_go(request)

    def hold(self, request: Request) -> None:
        """Keep its place until `answered` names it."""
        self._held.setdefault(request.tenant, {})[request.request_id] = None

    def let_go(self, request: Request) -> None:
        """It need not be held any more, if it was."""
        if request.request_id in self._held.get(request.tenant, ()):
            self._drop(request.tenant, request.request_id)

    def answered(self, router: str, key: Key) -> Iterator[str]:
        """The held requests that may be submitted now; whoever iterates submits each before the next."""
        found = self._unanswered.get(router, {}).pop(key, None)
        if found is None:
            return  # answered before: it was queued
        self._free(*found)
        tenant = found[0]
        while not self.is_full(tenant) and (held := self._held.get(tenant)):
            request_id = next(iter(held))
            self._drop(tenant, request_id)
            yield request_id

    def lose(self, router: str) -> None:
        """It answers nothing any more."""
        for tenant, num_tokens in self._unanswered.pop(router, {}).values():
            self._free(tenant, num_tokens)

    def _drop(self, tenant: str, request_id: str) -> None:
        del self._held[tenant][request_id]
        if not self._held[tenant]:
            del self._held[tenant]

    def _free(self, tenant: str, num_tokens: int) -> None:
        self._num_tokens[tenant] -= num_tokens
        if not self._num_tokens[tenant]:
            del self._num_tokens[tenant]
