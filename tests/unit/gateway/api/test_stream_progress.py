"""Where a resumable stream goes on, though text lags behind its tokens and the client behind its text."""

import asyncio
from random import Random
from typing import Any

import msgspec
import pytest

from baton.errors import IntegrityError
from baton.gateway.api.answer import Answer
from baton.gateway.api.answer_stream import SERVER_SENT_EVENTS, AnswerStream, StreamProgress, WriteCoalescer
from baton.gateway.api.format import answer_format
from baton.gateway.streams.resume import ResumePoint, Shown
from baton.request import FinishReason
from tests.event_loop import on_loop
from tests.event_stream import Event, joined
from tests.scripted_service import ScriptedService, events
from tests.unit.gateway import calls

TEXTS = (
    "One. Two two two! Three; then caf\u00e9 \U0001f600\U0001f680 and so on. Four?\nFive. Six. Seven sevens.",
    "\U0001f680\U0001f680. A b c. D e f! <stop inside> no end. More of it. And more of that. Done",
)
POINT = ResumePoint(b"a" * 16, b"d" * 16, 7, 1_700_000_000, 2_000_000_000, False, (Shown(),) * 2)


class Script:
    """One stream of two choices, whose tokens come in batches and whose client lags as a seed says."""

    def __init__(self, random: Random, point: ResumePoint = POINT, **fields: Any) -> None:
        self.points: list[ResumePoint] = []
        self._random = random
        self._service = ScriptedService()
        call = calls.call(num_choices=2, is_streamed=True, is_resumable=True, resumed=point, **fields)
        self._answer = Answer(call, self._service, calls.TOKENIZER)
        form = answer_format(self._answer, point.created_s)
        progress = StreamProgress(point, form, self._seal)
        self.stream = AnswerStream(
            self._answer, form, SERVER_SENT_EVENTS, WriteCoalescer(), lambda choice, delta: None, progress
        )
        self._client = calls.Client()

    def _seal(self, point: ResumePoint) -> bytes:
        self.points.append(msgspec.msgpack.decode(msgspec.msgpack.encode(point), type=ResumePoint))
        return b"%d" % (len(self.points) - 1)

    async def play(self, texts: tuple[str, ...] = TEXTS) -> list[Event]:
        """What the client has read in the end."""
        random, client = self._random, self._client
        self._answer.start(self.stream)
        self.stream.begin(client)
        left = [calls.ids(text) for text in texts]
        sent = [0] * len(texts)
        while any(left) and not self.stream.is_over:
            choice = 0 if not sent[0] else random.choice([index for index, ids in enumerate(left) if ids])
            size = random.randint(1, 6)
            batch, left[choice] = left[choice][:size], left[choice][size:]
            request = self._service.requests[choice]
            end = None if left[choice] else FinishReason.LENGTH
            self._service.emit(request.request_id, events(request, batch, start=sent[choice], end=end))
            sent[choice] += len(batch)
            if random.random() < 0.5:
                await asyncio.sleep(0)
            if client.lags:
                if random.random() < 0.3:
                    client.lags = False
                    client.catch_up()
            else:
                client.lags = random.random() < 0.3
        if client.lags:
            client.lags = False
            client.catch_up()
        await asyncio.sleep(0)
        return read(b"".join(client.writes))


def read(data: bytes) -> list[Event]:
    found = []
    for part in data.split(b"\n\n")[:-1]:
        lines = dict(line.split(b": ", 1) for line in part.split(b"\n"))
        found.append(Event(lines.get(b"id", b"").decode(), lines[b"data"].decode()))
    return found


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completion"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"stops": ("<stop>", "of that")}, {"returns_token_ids": True}, {"has_usage": True}],
    ids=["plain", "stops", "ids", "usage"],
)
@pytest.mark.parametrize("seed", range(6))
def test_stream_resumed_after_any_event_has_the_rest(
    is_chat: bool, fields: dict[str, Any], seed: int
) -> None:
    random = Random(seed)
    fields = {**fields, "is_chat": is_chat}

    async def scenario() -> None:
        first = Script(random, **fields)
        told = await first.play()
        whole = joined(told)
        assert whole["is_done"] and len(whole["choices"]) == 2
        for place, event in enumerate(told):
            if event.id:
                again = Script(random, first.points[int(event.id)], **fields)
                assert joined([*told[: place + 1], *await again.play()]) == whole, f"after event {place}"

    asyncio.run(scenario())


@on_loop
async def test_different_tokens_are_an_integrity_error() -> None:
    first = Script(Random(1))
    told = await first.play()
    late = max(int(event.id) for event in told[: len(told) // 2] if event.id)
    for changed in ("Two", "caf"):  # before the point, whether or not it is of the same length
        other = TEXTS[0].replace(changed, changed[::-1]), TEXTS[1]
        again = Script(Random(2), first.points[late])
        read_again = await again.play(other)
        if isinstance(again.stream.error, IntegrityError):
            assert "error" in read_again[-2].data and not read_again[-2].id
            return
    raise AssertionError("another answer was taken for the same")


@on_loop
async def test_answer_shorter_than_the_sent_part_is_an_integrity_error() -> None:
    first = Script(Random(1))
    told = await first.play()
    late = max(int(event.id) for event in told if event.id)
    again = Script(Random(2), first.points[late - 2])
    await again.play(("O", TEXTS[1]))
    assert isinstance(again.stream.error, IntegrityError)
