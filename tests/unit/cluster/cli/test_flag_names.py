import argparse

import pytest

from baton.cluster.cli.options import SPELLED, StoreSpelled, hint_for, in_flags

FLAGS = {"engine.cache.page_size": "--block-size", "sampling.n": "--n", "engine.dtype": "--dtype"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("cache.page_size: expected 1, got 0", "--block-size: expected 1, got 0"),
        ("too much: lower cache.page_size", "too much: lower --block-size"),
        ("n must be 1", "--n must be 1"),
        ("the n of it", "the n of it"),
        ("nothing", "nothing"),
        ("dtype: expected", "--dtype: expected"),
        ("cache.page_sizes", "cache.page_sizes"),
    ],
)
def test_settings_become_flags(message: str, expected: str) -> None:
    assert in_flags(message, FLAGS) == expected


def test_the_flag_that_was_typed_is_kept() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--block-size", "--page-size", dest="size", type=int, action=StoreSpelled)
    parser.add_argument("--on", dest="on", action=StoreSpelled, nargs=0, const=True)
    parsed = parser.parse_args(["--page-size", "5", "--on"])
    assert (parsed.size, parsed.on) == (5, True)
    assert getattr(parsed, SPELLED) == {"size": "--page-size", "on": "--on"}


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--temp", "did you mean --temperature?"),
        ("--temp=0", "did you mean --temperature?"),
        ("--max-tokns", "did you mean --max-tokens?"),
        ("--model", "the model comes first"),
        ("--prompt=x", "the prompt has no flag"),
        ("-1+2=", "put -- before a prompt"),
    ],
)
def test_hints(typed: str, hint: str) -> None:
    assert hint in hint_for(typed, ["--max-model-len", "--max-tokens", "--temperature"])
