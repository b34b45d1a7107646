"""Calls as the gateway makes them, for tests that need no HTTP."""

from typing import Any

from baton.cluster.model_directory import resolve_model
from baton.gateway.answer import Answer
from baton.gateway.call import Call, Prompt
from baton.gateway.service import Service
from baton.gateway.tenants import Tenant
from baton.gateway.tokenizer import Tokenizer
from baton.request import SamplingParams

TOKENIZER = Tokenizer.from_directory(resolve_model("tiny"))
PROMPT = Prompt("sort(3 1 2)=", tuple(TOKENIZER.encode("sort(3 1 2)=")))
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
