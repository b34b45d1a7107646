"""Options of commands: each fills one key of a tree of settings, and is absent where it is not given.

Defaults and limits live with the settings' structs alone.
"""

import argparse
import difflib
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

from baton.errors import ConfigError

# Errors in the words of the command line: the flag that was typed instead of the setting behind it.

SPELLED: Final = "spelled"  # of the namespace: setting -> the flag that set it

# Flags of other commands that mean something else here, or nothing.
NOT_OURS: Final = {
    "--model": "the model comes first and has no flag: baton generate MODEL PROMPT",
    "--prompt": "the prompt has no flag: baton generate MODEL PROMPT",
    "--scheduling-policy": "requests are served in their order; --scheduler-policy is about batches",
}


class StoreSpelled(argparse.Action):
    """Stores the value, or `const` where there is none, and how the flag was spelled."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        setattr(namespace, SPELLED, {**getattr(namespace, SPELLED, {}), self.dest: option_string})


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """`flags`: setting -> flag. A setting with a part is found anywhere, another where the message starts."""
    for key, flag in flags.items():
        name = re.escape(key.partition(".")[2])
        pattern = rf"\b{name}\b" if "." in key.partition(".")[2] else rf"^{name}\b"
        message = re.sub(pattern, flag, message)
    return message


def hint_for(unknown: str, known: Iterable[str]) -> str:
    typed = unknown.partition("=")[0]
    if typed in NOT_OURS:
        return NOT_OURS[typed]
    flags = list(known)
    begun = [flag for flag in flags if len(typed) > 2 and flag.startswith(typed)]
    nearest = begun if len(begun) == 1 else difflib.get_close_matches(typed, flags, n=1)
    return f"did you mean {nearest[0]}?" if nearest else "put -- before a prompt that starts with a dash"


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


# What the text of an option stands for; one that stands for nothing is refused before anything is loaded.

COUNT_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
# vLLM's other names of the same thing.
DTYPE_NAMES: Final = {"half": "float16", "float": "float32"}
LOAD_FORMAT_NAMES: Final = {"safetensors": "auto"}


def integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"expected integers such as 5,17, got {text!r}") from None


def biases(text: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError:
        raise ArgumentTypeError(f"expected biases such as 5:-1.5,17:2, got {text!r}") from None


def count(text: str) -> int:
    """As vLLM reads it: 4k is 4,000 and 4K is 4,096."""
    match = re.fullmatch(r"(\d{1,19})(\.\d{1,9})?([kmgKMG]?)", text)
    if match is None or (match[2] and match[3] not in ("k", "m", "g")):
        raise ArgumentTypeError(f"expected an integer such as 4096, 4k (4000) or 4K (4096), got {text!r}")
    unit = COUNT_UNITS[match[3]]
    return int(match[1]) * unit + round(float(match[2] or 0) * unit)


def stop_string(text: str) -> str:
    if not text:
        raise ArgumentTypeError("a stop string must not be empty")
    return text


def dtype(text: str) -> str:
    return DTYPE_NAMES.get(text, text)


def routing_policy(text: str) -> str:
    """The name of a routing policy that exists, or package.module:Class of one that can be imported."""
    from baton.router.policies.registry import policy_class  # numpy: --help does not wait for it

    try:
        policy_class(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("router.policy: ")) from error
    return text


def load_format(text: str) -> str:
    return LOAD_FORMAT_NAMES.get(text, text)


# What the commands of `baton` have in common: one-line errors, and help that need not import anything.

FAILED: Final = 1  # what was asked for could not be done, or broke later
USER_ERROR: Final = 2

# Of vLLM's command lines, which people paste: what to do instead.
VLLMS: Final = {
    "--api-key": "keys are of tenants, in a file: --tenants FILE",
    "--enable-auto-tool-choice": "tools may be called where the chat template tells of them; leave it out",
    "--tool-call-parser": "the chat template tells how tools are called; leave it out",
    "--kv-transfer-config": "prefill and decode workers find each other; leave it out, or give --transport",
    "--tokenizer": "it is read from the model's directory; leave it out",
    "--revision": "the model is a directory of yours; leave it out",
    "--trust-remote-code": "no code of a model is ever run; leave it out",
    "--pipeline-parallel-size": "a replica is split by --tensor-parallel-size alone",
    "-pp": "a replica is split by --tensor-parallel-size alone",
    "--shutdown-timeout": "give --drain-timeout",
}


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong without the usage, which would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"baton: error: {message} (see {self.prog} --help)\n")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """As `parse_args`, but an unknown option is answered with the nearest known one."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(self._what_is_unknown(unknown[0]))
        return arguments

    def _what_is_unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"unexpected argument {argument!r}"
        flag = argument.partition("=")[0]
        known = list(self._option_string_actions)
        if flag == "--model":
            return f"the model comes first and has no flag: {self.prog} MODEL"
        if flag in VLLMS:
            return f"{flag} is not needed or not there: {VLLMS[flag]}"
        nearest = difflib.get_close_matches(flag, known, n=1)
        return f"unknown option {flag!r}" + (f"; did you mean {nearest[0]}?" if nearest else "")


def parser_of(command: str, description: str | None) -> OneLineParser:
    return OneLineParser(
        prog=f"baton {command}",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
