import pytest

from baton.gateway.text.tools import LlamaCalls

WEATHER = '{"name": "weather", "parameters": {"city": "Paris; {France}"}}'
TIME = '{"name": "time", "parameters": {}}'
FOUND = [("weather", '{"city":"Paris; {France}"}'), ("time", "{}")]


def read(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The text that is shown, and the calls; the same, however the text is cut."""
    results = []
    for size in (1, 7, len(text) + 1):
        calls = LlamaCalls()
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        shown = "".join([calls.push(part) for part in parts]) + calls.finish()
        results.append((shown, [(call.name, call.arguments) for call in calls.found]))
    assert results[0] == results[1] == results[2]
    return results[0]


@pytest.mark.parametrize("text", [WEATHER, f"\n {WEATHER}\n", f"<|python_tag|>{WEATHER}"])
def test_an_answer_that_is_a_call_is_no_text(text: str) -> None:
    assert read(text) == ("", FOUND[:1])


def test_calls_are_apart_by_semicolons() -> None:
    assert read(f"{WEATHER}; {TIME}") == ("", FOUND)
    assert read(f"<|python_tag|>{WEATHER};{TIME}") == ("", FOUND)


@pytest.mark.parametrize(
    "text",
    [
        "It rains.",
        f"I look: {WEATHER}",
        f"{WEATHER} and more",
        f"{WEATHER}; nothing",
        '{"city": "Paris"}',
        '{"name": "weather", "param',
        "<|python_tag|>print(1)",
        "<|pyth",
        " \n",
        "",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert read(text) == (text, [])


def test_text_is_shown_as_soon_as_it_cannot_be_a_call() -> None:
    calls = LlamaCalls()
    assert [calls.push(part) for part in (" ", "<", "b", ">", "{")] == ["", "", " <b", ">", "{"]
