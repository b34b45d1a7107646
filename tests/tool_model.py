"""A model that is told of tools: the tiny one's tokenizer, and a chat template that writes them."""

import shutil
from pathlib import Path
from typing import Any, Final

from baton.cluster.model_directory import resolve_model

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


def tool_model(directory: Path) -> str:
    """`directory`, with what a gateway reads of a model."""
    for file in resolve_model("tiny").glob("*.json"):
        shutil.copy(file, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return str(directory)
