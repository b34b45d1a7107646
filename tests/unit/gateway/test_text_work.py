import asyncio
import threading
from collections.abc import Iterator

import pytest

from baton.cluster.model_directory import resolve_model
from baton.errors import InvalidRequest, Overloaded
from baton.gateway.chat_template import ChatTemplate
from baton.gateway.text_turns import MAX_WAITING
from baton.gateway.text_work import MAX_CHARS_PER_TOKEN, NUM_THREADS, SHORT_CHARS, Chat, TextWork
from baton.gateway.tokenizer import Tokenizer

DIRECTORY = resolve_model("tiny")
TOKENIZER = Tokenizer.from_directory(DIRECTORY)
LONG = "the sun " * SHORT_CHARS


class Watched(ChatTemplate):
    """Remembers which thread rendered it."""

    threads: list[str]

    def render(self, *arguments: object, **settings: object) -> str:
        self.threads.append(threading.current_thread().name)
        return super().render(*arguments, **settings)  # type: ignore[arg-type]


@pytest.fixture
def template() -> Watched:
    template = Watched("{{ messages[0]['content'] }}", {})
    template.threads = []
    return template


@pytest.fixture
def text(template: Watched) -> Iterator[TextWork]:
    work = TextWork(TOKENIZER, template)
    yield work
    work.close()


def test_long_text_is_worked_on_by_other_threads(text: TextWork, template: Watched) -> None:
    for content in ("short", LONG):
        rendered, token_ids = asyncio.run(
            text.encode_chat(Chat([{"role": "user", "content": content}]), max_tokens=100_000)
        )
        assert rendered == content and token_ids == TOKENIZER.encode(content)
    assert template.threads[0] == "MainThread" and template.threads[1].startswith("text")


def test_long_token_ids_come_back_as_the_same_text(text: TextWork) -> None:
    assert asyncio.run(text.decode(TOKENIZER.encode(LONG))) == LONG


def test_what_cannot_fit_is_not_even_tokenised(text: TextWork) -> None:
    with pytest.raises(InvalidRequest, match="can't fit"):
        asyncio.run(text.encode("a" * (MAX_CHARS_PER_TOKEN * 10 + 1), max_tokens=10))
    with pytest.raises(InvalidRequest, match="can't fit"):
        asyncio.run(text.encode_chat(Chat([{"role": "user", "content": "a" * 1000}]), max_tokens=10))


def test_a_model_without_text(template: Watched) -> None:
    work = TextWork(None, template)
    assert not work.has_tokenizer
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        asyncio.run(work.encode("a", max_tokens=10))
    with pytest.raises(InvalidRequest, match="no chat template"):
        asyncio.run(TextWork(TOKENIZER, None).encode_chat(Chat([]), max_tokens=10))


def test_jobs_that_wait_are_bounded(text: TextWork) -> None:
    async def crowd() -> None:
        jobs = [text.encode(LONG, max_tokens=100_000) for _ in range(NUM_THREADS + MAX_WAITING + 1)]
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert sum(isinstance(result, Overloaded) for result in found) == 1

    asyncio.run(crowd())
