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
        """That may be brought: not the last, and none where the logits of each one are wanted."""
        return 0 if self.request.sampling.prompt_logprobs is not None else self.request.num_tokens - 1

    def claim(self, multiple_of: int) -> FilledPages:
        """Hold what is known of it here; see `Engine.claim_prefix`."""
        token_ids, salt = self.request.all_token_ids, self.request.cache_salt
        return self.engine.claim_prefix(token_ids, salt, self.owner, multiple_of=multiple_of)

    def keys(self, page_size: int) -> list[bytes]:
        """Of the pages of that size that it fills."""
        return self.engine.page_keys(self.request.all_token_ids, self.request.cache_salt, page_size)
