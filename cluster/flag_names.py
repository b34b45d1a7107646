"""Errors in the words of the command line: the flag that was typed instead of the setting behind it."""

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

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
