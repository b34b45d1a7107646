import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.cluster.model_directory import resolve_model
from baton.config.gateway import TextSettings
from baton.errors import InvalidRequest, Overloaded
from baton.gateway.api.body_reader import (
    MAX_WAITING,
    SMALL_BYTES,
    BodyReader,
    HelperQueue,
    PublicPrefixes,
    ServedModels,
)
from baton.gateway.api.call import AskedCall
from baton.gateway.api.errors import ApiError
from baton.gateway.api.prompt_reader import (
    BodyKind,
    PromptReader,
    ReadPolicy,
    TextAnswer,
)
from baton.gateway.text.chat_template import ChatTemplate
from baton.gateway.text.tokenizer import Tokenizer
from baton.request import TokenIds
from tests.event_loop import on_loop
from tests.node_peers import a_worker
from tests.scripted_service import ScriptedService
from tests.unit.gateway.calls import TENANT, ids, served_model
from tests.unit.gateway.frontend_peers import gateway

DIRECTORY = resolve_model("tiny")
TOKENIZER = Tokenizer.from_directory(DIRECTORY)
LONG = "the sun " * SMALL_BYTES
POLICY = ReadPolicy(model="tiny", may_use=True, max_model_len=100_000)


def body_reader() -> BodyReader:
    return BodyReader(PromptReader.from_directory(DIRECTORY))


@asynccontextmanager
async def helped_reader() -> AsyncIterator[BodyReader]:
    """A reader with real helper processes, which are gone afterwards."""
    work = BodyReader.from_directory(DIRECTORY)
    try:
        yield work
    finally:
        await work.close()


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def untimed(read: AskedCall | TextAnswer) -> AskedCall | TextAnswer:
    return msgspec.structs.replace(read, tokenised_s=0.0) if isinstance(read, AskedCall) else read


READ: list[tuple[BodyKind, bytes]] = [
    ("chat", body(messages=[{"role": "user", "content": LONG}], n=2, stop=["x"], seed=-3)),
    ("either", body(messages=[{"role": "user", "content": LONG}], unknown=1)),
    ("completion", body(prompt=[LONG, "short"], echo=True, logit_bias={"5": 1.5})),
    ("either", body(prompt=[[7] * SMALL_BYTES, [8, 9]], max_tokens=3)),
    ("detokenize", body(tokens=TOKENIZER.encode(LONG))),
    ("tokenize", body(prompt=LONG)),
]
REFUSED = [
    (body(prompt="a", max_tokens="x" * SMALL_BYTES), "max_tokens", 400),
    (body(prompt=LONG, model="other"), "does not exist", 404),
    (body(prompt=[7] * 100_000), "100000 tokens > 99999 maximum", 400),
    (body(prompt=[10**8, *[7] * SMALL_BYTES]), "token id 100000000 is outside the vocabulary of", 400),
    (b'{"prompt": "' + b"a" * SMALL_BYTES, "not valid JSON", 400),
    (body(prompt="a" * 2_000_000), "2000000 characters cannot fit", 400),
    (body(prompt=[7] * SMALL_BYTES, vllm_xargs={"a": 10**30}), "vllm_xargs", 400),  # no message carries it
    (body(prompt=[7] * SMALL_BYTES, vllm_xargs={"a": [10**30]}), "vllm_xargs", 400),
]


@on_loop
async def test_helpers_read_and_refuse_the_same_as_the_event_loop() -> None:
    here = body_reader()
    async with helped_reader() as work:
        for kind, data in READ:
            expected = await here.read(kind, data, POLICY)
            assert untimed(await work.read(kind, data, POLICY)) == untimed(expected), data[:80]
            if kind == "detokenize":
                assert isinstance(expected, TextAnswer) and json.loads(expected.json) == {"prompt": LONG}
        for data, message, status in REFUSED:
            with pytest.raises(ApiError, match=message) as refused:
                await work.read("completion", data, POLICY)
            assert refused.value.status == status


@on_loop
async def test_tokens_of_a_chat_become_the_text_of_its_prompt() -> None:
    reader = body_reader()
    chat = await reader.read("tokenize", body(messages=[{"role": "user", "content": "7+5="}]), POLICY)
    assert isinstance(chat, TextAnswer)
    token_ids = json.loads(chat.json)["tokens"]
    text = await reader.read("detokenize", body(tokens=token_ids), POLICY)
    assert isinstance(text, TextAnswer)
    assert json.loads(text.json) == {"prompt": "<|user|>7+5=<|end|><|assistant|>"}


def children() -> set[int]:
    found = (path.read_text().split() for path in Path("/proc/self/task").glob("*/children"))
    return {int(pid) for pids in found for pid in pids}


@on_loop
async def test_helper_that_died_is_replaced() -> None:
    async with helped_reader() as work:
        data = body(prompt=LONG)
        expected = await work.read("completion", data, POLICY)
        before = children()
        await work.start()
        assert before <= children()
        for pid in children():
            if b"baton.gateway.api.body_reader" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        assert untimed(await work.read("completion", data, POLICY)) == untimed(expected)


