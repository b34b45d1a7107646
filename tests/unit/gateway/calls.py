"""Calls as the gateway makes them, and a client, for tests that need no HTTP."""

from collections.abc import Callable
from typing import Any

import httpx2
from fastapi import FastAPI

from baton.bench.serve.figures import events_of
from baton.cluster.model_directory import resolve_model
from baton.errors import BatonError
from baton.gateway.api.answer import Answer, AnswerChoice
from baton.gateway.api.body_reader import BodyReader, ServedModel
from baton.gateway.api.call import Call, Prompt
from baton.gateway.api.errors import as_api_error
from baton.gateway.api.prompt_reader import PromptReader
from baton.gateway.streams.request_stream import Service
from baton.gateway.tenants.tenants import Tenant
from baton.gateway.text.answer_reader import Delta
from baton.gateway.text.tokenizer import Tokenizer
from baton.request import SamplingParams, TokenIds

TOKENIZER = Tokenizer.from_directory(resolve_model("tiny"))
PROMPT = Prompt("sort(3 1 2)=", TokenIds.of(TOKENIZER.encode("sort(3 1 2)=")))
TENANT = Tenant(name="acme", cache_salt=b"s" * 16)


def call(*, sampling: dict[str, Any] | None = None, **fields: Any) -> Call:
    return Call(
        **{
            "model": "tiny",
            "prompts": (PROMPT,),
            "sampling": SamplingParams(seed=7, max_tokens=100, **(sampling or {})),
            "num_choices": 1,
            "tenant": TENANT,
            **fields,
        }
    )


def answer(service: Service, *, sampling: dict[str, Any] | None = None, **fields: Any) -> Answer:
    return Answer(call(sampling=sampling, **fields), service, TOKENIZER)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def served_model(service: Service, *, name: str = "tiny", **fields: Any) -> ServedModel:
    """Return a model, without a tokenizer unless `bodies` has one."""
    given = {"bodies": BodyReader(PromptReader(None, None)), **fields}
    return ServedModel(name=name, service=service, created_s=0, **given)


async def ask(app: FastAPI, path: str, method: str = "GET") -> tuple[int, Any]:
    """Return the status and the decoded body of an answer, or the status and the code of the error."""
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
        try:
            answer = await client.request(method, path)
        except Exception as error:  # the middleware answers with this status
            refused = as_api_error(error)
            return refused.status, refused.code
        return answer.status_code, answer.json() if answer.content else None


class Heard:
    """An AnswerListener that remembers."""

    def __init__(self) -> None:
        self.deltas: list[tuple[int, Delta]] = []  # each with the index of its choice
        self.ends: list[str] = []
        self.error: BatonError | None = None

    def advanced(self, choice: AnswerChoice, delta: Delta) -> None:
        self.deltas.append((choice.index, delta))

    def finished(self) -> None:
        self.ends.append("end")

    def failed(self, error: BatonError) -> None:
        assert self.error is None
        self.error = error

    def joined(self, index: int = 0) -> Delta:
        """Return the deltas of a choice as one."""
        return Delta.joined([delta for of, delta in self.deltas if of == index])

    def text(self, index: int = 0) -> str:
        return self.joined(index).text


class Client:
    """A ResponseWriter that keeps its writes for the test."""

    def __init__(self) -> None:
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.is_gone = False
        self.lags = False
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def catch_up(self) -> None:
        self.lags = False
        assert self.on_writable is not None
        self.on_writable()

    def chunks(self) -> list[dict[str, Any]]:
        events = events_of([(0.0, each) for each in self.writes], may_be_cut=True)
        return [event.content for event in events if event.content is not None]

    def texts(self) -> list[str]:
        choices = [chunk["choices"][0] for chunk in self.chunks() if chunk.get("choices")]
        return [choice["text"] for choice in choices if choice["text"]]

    @property
    def is_done(self) -> bool:
        return bool(self.writes) and self.writes[-1].endswith(b"data: [DONE]\n\n")
