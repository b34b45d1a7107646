"""A stream of an answer: the test scripts the tokens and the pace of the client."""

import asyncio
from collections.abc import Sequence
from typing import Any

from baton.gateway.api.answer import Answer
from baton.gateway.api.answer_stream import SERVER_SENT_EVENTS, AnswerStream
from baton.gateway.api.format import answer_format
from baton.request import FinishReason
from tests.scripted_service import ScriptedService, events
from tests.unit.gateway import calls
from tests.unit.gateway.calls import Client


class Streaming:
    """One stream with its service and its client. Made on a loop."""

    def __init__(self, **fields: Any) -> None:
        self.service = ScriptedService()
        self.answer: Answer = calls.answer(self.service, is_streamed=True, **fields)
        form = answer_format(self.answer, 0)
        self.stream = AnswerStream(self.answer, form, SERVER_SENT_EVENTS)
        self.client = Client()
        self.answer.start(self.stream)
        self._nums = [0] * len(self.answer.choices)

    async def emit(self, text: str, *, choice: int = 0, is_end: bool = False) -> None:
        """Emit, then let the turn of the loop end."""
        self.emit_now(text, choice=choice, is_end=is_end)
        await asyncio.sleep(0)

    def emit_now(self, text: str, *, choice: int = 0, is_end: bool = False) -> None:
        self.emit_ids_now(calls.ids(text), choice=choice, end=FinishReason.LENGTH if is_end else None)

    def emit_ids_now(
        self, token_ids: Sequence[int], *, choice: int = 0, end: FinishReason | None = None
    ) -> None:
        request = self.service.requests[choice]
        batch = events(request, token_ids, start=self._nums[choice], end=end)
        self._nums[choice] += len(batch)
        self.service.emit(request.request_id, batch)
