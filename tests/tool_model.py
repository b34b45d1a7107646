"""A model that is told of tools: the tiny one's tokenizer, and a chat template that writes them."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from baton.cluster.model_directory import resolve_model
from baton.gateway.text.tokenizer import Tokenizer
from baton.request import FinishReason, Request
from tests.scripted_service import ScriptedService, events
from tests.served_gateway import ServedGateway

TEMPLATE: Final = """\
{%- if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
Answer <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif -%}
{%- for message in messages %}{{ message.role }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %} {{ call.function.arguments | tojson }}{% endfor %}
{% endfor -%}
"""
TOOL: Final[Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}
# A call of it, as the model writes it.
CALLED: Final = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOKENIZER: Final = Tokenizer.from_directory(resolve_model("tiny"))


def writing(text: str, end: FinishReason = FinishReason.STOP) -> Callable[[ScriptedService, Request], None]:
    """A model that answers with this text, token by token."""

    def play(service: ScriptedService, request: Request) -> None:
        # The token that stops is not shown.
        for event in events(request, [*TOKENIZER.encode(text), 0], end=end):
            service.emit(request.request_id, [event])

    return play


def tool_model(directory: Path, template: str = TEMPLATE, tags: Sequence[str] = ()) -> str:
    """`directory`, with the tiny model under another chat template. tags: are tokens of its vocabulary."""
    for file in resolve_model("tiny").iterdir():
        shutil.copy(file, directory)
    (directory / "chat_template.jinja").write_text(template)
    path = directory / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in tags])
    tokenizer.save(str(path))
    return str(directory)


def prompt_of(served: ServedGateway[ScriptedService], path: str, /, **fields: Any) -> list[int]:
    """Return the prompt that the service gets for a POST of these fields."""
    served.ask(path, **fields)
    return list(served.service.requests[-1].token_ids)


def last_prompt(served: ServedGateway[ScriptedService]) -> str:
    """Return the text of the latest prompt."""
    return TOKENIZER.decode(served.service.requests[-1].token_ids)
