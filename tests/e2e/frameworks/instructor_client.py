"""instructor: the modes in which Baton enforces the schema, and partial answers."""

from typing import Any, Final

import instructor
import openai
from questions import FRUIT_QUESTION, Fruit, run

MODES: Final = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA")


def answers(url: str) -> dict[str, object]:
    found: dict[str, object] = {}
    messages: Any = [{"role": "user", "content": FRUIT_QUESTION}]
    for name in MODES:
        own = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        client = instructor.from_openai(own, mode=instructor.Mode[name])
        asked: Any = {"model": "tiny", "messages": messages, "max_retries": 0, "temperature": 0}
        found[name] = client.chat.completions.create(**asked, response_model=Fruit).model_dump()
        *_, last = client.chat.completions.create_partial(**asked, response_model=Fruit)
        found[f"{name} partial"] = last.model_dump()
    return found


if __name__ == "__main__":
    run(answers)
