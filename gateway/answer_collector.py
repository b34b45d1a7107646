"""An answer that is sent in one piece."""

import asyncio
from collections.abc import Callable

from baton.errors import BatonError
from baton.gateway.answer import Answer, Choice, Delta
from baton.gateway.api_errors import ClientGone


class AnswerCollector:
    """A Listener that keeps everything until the end."""

    def __init__(self, answer: Answer, observe: Callable[[Choice, Delta], None]) -> None:
        self._answer = answer
        self._observe = observe
        self._deltas: list[list[Delta]] = [[] for _ in answer.choices]
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> list[Delta]:
        """What each choice has become. Raises the error that ended it; ClientGone when nobody waits."""
        await self._end
        return [Delta.joined(deltas) for deltas in self._deltas]

    def advanced(self, choice: Choice, delta: Delta) -> None:
        self._observe(choice, delta)
        self._deltas[choice.index].append(delta)

    def finished(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def failed(self, error: BatonError) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def gone(self) -> None:
        """The client has left."""
        self._answer.cancel()
        if not self._end.done():
            self._end.set_exception(ClientGone())