@on_loop
async def test_body_at_which_every_helper_dies_is_refused() -> None:
    work = BodyReader(PromptReader.from_directory(DIRECTORY), (str(DIRECTORY), "no settings"))
    with pytest.raises(Overloaded, match="a text helper failed"):
        await work.read("completion", body(prompt=LONG), POLICY)
    await work.close()


@on_loop
async def test_small_chat_with_a_long_text_is_tokenised_by_a_helper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for each in messages %}{{ 'the sun ' * 500 }}{{ each.content }}{% endfor %}")
    here, encode = list[int](), Tokenizer.encode

    def recorded(tokenizer: Tokenizer, text: str, **options: bool) -> list[int]:
        here.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", recorded)  # of this process, which has the event loop
    work = BodyReader.from_directory(DIRECTORY, TextSettings(chat_template=str(template)))
    here_read = BodyReader(work.reader)
    kinds: tuple[BodyKind, ...] = ("chat", "tokenize")
    try:
        for kind, num_messages in product(kinds, (1, 2)):
            data = body(messages=[{"role": "user", "content": "a"}] * num_messages)
            here.clear()
            read = await work.read(kind, data, POLICY)
            assert here == [4001] * (num_messages == 1), "a text of 8002 characters is no work for the loop"
            assert untimed(read) == untimed(await here_read.read(kind, data, POLICY))
    finally:
        await work.close()


@on_loop
async def test_cancelled_caller_does_not_confuse_the_next() -> None:
    async with helped_reader() as work:
        await work.start()
        leaving = asyncio.create_task(work.read("completion", body(prompt=LONG), POLICY))
        await asyncio.sleep(0)
        leaving.cancel()
        for index in range(3):
            token_ids = [index] * SMALL_BYTES
            read = await work.read("completion", body(prompt=token_ids), POLICY)
            assert isinstance(read, AskedCall) and read.prompts[0].token_ids == TokenIds.of(token_ids)


@on_loop
async def test_model_without_a_tokenizer_takes_token_ids() -> None:
    work = BodyReader(PromptReader(None, None))
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        await work.read("completion", body(prompt="a"), POLICY)
    with pytest.raises(InvalidRequest, match="no chat template"):
        await BodyReader(PromptReader(TOKENIZER, None)).read(
            "chat", body(messages=[{"role": "user", "content": ""}]), POLICY
        )
    read = await work.read("completion", body(prompt=[5, 6]), POLICY)
    assert isinstance(read, AskedCall) and read.prompts


# Turns.


class Jobs:
    """A queue of jobs that end once the gate is open."""

    def __init__(self) -> None:
        self.queue: HelperQueue[str] = HelperQueue()
        self.gate = asyncio.Event()
        self.begun: list[str] = []

    def ask(self, tenant: str, name: str, num_bytes: int = 10) -> "asyncio.Task[str]":
        async def job() -> str:
            self.begun.append(name)
            await self.gate.wait()
            return name

        return asyncio.create_task(self.queue.run(tenant, num_bytes, job))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@on_loop
async def test_tenant_with_many_bodies_does_not_delay_a_tenant_with_one() -> None:
    jobs, names = Jobs(), [f"n{number}" for number in range(20)]
    asked = [jobs.ask("noisy", name, 1000) for name in names]
    await settle()
    asked.append(jobs.ask("quiet", "q"))
    await settle()
    jobs.gate.set()
    assert await asyncio.gather(*asked) == [*names, "q"]
    assert jobs.begun.index("q") <= 2 and len(jobs.begun) == 21
    jobs.begun.remove("q")
    assert jobs.begun == names


@pytest.mark.parametrize("hears", [True, False])  # of the cancellation, before its turn comes
@pytest.mark.parametrize("tenant_of_next", ["a", "b"])
@on_loop
async def test_cancelled_job_is_skipped(hears: bool, tenant_of_next: str) -> None:
    jobs = Jobs()
    first = jobs.ask("a", "first")
    await settle()
    gone, after = jobs.ask("a", "gone"), jobs.ask(tenant_of_next, "after")
    await settle()
    gone.cancel()
    if hears:
        await settle()
    jobs.gate.set()
    assert (await first, await after) == ("first", "after")
    await settle()
    assert gone.cancelled() and jobs.begun == ["first", "after"] and not jobs.queue.num_taken
    assert await jobs.ask("c", "later") == "later"


@on_loop
async def test_job_that_has_begun_ends_without_its_caller_before_the_next_one_begins() -> None:
    jobs = Jobs()
    gone = jobs.ask("a", "gone")
    await settle()
    gone.cancel()
    after = jobs.ask("a", "after")
    await settle()
    assert gone.cancelled() and jobs.begun == ["gone"]
    jobs.gate.set()
    assert await after == "after"
    await settle()
    assert not jobs.queue.num_taken


