"""When Python looks for rings of garbage, in a process that serves.

A full look walks over all that lives, and everybody waits meanwhile: 0.2 s in a gateway where a thousand
requests wait. Nothing here makes rings on purpose, so full looks are rare; the young are looked at as often
as ever, and most rings are found there. A ring that has become old waits for a million objects more.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LOOKS_PER_FULL: Final = 200  # at the middle generation; Python's own number is 10

_inside: list[tuple[int, int, int]] = []  # of each that is inside, the thresholds when the first came


@contextmanager
def calm() -> Iterator[None]:
    """To be entered when all is loaded: what is there by now stays, and is not looked at again.

    It is one for the process: of several that overlap the last to leave ends it.
    """
    _inside.append(_inside[0] if _inside else gc.get_threshold())
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_inside[0][:2], LOOKS_PER_FULL)
    try:
        yield
    finally:
        thresholds = _inside.pop()
        if not _inside:
            gc.set_threshold(*thresholds)
            gc.unfreeze()
