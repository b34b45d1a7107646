import pytest

from baton.errors import InvalidRequest
from baton.gateway.api.call import MAX_PROMPTS, list_prompts


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_forms_of_prompts(prompt: object, expected: list[object]) -> None:
    assert list_prompts(prompt) == expected


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        1,
        {},
        [],
        [None],
        [[]],
        [1, "a"],
        ["a", 1],
        [True],
        [-1],
        [2**31],
        [[1, -1]],
        [[True]],
        [1.0],
        [[["a"]]],
    ],
)
def test_what_is_no_prompt(prompt: object) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        list_prompts(prompt)


def test_prompts_are_bounded() -> None:
    assert len(list_prompts(["a"] * MAX_PROMPTS)) == MAX_PROMPTS
    with pytest.raises(InvalidRequest, match="at most"):
        list_prompts(["a"] * (MAX_PROMPTS + 1))
