"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

Parameters = ParamSpec("Parameters")


def on_loop(test: Callable[Parameters, Coroutine[Any, Any, None]]) -> Callable[Parameters, None]:
    """Return the test as a function that runs the coroutine on an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> None:
        asyncio.run(test(*arguments, **keywords))

    return run
