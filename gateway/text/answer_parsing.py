"""The parsers of one model, and what they make of one answer: a reader of its text, and a grammar.

`ModelParsers.chosen` chooses the parsers, by the settings or from the chat template. `AnswerParsing` travels
in the call, and `choice_reader` makes from it the reader of each choice. `frame_of` writes the grammar of an
answer that must call tools, or that has a form after reasoning (`StructuredOutputs.frame`).

`REASONING_PARSERS` is the registry of the forms of reasoning, by vLLM's names of its parsers. The setting
`gateway.reasoning_parser` chooses a parser, or "none"; without the setting the model's chat template tells
the form. A prompt may have the beginning of the reasoning, or the whole of an empty one
(`enable_thinking: false`): its text tells.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from baton.errors import ConfigError, InvalidRequest
from baton.gateway.text.answer_grammar import AnswerGrammar, AskedCalls, CallForm, Tags
from baton.gateway.text.answer_reader import (
    AnswerParsing,
    AnswerReader,
    ReaderOptions,
    ReasoningState,
)
from baton.gateway.text.tool_calls import TOOL_CALL_PARSERS, HarmonyReader, parser_of_template
from baton.request import MAX_FRAME_CHARS

NONE: Final = "none"  # in place of a parser's name
HARMONY_REASONING: Final = "openai_gptoss"
HARMONY: Final = frozenset({"openai", HARMONY_REASONING})  # one reader finds all parts of such an answer


class ReasoningParser(msgspec.Struct, frozen=True, kw_only=True):
    """One form of reasoning: between `begin` and `end`."""

    begin: str
    end: str
    always: bool = False  # an answer begins as reasoning, also without `begin`, unless the prompt ends it
    after: str = ""  # between `end` and the answer
    answer: str = ""  # precedes an answer without calls
    is_of: Callable[[str], bool] = lambda template: False  # whether a chat template asks for this form

    @property
    def tags(self) -> str:
        """The text of all tags."""
        return self.begin + self.end + self.after + self.answer

    def state(self, prompt: str) -> ReasoningState:
        """Return the place at which the answer to a rendered prompt begins."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return ReasoningState.WITHIN
        if prompt.endswith(self.end):
            return ReasoningState.AFTER
        return ReasoningState.WITHIN if self.always else ReasoningState.BEFORE

    def preamble(self, grammar: AnswerGrammar, state: ReasoningState) -> str:
        """Return an expression of what precedes the answer proper: reasoning, white space."""
        if state is ReasoningState.AFTER:
            return ""
        rest = grammar.until("reasoning", self.end)
        after = grammar.text(self.after) if self.after else grammar.rule("space", r"/\s{0,2}/")
        begin = grammar.text(self.begin)
        if state is ReasoningState.BEFORE:
            return f"({begin} {rest} {after})?"
        return f"({begin})? {rest} {after}" if self.always else f"{rest} {after}"


# name -> parser. The first with an `is_of` that holds for a chat template is the model's.
REASONING_PARSERS: Final[dict[str, ReasoningParser]] = {
    HARMONY_REASONING: ReasoningParser(
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        after="<|start|>assistant",
        answer="<|channel|>final<|message|>",
        is_of=lambda template: "<|channel|>" in template and "<|message|>" in template,
    ),
    "qwen3": ReasoningParser(begin="<think>", end="</think>", is_of=lambda template: "</think>" in template),
    "deepseek_r1": ReasoningParser(begin="<think>", end="</think>", always=True),
}


def reasoning_of_template(template: str) -> str | None:
    """Return the name of the parser for a chat template; None for a model that does not reason."""
    return next((name for name, parser in REASONING_PARSERS.items() if parser.is_of(template)), None)


class ModelParsers(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a model's parsers; None: the model calls no tools that Baton reads, or does not reason."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    @classmethod
    def chosen(
        cls, template: str, *, tool_call_parser: str | None = None, reasoning_parser: str | None = None
    ) -> "ModelParsers":
        """Return the parsers of the settings; None: as the template tells. Raises ConfigError."""
        _check("tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS)
        _check("reasoning_parser", reasoning_parser, (*REASONING_PARSERS, NONE))
        calls = tool_call_parser or parser_of_template(template)
        reasoning = reasoning_parser or reasoning_of_template(template)
        if calls in HARMONY:
            reasoning = HARMONY_REASONING
        return cls(tool_call_parser=calls, reasoning_parser=None if reasoning == NONE else reasoning)


def _check(setting: str, name: str | None, known: Sequence[str] | Mapping[str, object]) -> None:
    if name is not None and name not in known:
        raise ConfigError(f"gateway.{setting}: {name!r} is not known; known are {', '.join(known)}")


def choice_reader(parsing: AnswerParsing, digests: Iterator[str]) -> AnswerReader | None:
    """Return the reader of a choice; None when all of the text is shown.

    digests: the sources of the ids of calls, each hexadecimal and of 24 characters or more.
    """
    parser = TOOL_CALL_PARSERS.get(parsing.tool_call_parser or "")
    reasoning = REASONING_PARSERS.get(parsing.reasoning_parser or "")
    if parser is None and reasoning is None:
        return None
    named, state = parser or TOOL_CALL_PARSERS["hermes"], parsing.reasoning_state
    is_harmony = bool(HARMONY & {parsing.tool_call_parser, parsing.reasoning_parser})
    options = ReaderOptions(
        is_parallel=parsing.is_parallel,
        new_id=lambda: named.id_prefix + next(digests)[: named.num_id_chars],
        text_arguments=parsing.text_arguments,
    )
    if reasoning is not None and not is_harmony and state is not ReasoningState.AFTER:
        options = replace(
            options,
            reasoning_begin=reasoning.begin,
            reasoning_end=reasoning.end,
            begins_in_reasoning=state is ReasoningState.WITHIN,
        )
    if is_harmony:
        return HarmonyReader(options)
    return AnswerReader(options) if parser is None else parser.reader(options)


def frame_of(
    parsers: ModelParsers,
    state: ReasoningState,
    tags: Tags,
    *,
    calls: AskedCalls | None,
    has_form: bool,
) -> str | None:
    """Return the frame of an answer; None when its form, or its freedom, needs none.

    calls: None without tools. has_form: the request asks for a form, which holds for an answer without calls.
    Raises InvalidRequest that names the key of a tool with arguments that cannot be described.
    """
    reasoning = REASONING_PARSERS.get(parsers.reasoning_parser or "")
    grammar = AnswerGrammar(tags)
    preamble = reasoning.preamble(grammar, state) if reasoning is not None else ""
    before_answer = grammar.text(reasoning.answer) if reasoning is not None and reasoning.answer else ""
    parser = TOOL_CALL_PARSERS.get(parsers.tool_call_parser or "")
    if parser is None or calls is None or not _describes_calls(parser.form, calls, has_form):
        if not has_form or not (preamble or before_answer):
            return None
        return grammar.written(f"{preamble} {before_answer} @form")
    body = grammar.calls(
        parser.form,
        calls.tools,
        is_parallel=calls.is_parallel,
        has_text=not calls.is_required and not has_form,
        before_text=before_answer,
    )
    if has_form:
        body = f"{body} | {before_answer} @form"
    frame = grammar.written(f"{preamble} ({body})")
    if len(frame) > MAX_FRAME_CHARS:
        raise InvalidRequest(
            f"tools: the grammar of the calls has {len(frame)} of {MAX_FRAME_CHARS} characters"
        )
    return frame


def _describes_calls(form: CallForm, calls: AskedCalls, has_form: bool) -> bool:
    return not form.begins_as_json if has_form else calls.is_constrained
