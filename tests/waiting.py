"""Waiting until a condition of a test holds."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

TIMEOUT_S: Final = 20.0


def wait_for(
    condition: Callable[[], bool], timeout_s: float = TIMEOUT_S, *, interval_s: float = 0.002
) -> float:
    """Return the seconds until the condition held. Raises TimeoutError."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > timeout_s:
            raise TimeoutError(f"the condition does not hold after {timeout_s:g} s")
        time.sleep(interval_s)
    return time.monotonic() - started_s


async def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait until the condition holds, while the event loop does other work. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
