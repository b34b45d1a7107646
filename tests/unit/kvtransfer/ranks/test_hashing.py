import threading

import pytest

from baton.kvtransfer.ranks.shards import INLINE_BYTES, Hashing


@pytest.mark.parametrize(
    ("num_bytes", "may_inline", "is_inline"),
    [(INLINE_BYTES, True, True), (INLINE_BYTES + 1, True, False), (0, False, False)],
)
def test_the_caller_does_what_is_little_and_its_own(
    num_bytes: int, may_inline: bool, is_inline: bool
) -> None:
    hashing = Hashing(1, may_inline=may_inline)
    taken = hashing.submit(num_bytes, threading.current_thread)
    assert (taken.result(10) is threading.current_thread()) == is_inline
    hashing.close()
