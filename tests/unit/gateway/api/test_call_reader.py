import asyncio
import json
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.gateway.api.call import Call
from baton.gateway.api.call_reader import CallReader
from baton.gateway.api.errors import ApiError
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.streams.resume import EventIds
from baton.gateway.tenants.tenants import Tenant
from baton.gateway.text import tools
from baton.gateway.text.chat_template import ChatTemplate
from baton.gateway.text.work import ServedModel, TextWork
from tests.scripted_service import ScriptedService
from tests.unit.gateway.calls import TOKENIZER

TOOL = {"type": "function", "function": {"name": "weather"}}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool }} <tool_call>{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


def chat(**fields: Any) -> Call:
    template = ChatTemplate(TEMPLATE, {})
    model = ServedModel(
        name="tiny",
        text=TextWork(TOKENIZER, template),
        service=ScriptedService(),
        created_s=0,
        known_length=4096,
    )
    reader = CallReader(
        model,
        Metrics(),
        ManualClock(),
        draw_seed=lambda: 1,
        max_answer_entries=10**6,
        event_ids=EventIds([b"k" * 32]),
        calendar_s=lambda: 0.0,
    )
    body = {"model": "tiny", "messages": [{"role": "user", "content": "sort(3 1 2)="}], **fields}
    scope = {"type": "http", "headers": [], "state": {"tenant": Tenant(name="acme", cache_salt=b"s")}}
    return asyncio.run(reader.chat(json.dumps(body).encode(), scope))


def test_a_chats_tools_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, check = list[str](), tools._check

    def counted(tool: tools.Tool, name: str) -> None:
        checked.append(name)
        check(tool, name)

    monkeypatch.setattr(tools, "_check", counted)
    call = chat(tools=[TOOL, TOOL])
    assert call.tool_form is not None and "weather" in (call.prompts[0].text or "")
    assert checked == ["tools[0]", "tools[1]"]


def test_tools_that_may_not_be_called_are_no_tools() -> None:
    assert chat(tools=[TOOL], tool_choice="none").tool_form is None
    assert chat().tool_form is None


def test_a_tool_that_is_none_is_refused() -> None:
    with pytest.raises(ApiError, match=r"tools\[0\]"):
        chat(tools=[{}])
