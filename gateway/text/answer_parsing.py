"""The parsers of one model, and what they make of one answer: a reader of its text, and a grammar.

`ModelParsers.chosen` chooses the parsers, by the settings or from the chat template. `AnswerParsing` travels
in the call: each choice of the answer has a reader of its own. `frame_of` writes the grammar of an answer
that must call tools, or that has a form after reasoning (`StructuredOutputs.frame`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from baton.errors import ConfigError, InvalidRequest
from baton.gateway.text.answer_grammar import AnswerGrammar, CallableTool, CallForm, Tags
from baton.gateway.text.answer_reader import Parts, ReaderOptions
from baton.gateway.text.reasoning import (
    HARMONY,
    HARMONY_REASONING,
    NONE,
    REASONING_PARSERS,
    ChainedReader,
    ReasoningReader,
    ReasoningState,
    reasoning_of_template,
)
from baton.gateway.text.tool_call_readers import HarmonyReader
from baton.gateway.text.tool_calls import TOOL_CALL_PARSERS, parser_of_template
from baton.request import MAX_FRAME_CHARS


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


class ChoiceReader(Protocol):
    """Reads the text of one choice."""

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""

    @property
    def is_reasoning(self) -> bool:
        """The text so far ends within reasoning."""

    def push(self, text: str) -> Parts:
        """Return the parts that have become certain."""

    def finish(self) -> Parts:
        """Return the rest: the text has ended."""


class AnswerParsing(msgspec.Struct, frozen=True, kw_only=True):
    """The reading of one answer's text. Without parsers all of it is shown."""

    tool_call_parser: str | None = None  # None: there are no tools
    reasoning_parser: str | None = None
    reasoning_state: ReasoningState = ReasoningState.AFTER
    is_parallel: bool = True  # False: calls after the first are dropped
    is_named: bool = False  # the call is to the one tool that the request names
    keeps_special_tokens: bool = False  # in the text: tags are among them
    text_arguments: dict[str, list[str]] = {}  # by tool: see ReaderOptions

    def new_id(self, digest: str) -> str:
        """Return the id of a call. digest: hexadecimal, at least 24 characters."""
        parser = TOOL_CALL_PARSERS[self.tool_call_parser or "hermes"]
        return parser.id_prefix + digest[: parser.num_id_chars]

    def reader(self, new_id: Callable[[], str]) -> ChoiceReader | None:
        """Return the reader of a choice; None when all of the text is shown."""
        if self.tool_call_parser is None and self.reasoning_parser is None:
            return None
        options = ReaderOptions(
            is_parallel=self.is_parallel,
            new_id=new_id,
            text_arguments={name: frozenset(keys) for name, keys in self.text_arguments.items()},
        )
        if HARMONY & {self.tool_call_parser, self.reasoning_parser}:
            return HarmonyReader(options)
        parser = TOOL_CALL_PARSERS.get(self.tool_call_parser or "")
        calls = None if parser is None else parser.reader(options)
        if self.reasoning_parser is None or self.reasoning_state is ReasoningState.AFTER:
            return calls
        reasoning = ReasoningReader(REASONING_PARSERS[self.reasoning_parser], self.reasoning_state)
        return reasoning if calls is None else ChainedReader(reasoning, calls)


class AskedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that a request asks for or allows."""

    tools: list[CallableTool]
    is_required: bool
    is_parallel: bool
    is_limited: bool = False  # the model is told of further tools, which it may not call

    @property
    def is_constrained(self) -> bool:
        """The model alone would not keep what was asked for."""
        return self.is_required or self.is_limited or any(tool.schema is not None for tool in self.tools)


def frame_of(
    parsers: ModelParsers,
    state: ReasoningState,
    tags: Tags,
    *,
    calls: AskedCalls | None,
    has_form: bool,
) -> str | None:
    """Return the frame of an answer; None when its form, or its freedom, needs none.

    calls: None without tools. has_form: the request asks for a
    form, which holds for an answer that is no call. Raises InvalidRequest that names the key of a tool whose
    arguments cannot be described.
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
