"""The keys of a prompt's pages, as each family of workers names them."""

from typing import Final, TypeAlias

import numpy as np

from baton.messages.bounds import MAX_PULLED_PAGES
from baton.messages.workers import Worker
from baton.pages import KEY_BYTES, PageKeys
from baton.request import Request

# The index and Redis know pages by the first halves of their keys.
SHORT_KEY_BYTES: Final = KEY_BYTES // 2
Family: TypeAlias = tuple[str, str, int]  # fingerprint, kv_dtype, page_size: equal ones name pages alike


def family_of(worker: Worker) -> Family:
    """The family of a worker."""
    return (worker.fingerprint, worker.kv_dtype, worker.page_size)


class PromptKeys:
    """Computes page keys. Keeps a `PageKeys` for each family, and nothing of prompts."""

    def __init__(self) -> None:
        self._families: dict[Family, PageKeys] = {}

    def keys(self, family: Family, request: Request) -> bytes:
        """16 bytes for each full page of the prompt and of the tokens that earlier attempts generated."""
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


def first_halves(page_keys: bytes) -> bytes:
    """The first half of each page key."""
    return np.frombuffer(page_keys, "<u8").reshape(-1, KEY_BYTES // 8)[:, 0].tobytes()


def with_zeros(halves: bytes) -> bytes:
    """Page keys with zeros for their second halves, which the index does not read."""
    whole = np.zeros((len(halves) // SHORT_KEY_BYTES, KEY_BYTES // 8), "<u8")
    whole[:, 0] = np.frombuffer(halves, "<u8")
    return whole.tobytes()
