"""Splits the text of one choice, as it comes, into shown text, reasoning and calls of tools.

`AnswerReader.push` takes text and returns the `Delta` that have become certain; `finish` returns the rest.
Cutting the text into other parts changes nothing: each reader is a generator that waits, where it needs more
text to decide, and looks at no boundary between parts.

A call of a tool is certain once its name and the beginning of its arguments are there. From then on its
arguments are passed on as they come, also when the model breaks off or breaks the form. Text that turns out
to be no call is shown.
"""

import itertools
import re
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, TypeAlias, TypeVar

import msgspec

from baton.request import TokenLogprobs

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]  # waits for more text at each yield

MAX_NAME_CHARS: Final = 64  # of a tool, as the API bounds it
NAME: Final = re.compile(rf"[a-zA-Z0-9_.-]{{0,{MAX_NAME_CHARS + 1}}}")
STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
MAX_STRING_CHARS: Final = MAX_NAME_CHARS + 16  # of a name or a key around arguments, with quotes
IN_STRING: Final = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
OUTSIDE_STRING: Final = re.compile(r'[^{}\[\]"\s<]*')
SCALAR: Final = re.compile(r"[^\s,\]}<]*")


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A part of one call: the first has the id and the name, those after it have pieces of the arguments."""

    index: int  # of the call in its choice
    id: str = ""
    name: str = ""
    arguments: str = ""  # JSON, in pieces

    @property
    def is_first(self) -> bool:
        """This part begins its call."""
        return bool(self.id)


class Delta(msgspec.Struct):
    """The part of a choice that one batch of tokens adds. A reader of text fills in no tokens."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: Sequence[TokenLogprobs] = []
    tool_calls: list[ToolCallDelta] = []
    reasoning: str = ""

    @classmethod
    def joined(cls, deltas: Sequence["Delta"]) -> "Delta":
        """Return deltas that follow each other as one."""
        if len(deltas) == 1:
            return deltas[0]
        return cls(
            "".join([delta.text for delta in deltas]),
            [token_id for delta in deltas for token_id in delta.token_ids],
            [entry for delta in deltas for entry in delta.logprobs],
            joined_calls(part for delta in deltas for part in delta.tool_calls),
            "".join([delta.reasoning for delta in deltas]),
        )


