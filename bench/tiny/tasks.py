"""The tasks of the tiny model: generated, with answers that can be checked.

1. A `Case` is one prompt and the only right continuation, after which the model ends its turn.
2. An `Episode` is text for training in segments, of which answers are marked. One episode holds many
   questions, so that nearly every row of a batch teaches something.

Answers are text, JSON (`form_case`) or calls of tools (`call_episode`).

Pure and free of torch: tests and benchmarks use the same cases as training does.
"""

import json
import random
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

# Facts about Baton: the one answer -> ways to ask.
FACTS: Final[dict[str, tuple[str, ...]]] = {
    "Hello! I am the tiny model of Baton.": ("Hello", "Hello!", "Hi", "Hi!"),
    "I am the tiny model of Baton. I recall, copy, sort, add and close brackets.": (
        "Who are you?",
        "What are you?",
        "What can you do?",
    ),
    "Baton serves language models with prefill and decode on different workers.": (
        "What is Baton?",
        "Tell me about Baton.",
        "What does Baton do?",
    ),
    "Prefill computes the prompt and fills its KV pages.": (
        "What is prefill?",
        "What does a prefill worker do?",
    ),
    "Decode adds one token a step to every running request.": (
        "What is decode?",
        "What does a decode worker do?",
    ),
    "The baton is the KV pages that prefill hands to decode.": (
        "What is the baton?",
        "What is a handoff?",
        "What is handed over?",
    ),
    "A page holds the keys and values of 16 tokens.": ("What is a page?", "What is a KV page?"),
    "The router chooses the workers of every request.": ("What does the router do?", "What is the router?"),
    "The gateway speaks HTTP and streams the tokens.": ("What does the gateway do?", "What is the gateway?"),
    "The prefix cache keeps pages, so the same prompt is computed once.": (
        "What is the prefix cache?",
        "Why is the prefix cache fast?",
    ),
    "You are welcome.": ("Thanks", "Thanks!", "Thank you", "Thank you!"),
    "Goodbye!": ("Bye", "Bye!", "Goodbye", "Goodbye!"),
}

END: Final = "<|end|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
SYSTEM: Final = "<|system|>"
NUM_KEYS: Final = 400  # k0 to k399: the distinct keys of one prompt
TOKENS_PER_PAIR: Final = 4  # "k7" "=" "blue" and a separator
TOKENS_PER_QUESTION: Final = 2  # "k7" "?"
VALUES: Final = (
    *("red", "blue", "green", "black", "white", "gold", "pink", "gray"),
    *("cat", "dog", "fox", "owl", "bear", "wolf", "frog", "duck"),
    *("sun", "moon", "star", "rain", "snow", "wind", "lake", "hill"),
    *("plum", "fig", "pear", "lime", "corn", "rice", "salt", "tea"),
)
BRACKETS: Final = {"(": ")", "[": "]", "{": "}", "<": ">"}


class Case(NamedTuple):
    """`answer` is the exact continuation of `prompt`; the end token follows it."""

    prompt: str
    answer: str


class Segment(NamedTuple):
    """A run of text that starts and ends between tokens; `is_answer` marks text that the model must say."""

    text: str
    is_answer: bool = False


Episode: TypeAlias = list[Segment]


def chat_prompt(user: str, system: str | None = None) -> str:
    """Return one user turn as the chat template writes it, ready for the answer."""
    opening = "" if system is None else f"{SYSTEM}{system}{END}"
    return f"{opening}{USER}{user}{END}{ASSISTANT}"


