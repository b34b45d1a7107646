"""The prompts of a completion, in OpenAI's four forms: text, texts, token ids, several of these."""

from typing import Final, TypeAlias

from baton.errors import InvalidRequest, shown

MAX_PROMPTS: Final = 128
MAX_TOKEN_ID: Final = 2**31 - 1
GivenPrompt: TypeAlias = str | list[int]


def list_prompts(prompt: object) -> list[GivenPrompt]:
    """Raises InvalidRequest for anything else; decoded JSON is expected."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(f"prompt: expected text, token ids, or a list of these, got {shown(prompt)}")
    if _are_token_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} prompts, got {len(prompt)}")
    return [_one(item, index) for index, item in enumerate(prompt)]


def _one(item: object, index: int) -> GivenPrompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _are_token_ids(item):
        return item
    raise InvalidRequest(f"prompt[{index}]: expected text or token ids, got {shown(item)}")


def _are_token_ids(items: list[object]) -> bool:
    return bool(items) and all(
        type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in items
    )  # True is no token id