def joined_calls(parts: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Return parts of calls with the pieces of each call's arguments joined."""
    joined: list[ToolCallDelta] = []
    for is_first, run in itertools.groupby(parts, key=lambda part: part.is_first):
        if is_first:
            joined += run
        else:
            begun, *others = run
            arguments = "".join([begun.arguments, *(piece.arguments for piece in others)])
            joined.append(ToolCallDelta(begun.index, arguments=arguments))
    return joined


class ReasoningState(StrEnum):
    """The place at which an answer begins."""

    WITHIN = "within"  # the prompt has begun the reasoning, or the model always reasons
    BEFORE = "before"  # the model may reason
    AFTER = "after"  # the prompt has ended the reasoning


class ReaderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an AnswerReader."""

    # The tags around the reasoning with which an answer may begin; "": it has none between tags.
    reasoning_begin: str = ""
    reasoning_end: str = ""
    begins_in_reasoning: bool = False
    is_parallel: bool = True  # False: calls after the first are dropped
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"
    # By tool: the arguments that are text, for forms that write text without quotes.
    text_arguments: Mapping[str, frozenset[str]] = {}


class AnswerParsing(msgspec.Struct, frozen=True, kw_only=True):
    """The reading of one answer's text. Without parsers all of it is shown."""

    tool_call_parser: str | None = None  # None: there are no tools
    reasoning_parser: str | None = None
    reasoning_state: ReasoningState = ReasoningState.AFTER
    is_parallel: bool = True  # False: calls after the first are dropped
    is_named: bool = False  # the call is to the one tool that the request names
    keeps_special_tokens: bool = False  # in the text: tags are among them
    text_arguments: dict[str, frozenset[str]] = {}  # by tool: see ReaderOptions


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest ending of `text` that begins `stop`; `stop` is not in `text`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class AnswerReader:
    """Reads the text of one choice: reasoning between tags, and then what `_read` of a subclass finds.

    `_read` waits for text and takes text by the helpers below. White space around reasoning is dropped.

    _text    |-- dropped at the next push --|-- [kept, at) may be read again --|-- [at, end) unread --|
    """

    def __init__(self, options: ReaderOptions | None = None) -> None:
        self.options = options or ReaderOptions()
        self.num_calls = 0
        self.is_reasoning = self.options.begins_in_reasoning  # the text so far ends within reasoning
        self._delta = Delta()
        self._text = ""
        self._at = 0
        self._kept: int | None = None  # None: nothing is read again
        self._has_ended = False
        self._is_muted = False  # the running call is dropped
        self._steps = self._run()

    def push(self, text: str) -> Delta:
        """Return the parts that have become certain."""
        drop = self._at if self._kept is None else self._kept
        self._text = self._text[drop:] + text
        self._at -= drop
        self._kept = None if self._kept is None else 0
        next(self._steps, None)
        delta, self._delta = self._delta, Delta()
        return delta

    def finish(self) -> Delta:
        """Return the rest: the text has ended."""
        self._has_ended = True
        return self.push("")

    def _read(self) -> Steps[None]:
        """Read the answer, or its beginning: text after that is shown as it is."""
        yield from ()

    def _run(self) -> Steps[None]:
        if self.options.reasoning_end:
            yield from self._read_reasoning()
        yield from self._read()
        while True:
            self._show(self._text[self._at :])
            self._at = len(self._text)
            if not (yield from self._more()):
                return

    def _read_reasoning(self) -> Steps[None]:
        self._keep()
        yield from self._take_space()
        has_tag = yield from self._take(self.options.reasoning_begin)
        if not has_tag and not self.options.begins_in_reasoning:
            self._go_back()
            return
        self._go_on()
        self.is_reasoning = True
        yield from self._take_space()
        yield from self._pass_until(self.options.reasoning_end, self._reason)
        yield from self._take_space()
        yield from self._take(self.options.reasoning_end)
        self.is_reasoning = False
        yield from self._take_space()

    def _more(self) -> Steps[bool]:
        """Wait for more text. False: the text has ended."""
        if self._has_ended:
            return False
        yield
        return True

    # Parts.

    def _show(self, text: str) -> None:
        self._delta.text += text

    def _reason(self, text: str) -> None:
        self._delta.reasoning += text

    def _begin_call(self, name: str) -> None:
        self._is_muted = self.num_calls > 0 and not self.options.is_parallel
        if not self._is_muted:
            self._delta.tool_calls.append(ToolCallDelta(self.num_calls, self.options.new_id(), name))
            self.num_calls += 1

    def _add_arguments(self, piece: str) -> None:
        if self._is_muted or not piece:
            return
        calls, index = self._delta.tool_calls, self.num_calls - 1
        if calls and not calls[-1].is_first:  # a part of the same call
            piece = calls.pop().arguments + piece
        calls.append(ToolCallDelta(index, arguments=piece))

    # Positions.

    def _keep(self) -> None:
        """Let `_go_back` return to this place in the text."""
        self._kept = self._at

    def _go_back(self) -> None:
        assert self._kept is not None
        self._at, self._kept = self._kept, None

    def _go_on(self) -> None:
        self._kept = None

    # Text.

    def _pass_until(self, tag: str, take: Callable[[str], None]) -> Steps[bool]:
        """Take the text up to the tag and the white space before it, which stay. False: there is no tag."""
        while True:
            rest = self._text[self._at :]
            place = rest.find(tag)
            end = place if place >= 0 else len(rest) - overlap(rest, tag)
            certain = rest[:end].rstrip()
            take(certain)
            self._at += len(certain)
            if place >= 0:
                return True
            if not (yield from self._more()):
                take(self._text[self._at :])
                self._at = len(self._text)
                return False

    def _take_until(
        self, mark: re.Pattern[str], first: str, longest: int, take: Callable[[str], None]
    ) -> Steps[str]:
        """Take the text up to a mark and return the mark, which stays unread; "": the text has ended.

        first: the characters that a mark may begin with. longest: the most characters of a mark.
        """
        while True:
            found = mark.search(self._text, self._at)
            tail = range(max(self._at, len(self._text) - longest + 1), len(self._text))
            held = next((at for at in tail if self._text[at] in first), len(self._text))
            end = held if found is None else found.start()
            take(self._text[self._at : end])
            self._at = end
            if found is not None:
                return found[0]
            if not (yield from self._more()):
                take(self._text[self._at :])
                self._at = len(self._text)
                return ""

    def _take(self, literal: str) -> Steps[bool]:
        """Take the literal if it comes next."""
        while True:
            if self._text.startswith(literal, self._at):
                self._at += len(literal)
                return True
            if not literal.startswith(self._text[self._at :]) or not (yield from self._more()):
                return False

    def _take_space(self) -> Steps[None]:
        while True:
            rest = self._text[self._at :]
            unread = rest.lstrip()
            self._at += len(rest) - len(unread)
            if unread or not (yield from self._more()):
                return

    def _take_after_space(self, literal: str) -> Steps[bool]:
        """Take white space and the literal, or what there is of both at the end of the text; else neither.

        False: the literal is not whole. Nothing may be kept.
        """
        self._keep()
        yield from self._take_space()
        found = yield from self._take(literal)
        rest = self._text[self._at :]
        if found:
            self._go_on()
        elif literal.startswith(rest):  # the text ends here
            self._at += len(rest)
            self._go_on()
        else:
            self._go_back()
        return found

    def _after_tag(self, tag: str, read: Callable[[], Steps[bool]]) -> Steps[bool]:
        """Take white space, the tag, and what `read` takes. The tag is shown if `read` finds no call."""
        self._keep()
        yield from self._take_space()
        yield from self._take(tag)
        begun = self._text[self._kept : self._at]
        yield from self._take_space()
        if (yield from read()):
            self._go_on()
            return True
        self._go_back()
        self._at += len(begun)
        self._show(begun)
        return False

    def _end(self) -> Steps[None]:
        """Drop the white space that was kept if the text ends here, or else go back to it."""
        if (yield from self._next_character()):
            self._go_back()
        else:
            self._go_on()

    def _take_pattern(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take the longest match of a pattern, which must match every beginning of a text that it matches."""
        while True:
            found = pattern.match(self._text, self._at)
            assert found is not None
            if found.end() < len(self._text) or not (yield from self._more()):
                self._at = found.end()
                return found[0]

    def _take_name(self) -> Steps[str | None]:
        """Take a tool's name; None for text that is none."""
        name = yield from self._take_pattern(NAME)
        return name if 0 < len(name) <= MAX_NAME_CHARS else None

    # JSON.

    def _next_character(self) -> Steps[str]:
        """Return the next character, which stays unread; "" at the end."""
        while self._at == len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def _json_string(self) -> Steps[str | None]:
        """Take a short string; None for anything else."""
        while (yield from self._next_character()) == '"':
            if (found := STRING.match(self._text, self._at)) is not None:
                self._at = found.end()
                return _decoded(found[0])
            if len(self._text) - self._at > MAX_STRING_CHARS or not (yield from self._more()):
                return None
        return None

    def _json_value(self, take: Callable[[str], None]) -> Steps[bool]:
        """Take a value as it comes, without white space between its parts. False: it is broken or cut off."""
        first = yield from self._next_character()
        if first == "" or first not in '{["':
            take((yield from self._take_pattern(SCALAR)))
            return True
        depth, is_in_string = 0, False
        while True:
            pieces, end = [], self._at
            while end < len(self._text):
                found = (IN_STRING if is_in_string else OUTSIDE_STRING).match(self._text, end)
                assert found is not None
                pieces.append(found[0])
                end = found.end()
                character = self._text[end : end + 1]
                if is_in_string:
                    if character != '"':
                        break  # a backslash; its character is still to come
                    is_in_string = False
                elif character == '"':
                    is_in_string = True
                elif character == "<":  # a tag, so the value is broken
                    self._at = end
                    take("".join(pieces))
                    return False
                elif character:
                    depth += (character in "{[") - (character in "}]")
                end += 1
                if not character.isspace():
                    pieces.append(character)
                if depth == 0 and not is_in_string and character:
                    self._at = end
                    take("".join(pieces))
                    return True
            self._at = min(end, len(self._text))
            take("".join(pieces))
            if not (yield from self._more()):
                take(self._text[self._at :])
                self._at = len(self._text)
                return False

    def _json_arguments(self, name: str) -> Steps[bool]:
        """Begin the call if an object follows, and take it as the arguments. False: there is none."""
        if (yield from self._next_character()) != "{":
            return False
        self._begin_call(name)
        yield from self._json_value(self._add_arguments)
        return True

    def _json_call(self) -> Steps[bool]:
        """Take `{"name": "weather", "arguments": {...}}`; the keys may have any order, and others may follow.

        False: the text is no call, and a part of it was taken. "parameters" is Llama's word for "arguments".
        """
        if not (yield from self._take("{")):
            return False
        name, held, has_begun, has_others = None, list[str](), False, False
        while True:
            yield from self._take_space()
            key = yield from self._json_string()
            yield from self._take_space()
            if key is None or not (yield from self._take(":")):
                return has_begun
            yield from self._take_space()
            if key == "name" and name is None:
                name = yield from self._json_string()
                if name is None or not NAME.fullmatch(name):
                    return has_begun
            elif key in ("arguments", "parameters") and not has_begun and not held:
                if name is not None:
                    has_begun = yield from self._arguments_or_null(name)
                    if not has_begun:
                        return False
                elif (yield from self._next_character()) != "{" or not (
                    yield from self._json_value(held.append)
                ):
                    return False
            else:
                has_others = True
                yield from self._json_value(lambda _: None)
            if name is not None and held and not has_begun:
                has_begun = True
                self._begin_call(name)
                self._add_arguments("".join(held))
            yield from self._take_space()
            if (yield from self._take("}")):
                break
            if not (yield from self._take(",")):
                return has_begun
        if name is not None and not has_begun and not has_others:
            has_begun = True
            self._begin_call(name)
            self._add_arguments("{}")
        return has_begun

    def _arguments_or_null(self, name: str) -> Steps[bool]:
        if (yield from self._json_arguments(name)):
            return True
        if not (yield from self._take("null")):
            return False
        self._begin_call(name)
        self._add_arguments("{}")
        return True


def _decoded(string: str) -> str | None:
    try:
        return msgspec.json.decode(string, type=str)
    except (msgspec.MsgspecError, ValueError):
        return None
