"""First halves of page keys, eight bytes each: the index knows pages by these, and so does Redis."""

import numpy as np

from baton.page_keys import KEY_BYTES

SHORT_KEY_BYTES = KEY_BYTES // 2


def first_halves(page_keys: bytes) -> bytes:
    return np.frombuffer(page_keys, "<u8").reshape(-1, KEY_BYTES // 8)[:, 0].tobytes()


def with_zeros(halves: bytes) -> bytes:
    """As page keys. What they have lost by being cut is zeros; nobody looks at it."""
    whole = np.zeros((len(halves) // SHORT_KEY_BYTES, KEY_BYTES // 8), "<u8")
    whole[:, 0] = np.frombuffer(halves, "<u8")
    return whole.tobytes()
