"""The prompts of a completion, in OpenAI's four forms: text, texts, token ids, several of these."""

from collections.abc import Collection
from typing import Any, Final, TypeAlias

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


def check_token_ids(token_ids: Collection[int], vocab_size: int | None, what: str) -> None:
    """Raises InvalidRequest that names the first id outside the vocabulary. None: the size is not known."""
    if vocab_size is None or not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    bad = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise InvalidRequest(f"{what}: token id {bad} is outside the vocabulary of {vocab_size} tokens")


def _are_token_ids(items: list[object]) -> bool:
    """Decoded JSON has no other number types; `set(map(type, ...))` runs in C. True is no token id."""
    return bool(items) and set(map(type, items)) == {int} and _are_between(items)


def _are_between(items: list[Any]) -> bool:
    return bool(min(items) >= 0 and max(items) <= MAX_TOKEN_ID)
