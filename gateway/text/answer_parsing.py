"""The parsers of one model, and what they make of one answer: a reader of its text, and a grammar.

`ModelParsers.chosen` chooses the parsers, by the settings or from the chat template. `AnswerParsing` travels
in the call, and `choice_reader` makes from it the reader of each choice. `frame_of` writes the grammar of an
answer that must call tools, or that has a form after reasoning (`StructuredOutputs.frame`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from baton.errors import ConfigError, InvalidRequest
from baton.gateway.text.answer_grammar import AnswerGrammar, AskedCalls, CallForm, Tags
from baton.gateway.text.answer_reader import AnswerParsing, Parts, ReaderOptions, ReasoningState
from baton.gateway.text.reasoning import (
    HARMONY,
    HARMONY_REASONING,
    NONE,
    REASONING_PARSERS,
    ChainedReader,
    ReasoningReader,
    reasoning_of_template,
)
from baton.gateway.text.tool_calls import TOOL_CALL_PARSERS, HarmonyReader, parser_of_template
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


def choice_reader(parsing: AnswerParsing, digests: Iterator[str]) -> ChoiceReader | None:
    """Return the reader of a choice; None when all of the text is shown.

    digests: the sources of the ids of calls, each hexadecimal and of 24 characters or more.
    """
    if parsing.tool_call_parser is None and parsing.reasoning_parser is None:
        return None
    parser = TOOL_CALL_PARSERS.get(parsing.tool_call_parser or "")
    named = parser or TOOL_CALL_PARSERS["hermes"]
    options = ReaderOptions(
        is_parallel=parsing.is_parallel,
        new_id=lambda: named.id_prefix + next(digests)[: named.num_id_chars],
        text_arguments={name: frozenset(keys) for name, keys in parsing.text_arguments.items()},
    )
    if HARMONY & {parsing.tool_call_parser, parsing.reasoning_parser}:
        return HarmonyReader(options)
    calls = None if parser is None else parser.reader(options)
    if parsing.reasoning_parser is None or parsing.reasoning_state is ReasoningState.AFTER:
        return calls
    reasoning = ReasoningReader(REASONING_PARSERS[parsing.reasoning_parser], parsing.reasoning_state)
    return reasoning if calls is None else ChainedReader(reasoning, calls)


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
