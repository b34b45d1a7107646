import asyncio
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.gateway import GatewayConfig, GatewaySettings
from baton.errors import IntegrityError, Refused, WorkerLost
from baton.gateway.api import answer_stream
from baton.gateway.api.answer import Answer, AnswerChoice
from baton.gateway.api.answer_stream import (
    MAX_HELD_BYTES,
    MAX_TURN_BYTES,
    SERVER_SENT_EVENTS,
    AnswerCollector,
    AnswerStream,
    PackedLogprobs,
    StreamProgress,
)
from baton.gateway.api.call import Prompt
from baton.gateway.api.format import ChatFormat, answer_format
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.streams.resume import DeliveredChoice, ResumePoint
from baton.gateway.tenants.limiter import Limiter
from baton.request import FinishReason, TokenEvent, TokenIds, TokenLogprobs
from baton.tenants import Quotas
from tests.event_loop import on_loop
from tests.event_stream import Event, joined
from tests.scripted_service import ScriptedService, events
from tests.unit.gateway import calls
from tests.unit.gateway.streaming import Streaming


@on_loop
async def test_nothing_is_written_before_the_headers() -> None:
    streaming = Streaming()
    assert not await streaming.stream.wait(0.0)
    await streaming.emit("1 ")
    await streaming.emit("2")
    assert await streaming.stream.wait(1.0)
    streaming.stream.begin(streaming.client)
    assert streaming.client.texts() == ["1 2"]


@on_loop
async def test_tokens_of_one_turn_leave_in_one_write() -> None:
    streaming = Streaming()
    streaming.stream.begin(streaming.client)
    streaming.emit_now("1 ")
    streaming.emit_now("2")
    assert not streaming.client.writes
    await asyncio.sleep(0)
    await streaming.emit(" 3", is_end=True)
    assert streaming.client.texts() == ["1 2", " 3"]
    assert len(streaming.client.writes) == 2 and streaming.client.is_done


@on_loop
async def test_wait_returns_false_after_silence_and_ping_is_written() -> None:
    streaming = Streaming()
    streaming.stream.begin(streaming.client)
    assert not await streaming.stream.wait(0.0)
    streaming.stream.ping()
    assert streaming.client.writes == [b": ping\n\n"]
    waiting = asyncio.create_task(streaming.stream.wait(0.01))
    await asyncio.sleep(0)
    await streaming.emit("1")
    assert await waiting and not streaming.stream.is_over
    streaming.client.lags = True
    streaming.stream.ping()
    assert len(streaming.client.writes) == 2  # a client that lags needs no ping


@on_loop
async def test_lagging_client_gets_the_held_text_in_one_piece() -> None:
    streaming = Streaming()
    client = streaming.client
    streaming.stream.begin(client)
    client.lags = True
    for text in ("one. ", "two", ". three"):
        await streaming.emit(text)
    assert not client.writes
    client.catch_up()
    await streaming.emit(" four")
    assert client.texts() == ["one. two. three", " four"]


@on_loop
async def test_end_waits_for_a_lagging_client() -> None:
    streaming = Streaming()
    client = streaming.client
    streaming.stream.begin(client)
    client.lags = True
    await streaming.emit("one. two")
    await streaming.emit(" three", is_end=True)
    assert not client.writes and not streaming.stream.is_over
    client.catch_up()
    assert client.texts() == ["one. two three"] and client.is_done and streaming.stream.is_over


@on_loop
async def test_client_that_never_reads_is_given_up() -> None:
    streaming = Streaming()
    streaming.stream.begin(streaming.client)
    streaming.client.lags = True
    num_bytes = 0
    while not streaming.stream.is_over:
        await streaming.emit("words " * 20)
        num_bytes += 120
        assert num_bytes <= MAX_HELD_BYTES
    assert streaming.stream.is_given_up and streaming.stream.is_gone
    assert streaming.service.cancelled and not streaming.client.writes


@pytest.mark.parametrize("lags", [False, True])
@on_loop
async def test_failure_comes_after_the_text(lags: bool) -> None:
    streaming = Streaming()
    client = streaming.client
    streaming.stream.begin(client)
    await streaming.emit("one ")
    client.lags = lags
    streaming.emit_now("two")
    streaming.service.fail(streaming.service.requests[0].request_id, WorkerLost("twice"))
    await asyncio.sleep(0)
    if lags:
        client.catch_up()
    assert "".join(client.texts()) == "one two" and client.is_done
    assert client.chunks()[-1]["error"]["code"] == "worker_crash"


@on_loop
async def test_client_that_left_before_the_headers_cancels_the_answer() -> None:
    streaming = Streaming()
    streaming.client.is_gone = True
    streaming.stream.begin(streaming.client)
    assert streaming.stream.is_gone and streaming.service.cancelled