@on_loop
async def test_tenant_with_many_waiting_bodies_is_refused_before_others() -> None:
    jobs = Jobs()
    noisy = [jobs.ask("noisy", "n")]
    await settle()
    noisy += [jobs.ask("noisy", "n") for _ in range(2 * MAX_WAITING - 1)]
    await settle()
    num_refused = sum(task.done() and isinstance(task.exception(), Overloaded) for task in noisy)
    assert len(noisy) - num_refused == 1 + 4 * MAX_WAITING // 5 + 1
    quiet = jobs.ask("quiet", "q")
    await settle()
    assert not quiet.done()
    jobs.gate.set()
    await asyncio.gather(quiet, *noisy, return_exceptions=True)


# Public texts.

HOUSE = "You sort numbers. Answer with the numbers alone."


def num_public(token_ids: Sequence[int], *texts: str, reader: PromptReader | None = None) -> int:
    return asyncio.run(
        PublicPrefixes(reader or PromptReader.from_directory(DIRECTORY)).num_tokens(texts, token_ids)
    )


def chat(*contents: str) -> list[int]:
    messages = [
        {"role": role, "content": content}
        for role, content in zip(("system", "user"), contents, strict=False)
    ]
    return PromptReader.from_directory(DIRECTORY).encode_chat(messages, max_tokens=1000)


def test_prompt_shares_the_tokens_that_equal_a_public_text() -> None:
    other = HOUSE.replace("numbers alone", "secret word")
    shared = num_public(ids(other), HOUSE)
    assert 0 < shared < len(ids(HOUSE))
    assert HOUSE.startswith(TOKENIZER.decode(ids(other)[:shared]))


def test_longest_of_several_public_texts_counts() -> None:
    prompt = ids(HOUSE + " sort(1)=")
    assert num_public(prompt, "You", HOUSE, "nothing alike") == num_public(prompt, HOUSE)


def test_without_public_texts_or_tokenizer_no_token_is_shared() -> None:
    assert num_public(ids(HOUSE)) == 0
    assert num_public([1, 2, 3], HOUSE, reader=PromptReader(None, None)) == 0


@on_loop
async def test_missing_form_of_a_public_text_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        public = PublicPrefixes(PromptReader(TOKENIZER, None))
        for _ in range(2):
            assert await public.num_tokens([HOUSE], ids(HOUSE))
    assert len(caplog.records) == 1 and HOUSE not in str(vars(caplog.records[0]))


def test_public_text_that_the_template_fails_on_shares_the_tokens_of_its_prompt() -> None:
    reader = PromptReader(TOKENIZER, ChatTemplate("{{ messages | no_such_filter }}", {}))
    assert num_public(ids(HOUSE), HOUSE, reader=reader) == len(ids(HOUSE))


def test_before_the_first_worker_clients_hear_when_to_retry() -> None:
    with pytest.raises(ApiError, match="^no worker has joined yet") as refused:
        served_model(gateway().frontend).read_policy(TENANT).check_length(1)
    headers = dict(refused.value.headers())
    assert (refused.value.status, headers[b"retry-after"], headers[b"x-should-retry"]) == (503, b"2", b"true")


def test_without_workers_the_last_known_context_length_holds() -> None:
    made = gateway("d0")
    model = served_model(made.frontend)
    length = model.read_policy(TENANT).longest()
    made.list_members()
    assert not made.frontend.workers
    model.read_policy(TENANT).check_length(length - 1)
    with pytest.raises(ApiError, match="one of them for the answer"):
        model.read_policy(TENANT).check_length(length)
    with pytest.raises(ApiError, match="the prompt is empty") as refused:
        model.read_policy(TENANT).check_length(0)
    assert (refused.value.status, refused.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"model": "b", "prompt": "x"}', "b"),
        (b'{"prompt": "x"}', "a"),
        (b'{"model": null}', "a"),
        (b'{"model": "c"}', "a"),
        (b'{"model": 5}', "a"),
        (b'{"model": {"model": "b"}}', "a"),
        (b'["b"]', "a"),
        (b"no json", "a"),
        (b"\xff\xfe", "a"),
    ],
)
def test_body_is_read_for_the_model_that_it_names_and_else_for_the_first(body: bytes, name: str) -> None:
    service = ScriptedService()
    models = ServedModels([served_model(service, name=each, key=each) for each in ("a", "b")])
    assert models.of_body(body).name == name


def test_served_model_has_its_own_workers_alone() -> None:
    service = ScriptedService()
    service.workers = [
        a_worker("d0", model="a", max_model_len=10),
        a_worker("d1", model="b", max_model_len=20),
    ]
    of_key = {key: served_model(service, key=key) for key in ("a", "b", "")}
    assert {key: model.view.max_model_len for key, model in of_key.items()} == {"a": 10, "b": 20, "": 10}