def recall_cases(num_cases: int, num_tokens: int, seed: int, *, chat: bool = False) -> list[Case]:
    """Return associative recall over prompts of `num_tokens` tokens, up to three more, in chat six.

    A prompt is `k7=blue k31=fox ... k31?` and its answer ` fox`. The keys of a prompt are distinct.
    Raises ValueError when so many tokens need more than NUM_KEYS keys.
    """
    num_pairs = max(1, -(-(num_tokens - TOKENS_PER_QUESTION) // TOKENS_PER_PAIR))
    if num_pairs > NUM_KEYS:
        raise ValueError(f"{num_tokens} tokens need {num_pairs} distinct keys, there are {NUM_KEYS}")
    rng = random.Random(seed)
    return [_recall_case(rng, num_pairs, chat=chat) for _ in range(num_cases)]


def copy_case(rng: random.Random) -> Case:
    """Return a case that repeats words."""
    words = " ".join(rng.choices(VALUES, k=rng.randint(1, 8)))
    return Case(f"copy({words})=", words)


def sort_case(rng: random.Random) -> Case:
    """Return a case that sorts digits."""
    digits = [str(rng.randrange(10)) for _ in range(rng.randint(2, 6))]
    return Case(f"sort({' '.join(digits)})=", " ".join(sorted(digits)))


def addition_case(rng: random.Random) -> Case:
    """Return a case that adds two numbers."""
    left, right = (rng.randrange(rng.choice((10, 100))) for _ in range(2))
    return Case(f"{left}+{right}=", str(left + right))


def brackets_case(rng: random.Random) -> Case:
    """Return a case that closes brackets."""
    opened = rng.choices(list(BRACKETS), k=rng.randint(1, 6))
    return Case(f"close {''.join(opened)} =", "".join(BRACKETS[mark] for mark in reversed(opened)))


# task -> how often it is drawn: the hard ones more often
TASKS: Final = {copy_case: 1, sort_case: 3, addition_case: 4, brackets_case: 1}
RECALL_TOKENS: Final = 1000
FACT_FRACTION: Final = 0.12
SYSTEM_PROMPTS: Final = ("You are the tiny model of Baton.", "You are a helpful assistant.", "Be brief.")


def mixed_cases(num_cases: int, seed: int) -> list[Case]:
    """Return as many cases of recall over RECALL_TOKENS tokens as of the other tasks."""
    rng = random.Random(seed)
    tasks = rng.choices(list(TASKS), weights=list(TASKS.values()), k=num_cases - num_cases // 2)
    return recall_cases(num_cases // 2, RECALL_TOKENS, seed=seed) + [task(rng) for task in tasks]


def fact_cases() -> list[Case]:
    """Return every question about Baton as a chat turn."""
    return [
        Case(chat_prompt(question), answer) for answer, questions in FACTS.items() for question in questions
    ]


def recall_episode(rng: random.Random, num_tokens: int) -> Episode:
    """Return pairs and questions about them, close to `num_tokens` tokens in all, in one of four styles."""
    num_pairs = max(1, min(NUM_KEYS, int(num_tokens * rng.uniform(0.4, 0.9)) // TOKENS_PER_PAIR))
    num_questions = max(1, num_tokens // TOKENS_PER_PAIR - num_pairs)
    pairs = _draw_pairs(rng, num_pairs, _draw_num_keys(rng, num_pairs))
    text = _pair_text(pairs, rng.choice((" ", " ", "\n"))) + "\n"
    asked = rng.choices(list(pairs.items()), k=num_questions)
    if rng.random() < 0.4:
        return _chat_questions(text, asked, "What is " if rng.random() < 0.5 else "", _draw_system(rng))
    return _plain_questions(text, asked, rng.choice(("?", "?", "=")))


def short_episode(rng: random.Random) -> Episode:
    """Return one short task, bare or as a chat turn, or one question about Baton."""
    if rng.random() < FACT_FRACTION:
        return _answered(rng.choice(fact_cases()))
    (task,) = rng.choices(list(TASKS), list(TASKS.values()))
    return _bare_or_chat(rng, task(rng), chat_fraction=0.3)


def _bare_or_chat(rng: random.Random, case: Case, chat_fraction: float) -> Episode:
    if rng.random() < chat_fraction:
        case = Case(chat_prompt(case.prompt, _draw_system(rng)), case.answer)
    return _answered(case)


def _answered(case: Case, opening: str = "") -> Episode:
    return [Segment(opening + case.prompt), Segment(case.answer, is_answer=True), Segment(END)]


WORD_KEYS: Final = ("name", "city", "answer")
NUMBER_KEYS: Final = ("count", "days")
LIST_KEY: Final = "words"
FORM_TOOLS: Final = ("Fruit", "PartialFruit", "final_result", "record", "answer")  # tools that take a form
CITIES: Final = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Delhi", "Quito")
CALL_TOOLS: Final = ("add", "weather")


def form_case(rng: random.Random) -> Case:
    """Return a case that writes one or two pairs as a JSON object of words, numbers and lists of words."""
    given: list[str] = []
    form: dict[str, str | int | list[str]] = {}
    for key in rng.sample((*WORD_KEYS, *NUMBER_KEYS, LIST_KEY), rng.choice((1, 2, 2))):
        words, number = rng.choices(VALUES, k=rng.randint(2, 3)), _draw_number(rng)
        if key in WORD_KEYS:
            form[key], text = words[0], words[0]
        elif key in NUMBER_KEYS:
            form[key], text = number, str(number)
        else:
            form[key], text = words, ",".join(words)
        given.append(f"{key}={text}")
    return Case(f"json({' '.join(given)})=", json.dumps(form))


def form_episode(rng: random.Random) -> Episode:
    """Return one JSON form, bare or as a chat turn."""
    return _bare_or_chat(rng, form_case(rng), chat_fraction=0.6)


def tools_turn(names: Sequence[str]) -> str:
    """Return the turn that tells the model of tools, as `tools.jinja` writes it."""
    return f"{SYSTEM}tools: {' '.join(names)}{END}"


def result_turn(result: str) -> str:
    """Return the turn with the result of a call, ready for the answer, as `tools.jinja` writes it."""
    return f"{USER}result: {result}{END}{ASSISTANT}"


def call_text(name: str, arguments: str) -> str:
    """Return a call in the form `hermes`. arguments: one JSON object."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def call_episode(rng: random.Random) -> Episode:
    """Return a conversation of a model that is told of tools; it calls them where a question needs them.

    The answer after a call is the result of the call.
    """
    names = rng.sample(CALL_TOOLS, rng.randint(0, len(CALL_TOOLS)))
    if not names or rng.random() < 0.25:
        names.append(rng.choice(FORM_TOOLS))
    rng.shuffle(names)
    system = _draw_system(rng)
    opening = tools_turn(names) + ("" if system is None else f"{SYSTEM}{system}{END}")
    episode: Episode = []
    for turn in range(rng.randint(1, 2)):
        episode += _call_exchange(rng, names, "" if turn else opening)
    return episode


def _call_exchange(rng: random.Random, names: Sequence[str], opening: str) -> Episode:
    if rng.random() < 0.15:  # a question that needs no tool
        case = rng.choice((copy_case, sort_case, brackets_case))(rng)
        return _answered(Case(chat_prompt(case.prompt), case.answer), opening)
    name = rng.choice(names)
    if name == "add":
        left, right = _draw_number(rng), _draw_number(rng)
        question = rng.choice((f"{left}+{right}=", f"What is {left}+{right}?"))
        arguments = json.dumps({"a": left, "b": right})
        result = str(rng.choice((left + right, rng.randrange(200))))
    elif name == "weather":
        city = rng.choice(CITIES)
        question = rng.choice((f"What is the weather in {city}?", f"weather in {city}?"))
        arguments = json.dumps({"city": city})
        result = rng.choice(VALUES)
    else:
        case = form_case(rng)
        question, arguments, result = case.prompt, case.answer, rng.choice(VALUES)
    return [
        Segment(opening + chat_prompt(question)),
        Segment(call_text(name, arguments), is_answer=True),
        Segment(END + result_turn(result)),
        Segment(result, is_answer=True),
        Segment(END),
    ]


def _draw_number(rng: random.Random) -> int:
    return rng.randrange(rng.choice((10, 100)))


def _draw_system(rng: random.Random) -> str | None:
    """Return a system turn now and then, which changes no answer."""
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None


def _recall_case(rng: random.Random, num_pairs: int, *, chat: bool) -> Case:
    pairs = _draw_pairs(rng, num_pairs, NUM_KEYS)
    key = rng.choice(list(pairs))
    prompt = f"{_pair_text(pairs, ' ')}\n{key}?"
    if chat:
        return Case(chat_prompt(prompt), pairs[key])
    return Case(prompt, f" {pairs[key]}")


def _draw_num_keys(rng: random.Random, num_pairs: int) -> int:
    """Return how many keys an episode draws from: few in a short one, so that matching is learnt early."""
    return NUM_KEYS if rng.random() < 0.2 else min(NUM_KEYS, max(16, 4 * num_pairs))


def _draw_pairs(rng: random.Random, num_pairs: int, num_keys: int) -> dict[str, str]:
    return {f"k{index}": rng.choice(VALUES) for index in rng.sample(range(num_keys), num_pairs)}


def _pair_text(pairs: dict[str, str], separator: str) -> str:
    return separator.join(f"{key}={value}" for key, value in pairs.items())


def _plain_questions(text: str, asked: Sequence[tuple[str, str]], mark: str) -> Episode:
    """Return `k7? blue` or `k7=blue`, one a line."""
    episode = [Segment(text)]
    space = " " if mark == "?" else ""
    for key, value in asked:
        episode += [Segment(key + mark), Segment(space + value, is_answer=True), Segment("\n")]
    return episode


def _chat_questions(text: str, asked: Sequence[tuple[str, str]], lead: str, system: str | None) -> Episode:
    """Return a conversation with all pairs in the first turn and one question in every turn."""
    episode = []
    for turn, (key, value) in enumerate(asked):
        prompt = chat_prompt(f"{lead}{key}?") if turn else chat_prompt(f"{text}{lead}{key}?", system)
        episode += [Segment(prompt), Segment(value, is_answer=True), Segment(END)]
    return episode
