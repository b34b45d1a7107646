"""Prompts with shared beginnings: questions about long documents, and conversations that grow."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from baton.bench.prefix_world import VOCAB_SIZE, Answer, World

DOCUMENT_TOKENS: Final = 1536
QUESTION_TOKENS: Final = 24
SYSTEM_TOKENS: Final = 1024  # that all conversations of a round begin with
TURN_TOKENS: Final = 32
ANSWER_TOKENS: Final = 8
NUM_AT_ONCE: Final = 2


class Told(NamedTuple):
    """Of one request: its time to first token, and its tokens, which must be the same whoever answers."""

    ttft_s: float
    token_ids: tuple[int, ...]


def tokens(random: Random, num_tokens: int) -> list[int]:
    return [random.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


async def questions(world: World, seed: int, num_documents: int = 2, num_questions: int = 6) -> list[Told]:
    """In turns about each document, NUM_AT_ONCE at a time; the first of each is as cold as any."""
    random = Random(seed)
    documents = [tokens(random, DOCUMENT_TOKENS) for _ in range(num_documents)]
    prompts = [
        [*document, *tokens(random, QUESTION_TOKENS)] for _ in range(num_questions) for document in documents
    ]
    seats = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(prompt: Sequence[int]) -> Told:
        async with seats:
            return _told(await (await world.ask(prompt, ANSWER_TOKENS)).end())

    return await asyncio.gather(*map(ask, prompts))


async def conversations(
    world: World, seed: int, num_conversations: int = 2, num_turns: int = 5
) -> list[Told]:
    """Each turn's prompt is all that was said before and a little more; conversations go on side by side."""
    random = Random(seed)
    system = tokens(random, SYSTEM_TOKENS)
    said = [[tokens(random, TURN_TOKENS) for _ in range(num_turns)] for _ in range(num_conversations)]

    async def converse(turns: Sequence[Sequence[int]]) -> list[Told]:
        history, told = list(system), list[Told]()
        for turn in turns:
            history += turn
            told.append(_told(await (await world.ask(history, ANSWER_TOKENS)).end()))
            history += told[-1].token_ids
        return told

    return [each for told in await asyncio.gather(*map(converse, said)) for each in told]


async def warm_up(world: World, seed: int) -> None:
    """Prompts of all lengths that come: workers have run, and the router has seen what they take."""
    random = Random(seed)
    for num_tokens in (24, 100, 400, 800, 1200, DOCUMENT_TOKENS):
        asked = [await world.ask(tokens(random, num_tokens), ANSWER_TOKENS) for _ in range(4)]
        for answer in asked:
            await answer.end()


def _told(answer: Answer) -> Told:
    return Told(answer.ttft_s, tuple(answer.token_ids))
