"""The reasoning that models write before an answer, by vLLM's names of its parsers.

`REASONING_PARSERS` is the registry. The setting `gateway.reasoning_parser` chooses a parser, or "none";
without the setting the model's chat template tells the form. A prompt may have the beginning of the
reasoning, or the whole of an empty one (`enable_thinking: false`): its text tells.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from baton.gateway.text.answer_grammar import AnswerGrammar
from baton.gateway.text.answer_reader import AnswerReader, Parts, ReasoningState, Steps

NONE: Final = "none"  # in place of a parser's name
HARMONY_REASONING: Final = "openai_gptoss"
HARMONY: Final = frozenset({"openai", HARMONY_REASONING})  # one reader finds all parts of such an answer


class ReasoningParser(msgspec.Struct, frozen=True, kw_only=True):
    """One form of reasoning: between `begin` and `end`."""

    begin: str
    end: str
    always: bool = False  # an answer begins as reasoning, also without `begin`, unless the prompt ends it
    after: str = ""  # between `end` and the answer
    answer: str = ""  # before an answer that is no call
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


# name -> parser. The first whose `is_of` holds for a chat template is the model's.
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


class ReasoningReader(AnswerReader):
    """Splits reasoning between tags off the beginning of an answer; white space around it is dropped."""

    def __init__(self, parser: ReasoningParser, state: ReasoningState) -> None:
        super().__init__()
        self._parser = parser
        self._state = state
        self.is_reasoning = state is ReasoningState.WITHIN

    def _read(self) -> Steps[None]:
        if self._state is ReasoningState.AFTER:
            return
        self._keep()
        yield from self._take_space()
        has_begun = yield from self._take(self._parser.begin)
        if not has_begun and self._state is ReasoningState.BEFORE:
            self._go_back()
            return
        self._go_on()
        self.is_reasoning = True
        yield from self._take_space()
        yield from self._pass_until(self._parser.end, self._reason)
        yield from self._take_space()
        yield from self._take(self._parser.end)
        self.is_reasoning = False
        yield from self._take_space()


class ChainedReader:
    """Splits reasoning off first, and reads the rest by another reader."""

    def __init__(self, first: AnswerReader, second: AnswerReader) -> None:
        self._first = first
        self._second = second

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._second.num_calls

    @property
    def is_reasoning(self) -> bool:
        """The text so far ends within reasoning."""
        return self._first.is_reasoning

    def push(self, text: str) -> Parts:
        """See AnswerReader."""
        parts = self._first.push(text)
        rest = self._second.push(parts.text)
        return Parts(rest.text, parts.reasoning + rest.reasoning, rest.calls)

    def finish(self) -> Parts:
        """See AnswerReader."""
        parts = self._first.finish()
        begun, rest = self._second.push(parts.text), self._second.finish()
        return Parts(
            begun.text + rest.text,
            parts.reasoning + begun.reasoning + rest.reasoning,
            begun.calls + rest.calls,
        )
