"""The names of a prompt's pages, as each kind of worker gives them."""

from typing import TypeAlias

import numpy as np

from baton.messages.bounds import MAX_PULLED_PAGES
from baton.messages.workers import Worker
from baton.pages import KEY_BYTES, PageKeys
from baton.request import Request

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


# First halves of page keys, eight bytes each: the index knows pages by these, and so does Redis.

SHORT_KEY_BYTES = KEY_BYTES // 2


def first_halves(page_keys: bytes) -> bytes:
    return np.frombuffer(page_keys, "<u8").reshape(-1, KEY_BYTES // 8)[:, 0].tobytes()


def with_zeros(halves: bytes) -> bytes:
    """As page keys. What they have lost by being cut is zeros; nobody looks at it."""
    whole = np.zeros((len(halves) // SHORT_KEY_BYTES, KEY_BYTES // 8), "<u8")
    whole[:, 0] = np.frombuffer(halves, "<u8")
    return whole.tobytes()
