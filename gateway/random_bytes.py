"""Random bytes for the ids and seeds of a gateway, from a block that is fetched at once."""

import os
from typing import Final

BLOCK_BYTES: Final = 4096  # of one system call


class RandomBytes:
    """Random bytes for ids and seeds, on one thread: a system call for each takes 1 % of a short call."""

    def __init__(self) -> None:
        self._block, self._num_used = b"", 0

    def __call__(self, num: int) -> bytes:
        """Return so many bytes, each of which is given once; BLOCK_BYTES at most."""
        if self._num_used + num > len(self._block):
            self._block, self._num_used = os.urandom(BLOCK_BYTES), 0
        begin = self._num_used
        self._num_used += num
        return self._block[begin : self._num_used]
