"""What the commands of `baton` have in common: one-line errors, and help that need not import anything."""

import argparse
import difflib
from collections.abc import Sequence
from typing import Final, NoReturn

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
