"""Keys and routes that vLLM has as well, seen by a client: each does what it does there."""

import html
import json
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from baton.request import FinishReason
from tests.e2e.conftest import Served as EngineServed
from tests.scripted_service import ScriptedService, answer_at_once, events
from tests.served_gateway import ServedGateway
from tests.tenant_clients import write_tenants
from tests.tool_model import TOKENIZER, prompt_of, writing

Served = ServedGateway[ScriptedService]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT: Final = "copy(sun moon star)="
MESSAGES: Final = [{"role": "user", "content": TEXT}]
SITE: Final = "https://chat.example"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_many_choices_are_answered(served: EngineServed, path: str) -> None:
    body: Any = {"messages": MESSAGES} if path == CHAT else {"prompt": TEXT}
    choices = served.ask(path, **body, n=128, max_tokens=2, temperature=1, seed=5)["choices"]
    assert [choice["index"] for choice in choices] == list(range(128))
    assert served.refused(path, **body, n=129)["param"] == "n"


def test_many_prompts_are_answered(served: EngineServed) -> None:
    choices = served.ask(COMPLETIONS, prompt=[TEXT] * 1024, max_tokens=1, temperature=0)["choices"]
    assert len(choices) == 1024 and {choice["text"] for choice in choices} == {"sun"}
    assert served.refused(COMPLETIONS, prompt=[TEXT] * 1025)["param"] == "prompt"
    too_many = {"prompt": [TEXT] * 1024, "n": 5}  # more choices than are ever open at once
    assert served.refused(COMPLETIONS, **too_many)["param"] == "n"


def test_prompt_is_truncated(scripted: Served) -> None:
    whole = prompt_of(scripted, COMPLETIONS, prompt=TEXT)
    assert prompt_of(scripted, COMPLETIONS, prompt=TEXT, truncate_prompt_tokens=3) == whole[-3:]
    right = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
    assert prompt_of(scripted, COMPLETIONS, prompt=TEXT, **right) == whole[:3]
    assert prompt_of(scripted, COMPLETIONS, prompt=whole, truncate_prompt_tokens=2) == whole[-2:]
    chat = prompt_of(scripted, CHAT, messages=MESSAGES)
    assert prompt_of(scripted, CHAT, messages=MESSAGES, truncate_prompt_tokens=4) == chat[-4:]
    long = whole * 1000
    kept = prompt_of(scripted, COMPLETIONS, prompt=long, truncate_prompt_tokens=-1, max_tokens=96)
    assert kept == long[-4000:]
    longer = "sun moon " * 10_000  # than the model's tokens can have characters
    kept = prompt_of(scripted, COMPLETIONS, prompt=longer, truncate_prompt_tokens=4)
    assert TOKENIZER.decode(kept) in longer
    messages = [{"role": "user", "content": longer}]
    assert len(prompt_of(scripted, CHAT, messages=messages, truncate_prompt_tokens=4)) == 4
    echoed = scripted.ask(COMPLETIONS, prompt=TEXT, truncate_prompt_tokens=2, echo=True)
    assert echoed["choices"][0]["text"].startswith(TOKENIZER.decode(whole[-2:]))
    for wrong in (
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": 5000},
        {"truncation_side": "left"},
    ):
        assert scripted.refused(COMPLETIONS, prompt=TEXT, **wrong)["param"] == next(iter(wrong))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_stop_string_is_shown_when_asked_for(scripted: Served, is_streamed: bool) -> None:
    scripted.service.play = writing("sun moon star")
    for shown, expected in ((None, "sun "), (False, "sun "), (True, "sun moo")):
        fields = {"prompt": TEXT, "stop": ["moo"], "include_stop_str_in_output": shown, "stream": is_streamed}
        answer = httpx2.post(f"{scripted.url}{COMPLETIONS}", json=fields)
        blocks = [block.removeprefix("data: ") for block in answer.text.split("\n\n") if block]
        chunks = [json.loads(block) for block in blocks if block != "[DONE]"]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert (text, chunks[-1]["choices"][0]["finish_reason"]) == (expected, "stop")
        assert chunks[-1]["choices"][0]["stop_reason"] == "moo"


def test_stop_token_is_shown_when_asked_for(scripted: Served) -> None:
    star = TOKENIZER.encode("star")[-1]
    script = [*TOKENIZER.encode("sun"), star]

    def play(service: ScriptedService, request: Any) -> None:
        service.emit(request.request_id, events(request, script, end=FinishReason.STOP))

    scripted.service.play = play
    bare = scripted.ask(COMPLETIONS, prompt=TEXT, stop_token_ids=[star])["choices"][0]
    shown = scripted.ask(COMPLETIONS, prompt=TEXT, stop_token_ids=[star], include_stop_str_in_output=True)
    assert bare["stop_reason"] == shown["choices"][0]["stop_reason"] == star
    assert shown["choices"][0]["text"] == bare["text"] + TOKENIZER.decode([star])


