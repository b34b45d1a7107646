"""The forms in which models write calls of tools, by vLLM's names of their parsers.

`TOOL_CALL_PARSERS` is the registry. The setting `gateway.tool_call_parser` chooses a parser; without the
setting the model's chat template tells its form. A parser has two sides that agree: a reader, which finds the
calls in an answer's text, and a form, from which gateway/text/answer_grammar.py makes grammars.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from baton.gateway.text.answer_grammar import CallForm
from baton.gateway.text.answer_reader import AnswerReader, ReaderOptions
from baton.gateway.text.tool_call_readers import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
    HERMES_BEGIN,
    HERMES_END,
    MISTRAL_BEGIN,
    DeepSeekReader,
    HarmonyReader,
    HermesReader,
    LlamaReader,
    MistralReader,
    PythonicReader,
    Qwen3CoderReader,
)


class ToolCallParser(msgspec.Struct, frozen=True, kw_only=True):
    """One form of calls."""

    reader: Callable[[ReaderOptions], AnswerReader]
    form: CallForm
    is_of: Callable[[str], bool]  # whether a chat template asks for this form
    id_prefix: str = "call_"
    num_id_chars: int = 24  # after the prefix


def _has(*marks: str, lacks: str = "\0") -> Callable[[str], bool]:
    return lambda template: all(mark in template for mark in marks) and lacks not in template


_PYTHONIC: Final = CallForm(
    begin="[", before="{name}(", after=")", between=", ", end="]", arguments="python", not_text="["
)

# name -> parser. The first whose `is_of` holds for a chat template is the model's.
TOOL_CALL_PARSERS: Final[dict[str, ToolCallParser]] = {
    "openai": ToolCallParser(
        reader=HarmonyReader,
        form=CallForm(
            before="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", is_single=True
        ),
        is_of=_has("<|channel|>", "<|message|>"),
    ),
    "deepseek_v31": ToolCallParser(
        reader=DeepSeekReader,
        form=CallForm(
            begin=DEEPSEEK_BEGIN,
            before=f"{DEEPSEEK_CALL}{{name}}{DEEPSEEK_SEPARATOR}",
            after=DEEPSEEK_CALL_END,
            end=DEEPSEEK_END,
            trigger=DEEPSEEK_BEGIN,
        ),
        is_of=_has(DEEPSEEK_BEGIN, lacks="```json"),
    ),
    "deepseek_v3": ToolCallParser(
        reader=DeepSeekReader,
        form=CallForm(
            begin=DEEPSEEK_BEGIN,
            before=f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}{{name}}\n```json\n",
            after=f"\n```{DEEPSEEK_CALL_END}",
            between="\n",
            end=DEEPSEEK_END,
            trigger=DEEPSEEK_BEGIN,
        ),
        is_of=_has(DEEPSEEK_BEGIN),
    ),
    "qwen3_coder": ToolCallParser(
        reader=Qwen3CoderReader,
        form=CallForm(
            before="<tool_call>\n<function={name}>\n",
            after="</function>\n</tool_call>",
            between="\n",
            arguments="tags",
            trigger=HERMES_BEGIN,
        ),
        is_of=_has(HERMES_BEGIN, "<function="),
    ),
    "hermes": ToolCallParser(
        reader=HermesReader,
        form=CallForm(
            before='<tool_call>\n{{"name": "{name}", "arguments": ',
            after=f"}}\n{HERMES_END}",
            between="\n",
            trigger=HERMES_BEGIN,
        ),
        is_of=_has(HERMES_BEGIN, lacks="<arg_key>"),  # GLM's arguments are in tags of their own
    ),
    "mistral": ToolCallParser(
        reader=MistralReader,
        form=CallForm(
            begin=f"{MISTRAL_BEGIN}[",
            before='{{"name": "{name}", "arguments": ',
            after="}",
            between=", ",
            end="]",
            trigger=MISTRAL_BEGIN,
        ),
        is_of=_has(MISTRAL_BEGIN),
        id_prefix="",
        num_id_chars=9,
    ),
    "llama3_json": ToolCallParser(
        reader=LlamaReader,
        form=CallForm(
            before='{{"name": "{name}", "parameters": ',
            after="}",
            between="; ",
            not_text="{<",
            begins_as_json=True,
        ),
        is_of=_has('"parameters": dictionary of argument name'),
    ),
    "llama4_pythonic": ToolCallParser(
        reader=PythonicReader, form=_PYTHONIC, is_of=_has("func_name1(", "<|header_start|>")
    ),
    "pythonic": ToolCallParser(reader=PythonicReader, form=_PYTHONIC, is_of=_has("func_name1(")),
}


def has_tagged_arguments(parser: str | None) -> bool:
    """Return whether a parser must know which arguments are text."""
    return parser is not None and TOOL_CALL_PARSERS[parser].form.arguments == "tags"


def parser_of_template(template: str) -> str | None:
    """Return the name of the parser for a chat template; None when Baton does not read its calls."""
    if "tools" not in template:
        return None
    return next((name for name, parser in TOOL_CALL_PARSERS.items() if parser.is_of(template)), None)
