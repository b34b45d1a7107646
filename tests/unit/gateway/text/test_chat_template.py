import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from baton.errors import ConfigError, InvalidRequest, ModelError
from baton.gateway.text.chat_template import ChatTemplate
from tests.unit.gateway import tiny_tokenizers

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "2 < 3 & 'é'?"},
    {"role": "assistant", "content": "yes", "tool_calls": [{"name": "f", "arguments": {"x": "<é>", "a": 1}}]},
    {"role": "user", "content": "why"},
]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
# What published templates are made of: whitespace control, loops with loop variables, namespaces, string
# methods, slices, tests, filters, macros, tojson, raise_exception.
TEMPLATES = {
    "chatml": """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "llama": """\
{% if messages[0]['role'] == 'system' %}
    {% set system = messages[0]['content'] | trim %}
    {% set messages = messages[1:] %}
{% else %}
    {% set system = '' %}
{% endif %}
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('roles must alternate') }}
{% endif %}
[{{ loop.index }}/{{ loop.length }}{% if loop.first %} {{ system }}{% endif %}] {{ message.content.strip() }}\
{% if loop.last %}{{ eos_token }}{% endif %}

{% endfor %}
""",
    "tools": """\
{%- macro call(c) %}{{ c.name }}({{ c.arguments | tojson }}){% endmacro -%}
{%- set ns = namespace(count=0) -%}
{%- if tools is defined and tools is not none %}{{ tools | tojson(indent=4) }}{% endif -%}
{%- for message in messages if message.role != 'system' %}
{%- if message.tool_calls is defined %}{% set ns.count = ns.count + message.tool_calls | length -%}
{%- for c in message.tool_calls %}{{ call(c) }}{% endfor %}{% endif -%}
{%- if message.content is string and message.content.startswith('w') %}{{ message.role | upper }}{% endif %}
{%- for key, value in message.items() if key in ['role'] %}|{{ key }}={{ value }}{% endfor -%}
{% generation %} {{ message.content.split('?')[0] }}
{% endgeneration %}
{% endfor -%}
{{ ns.count }}
""",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_prompts_are_those_of_transformers(name: str, tools: list[dict[str, Any]] | None) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    oracle = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.byte_level(), **special)
    expected = oracle.apply_chat_template(
        MESSAGES, tools, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(TEMPLATES[name], special).render(MESSAGES, tools=tools) == expected


def test_the_templates_own_file_comes_first(tmp_path: Path) -> None:
    config = {"chat_template": "from the config", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered(tmp_path) == "from the config"
    (tmp_path / "chat_template.jinja").write_text("from the file{{ eos_token }}")
    assert rendered(tmp_path) == "from the file</s>"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert rendered(tmp_path) == "plain"


def test_a_template_of_its_own_for_tools_is_taken_for_them(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "<tool_call> {{ tools | length }}"},
        {"name": "default", "template": "plain"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None and template.tool_form == "hermes"
    assert template.render(MESSAGES, tools=TOOLS) == f"<tool_call> {len(TOOLS)}"
    assert template.render(MESSAGES) == "plain"
    (tmp_path / "chat_template.jinja").write_text("a file")
    assert rendered(tmp_path) == "a file"


def rendered(directory: Path) -> str:
    template = ChatTemplate.from_directory(directory)
    assert template is not None
    return template.render(MESSAGES)


def test_another_template_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "its own", "eos_token": "</s>"}')
    (tmp_path / "given.jinja").write_text("given{{ eos_token }}")
    template = ChatTemplate.from_directory(tmp_path, str(tmp_path / "given.jinja"))
    assert template is not None and template.render(MESSAGES) == "given</s>"
    for wrong in ("none.jinja", "."):
        with pytest.raises(ConfigError, match="^gateway.chat_template: "):
            ChatTemplate.from_directory(tmp_path, str(tmp_path / wrong))


def test_a_model_without_a_template_cannot_chat(tmp_path: Path) -> None:
    assert ChatTemplate.from_directory(tmp_path) is None


def test_the_date_is_an_argument() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2026, 1, 2))
    assert template.render([]) == "02 Jan 2026"


def test_the_template_may_refuse_the_messages() -> None:
    template = ChatTemplate(TEMPLATES["llama"], {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(InvalidRequest, match="^roles must alternate$"):
        template.render(MESSAGES[2:])


def test_messages_of_another_shape_are_refused() -> None:
    template = ChatTemplate("{{ messages[0].content + '!' }}", {})
    with pytest.raises(InvalidRequest, match="do not fit the chat template"):
        template.render([{"content": ["secret"]}])


def test_an_error_does_not_quote_the_messages() -> None:
    with pytest.raises(InvalidRequest) as error:
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render([{"content": "secret"}])
    assert "secret" not in str(error.value)


def test_a_template_that_never_ends_is_stopped() -> None:
    nested = "{% for a in range(50000) %}{% for b in range(50000) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="more than 5000000 steps"):
        ChatTemplate(nested, {}).render([])


def test_output_is_bounded() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content * 1000 }}{% endfor %}", {})
    with pytest.raises(InvalidRequest, match="at most 8388608 characters, got 10000000"):
        template.render([{"content": "x" * 1000}] * 10)


@pytest.mark.parametrize("indent", [-1, 65, 10**9])
def test_json_is_not_indented_out_of_sight(indent: int) -> None:
    template = ChatTemplate(f"{{{{ messages | tojson(indent={indent}) }}}}", {})
    with pytest.raises(ModelError, match=f"indents JSON by {indent}: expected 0 to 64"):
        template.render([{"content": "x"}])


@pytest.mark.parametrize("source", ["'x' * 3000000000", "[1] * 1000000000", "range(1000000000)"])
def test_repetition_is_bounded_by_the_template_engine(source: str) -> None:
    with pytest.raises(InvalidRequest, match="too large|too many"):
        ChatTemplate(f"{{{{ {source} }}}}", {}).render([])


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'open", "{% for x in y %}"])
def test_a_damaged_template_is_the_models_fault(source: str) -> None:
    with pytest.raises(ModelError, match="chat template is damaged"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source", ["{{ 1 | nothing }}", "{{ nothing() }}", "{{ 1 is nothing }}", "{% include 'x' %}"]
)
def test_a_template_that_needs_what_there_is_not(source: str) -> None:
    with pytest.raises(ModelError, match="cannot be used|is damaged"):
        ChatTemplate(source, {}).render([])