def test_final_message_is_continued(scripted: Served) -> None:
    scripted.service.play = answer_at_once([300])
    messages = [*MESSAGES, {"role": "assistant", "content": "sun moon "}]
    given = {"continue_final_message": True, "add_generation_prompt": False}
    prompt = TOKENIZER.decode(prompt_of(scripted, CHAT, messages=messages, **given))
    assert prompt.endswith("assistant: sun moon ")
    tokens = scripted.ask("/tokenize", messages=messages, **given)["tokens"]
    assert TOKENIZER.decode(tokens) == prompt
    for path in (CHAT, "/tokenize"):  # they add the generation prompt by default
        error = scripted.refused(path, messages=messages, continue_final_message=True)
        assert error["param"] == "continue_final_message"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert scripted.refused(CHAT, messages=called, **given)["param"] == "continue_final_message"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_tokens_are_named_by_their_ids(served: EngineServed, path: str) -> None:
    body: Any = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    if path == COMPLETIONS:
        body = {"prompt": TEXT, "logprobs": 2}
    answer = served.ask(path, **body, max_tokens=2, temperature=0, return_tokens_as_token_ids=True)
    logprobs = answer["choices"][0]["logprobs"]
    if path == CHAT:
        tokens = [each["token"] for entry in logprobs["content"] for each in (entry, *entry["top_logprobs"])]
    else:
        tokens = [*logprobs["tokens"], *(name for top in logprobs["top_logprobs"] for name in top)]
    assert tokens and all(token.startswith("token_id:") for token in tokens)
    assert f"token_id:{TOKENIZER.encode('sun')[-1]}" in tokens


def test_echo_of_special_tokens_is_as_long_as_its_offsets_say(served: EngineServed) -> None:
    ids = [0, *TOKENIZER.encode(TEXT)]
    choice = served.ask(COMPLETIONS, prompt=ids, echo=True, logprobs=0, max_tokens=1, temperature=0)[
        "choices"
    ][0]
    texts = choice["logprobs"]["tokens"]
    assert "".join(texts) == choice["text"]
    assert choice["logprobs"]["text_offset"] == [len("".join(texts[:at])) for at in range(len(texts))]


def test_message_without_content_and_calls_is_empty(scripted: Served) -> None:
    scripted.service.play = answer_at_once([300])
    empty = prompt_of(scripted, CHAT, messages=[*MESSAGES, {"role": "assistant", "content": ""}])
    without: dict[str, Any] = {"role": "assistant", "content": None}
    for message in (without, {**without, "tool_calls": []}, {**without, "tool_calls": None}):
        assert prompt_of(scripted, CHAT, messages=[*MESSAGES, message]) == empty
    assert scripted.ask(CHAT, messages=MESSAGES, top_logprobs=0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    ("kind", "is_taken"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("", True),
        ("text/plain", False),
        ("application/x-www-form-urlencoded", False),
    ],
)
def test_body_is_said_to_be_json(scripted: Served, path: str, kind: str, is_taken: bool) -> None:
    scripted.service.play = writing("One.")
    body = {"prompt": "a"} if path in (COMPLETIONS, "/tokenize") else {"messages": MESSAGES, "max_tokens": 5}
    body = {"input": "a"} if path == "/v1/responses" else body
    headers = {"content-type": kind} if kind else {}
    answer = httpx2.post(scripted.url + path, content=json.dumps(body), headers=headers)
    assert answer.status_code == (200 if is_taken else 400), answer.text
    assert is_taken or "Content-Type" in answer.text


@pytest.mark.parametrize("has_keys", [False, True])
def test_pages_of_allowed_sites_may_use_the_api(tmp_path: Path, has_keys: bool) -> None:
    settings: dict[str, Any] = {"allowed_origins": (SITE,)}
    if has_keys:
        settings["tenants_file"] = str(write_tenants(tmp_path))
    with ServedGateway(lambda: ScriptedService(answer_at_once([300])), **settings) as served:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        url = served.url + COMPLETIONS
        allowed = httpx2.options(url, headers={"origin": SITE, **asked})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == SITE
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        other = httpx2.options(url, headers={"origin": "https://evil.example", **asked})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        for is_streamed in (False, True):
            body = {"prompt": "a", "stream": is_streamed}
            headers = {"origin": SITE, "authorization": "Bearer k-zeta"}
            answer = httpx2.post(url, json=body, headers=headers)
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == SITE
            headers["origin"] = "https://evil.example"
            answer = httpx2.post(url, json=body, headers=headers)
            assert "access-control-allow-origin" not in answer.headers
            assert answer.status_code == (200 if has_keys else 403)


def test_every_site_may_be_allowed() -> None:
    with ServedGateway(lambda: ScriptedService(answer_at_once([300])), allowed_origins=("*",)) as served:
        answer = httpx2.post(served.url + COMPLETIONS, json={"prompt": "a"}, headers={"origin": SITE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


def test_page_of_the_api_needs_no_other_file(scripted: Served) -> None:
    page = httpx2.get(f"{scripted.url}/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    text = html.unescape(page.text)
    assert "<script" not in text and "http:" not in text and "https:" not in text
    document = httpx2.get(f"{scripted.url}/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages"} <= document["paths"].keys()
    for path in document["paths"]:
        assert path in text
    for key in ("max_output_tokens", "stop_sequences", "truncate_prompt_tokens"):
        assert key in text
