"""Reasoning in the text of answers, and the place at which an answer begins."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.gateway.text.answer_parsing import REASONING_PARSERS, ModelParsers, choice_reader
from baton.gateway.text.answer_reader import AnswerParsing, ReasoningState

WITHIN, BEFORE, AFTER = ReasoningState.WITHIN, ReasoningState.BEFORE, ReasoningState.AFTER
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def read(parsing: AnswerParsing, *parts: str) -> tuple[str, str, list[str]]:
    """Return the text, the reasoning, and the names of calls."""
    reader = choice_reader(parsing, (f"{number:024x}" for number in count()))
    if reader is None:
        return "".join(parts), "", []
    found = [*(reader.push(part) for part in parts), reader.finish()]
    text, reasoning = ("".join(getattr(each, name) for each in found) for name in ("text", "reasoning"))
    return text, reasoning, [call.name for each in found for call in each.tool_calls if call.is_first]


def parsing(name: str, state: ReasoningState, tool_call_parser: str | None = None) -> AnswerParsing:
    return AnswerParsing(reasoning_parser=name, reasoning_state=state, tool_call_parser=tool_call_parser)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("state", "text", "expected"),
    [
        (BEFORE, "<think>\nIt is 2 < 3.\n</think>\n\nYes.", ("Yes.", "It is 2 < 3.")),
        (WITHIN, "\nIt is 2 < 3.\n</think>\n\nYes.", ("Yes.", "It is 2 < 3.")),
        (WITHIN, "<think>\nWell</think>Yes.\n", ("Yes.\n", "Well")),
        (BEFORE, "<think>\n\n</think>\n\nYes.", ("Yes.", "")),
        (WITHIN, "cut off </thi", ("", "cut off </thi")),
        (BEFORE, "<think>cut", ("", "cut")),
        (BEFORE, "Yes. <think>no</think>", ("Yes. <think>no</think>", "")),
        (BEFORE, "\n<thin", ("\n<thin", "")),
        (BEFORE, "", ("", "")),
        (AFTER, "<think>a</think>b", ("<think>a</think>b", "")),
        (WITHIN, "a</think>b</think>c", ("b</think>c", "a")),
    ],
)
def test_reasoning_is_split_off(
    name: str, state: ReasoningState, text: str, expected: tuple[str, str]
) -> None:
    for parts in ([text], list(text)):
        assert read(parsing(name, state), *parts) == (*expected, [])


@pytest.mark.parametrize("state", list(ReasoningState))
@given(data=st.data())
def test_cutting_the_text_into_parts_changes_nothing(state: ReasoningState, data: st.DataObject) -> None:
    pieces = ["<think>", "</think>", CALL, "<", "</", "think", " ", "\n", "a", "<tool_call>"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    wanted = read(parsing("qwen3", state, "hermes"), text)
    assert read(parsing("qwen3", state, "hermes"), *parts) == wanted


def test_calls_within_reasoning_are_no_calls() -> None:
    text = f"<think>I could {CALL}</think>\n{CALL}"
    assert read(parsing("qwen3", BEFORE, "hermes"), *text) == ("", f"I could {CALL}", ["f"])


def test_reasoning_is_shown_as_it_comes() -> None:
    reader = choice_reader(parsing("qwen3", WITHIN), iter(()))
    assert reader is not None
    parts = [reader.push(part) for part in ("\nWhere", " is </", "th", "is", "?</think>", " In", " Paris.")]
    assert [part.reasoning for part in parts] == ["Where", " is", "", " </this", "?", "", ""]
    assert [part.text for part in parts] == ["", "", "", "", "", "In", " Paris."]


@pytest.mark.parametrize(
    ("name", "prompt", "state"),
    [
        ("qwen3", "<|im_start|>assistant\n", BEFORE),
        ("qwen3", "<|im_start|>assistant\n<think>\n", WITHIN),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", AFTER),
        ("deepseek_r1", "<｜Assistant｜>", WITHIN),
        ("deepseek_r1", "<｜Assistant｜><think>\n", WITHIN),
        ("deepseek_r1", "<｜Assistant｜></think>", AFTER),
        ("openai_gptoss", "<|start|>assistant", BEFORE),
    ],
)
def test_prompt_tells_where_the_answer_begins(name: str, prompt: str, state: ReasoningState) -> None:
    assert REASONING_PARSERS[name].state(prompt) is state


THINKS = "{% if tools %}<tool_call>{% endif %}{{ content.split('</think>')[-1] }}"
HARMONY = "{% if tools %}{% endif %}<|channel|>analysis<|message|>"


@pytest.mark.parametrize(
    ("template", "settings", "expected"),
    [
        (THINKS, {}, ("hermes", "qwen3")),
        (
            THINKS,
            {"reasoning_parser": "deepseek_r1", "tool_call_parser": "pythonic"},
            ("pythonic", "deepseek_r1"),
        ),
        (THINKS, {"reasoning_parser": "none"}, ("hermes", None)),
        ("{{ messages }}", {}, (None, None)),
        ("{{ messages }}", {"tool_call_parser": "mistral"}, ("mistral", None)),
        (HARMONY, {}, ("openai", "openai_gptoss")),
        (
            HARMONY,
            {"reasoning_parser": "none"},
            ("openai", "openai_gptoss"),
        ),  # there is no text without channels
    ],
)
def test_parsers_are_chosen(template: str, settings: dict[str, str], expected: tuple[str, str]) -> None:
    chosen = ModelParsers.chosen(template, **settings)
    assert (chosen.tool_call_parser, chosen.reasoning_parser) == expected


def test_parser_that_does_not_exist_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"gateway.tool_call_parser: 'hermes2' is not known; known are .*hermes"
    ):
        ModelParsers.chosen("", tool_call_parser="hermes2")
    with pytest.raises(ConfigError, match=r"gateway.reasoning_parser: 'x' is not known; known are .*none"):
        ModelParsers.chosen("", reasoning_parser="x")


def test_answer_of_harmony_needs_one_reader() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert read(parsing("openai_gptoss", BEFORE), *text) == ("Yes.", "Hm.", [])
