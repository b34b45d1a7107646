"""The questions to the model tiny that the scripts of all frameworks share, and the functions that it calls.

Runs in the virtual environment of the frameworks, without Baton.
"""

import json
import sys
from collections.abc import Callable
from typing import Any, Final

import openai
from pydantic import BaseModel

FRUIT_QUESTION: Final = "json(name=fig count=7)="
SUM_QUESTION: Final = "What is 7+5?"
WEATHER_QUESTION: Final = "What is the weather in Paris?"


class Fruit(BaseModel):
    """A fruit."""

    name: str
    count: int


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def weather(city: str) -> str:
    """Return the weather in a city."""
    return "rain" if city == "Paris" else "sun"


class Add(BaseModel):
    """Add two numbers."""

    a: int
    b: int


class Weather(BaseModel):
    """Return the weather in a city."""

    city: str


TOOLS: Final[Any] = [
    openai.pydantic_function_tool(Add, name="add"),
    openai.pydantic_function_tool(Weather, name="weather"),
]
FUNCTIONS: Final[dict[str, Callable[..., str]]] = {"add": add, "weather": weather}


def run(answers: Callable[[str], dict[str, object]]) -> None:
    """Call `answers` with the URL of the API, which is the only argument, and print its results as JSON."""
    _, url = sys.argv
    print(json.dumps(answers(url)))
