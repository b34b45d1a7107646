from argparse import ArgumentTypeError

import pytest

from baton.cluster.cli.options import biases, count, dtype, integers, load_format, stop_string


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25600), ("1m", 10**6), ("1M", 2**20), ("0", 0)],
)
def test_counts_may_have_a_unit(text: str, expected: int) -> None:
    assert count(text) == expected


@pytest.mark.parametrize("text", ["", "k", "-1", "1e12", "4.5", "4.5K", "4 k", "4kk", "9" * 20])
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="expected an integer such as 4096, 4k"):
        count(text)


def test_other_names_of_the_same_thing() -> None:
    assert [dtype(name) for name in ("half", "float", "bfloat16", "x")] == [
        "float16", "float32", "bfloat16", "x",
    ]  # fmt: skip
    assert [load_format(name) for name in ("safetensors", "dummy")] == ["auto", "dummy"]


def test_lists() -> None:
    assert integers("5,17") == (5, 17)
    assert biases("5:-1.5,17:2") == {5: -1.5, 17: 2.0}


def test_an_empty_stop_string_is_refused() -> None:
    assert stop_string(" ") == " "
    with pytest.raises(ArgumentTypeError, match="must not be empty"):
        stop_string("")
