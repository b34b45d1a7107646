"""Keys of a request's body, seen by a client: each changes the answer, or is refused with 400."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.scripted_service import ScriptedService, answer_at_once
from tests.served_gateway import ServedGateway
from tests.tool_model import TEMPLATE, prompt_of, tool_model

Served = ServedGateway[ScriptedService]
THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}quietly {% endif %}{{ reasoning_effort }}"
)
MESSAGES = [{"role": "user", "content": "sort(3 1 2)="}]
BEGIN = 0  # the token that this tokenizer writes before a text
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = Path(tool_model(tmp_path_factory.mktemp("model")))
    (directory / "chat_template.jinja").write_text(TEMPLATE + THINKING)
    (directory / "generation_config.json").write_text('{"temperature": 0.25, "max_new_tokens": 50}')
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    begin = tokenizer.id_to_token(BEGIN)
    tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, BEGIN)])
    tokenizer.save(str(directory / "tokenizer.json"))
    with ServedGateway(lambda: ScriptedService(answer_at_once([300])), model=str(directory)) as gateway:
        yield gateway


def test_template_variables_change_the_prompt(served: Served) -> None:
    plain = prompt_of(served, CHAT, messages=MESSAGES)
    quiet = prompt_of(served, CHAT, messages=MESSAGES, chat_template_kwargs={"enable_thinking": False})
    high = prompt_of(served, CHAT, messages=MESSAGES, reasoning_effort="high")
    assert plain != quiet != high != plain


@pytest.mark.parametrize(
    ("path", "prompt", "default"),
    [(COMPLETIONS, {"prompt": "sort(3 1 2)="}, True), (CHAT, {"messages": MESSAGES}, False)],
)
def test_add_special_tokens_is_obeyed(
    served: Served, path: str, prompt: dict[str, Any], default: bool
) -> None:
    bare = prompt_of(served, path, **prompt, add_special_tokens=False)
    begun = prompt_of(served, path, **prompt, add_special_tokens=True)
    assert begun == [BEGIN, *bare] and bare[0] != BEGIN
    assert prompt_of(served, path, **prompt) == (begun if default else bare)
    assert served.ask("/tokenize", **prompt, add_special_tokens=True)["tokens"] == begun


def test_add_special_tokens_is_refused_for_token_ids(served: Served) -> None:
    assert (
        "add_special_tokens" in served.refused(COMPLETIONS, prompt=[5, 6], add_special_tokens=True)["message"]
    )


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize"])
def test_reserved_template_variable_is_refused(served: Served, name: str) -> None:
    assert name in served.refused(CHAT, messages=MESSAGES, chat_template_kwargs={name: "x"})["message"]


def test_unknown_template_variable_is_refused(served: Served) -> None:
    error = served.refused(CHAT, messages=MESSAGES, chat_template_kwargs={"thinking": True})
    assert "'thinking'" in error["message"]


def test_metadata_is_accepted(served: Served) -> None:
    assert served.ask(CHAT, messages=MESSAGES, user="me", metadata={"a": "b"}, store=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [5, 10**7, 6]},
        {"prompt": [[5], [6, 10**7]]},
        {"prompt": [10**7] + [5] * 3000},
        {"prompt": "a", "logit_bias": {str(10**7): 1}},
        {"prompt": "a", "stop_token_ids": [5, 10**7]},
    ],
)
def test_ids_outside_the_vocabulary_are_named(served: Served, fields: dict[str, Any]) -> None:
    before = len(served.service.requests)
    message = served.refused(COMPLETIONS, **fields)["message"]
    assert "token id 10000000 is outside the vocabulary of" in message
    assert len(served.service.requests) == before


@pytest.mark.parametrize("depth", [65, 300, 900, 980, 990, 1000, 1100, 5000, 100_000])
def test_deeply_nested_json_is_refused(served: Served, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": ' + nested + "}"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    served.refused(CHAT, messages=[message])
    for body in (
        '{"messages": [{"role": "user", "content": "a", "x": %s}]}',
        '{"messages": [{"role": "user", "content": "a"}], "metadata": %s}',
        '{"messages": [{"role": "user", "content": "a"}], "tools": %s}',
        '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinking": %s}}',
    ):
        assert httpx2.post(served.url + CHAT, content=body % nested).status_code == 400


def test_sampling_defaults_come_from_the_model(served: Served) -> None:
    prompt_of(served, CHAT, messages=MESSAGES)
    sampling = served.service.requests[-1].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.25, 50)
    prompt_of(served, CHAT, messages=MESSAGES, temperature=0.5, max_tokens=100)
    sampling = served.service.requests[-1].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 50)
