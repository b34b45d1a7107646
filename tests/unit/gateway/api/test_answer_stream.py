import asyncio

import pytest

from baton.errors import WorkerLost
from baton.gateway.api.answer_stream import CALM_SENTENCES, MAX_HELD_BYTES, MAX_TURN_BYTES, WriteCoalescer
from baton.gateway.api.call import Prompt
from tests.unit.gateway.streaming import Streaming, run


def test_nothing_is_written_before_the_headers() -> None:
    async def scenario() -> None:
        streaming = Streaming()
        assert not await streaming.stream.wait(0.0)
        await streaming.emit("1 ")
        await streaming.emit("2")
        assert await streaming.stream.wait(1.0)
        streaming.stream.begin(streaming.client)
        assert streaming.client.texts() == ["1 2"]

    run(scenario)


def test_a_turns_tokens_leave_in_one_write() -> None:
    async def scenario() -> None:
        streaming = Streaming()
        streaming.stream.begin(streaming.client)
        streaming.emit_now("1 ")
        streaming.emit_now("2")
        assert not streaming.client.writes
        await asyncio.sleep(0)
        await streaming.emit(" 3", is_end=True)
        assert streaming.client.texts() == ["1 2", " 3"]
        assert len(streaming.client.writes) == 2 and streaming.client.is_done

    run(scenario)


def test_the_end_wakes_the_one_who_waits() -> None:
    async def scenario() -> None:
        streaming = Streaming()
        streaming.stream.begin(streaming.client)
        waiting = asyncio.create_task(streaming.stream.wait(30.0))
        await streaming.emit("1", is_end=True)
        assert await waiting and streaming.stream.is_over

    run(scenario)


def test_silence_is_told_from_writing() -> None:
    async def scenario() -> None:
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
        assert len(streaming.client.writes) == 2  # who lags needs no ping

    run(scenario)


def test_a_client_that_lags_gets_whole_sentences_until_it_is_calm() -> None:
    async def scenario() -> None:
        streaming = Streaming()
        client = streaming.client
        streaming.stream.begin(client)
        await streaming.emit("one ")
        client.lags = True
        for text in ("two. ", "three", ". fo", "ur"):
            await streaming.emit(text)
        assert client.texts() == ["one "]
        client.catch_up()
        assert client.texts() == ["one ", "two. three. "]
        await streaming.emit(" five")
        assert len(client.texts()) == 2
        await streaming.emit(". six. se")
        assert client.texts()[2:] == ["four five. six. "]
        await streaming.emit("ven")
        assert client.texts()[3:] == ["seven"]  # calm again
        await streaming.emit("!", is_end=True)
        assert "".join(client.texts()) == "one two. three. four five. six. seven!"
        assert CALM_SENTENCES == 4 and client.is_done

    run(scenario)


def test_a_lagging_clients_end_waits_for_it() -> None:
    async def scenario() -> None:
        streaming = Streaming()
        client = streaming.client
        streaming.stream.begin(client)
        client.lags = True
        await streaming.emit("one. two")
        await streaming.emit(" three", is_end=True)
        assert not client.writes and not streaming.stream.is_over
        client.catch_up()
        assert client.texts() == ["one. two three"] and client.is_done and streaming.stream.is_over

    run(scenario)


def test_text_without_sentences_goes_all_the_same() -> None:
    async def scenario() -> None:
        streaming = Streaming()
        streaming.stream.begin(streaming.client)
        streaming.client.lags = True
        await streaming.emit("word " * 200)
        streaming.client.catch_up()
        assert streaming.client.texts() == ["word " * 200]

    run(scenario)


def test_logprobs_are_never_held_for_a_sentence() -> None:
    async def scenario() -> None:
        streaming = Streaming(returns_token_ids=True)
        streaming.stream.begin(streaming.client)
        streaming.client.lags = True
        await streaming.emit("one two")
        streaming.client.catch_up()
        assert streaming.client.texts() == ["one two"]

    run(scenario)


def test_a_call_of_a_tool_is_never_held_for_a_sentence() -> None:
    async def scenario() -> None:
        streaming = Streaming(is_chat=True, tool_form="hermes")
        streaming.stream.begin(streaming.client)
        await streaming.emit("I look")
        streaming.client.lags = True
        await streaming.emit(' there<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
        streaming.client.catch_up()
        deltas = [chunk["choices"][0]["delta"] for chunk in streaming.client.chunks()]
        assert "".join(delta.get("content", "") for delta in deltas) == "I look there"
        (call,) = deltas[-1]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"x":1}'}

    run(scenario)


def test_a_client_that_never_reads_is_given_up() -> None:
    async def scenario() -> None:
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

    run(scenario)


@pytest.mark.parametrize("lags", [False, True])
def test_a_failure_comes_after_the_text_there_was(lags: bool) -> None:
    async def scenario() -> None:
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

    run(scenario)


def test_usage_comes_last_and_only_if_asked() -> None:
    async def scenario(has_usage: bool) -> None:
        streaming = Streaming(has_usage=has_usage)
        streaming.stream.begin(streaming.client)
        await streaming.emit("one", is_end=True)
        last = streaming.client.chunks()[-1]
        assert (last["choices"] == []) == has_usage == ("usage" in last)

    asyncio.run(scenario(True))
    asyncio.run(scenario(False))


def test_a_client_that_goes_before_the_headers_is_found() -> None:
    async def scenario() -> None:
        streaming = Streaming()
        streaming.client.is_gone = True
        streaming.stream.begin(streaming.client)
        assert streaming.stream.is_gone and streaming.service.cancelled

    run(scenario)


def test_choices_share_a_write() -> None:
    async def scenario() -> None:
        streaming = Streaming(num_choices=2)
        streaming.stream.begin(streaming.client)
        await streaming.emit("1")
        streaming.emit_now("2")
        streaming.emit_now("3", choice=1)
        await asyncio.sleep(0)
        assert len(streaming.client.writes) == 2
        assert [chunk["choices"][0]["index"] for chunk in streaming.client.chunks()] == [0, 0, 1]

    run(scenario)


def test_a_stream_that_cannot_be_written_leaves_the_others_of_its_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        turn = WriteCoalescer()
        broken, good = Streaming(turn), Streaming(turn)

        def break_down(data: bytes) -> None:
            raise ZeroDivisionError("a bug")

        broken.client.write = break_down  # type: ignore[method-assign]
        for streaming in (broken, good):
            streaming.stream.begin(streaming.client)
            streaming.emit_now("1")
        await asyncio.sleep(0)
        assert broken.stream.is_over and broken.service.cancelled
        assert good.client.texts() == ["1"] and not good.stream.is_over

    run(scenario)
    assert "a bug" in caplog.text


def test_long_echoes_are_written_choice_by_choice() -> None:
    async def scenario() -> None:
        prompt = Prompt("a" * (MAX_TURN_BYTES + 1), (5, 6))
        streaming = Streaming(prompts=(prompt, prompt, prompt), has_echo=True)
        client = streaming.client
        for choice in range(3):
            streaming.emit_now("1", choice=choice, is_end=True)
        streaming.stream.begin(client)
        for num_choices in (1, 2):
            assert len(client.texts()) == 2 * num_choices and not client.is_done
            await asyncio.sleep(0)
        client.lags = True  # what is left waits for the client
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        num_texts = len(client.texts())
        client.catch_up()
        await asyncio.sleep(0)
        assert num_texts <= len(client.texts()) == 6 and client.is_done

    run(scenario)
