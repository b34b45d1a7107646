"""An answer that is sent in one piece."""

import asyncio
from array import array
from collections.abc import Callable
from io import StringIO
from typing import Final

from baton.errors import BatonError
from baton.gateway.answer import Answer, Choice, Delta
from baton.gateway.api_errors import ClientGone
from baton.gateway.logprobs_format import PackedLogprobs
from baton.gateway.tenants_door import Charge
from baton.gateway.tool_forms import ToolCall

BYTES_PER_CHARACTER: Final = 4
BYTES_PER_TOKEN_ID: Final = 4


class AnswerCollector:
    """A Listener that keeps everything until the end, in little memory, which is charged as it grows."""

    def __init__(self, answer: Answer, observe: Callable[[Choice, Delta], None], charge: Charge) -> None:
        self._answer = answer
        self._observe = observe
        self._charge = charge
        self._kept = [_Kept() for _ in answer.choices]
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> list[Delta]:
        """What each choice has become. Raises the error that ended it; ClientGone when nobody waits."""
        await self._end
        kept, self._kept = self._kept, []
        return [choice.joined() for choice in kept]

    def advanced(self, choice: Choice, delta: Delta) -> None:
        self._observe(choice, delta)
        try:
            self._charge.add(self._kept[choice.index].add(delta))
        except BatonError as error:
            self._kept.clear()
            self._charge.release()  # at once: the next call that asks finds the room
            self._answer.fail(error)

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


class _Kept:
    """The deltas of one choice."""

    def __init__(self) -> None:
        self._text = StringIO()
        self._token_ids = array("i")
        self._logprobs = PackedLogprobs()
        self._tool_calls: list[ToolCall] = []

    def add(self, delta: Delta) -> int:
        """Keep a delta; returns how many bytes that takes, about."""
        before = self._logprobs.num_bytes
        self._text.write(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._tool_calls += delta.tool_calls
        num_chars = len(delta.text) + sum(len(call.arguments) for call in delta.tool_calls)
        num_bytes = BYTES_PER_CHARACTER * num_chars + BYTES_PER_TOKEN_ID * len(delta.token_ids)
        return num_bytes + self._logprobs.num_bytes - before

    def joined(self) -> Delta:
        return Delta(self._text.getvalue(), self._token_ids.tolist(), self._logprobs, self._tool_calls)
