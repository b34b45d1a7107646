"""The arguments of `generate` and `stream`, in the forms that vLLM takes, checked and brought into one form.

One prompt is text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; several are any iterable of
these. Integers alone are one prompt. Arrays and tensors count as the lists that they hold.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Final, NamedTuple, TypeAlias

from baton.errors import InvalidRequest, shown
from baton.request import SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, object]
Prompts: TypeAlias = str | Mapping[str, object] | Iterable[int | Prompt]
Sampling: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Stop: TypeAlias = str | Sequence[str] | None

PROMPT_KEYS: Final = ("prompt", "prompt_token_ids")
EXPECTED: Final = "text, token ids, or a dict with 'prompt' or 'prompt_token_ids'"


class GivenPrompt(NamedTuple):
    """One prompt. `text` is encoded unless `token_ids` are given; beside token ids it is only shown."""

    text: str | None
    token_ids: tuple[int, ...] | None


def list_prompts(prompts: object) -> list[object]:
    """Return one entry for each prompt, unread. Raises InvalidRequest for a value that holds no prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = items_of(prompts)
    if listed is None:
        raise InvalidRequest(f"prompts: expected {EXPECTED}, or several of these, got {shown(prompts)}")
    return [listed] if listed and _is_integer(listed[0]) else listed


def read_prompt(prompt: object) -> GivenPrompt:
    """Read one entry of `list_prompts`. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return GivenPrompt(prompt, None)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt)
    return GivenPrompt(None, _token_ids(prompt, EXPECTED))


def list_stops(stop: object) -> tuple[str, ...]:
    """Return the stop strings. Raises InvalidRequest for anything but text."""
    if stop is None or isinstance(stop, str):
        return () if stop is None else (stop,)
    listed = items_of(stop)
    texts = [text for text in listed or () if isinstance(text, str)]
    if listed is None or len(texts) < len(listed):
        raise InvalidRequest(f"stop: expected text or a list of texts, got {shown(stop)}")
    return tuple(texts)


def list_sampling(sampling: object, num_prompts: int) -> list[SamplingParams]:
    """Return one for each prompt. Raises InvalidRequest."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * num_prompts
    listed = items_of(sampling)
    known = [one for one in listed or () if isinstance(one, SamplingParams)]
    if listed is None or len(known) < len(listed):
        raise InvalidRequest(
            f"sampling_params: expected SamplingParams(...), or a list of them, got {shown(sampling)}"
        )
    if len(known) != num_prompts:
        raise InvalidRequest(
            f"sampling_params: expected one, or {num_prompts} for as many prompts, got {len(known)}"
        )
    return known


@contextmanager
def naming(index: int, num_prompts: int) -> Iterator[None]:
    """Name the prompt in an InvalidRequest, where there are several."""
    try:
        yield
    except InvalidRequest as error:
        if num_prompts == 1:
            raise
        raise InvalidRequest(f"prompt {index}: {error}") from None


def items_of(value: object) -> list[object] | None:
    """Return the items of a list, array or tensor; None for text, bytes, mappings and single values."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return None
    to_list = getattr(value, "tolist", None)  # of arrays and tensors
    if callable(to_list):
        value = to_list()
    return list(value) if isinstance(value, Iterable) else None


def _from_mapping(prompt: Mapping[object, object]) -> GivenPrompt:
    given = {key: value for key, value in prompt.items() if value is not None}
    for key in given:
        if key not in PROMPT_KEYS:
            raise InvalidRequest(f"unknown key {key!r}; known are 'prompt' and 'prompt_token_ids'")
    text = given.get("prompt")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"prompt: expected text, got {shown(text)}")
    if "prompt_token_ids" in given:
        return GivenPrompt(text, _token_ids(given["prompt_token_ids"], "prompt_token_ids: token ids"))
    if text is None:
        raise InvalidRequest(f"expected {EXPECTED}, got {shown(prompt)}")
    return GivenPrompt(text, None)


def _token_ids(given: object, expected: str) -> tuple[int, ...]:
    listed = items_of(given)
    if listed is None:
        raise InvalidRequest(f"expected {expected}, got {shown(given)}")
    for index, token_id in enumerate(listed):
        if not _is_integer(token_id):
            raise InvalidRequest(f"token id {index}: expected an integer, got {shown(token_id)}")
    return tuple(int(token_id) for token_id in listed if isinstance(token_id, Integral))


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
