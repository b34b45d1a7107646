"""The forms in which models write calls of tools, by vLLM's names of their parsers.

- Hermes, Qwen 2.5 and 3: <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>
- Qwen 3 Coder: <tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>
- Llama 3: {"name": "weather", "parameters": {"city": "Paris"}}
- Llama 3.2 and 4, pythonic: [weather(city="Paris")]
- Mistral: [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]; newer: [TOOL_CALLS]name[ARGS]{}
- DeepSeek V3, R1 and V3.1: calls between tokens such as <｜tool▁call▁begin｜>
- gpt-oss: the messages of the harmony format, with channels for reasoning and for calls

`TOOL_CALL_PARSERS`, at the end, is the registry. The setting `gateway.tool_call_parser` chooses a parser;
without the setting the model's chat template tells its form. A parser has two sides that agree: a reader,
which finds the calls in an answer's text, and a form, from which gateway/text/answer_grammar.py makes
grammars.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from baton.gateway.text.answer_grammar import CallForm
from baton.gateway.text.answer_reader import AnswerReader, ReaderOptions, Steps

HERMES_BEGIN: Final = "<tool_call>"
HERMES_END: Final = "</tool_call>"


class TaggedReader(AnswerReader):
    """Reads calls of JSON between tags. White space before a call, and between calls, is dropped."""

    begin = HERMES_BEGIN
    end = HERMES_END
    separator: str | None = None  # between calls of the same tags; None: there is one call

    def _read(self) -> Steps[None]:
        while (yield from self._pass_until(self.begin, self._show)):
            if (yield from self._after_tag(self.begin, self._calls)) and self.end:
                yield from self._take_after_space(self.end)

    def _calls(self) -> Steps[bool]:
        """Take the calls after a tag. False: there is none, and a part of the text was taken."""
        if not (yield from self._call()):
            return False
        while self.separator is not None:
            self._keep()
            yield from self._take_space()
            has_more = yield from self._take(self.separator)
            yield from self._take_space()
            if not has_more or not (yield from self._call()):
                self._go_back()
                break
        return True

    def _call(self) -> Steps[bool]:
        return (yield from self._json_call())


PARAMETER_KEY: Final = re.compile(r"[^>\n]{0,256}")
PARAMETER_END: Final = re.compile(r"\n?</parameter>")


class Qwen3CoderReader(TaggedReader):
    """Reads calls with arguments between tags. A tool's schema tells whether one is text or JSON."""

    def _call(self) -> Steps[bool]:
        if not (yield from self._take("<function=")):
            return False
        name = yield from self._take_name()
        if name is None or not (yield from self._take(">")):
            return False
        self._begin_call(name)
        self._go_on()
        self._add_arguments("{")
        is_first = True
        while (yield from self._take_after_space("<parameter=")):
            key = (yield from self._take_pattern(PARAMETER_KEY)).strip()
            if not (yield from self._take(">")):
                return True
            yield from self._take("\n")
            self._add_arguments(f"{'' if is_first else ','}{json.dumps(key, ensure_ascii=False)}:")
            is_first = False
            is_text = key in self.options.text_arguments.get(name, ())
            if not (yield from self._text_value() if is_text else self._other_value()):
                return True
        if (yield from self._take_after_space("</function>")):
            self._add_arguments("}")
        return True

    def _text_value(self) -> Steps[bool]:
        self._add_arguments('"')
        is_whole = yield from self._value(lambda text: self._add_arguments(_escaped(text)))
        self._add_arguments('"' if is_whole else "")
        return is_whole

    def _other_value(self) -> Steps[bool]:
        parts: list[str] = []
        is_whole = yield from self._value(parts.append)
        self._add_arguments(_json_of("".join(parts).strip()))
        return is_whole

    def _value(self, take: Callable[[str], None]) -> Steps[bool]:
        """Take a value, the line break after it and the end of its parameter. False: it is cut off."""
        end = yield from self._take_until(PARAMETER_END, "\n<", len("\n</parameter>"), take)
        self._at += len(end)
        return bool(end)


