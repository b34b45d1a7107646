"""When Python looks for rings of garbage, in a process that serves.

A full look walks over all that lives, and everybody waits meanwhile: 0.2 s in a gateway where a thousand
requests wait. Nothing here makes rings on purpose, so full looks are rare; the young are looked at as often
as ever.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LOOKS_PER_FULL: Final = 200  # at the middle generation; Python's own number is 10


@contextmanager
def calm() -> Iterator[None]:
    """To be entered when all is loaded: what is there by now stays, and is not looked at again."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], LOOKS_PER_FULL)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
