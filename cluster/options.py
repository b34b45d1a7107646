"""Options of commands: each fills one key of a tree of settings, and is absent where it is not given.

Defaults and limits live with the settings' structs alone.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from baton.cluster.flag_names import StoreSpelled


class Option(NamedTuple):
    flags: str  # with spaces between them
    key: str
    kind: Callable[[str], object]
    metavar: str
    help: str


class Switch(NamedTuple):
    flag: str
    key: str
    value: bool
    help: str


AnyOption: TypeAlias = Option | Switch
# What argparse's parsers and groups have in common.
Groups: TypeAlias = Mapping[str, "argparse._ArgumentGroup"]


def add_to(groups: Groups, options: Iterable[AnyOption]) -> None:
    """groups: by the first part of an option's key."""
    for option in options:
        if isinstance(option, Option):
            groups[part_of(option.key)].add_argument(
                *option.flags.split(),
                dest=option.key,
                action=StoreSpelled,
                type=option.kind,
                metavar=option.metavar,
                default=argparse.SUPPRESS,
                help=option.help,
            )
        else:
            groups[part_of(option.key)].add_argument(
                option.flag,
                dest=option.key,
                action=StoreSpelled,
                nargs=0,
                const=option.value,
                default=argparse.SUPPRESS,
                help=option.help,
            )


def flags_of(options: Iterable[AnyOption]) -> list[str]:
    return [
        flag
        for option in options
        for flag in (option.flags.split() if isinstance(option, Option) else (option.flag,))
    ]


def part_of(key: str) -> str:
    return key.partition(".")[0]
