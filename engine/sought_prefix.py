"""What a request begins with, for whoever might bring its KV from elsewhere."""

from typing import NamedTuple

from baton.engine.replica import Replica
from baton.filled_pages import FilledPages
from baton.request import Request


class SoughtPrefix(NamedTuple):
    engine: Replica
    request: Request
    owner: str  # who has a claim on what is known, and whose the pages are that come

    @property
    def num_tokens(self) -> int:
        """That may be brought: not the last, no more than the tenant's quota of pages leaves, and none where
        the logits of each one are wanted."""
        if self.request.sampling.prompt_logprobs is not None:
            return 0
        most, quota = self.request.num_tokens - 1, self.request.standing.quotas.max_kv_pages
        if quota is None:
            return most
        pages = self.engine.pages
        return max(0, min(most, (quota - pages.accounts.held(self.request.tenant)) * pages.page_size))

    def claim(self, multiple_of: int) -> FilledPages:
        """Hold what is known of it here, on the tenant's account; see `Engine.claim_prefix`."""
        self.engine.pages.accounts.book(self.owner, self.request.tenant)
        token_ids, salt = self.request.all_token_ids, self.request.cache_salt
        return self.engine.claim_prefix(token_ids, salt, self.owner, multiple_of=multiple_of)

    def keys(self, page_size: int) -> list[bytes]:
        """Of the pages of that size that it fills."""
        return self.engine.page_keys(self.request.all_token_ids, self.request.cache_salt, page_size)
