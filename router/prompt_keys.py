"""The names of a prompt's pages, as each kind of worker gives them."""

from typing import TypeAlias

from baton.page_keys import PageKeys
from baton.request import Request
from baton.wire_types import MAX_PULLED_PAGES
from baton.worker import Worker

Family: TypeAlias = tuple[str, str, int]  # fingerprint, kv_dtype, page_size: equal ones name pages alike


def family_of(worker: Worker) -> Family:
    return (worker.fingerprint, worker.kv_dtype, worker.page_size)


def kin_of(worker: Worker) -> tuple[str, str]:
    """Equal ones can use each other's pages, of whatever size."""
    return (worker.fingerprint, worker.kv_dtype)


class PromptKeys:
    """Remembers how each family names pages; of prompts nothing."""

    def __init__(self) -> None:
        self._families: dict[Family, PageKeys] = {}

    def keys(self, family: Family, request: Request) -> bytes:
        """16 bytes for each full page of the prompt and of what earlier attempts have generated."""
        fingerprint, dtype, page_size = family
        namer = self._families.get(family)
        if namer is None:
            namer = PageKeys(model_fingerprint=fingerprint, dtype=dtype, page_size=page_size)
            self._families[family] = namer
        token_ids = [*request.token_ids, *request.generated_token_ids]
        keys: list[bytes] = []
        num_pages = min(len(token_ids) // page_size, MAX_PULLED_PAGES)
        namer.extend(keys, token_ids, num_pages, request.cache_salt)
        return b"".join(keys)

    def keep(self, families: set[Family]) -> None:
        """Forget all others: nobody of them is here any more."""
        self._families = {family: namer for family, namer in self._families.items() if family in families}