@on_loop
async def test_stream_that_cannot_be_written_does_not_harm_other_streams(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, good = Streaming(), Streaming()

    def break_down(data: bytes) -> None:
        raise ZeroDivisionError("a bug")

    broken.client.write = break_down  # type: ignore[method-assign]
    for streaming in (broken, good):
        streaming.stream.begin(streaming.client)
        streaming.emit_now("1")
    await asyncio.sleep(0)
    assert broken.stream.is_over and broken.service.cancelled
    assert good.client.texts() == ["1"] and not good.stream.is_over
    assert "a bug" in caplog.text


@on_loop
async def test_stream_that_cannot_be_written_to_a_client_that_lagged_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(self: ChatFormat, choice: AnswerChoice) -> bytes:
        raise ZeroDivisionError("a bug")

    streaming = Streaming(is_chat=True)
    streaming.stream.begin(streaming.client)
    streaming.client.lags = True
    streaming.emit_now("1", is_end=True)
    monkeypatch.setattr(ChatFormat, "last", break_down)
    streaming.client.catch_up()
    assert streaming.stream.is_over and streaming.stream.is_gone
    assert "a bug" in caplog.text


@on_loop
async def test_long_echoes_are_written_choice_by_choice() -> None:
    prompt = Prompt("a" * (MAX_TURN_BYTES + 1), TokenIds.of((5, 6)))
    streaming = Streaming(prompts=(prompt, prompt, prompt), has_echo=True)
    client = streaming.client
    for choice in range(3):
        streaming.emit_now("1", choice=choice, is_end=True)
    streaming.stream.begin(client)
    for num_choices in (1, 2):
        assert len(client.texts()) == 2 * num_choices and not client.is_done
        await asyncio.sleep(0)
    client.lags = True  # the remaining choices wait for the client
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    num_texts = len(client.texts())
    client.catch_up()
    await asyncio.sleep(0)
    assert num_texts <= len(client.texts()) == 6 and client.is_done


LETTER = "\u00e9"
HALF, OTHER_HALF = calls.ids(LETTER)


async def begun(**fields: Any) -> Streaming:
    streaming = Streaming(**fields)
    streaming.stream.begin(streaming.client)
    assert not streaming.client.writes
    return streaming


async def emit_id(
    streaming: Streaming, token_id: int, *, choice: int = 0, end: FinishReason | None = None
) -> None:
    streaming.emit_ids_now([token_id], choice=choice, end=end)
    await asyncio.sleep(0)


def shown(streaming: Streaming) -> list[tuple[str, str | None]]:
    """Return the text and the finish reason of each chunk of a completion."""
    choices = [choice for chunk in streaming.client.chunks() for choice in chunk["choices"]]
    return [(choice["text"], choice["finish_reason"]) for choice in choices]


@on_loop
async def test_first_token_of_each_choice_is_shown() -> None:
    streaming = await begun(num_choices=2)
    for token_id in (HALF, OTHER_HALF):
        for choice in (0, 1):
            await emit_id(streaming, token_id, choice=choice)
    choices = [chunk["choices"][0] for chunk in streaming.client.chunks()]
    expected = [(0, ""), (1, ""), (0, LETTER), (1, LETTER)]
    assert [(choice["index"], choice["text"]) for choice in choices] == expected


@on_loop
async def test_lagging_client_gets_the_empty_chunk_once() -> None:
    streaming = await begun()
    streaming.client.lags = True
    await emit_id(streaming, HALF)
    streaming.client.catch_up()
    assert shown(streaming) == [("", None)], "there is no whole character yet"
    await emit_id(streaming, OTHER_HALF)
    streaming.client.lags = True
    for token_id in (HALF, OTHER_HALF):
        await emit_id(streaming, token_id, end=FinishReason.LENGTH if token_id == OTHER_HALF else None)
    streaming.client.catch_up()
    assert "".join(streaming.client.texts()) == 2 * LETTER
    assert [text for text, _ in shown(streaming)].count("") == 2, "the first and the last"


@on_loop
async def test_answer_without_text_is_its_end_alone() -> None:
    streaming = await begun()
    (end,) = calls.ids("<|end|>")
    await emit_id(streaming, end, end=FinishReason.STOP)
    assert shown(streaming) == [("", "stop")] and streaming.client.is_done


@on_loop
async def test_echoed_prompt_replaces_the_empty_chunk() -> None:
    streaming = await begun(has_echo=True)
    await emit_id(streaming, HALF)
    assert shown(streaming) == [(calls.PROMPT.text, None)]
    await emit_id(streaming, OTHER_HALF)
    assert shown(streaming)[1:] == [(LETTER, None)]


# Answers that are kept until their end.

TOKENS = st.integers(0, 2**31 - 1)
VALUES = st.floats(max_value=0.0, allow_nan=False)
ENTRIES = st.lists(
    st.builds(
        TokenLogprobs,
        token_id=TOKENS,
        logprob=VALUES,
        rank=st.integers(1, 2**31 - 1),
        top=st.lists(st.tuples(TOKENS, VALUES), max_size=20).map(tuple),
    )
)


@given(batches=st.lists(ENTRIES, max_size=4), first=st.integers(-9, 9), end=st.integers(-9, 9))
def test_packed_logprobs_equal_the_entries(batches: list[list[TokenLogprobs]], first: int, end: int) -> None:
    packed, plain = PackedLogprobs(), [entry for batch in batches for entry in batch]
    with patch.object(answer_stream, "BLOCK_TOKENS", 2):
        for batch in batches:
            packed.extend(batch)
        assert list(packed) == plain
        assert packed[first:end] == plain[first:end]
        if plain:
            assert packed[-1] == plain[-1]


@on_loop
async def test_answer_with_the_most_logprobs_fits_the_bytes_of_kept_answers() -> None:
    config, num_tokens = GatewayConfig(model="tiny", routers=()), 1000
    top = tuple((index, -1.0) for index in range(20))
    entry = TokenLogprobs(token_id=5, logprob=-1.0, rank=1, top=top)
    service = ScriptedService()
    answer = calls.answer(service, sampling={"logprobs": 20})
    answers = Limiter(Metrics(), config).answers
    charge = answers.charge("acme", Quotas())
    collector = AnswerCollector(answer, charge)
    answer.start(collector)
    name = service.requests[0].request_id
    for index in range(num_tokens):
        end = FinishReason.LENGTH if index == num_tokens - 1 else None
        service.emit(name, [TokenEvent(name, 0, index, 5, end, logprobs=entry)])
    (delta,) = await collector.wait()
    assert delta.token_ids == [5] * num_tokens and list(delta.logprobs) == [entry] * num_tokens
    assert charge.amount >= num_tokens * 21 * 12
    charge.add(charge.amount * (config.max_answer_entries // 21 // num_tokens))


@on_loop
async def test_answer_above_the_quota_of_kept_bytes_is_refused_and_releases_its_bytes() -> None:
    service = ScriptedService()
    answer = calls.answer(service)
    charge = Limiter(Metrics(), GatewaySettings()).answers.charge("acme", Quotas(max_answer_bytes=100))
    collector = AnswerCollector(answer, charge)
    answer.start(collector)
    (request,) = service.requests
    service.emit(request.request_id, events(request, calls.ids("1 2 " * 100), end=None))
    with pytest.raises(Refused):
        await collector.wait()
    assert charge.amount == 0 and service.cancelled == [request.request_id]


# Streams that are resumed.

TEXTS = (
    "One. Two two two! Three; then caf\u00e9 \U0001f600\U0001f680 and so on. Four?\nFive. Six. Seven sevens.",
    "\U0001f680\U0001f680. A b c. D e f! <stop inside> no end. More of it. And more of that. Done",
)
POINT = ResumePoint(b"a" * 16, b"d" * 16, 7, 1_700_000_000, 2_000_000_000, False, (DeliveredChoice(),) * 2)


class Script:
    """One stream of two choices; a seed decides the batches of tokens and when the client lags."""

    def __init__(self, random: Random, point: ResumePoint = POINT, **fields: Any) -> None:
        self.points: list[ResumePoint] = []
        self._random = random
        self._service = ScriptedService()
        call = calls.call(num_choices=2, is_streamed=True, is_resumable=True, resumed=point, **fields)
        self._answer = Answer(call, self._service, calls.TOKENIZER)
        form = answer_format(self._answer, point.created_s)
        progress = StreamProgress(point, form, self._seal)
        self.stream = AnswerStream(self._answer, form, SERVER_SENT_EVENTS, progress)
        self._client = calls.Client()

    def _seal(self, point: ResumePoint) -> bytes:
        self.points.append(msgspec.msgpack.decode(msgspec.msgpack.encode(point), type=ResumePoint))
        return b"%d" % (len(self.points) - 1)

    async def play(self, texts: tuple[str, ...] = TEXTS) -> list[Event]:
        """Return the events that the client has read at the end."""
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
    [{}, {"sampling": {"stop": ("<stop>", "of that")}}, {"returns_token_ids": True}, {"has_usage": True}],
    ids=["plain", "stops", "ids", "usage"],
)
@pytest.mark.parametrize("seed", range(6))
@on_loop
async def test_stream_resumed_after_any_event_has_the_rest(
    is_chat: bool, fields: dict[str, Any], seed: int
) -> None:
    random = Random(seed)
    fields = {**fields, "is_chat": is_chat}
    first = Script(random, **fields)
    told = await first.play()
    whole = joined(told)
    assert whole["is_done"] and len(whole["choices"]) == 2
    for place, event in enumerate(told):
        if event.id:
            again = Script(random, first.points[int(event.id)], **fields)
            assert joined([*told[: place + 1], *await again.play()]) == whole, f"after event {place}"


@on_loop
async def test_different_tokens_are_an_integrity_error() -> None:
    first = Script(Random(1))
    told = await first.play()
    late = max(int(event.id) for event in told[: len(told) // 2] if event.id)
    for changed in ("Two", "caf"):  # before the point
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
