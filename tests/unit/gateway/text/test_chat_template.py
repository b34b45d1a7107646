import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from baton.errors import ConfigError, InvalidRequest, ModelError
from baton.gateway.text.answer_parsing import ModelParsers
from baton.gateway.text.chat_template import (
    ChatTemplate,
    Message,
    read_messages,
)
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
    "iterable": """\
{%- if tools is iterable and tools | length > 0 %}{{ tools | length }} tools{% else %}none{% endif %}
{% raw %}
{ as it is }
{% endraw %}
{% for message in messages %}{{ message.content }}{% if message.content is iterable %}.{% endif %}{% endfor %}
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
def test_prompts_equal_those_of_transformers(name: str, tools: list[dict[str, Any]] | None) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    oracle = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.byte_level(), **special)
    expected = oracle.apply_chat_template(
        MESSAGES, tools, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(TEMPLATES[name], special).render(MESSAGES, tools=tools) == expected


# In the form of Gemma 3's: a loop over the parts of a message, and the first part of a system message.
GEMMA = """\
{{ bos_token }}
{%- set system = '' -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] -%}
    {%- set system = (first if first is string else first[0]['text']) + '\\n\\n' -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
    {{ '<start_of_turn>' + message['role'] + '\\n' + (system if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
"""


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("loop", ["message['content']", 'message["content"]', "message.content", "content"])
def test_text_parts_are_those_of_transformers_where_the_template_has_a_loop_over_them(loop: str) -> None:
    source = GEMMA.replace("in message['content']", f"in {loop}")
    source = source.replace("{%- for item", "{%- set content = message.content -%}{%- for item")
    oracle = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.byte_level(), bos_token="<s>")
    asked = [
        {"role": "system", "content": parts("Be brief.")},
        {"role": "user", "content": parts("one ", "two", "three")},
        {"role": "assistant", "content": parts("four")},
        {"role": "user", "content": parts("five")},
        {"role": "user", "content": "six"},
    ]
    expected = oracle.apply_chat_template(asked, chat_template=source, tokenize=False)
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(read_messages(asked)) == expected


def test_text_parts_are_lines_where_the_template_has_no_loop_over_them() -> None:
    asked = [{"role": "user", "content": parts("one", "two")}]
    for source in (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% for line in m.content.split('x') %}{{ line }}{% endfor %}{% endfor %}",
    ):
        assert ChatTemplate(source, {}).render(read_messages(asked)) == "one\ntwo"
        assert (
            ChatTemplate(GEMMA, {}, tool_source=source).render(read_messages(asked), tools=TOOLS)
            == "one\ntwo"
        )


def test_no_part_of_a_system_message_is_lost() -> None:
    """In transformers, the template leaves out all parts but the first."""
    asked = [{"role": "system", "content": parts("Be brief.", "Be kind.")}, {"role": "user", "content": "Hi"}]
    assert "Be brief.\nBe kind.\n\nHi" in ChatTemplate(GEMMA, {}).render(read_messages(asked))


def test_last_message_with_parts_is_continued() -> None:
    asked = [{"role": "assistant", "content": parts("one", "two")}]
    assert opened(GEMMA, read_messages(asked)).endswith("one\ntwo")


def opened(source: str, messages: Sequence[Message]) -> str:
    """The prompt of an answer that continues the last message."""
    template = ChatTemplate(source, {})
    return template.render(messages, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("content", ["sun moon", " sun ", "sun  ", "sun ends"])
@pytest.mark.parametrize(
    "source",
    [
        TEMPLATES["chatml"],
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }} ends{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %} of {{ messages | length }}",
    ],
)
def test_open_prompts_equal_those_of_transformers(source: str, content: str) -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.byte_level())
    messages = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": content}]
    expected = oracle.apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True
    )
    assert opened(source, messages) == expected


@pytest.mark.parametrize(
    ("source", "last", "message"),
    [
        ("{{ messages[0].content }}", {"content": "b"}, "leaves out the text"),
        ("{{ messages[-1].content }}", {"content": None, "tool_calls": [{}]}, "has no text"),
        ("{{ messages[-1].content }}", {"content": "b", "tool_calls": [{}]}, "calls tools"),
    ],
)
def test_last_message_that_cannot_be_continued_is_refused(
    source: str, last: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^continue_final_message: .*{message}"):
        opened(source, [{"role": "user", "content": "a"}, {"role": "assistant", **last}])


def from_directory(directory: Path, file: str | None = None) -> ChatTemplate:
    template = ChatTemplate.from_directory(directory, file)
    assert template is not None
    return template


def test_template_of_the_directory_is_chosen_as_in_transformers(tmp_path: Path) -> None:
    assert ChatTemplate.from_directory(tmp_path) is None
    named = [
        {"name": "tool_use", "template": "<tool_call> {{ tools | length }}"},
        {"name": "default", "template": "plain"},
    ]
    for template, expected in (("of the config", "of the config"), (named, "plain")):
        config = {"chat_template": template, "eos_token": {"content": "</s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert from_directory(tmp_path).render(MESSAGES) == expected
    assert ModelParsers.chosen(from_directory(tmp_path).source).tool_call_parser == "hermes"
    assert from_directory(tmp_path).render(MESSAGES, tools=TOOLS) == f"<tool_call> {len(TOOLS)}"
    (tmp_path / "chat_template.jinja").write_text("of the file{{ eos_token }}")
    assert from_directory(tmp_path).render(MESSAGES, tools=TOOLS) == "of the file</s>"


def test_template_for_tools_is_read_where_transformers_saves_it(tmp_path: Path) -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.byte_level())
    oracle.chat_template = {"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "other"}
    oracle.save_pretrained(tmp_path)
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").exists()
    template = from_directory(tmp_path)
    for tools in (None, TOOLS):
        expected = oracle.apply_chat_template(MESSAGES, tools, tokenize=False)
        assert template.render(MESSAGES, tools=tools) == expected
    (tmp_path / "given.jinja").write_text("given")
    assert from_directory(tmp_path, str(tmp_path / "given.jinja")).render(MESSAGES, tools=TOOLS) == "given"


def test_template_of_the_settings_replaces_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "its own", "eos_token": "</s>"}')
    (tmp_path / "given.jinja").write_text("given{{ eos_token }}")
    assert from_directory(tmp_path, str(tmp_path / "given.jinja")).render(MESSAGES) == "given</s>"
    for wrong in ("none.jinja", "."):
        with pytest.raises(ConfigError, match="^gateway.chat_template: "):
            ChatTemplate.from_directory(tmp_path, str(tmp_path / wrong))


def test_default_variables_hold_where_the_template_reads_them(tmp_path: Path) -> None:
    def template(source: str, **defaults: object) -> ChatTemplate:
        return ChatTemplate(source, {"bos_token": "<s>"}, tool_source="{{ y }}", default_kwargs=defaults)

    found = template("{{ x }}", x=1, y=2)
    assert (found.render(MESSAGES), found.render(MESSAGES, tools=TOOLS)) == ("1", "2")
    assert found.render(MESSAGES, kwargs={"x": 3}) == "3"
    for name in ("z", "messages", "bos_token"):
        with pytest.raises(ConfigError, match=f"^gateway.default_chat_template_kwargs: .* no '{name}'"):
            template("{{ x }} {{ messages }} {{ bos_token }}", **{name: 1})
    with pytest.raises(ConfigError, match="default_chat_template_kwargs: the model has no chat template"):
        ChatTemplate.from_directory(tmp_path, default_kwargs={"x": 1})


def test_special_tokens_are_strings_or_objects_with_their_content(tmp_path: Path) -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False},
        "unk_token": None,
        "model_max_length": 1e30,
        "chat_template": "{{ bos_token }} {{ eos_token }} {{ unk_token is defined }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert from_directory(tmp_path).render(MESSAGES) == "<s> </s> False"


@pytest.mark.parametrize("content", ['{"eos_token": 3}', '{"eos_token"', "[" * 100_000])
def test_damaged_tokenizer_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match="tokenizer_config.json: "):
        ChatTemplate.from_directory(tmp_path)


def test_date_is_an_argument() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2026, 1, 2))
    assert template.render([]) == "02 Jan 2026"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (TEMPLATES["llama"], "^roles must alternate$"),  # the template's own words
        ("{{ messages[0].content + 1 }}", "do not fit the chat template"),
        ("{% for a in range(50000) %}{% for b in range(50000) %}{% endfor %}{% endfor %}", "5000000 steps"),
        ("{% for a in range(100) %}{{ 'x' * 100000 }}{% endfor %}", "at most 8388608 characters, got 10000"),
        ("{{ 'x' * 3000000000 }}", "too large|too many"),
        ("{{ [1] * 1000000000 }}", "too large|too many"),
        ("{{ range(1000000000) }}", "too large|too many"),
    ],
)
def test_messages_that_the_template_cannot_render_are_refused(source: str, message: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(InvalidRequest, match=message) as refused:
        template.render([{"role": "assistant", "content": "secret"}])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "source",
    [
        *("{% if %}", "{{ 'open", "{% for x in y %}"),
        *("{{ 1 | nothing }}", "{{ nothing() }}", "{{ 1 is nothing }}", "{% include 'x' %}"),
        *(f"{{{{ messages | tojson(indent={indent}) }}}}" for indent in (-1, 65, 10**9)),
    ],
)
def test_faulty_template_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="cannot be used|is damaged|expected 0 to 64 spaces"):
        ChatTemplate(source, {}).render([])


# Messages.

HI = {"role": "user", "content": "Hi"}


def test_text_parts_are_read_and_other_messages_stay() -> None:
    asked = [
        {"role": "system", "content": ""},
        {**HI, "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    assert read_messages(iter(asked)) == asked
    for given, read in (([{"type": "text", "text": "one"}, "two"], parts("one", "two")), (["one"], "one")):
        assert read_messages([{"role": "user", "content": given}]) == [{"role": "user", "content": read}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_text", "text": "one"},
        {"type": "output_text", "text": "one", "annotations": []},
        {"type": "refusal", "refusal": "one"},
    ],
)
def test_part_of_a_former_answer_is_text(part: dict[str, object]) -> None:
    assert read_messages([{"role": "assistant", "content": [part]}])[0]["content"] == "one"


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_developers_instructions_are_the_systems_where_the_template_does_not_know_developers(
    tools: list[dict[str, Any]] | None,
) -> None:
    """Many templates leave out messages of a role that they do not know."""
    asked = read_messages([{"role": "developer", "content": "Be brief."}])
    loop = "{% for m in messages %}{% if m.role == 'ROLE' %}{{ m.content }}{% endif %}{% endfor %}"
    for role in ("system", "developer"):
        source = loop.replace("ROLE", role)
        assert ChatTemplate(source, {}).render(asked, tools=tools) == "Be brief."
        assert ChatTemplate("", {}, tool_source=source).render(asked, tools=TOOLS) == "Be brief."


@pytest.mark.parametrize("nothing", [None, []])
def test_message_without_calls_has_no_key_of_calls(nothing: object) -> None:
    """Templates ask whether there is the key; clients that write all fields of a message send null."""
    asked = {"role": "assistant", "content": "one"}
    assert read_messages([{**asked, "tool_calls": nothing}]) == [asked]


@pytest.mark.parametrize("calls", ["weather", {"id": "1"}, 5, ["weather"], [None]])
def test_calls_that_are_no_calls_are_named(calls: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]: tool_calls"):
        read_messages([HI, {"role": "assistant", "content": "", "tool_calls": calls}])


def test_reasoning_of_the_assistant_reaches_the_template_under_either_name() -> None:
    keys = ("reasoning", "reasoning_content")
    for read in keys:
        template = ChatTemplate("{% for each in messages %}<{{ each." + read + " }}>{% endfor %}", {})
        for given in keys:
            said = {"role": "assistant", "content": "", given: "Hm."}
            assert template.render(read_messages([said])) == "<Hm.>"
    unnamed = [{"role": "assistant", "content": "", "reasoning": None}, {**HI, "reasoning": "no"}]
    assert read_messages(unnamed) == unnamed


def calling(arguments: object) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}


@pytest.mark.parametrize(
    ("arguments", "read"), [('{"x": "é"}', {"x": "é"}), ("", {}), ({"x": 1}, {"x": 1}), (None, None)]
)
def test_arguments_of_a_tool_call_are_decoded_for_the_template(arguments: object, read: object) -> None:
    assert read_messages([calling(arguments)]) == [calling(read)]


@pytest.mark.parametrize("arguments", ["{", "[]", "x", '{"x": 1} {}', "[" * 5000])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^messages\[0\]: tool_calls\[0\]: arguments: expected the JSON of"
    ):
        read_messages([calling(arguments)])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", r"messages: expected a list such as \[{.role.: .*, got 'Hi' \(str\)"),
        (None, r"messages: expected a list .*, got None"),
        (HI, "messages: expected a list of messages .*, got one message"),
        ([], "messages: expected at least one message, got none"),
        (["Hi"], r"messages\[0\]: expected a dict such as .*, got 'Hi' \(str\)"),
        ([HI, {"content": "Hi"}], r"messages\[1\]: role: expected text such as 'user', got nothing"),
        ([{"role": 5, "content": "Hi"}], r"messages\[0\]: role: .*, got 5 \(int\)"),
        ([{"role": "user"}], r"messages\[0\]: content: expected text or a list of text parts, got nothing"),
        ([{"role": "user", "content": None}], r"messages\[0\]: content: .*, got None"),
        (
            [{"role": "user", "content": ["a", {"type": "image_url", "image_url": {}}]}],
            r'messages\[0\]: content\[1\]: expected {"type": "text", .*, got a part of the type .image_url',
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]: content\[0\]: expected"),
    ],
)
def test_wrong_message_is_named_with_its_key(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_messages(messages)
