"""A stream whose first tokens show no text yet: that they are here is shown all the same, and once."""

import asyncio
from typing import Any

from baton.request import FinishReason
from tests.unit.gateway import calls
from tests.unit.gateway.streaming import Streaming, run

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
    """Of each chunk of a completion its text and why it is the last, if it is."""
    choices = [choice for chunk in streaming.client.chunks() for choice in chunk["choices"]]
    return [(choice["text"], choice["finish_reason"]) for choice in choices]


def test_half_a_character_is_an_empty_chunk_at_once_and_only_once() -> None:
    async def scenario() -> None:
        streaming = await begun()
        await emit_id(streaming, HALF)
        assert shown(streaming) == [("", None)]
        await emit_id(streaming, OTHER_HALF)
        await emit_id(streaming, HALF)
        assert shown(streaming) == [("", None), (LETTER, None)]
        await emit_id(streaming, OTHER_HALF, end=FinishReason.LENGTH)
        assert shown(streaming)[2:] == [(LETTER, None), ("", "length")]
        assert streaming.client.is_done

    run(scenario)


def test_what_came_before_the_headers_is_shown_with_them() -> None:
    async def scenario() -> None:
        streaming = Streaming()
        await emit_id(streaming, HALF)
        streaming.stream.begin(streaming.client)
        assert shown(streaming) == [("", None)]

    run(scenario)


def test_a_first_token_that_shows_text_needs_no_empty_chunk() -> None:
    async def scenario() -> None:
        streaming = await begun()
        await streaming.emit("1")
        await emit_id(streaming, HALF)
        assert shown(streaming) == [("1", None)]

    run(scenario)


def test_first_tokens_of_each_choice_are_shown() -> None:
    async def scenario() -> None:
        streaming = await begun(num_choices=2)
        for token_id in (HALF, OTHER_HALF):
            for choice in (0, 1):
                await emit_id(streaming, token_id, choice=choice)
        choices = [chunk["choices"][0] for chunk in streaming.client.chunks()]
        expected = [(0, ""), (1, ""), (0, LETTER), (1, LETTER)]
        assert [(choice["index"], choice["text"]) for choice in choices] == expected

    run(scenario)


def test_a_client_that_lags_is_shown_it_once_too() -> None:
    async def scenario() -> None:
        streaming = await begun()
        streaming.client.lags = True
        for token_id in (HALF, OTHER_HALF, HALF):
            await emit_id(streaming, token_id)
        streaming.client.catch_up()
        assert shown(streaming) == [("", None)], "there is no whole sentence yet"
        await emit_id(streaming, OTHER_HALF, end=FinishReason.LENGTH)
        assert "".join(streaming.client.texts()) == 2 * LETTER
        assert [text for text, _ in shown(streaming)].count("") == 2, "the first and the last"

    run(scenario)


def test_an_answer_without_any_text_is_its_end_alone() -> None:
    async def scenario() -> None:
        streaming = await begun()
        assert calls.TOKENIZER.eos_token_id is not None
        await emit_id(streaming, calls.TOKENIZER.eos_token_id, end=FinishReason.STOP)
        assert shown(streaming) == [("", "stop")] and streaming.client.is_done

    run(scenario)


def test_half_a_character_and_the_end_in_one_turn_are_no_empty_chunk() -> None:
    async def scenario() -> None:
        streaming = await begun()
        streaming.emit_ids_now([HALF])
        streaming.emit_ids_now([OTHER_HALF], end=FinishReason.LENGTH)
        await asyncio.sleep(0)
        assert shown(streaming) == [(LETTER, None), ("", "length")] and streaming.client.is_done

    run(scenario)


def test_the_prompts_chunk_shows_it_where_the_prompt_is_echoed() -> None:
    async def scenario() -> None:
        streaming = await begun(has_echo=True)
        await emit_id(streaming, HALF)
        assert shown(streaming) == [(calls.PROMPT.text, None)]
        await emit_id(streaming, OTHER_HALF)
        assert shown(streaming)[1:] == [(LETTER, None)]

    run(scenario)


def test_the_roles_chunk_shows_it_in_a_chat() -> None:
    async def scenario() -> None:
        streaming = await begun(is_chat=True)
        await emit_id(streaming, HALF)
        (chunk,) = streaming.client.chunks()
        assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        await emit_id(streaming, OTHER_HALF)
        assert streaming.client.chunks()[1]["choices"][0]["delta"] == {"content": LETTER}

    run(scenario)