def _escaped(text: str) -> str:
    """Return text escaped for a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


PYTHON_CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"}


def _json_of(value: str) -> str:
    """Return a bare value as JSON: JSON as it is, a constant of Python, or else text in quotes."""
    if value in PYTHON_CONSTANTS:
        return PYTHON_CONSTANTS[value]
    try:
        return msgspec.json.encode(msgspec.json.decode(value)).decode()
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)


PYTHON_TAG: Final = "<|python_tag|>"  # may precede calls


class LlamaReader(AnswerReader):
    """Reads an answer that begins with calls, or is text. White space or semicolons separate calls."""

    def _read(self) -> Steps[None]:
        self._keep()
        yield from self._take_space()
        yield from self._take(PYTHON_TAG)
        yield from self._take_space()
        while (yield from self._next_character()) == "{":
            if not (yield from self._json_call()):
                self._go_back()
                return
            self._keep()
            yield from self._take_space()
            yield from self._take(";")
            yield from self._take_space()
        if self.num_calls:
            yield from self._end()
        else:
            self._go_back()


MISTRAL_BEGIN: Final = "[TOOL_CALLS]"


class MistralReader(TaggedReader):
    """Reads calls in a list of JSON, or, in newer models, each after its name."""

    begin = MISTRAL_BEGIN
    end = ""
    separator = ","

    def _calls(self) -> Steps[bool]:
        if not (yield from self._take("[")):
            return (yield from self._named())
        yield from self._take_space()
        if not (yield from super()._calls()):
            return False
        yield from self._take_after_space("]")
        return True

    def _named(self) -> Steps[bool]:
        name = yield from self._take_name()
        if name is None:
            return False
        if (yield from self._take("[CALL_ID]")):
            yield from self._take_name()
        yield from self._take("[ARGS]")
        yield from self._take_space()
        return (yield from self._json_arguments(name))


DEEPSEEK_BEGIN: Final = "<｜tool▁calls▁begin｜>"
DEEPSEEK_END: Final = "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL: Final = "<｜tool▁call▁begin｜>"
DEEPSEEK_CALL_END: Final = "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR: Final = "<｜tool▁sep｜>"


class DeepSeekReader(TaggedReader):
    """Reads a list of calls, of V3 and R1 (the arguments in a fence) or of V3.1 (without one)."""

    begin = DEEPSEEK_BEGIN
    end = DEEPSEEK_END
    separator = ""

    def _call(self) -> Steps[bool]:
        if not (yield from self._take(DEEPSEEK_CALL)):
            return False
        name = yield from self._take_name()
        if name is None or not (yield from self._take(DEEPSEEK_SEPARATOR)):
            return False
        if (yield from self._next_character()) != "{":
            name = yield from self._take_name()  # the word before the separator was the type
            if name is None:
                return False
            yield from self._take_space()
            yield from self._take("```json")
            yield from self._take_space()
        if not (yield from self._json_arguments(name)):
            return False
        self._go_on()
        yield from self._take_after_space("```")
        yield from self._take_after_space(DEEPSEEK_CALL_END)
        return True


PYTHON_NAME: Final = re.compile(r"[A-Za-z_0-9.-]*")
PYTHON_PLAIN: Final = {quote: re.compile(rf"[^\\{quote}]*") for quote in "\"'"}  # text within quotes
PYTHON_ESCAPES: Final = {**dict(zip("ntrbfav0", "\n\t\r\b\f\a\v\0", strict=True)), "\n": ""}
PYTHON_CODES: Final = {
    letter: re.compile(rf"[0-9a-fA-F]{{0,{size}}}") for letter, size in {"x": 2, "u": 4, "U": 8}.items()
}
PYTHON_BARE: Final = re.compile(r"[^,()\[\]{}:\"'<]{0,1024}")
MAX_PYTHON_DEPTH: Final = 64
SURROGATES: Final = range(0xD800, 0xE000)
LLAMA4_BEGIN: Final = "<|python_start|>"
LLAMA4_END: Final = "<|python_end|>"


class PythonicReader(AnswerReader):
    """Reads an answer that begins as a list of calls in Python, or is text. Arguments become JSON."""

    def _read(self) -> Steps[None]:
        self._keep()
        yield from self._take_space()
        yield from self._take(LLAMA4_BEGIN)
        yield from self._take_space()
        if not (yield from self._take("[")):
            self._go_back()
            return
        while True:
            yield from self._take_space()
            if not (yield from self._call()):
                self._go_back()
                return
            self._keep()
            yield from self._take_space()
            if not (yield from self._take(",")):
                break
        if not (yield from self._take("]")):
            self._go_back()
            return
        self._go_on()
        yield from self._take_after_space(LLAMA4_END)
        self._keep()
        yield from self._take_space()
        yield from self._end()

    def _call(self) -> Steps[bool]:
        """Take one call. It is certain after `name(key=` or `name()`."""
        name = yield from self._take_name()
        if name is None or not (yield from self._take("(")):
            return False
        yield from self._take_space()
        key = yield from self._take_pattern(PYTHON_NAME)
        yield from self._take_space()
        if not (yield from self._take("=" if key else ")")):
            return False
        self._begin_call(name)
        self._go_on()
        self._add_arguments("{")
        while key:
            self._add_arguments(json.dumps(key) + ":")
            yield from self._take_space()
            if not (yield from self._value(0)):
                return True
            yield from self._take_space()
            if (yield from self._take(",")):
                yield from self._take_space()
                key = yield from self._take_pattern(PYTHON_NAME)
                yield from self._take_space()
            else:
                key = ""
            if not (yield from self._take("=" if key else ")")):
                return True
            self._add_arguments("," if key else "")
        self._add_arguments("}")
        return True

    def _value(self, depth: int) -> Steps[bool]:
        """Take a value. False: it is broken, or cut off."""
        first = yield from self._next_character()
        if first and first in PYTHON_PLAIN:
            return (yield from self._string(first))
        if first and first in "[({" and depth < MAX_PYTHON_DEPTH:
            return (yield from self._collection(first, depth))
        bare = yield from self._take_pattern(PYTHON_BARE)
        self._add_arguments(_json_of(bare.strip()))
        return True

    def _collection(self, first: str, depth: int) -> Steps[bool]:
        end = {"[": "]", "(": ")", "{": "}"}[first]
        yield from self._take(first)
        self._add_arguments("{" if first == "{" else "[")
        separator = ""
        while True:
            yield from self._take_space()
            if (yield from self._take(end)):
                break
            self._add_arguments(separator)
            if not (yield from self._value(depth + 1)):
                return False
            yield from self._take_space()
            if first == "{":
                if not (yield from self._take(":")):
                    return False
                self._add_arguments(":")
                yield from self._take_space()
                if not (yield from self._value(depth + 1)):
                    return False
                yield from self._take_space()
            separator = ","
            if not (yield from self._take(",")):
                if not (yield from self._take(end)):
                    return False
                break
        self._add_arguments("}" if first == "{" else "]")
        return True

    def _string(self, quote: str) -> Steps[bool]:
        """Take a string as it comes. False: it is cut off."""
        yield from self._take(quote)
        self._add_arguments('"')
        while character := (yield from self._next_character()):
            if character == quote:
                self._at += 1
                self._add_arguments('"')
                return True
            if character == "\\":
                self._at += 1
                self._add_arguments((yield from self._escape()))
                continue
            found = PYTHON_PLAIN[quote].match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            self._add_arguments(_escaped(found[0]))
        return False

    def _escape(self) -> Steps[str]:
        """Take the rest of an escape sequence and return it for a string of JSON."""
        letter = yield from self._next_character()
        self._at += len(letter)
        if letter not in PYTHON_CODES:
            return _escaped(PYTHON_ESCAPES.get(letter, letter))
        digits = yield from self._take_pattern(PYTHON_CODES[letter])
        code = int(digits or "0", 16)
        if code in SURROGATES:  # a half of a character, which text cannot hold
            return f"\\u{code:04x}"
        return _escaped(chr(min(code, sys.maxunicode)))


CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
HEADER_MARK: Final = re.compile(r"<\|(?:start|channel|constrain|message|end|return|call)\|>")
MESSAGE_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([a-zA-Z0-9_.-]+)")
MAX_HEADER_CHARS: Final = 512


class HarmonyReader(AnswerReader):
    """Reads the messages of an answer: analysis is reasoning, a message to a function is a call.

    The prompt has the beginning of the first message's header. Text that begins as no header is text.
    """

    def _read(self) -> Steps[None]:
        while True:
            self._keep()
            header = yield from self._header()
            if header is None:
                self._go_back()
                return
            self._go_on()
            recipient = RECIPIENT.search(header)
            if recipient is not None:
                name = recipient[1]
                if (yield from self._json_arguments(name)):
                    yield from self._body(lambda _: None)
                else:
                    self._begin_call(name)
                    yield from self._body(self._add_arguments)
            elif "analysis" in header.partition(CHANNEL)[2]:
                self.is_reasoning = True
                yield from self._body(self._reason)
                self.is_reasoning = False
            else:
                yield from self._body(self._show)

    def _header(self) -> Steps[str | None]:
        """Take the header of a message, up to and with the mark of its body; None: there is none."""
        begun = self._at
        while True:
            place = self._text.find(MESSAGE, begun)
            header = self._text[begun:place] if place >= 0 else self._text[begun:]
            if not _may_be_header(header) or (place < 0 and len(header) > MAX_HEADER_CHARS):
                return None
            if place >= 0:
                self._at = place + len(MESSAGE)
                return header
            if not (yield from self._more()):
                return None
            begun = self._at

    def _body(self, take: Callable[[str], None]) -> Steps[None]:
        """Take a message and its end; the header of the next message stays."""
        mark = yield from self._take_until(HEADER_MARK, "<", len("<|constrain|>"), take)
        self._at += len(mark) if mark in MESSAGE_ENDS else 0


def _may_be_header(text: str) -> bool:
    text = text.lstrip()
    begins = (CHANNEL, "<|start|>", "to=", "<|message|>")
    return any(text.startswith(each) or each.startswith(text) for each in begins)


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

# name -> parser. The first with an `is_of` that holds for a chat template is the model's.
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
        reader=TaggedReader,
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
