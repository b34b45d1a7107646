"""The tiny model's tasks: every answer is right, every prompt as long as asked, every draw repeatable."""

import json
import random
from itertools import pairwise

import pytest

from baton.bench.tiny.tasks import (
    ASSISTANT,
    BRACKETS,
    END,
    NUM_KEYS,
    SYSTEM,
    TOKENS_PER_PAIR,
    TOKENS_PER_QUESTION,
    USER,
    VALUES,
    Episode,
    addition_case,
    brackets_case,
    call_episode,
    copy_case,
    fact_cases,
    form_case,
    form_episode,
    recall_cases,
    recall_episode,
    short_episode,
    sort_case,
)


def pairs_in(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split() if word.startswith("k") and "=" in word)


@pytest.mark.parametrize("num_tokens", [6, 7, 1000, 1602])
def test_recall_prompt_holds_the_tokens_asked_for(num_tokens: int) -> None:
    for case in recall_cases(3, num_tokens, seed=1):
        num_pairs = len(pairs_in(case.prompt))
        length = num_pairs * TOKENS_PER_PAIR + TOKENS_PER_QUESTION
        assert num_tokens <= length < num_tokens + TOKENS_PER_PAIR


def test_recall_answer_is_the_value_of_the_key_asked_for() -> None:
    for case in recall_cases(50, 400, seed=2):
        pair_text, question = case.prompt.rsplit("\n", 1)
        assert case.answer == " " + pairs_in(pair_text)[question.removesuffix("?")]


def test_recall_in_chat_asks_in_a_user_turn_and_answers_without_a_space() -> None:
    (case,) = recall_cases(1, 100, seed=3, chat=True)
    assert case.prompt.startswith(USER)
    assert case.prompt.endswith(f"?{END}{ASSISTANT}")
    assert case.answer in VALUES


def test_recall_cases_repeat_for_a_seed_and_differ_between_seeds() -> None:
    assert recall_cases(5, 200, seed=4) == recall_cases(5, 200, seed=4)
    assert recall_cases(5, 200, seed=4) != recall_cases(5, 200, seed=5)


def test_recall_refuses_more_pairs_than_there_are_keys() -> None:
    with pytest.raises(ValueError, match="distinct keys"):
        recall_cases(1, NUM_KEYS * TOKENS_PER_PAIR + TOKENS_PER_QUESTION + 1, seed=0)


def test_values_are_distinct() -> None:
    assert len(set(VALUES)) == len(VALUES)


def test_copy_repeats_the_words() -> None:
    case = copy_case(random.Random(0))
    assert case.prompt == f"copy({case.answer})="


def test_sort_orders_the_digits_and_keeps_each() -> None:
    for seed in range(20):
        case = sort_case(random.Random(seed))
        given = case.prompt.removeprefix("sort(").removesuffix(")=").split()
        assert case.answer.split() == sorted(given, key=int)


def test_addition_adds() -> None:
    for seed in range(20):
        case = addition_case(random.Random(seed))
        left, right = case.prompt.removesuffix("=").split("+")
        assert int(case.answer) == int(left) + int(right)


def test_brackets_close_the_last_one_first() -> None:
    closes = {right: left for left, right in BRACKETS.items()}
    for seed in range(20):
        case = brackets_case(random.Random(seed))
        open_marks = list(case.prompt.removeprefix("close ").removesuffix(" ="))
        for mark in case.answer:
            assert open_marks.pop() == closes[mark]
        assert not open_marks


def test_no_question_about_baton_has_two_answers() -> None:
    prompts = [case.prompt for case in fact_cases()]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("seed", range(8))
def test_recall_episode_answers_every_question_from_its_pairs(seed: int) -> None:
    episode = recall_episode(random.Random(seed), 256)
    pairs = pairs_in(episode[0].text.replace(USER, " "))
    questions = [before for before, after in pairwise(episode) if after.is_answer]
    answers = [segment for segment in episode if segment.is_answer]
    assert len(answers) >= 5
    for question, answer in zip(questions, answers, strict=True):
        assert pairs[asked_key(question.text)] == answer.text.strip()


@pytest.mark.parametrize("seed", range(8))
def test_short_episode_is_one_prompt_one_answer_and_the_end(seed: int) -> None:
    episode: Episode = short_episode(random.Random(seed))
    assert [segment.is_answer for segment in episode] == [False, True, False]
    assert episode[-1].text == END


def test_form_is_the_json_of_its_pairs() -> None:
    for seed in range(50):
        case = form_case(random.Random(seed))
        form = json.loads(case.answer)
        given = case.prompt.removeprefix("json(").removesuffix(")=").split()
        written = [
            f"{key}={','.join(value) if isinstance(value, list) else value}" for key, value in form.items()
        ]
        assert given == written and json.dumps(form) == case.answer


@pytest.mark.parametrize("seed", range(8))
def test_form_episode_is_one_prompt_one_answer_and_the_end(seed: int) -> None:
    episode = form_episode(random.Random(seed))
    assert [segment.is_answer for segment in episode] == [False, True, False]
    assert "json(" in episode[0].text and episode[-1].text == END


@pytest.mark.parametrize("seed", range(40))
def test_calls_name_tools_that_the_model_was_told_of_and_their_results_are_the_answers(seed: int) -> None:
    episode = call_episode(random.Random(seed))
    tools = episode[0].text.removeprefix(f"{SYSTEM}tools: ").partition(END)[0].split()
    answers = [index for index, segment in enumerate(episode) if segment.is_answer]
    calls = [index for index in answers if episode[index].text.startswith("<tool_call>")]
    for index in calls:
        text = episode[index].text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        assert json.loads(text)["name"] in tools
        result = episode[index + 1].text.removeprefix(f"{END}{USER}result: ")
        assert result == f"{episode[index + 2].text}{END}{ASSISTANT}"


def test_calls_have_the_arguments_of_the_question() -> None:
    asked: dict[str, list[str]] = {}
    for seed in range(60):
        episode = call_episode(random.Random(seed))
        for before, after in pairwise(episode):
            if after.text.startswith("<tool_call>"):
                call = json.loads(after.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
                values = [str(value) for value in call["arguments"].values()]
                question = before.text.rpartition(USER)[2]
                assert call["name"] not in ("add", "weather") or all(value in question for value in values)
                asked[call["name"]] = values
    assert {"add", "weather"} < asked.keys()


def asked_key(question: str) -> str:
    last_word = question.replace(END, " ").replace(ASSISTANT, " ").replace(USER, " ").split()[-1]
    return last_word.rstrip("?=")
