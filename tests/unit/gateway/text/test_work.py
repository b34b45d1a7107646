import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from baton.cluster.model_directory import resolve_model
from baton.errors import InvalidRequest, Overloaded
from baton.gateway.api.errors import ApiError
from baton.gateway.api.prompt_reader import MAX_CHARS_PER_TOKEN, Chat, Kind, ReadTerms
from baton.gateway.api.types import ChatBody, CompletionBody
from baton.gateway.text.chat_template import ChatTemplate
from baton.gateway.text.model_files import read_vocab_size
from baton.gateway.text.tokenizer import Tokenizer
from baton.gateway.text.work import MAX_WAITING, NUM_THREADS, SMALL_BYTES, HelperSpec, TextWork

DIRECTORY = resolve_model("tiny")
TOKENIZER = Tokenizer.from_directory(DIRECTORY)
VOCAB_SIZE = read_vocab_size(DIRECTORY)
LONG = "the sun " * SMALL_BYTES
TERMS = ReadTerms(model="tiny", may_use=True, max_model_len=100_000)

ResultT = TypeVar("ResultT")


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


def with_helpers(act: Callable[[TextWork], Awaitable[ResultT]]) -> ResultT:
    """What `act` returns of a TextWork that has real helper processes, which are gone afterwards."""

    async def run() -> ResultT:
        work = TextWork(
            TOKENIZER,
            ChatTemplate.from_directory(DIRECTORY),
            vocab_size=VOCAB_SIZE,
            helpers=HelperSpec(directory=DIRECTORY),
        )
        try:
            return await act(work)
        finally:
            await work.close()

    return asyncio.run(run())


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_long_text_of_the_operator_is_worked_on_by_threads(template: Watched) -> None:
    text = TextWork(TOKENIZER, template)
    for content in ("short", LONG):
        rendered, token_ids = asyncio.run(
            text.encode_chat(Chat([{"role": "user", "content": content}]), max_tokens=100_000)
        )
        assert rendered == content and token_ids == TOKENIZER.encode(content)
    asyncio.run(text.close())
    assert template.threads[0] == "MainThread" and template.threads[1].startswith("text")


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("chat", body(messages=[{"role": "user", "content": LONG}], n=2, stop=["x"], seed=-3)),
        ("either", body(messages=[{"role": "user", "content": LONG}], unknown=1)),
        ("completion", body(prompt=[LONG, "short"], echo=True, logit_bias={"5": 1.5})),
        ("either", body(prompt=[[7] * SMALL_BYTES, [8, 9]], max_tokens=3)),
    ],
)
def test_helper_reads_what_is_read_here(kind: Kind, data: bytes) -> None:
    here = TextWork(TOKENIZER, ChatTemplate.from_directory(DIRECTORY), vocab_size=VOCAB_SIZE)
    expected = asyncio.run(here.read_call(kind, data, TERMS))
    read = with_helpers(lambda work: work.read_call(kind, data, TERMS))
    assert read.body == expected.body and isinstance(read.body, ChatBody | CompletionBody)
    assert [each.token_ids for each in read.prompts] == [each.token_ids for each in expected.prompts]
    assert (read.has_tools, read.num_unknown) == (expected.has_tools, expected.num_unknown)
    if isinstance(read.body, CompletionBody) and read.body.echo:
        assert read.prompts == expected.prompts


def test_helper_detokenizes_and_tokenizes() -> None:
    async def both(work: TextWork) -> list[bytes]:
        token_ids = TOKENIZER.encode(LONG)
        told = [await work.read_text("detokenize", body(tokens=token_ids), TERMS)]
        told.append(await work.read_text("tokenize", body(prompt=LONG), TERMS))
        return [each.body for each in told]

    text, tokens = map(json.loads, with_helpers(both))
    assert text == {"prompt": LONG} and tokens["tokens"] == TOKENIZER.encode(LONG)


@pytest.mark.parametrize(
    ("data", "message", "status"),
    [
        (body(prompt="a", max_tokens="x" * SMALL_BYTES), "max_tokens", 400),
        (body(prompt=LONG, model="other"), "does not exist", 404),
        (body(prompt=[7] * 100_000), "the model takes 100000", 400),
        (body(prompt=[10**8, *[7] * SMALL_BYTES]), "token id 100000000 is outside the vocabulary of", 400),
        (b'{"prompt": "' + b"a" * SMALL_BYTES, "not valid JSON", 400),
    ],
)
def test_helper_refuses_what_is_refused_here(data: bytes, message: str, status: int) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        with_helpers(lambda work: work.read_call("completion", data, TERMS))
    assert refused.value.status == status


def test_helper_that_died_is_replaced() -> None:
    async def scenario(work: TextWork) -> None:
        data = body(prompt=LONG)
        expected = (await work.read_call("completion", data, TERMS)).prompts
        for lane in (work._pool._express, work._pool._any):  # type: ignore[union-attr]
            process = await lane.helper.start()
            process.kill()
            await process.wait()
        assert (await work.read_call("completion", data, TERMS)).prompts == expected

    with_helpers(scenario)


def test_caller_that_leaves_does_not_confuse_the_next() -> None:
    async def scenario(work: TextWork) -> None:
        await work.start()
        leaving = asyncio.create_task(work.read_call("completion", body(prompt=LONG), TERMS))
        await asyncio.sleep(0)
        leaving.cancel()
        for index in range(3):
            token_ids = [index] * SMALL_BYTES
            read = await work.read_call("completion", body(prompt=token_ids), TERMS)
            assert read.prompts[0].token_ids == tuple(token_ids)

    with_helpers(scenario)


def test_what_cannot_fit_is_not_even_tokenised(template: Watched) -> None:
    text = TextWork(TOKENIZER, template)
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


def test_jobs_that_wait_are_bounded(template: Watched) -> None:
    async def crowd() -> None:
        text = TextWork(TOKENIZER, template)
        jobs = [text.encode(LONG, max_tokens=100_000) for _ in range(NUM_THREADS + MAX_WAITING + 1)]
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert sum(isinstance(result, Overloaded) for result in found) == 1
        await text.close()

    asyncio.run(crowd())
