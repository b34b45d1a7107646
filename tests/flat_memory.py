"""A bound on the memory of this process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psutil

MAX_GROWTH_BYTES: Final = 32 << 20


@contextmanager
def memory_stays_flat() -> Iterator[None]:
    """Fail if the resident memory of this process is more than MAX_GROWTH_BYTES larger after the block."""
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    yield
    gc.collect()
    assert process.memory_info().rss - before < MAX_GROWTH_BYTES
