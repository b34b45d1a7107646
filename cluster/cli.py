"""The command line: `baton generate MODEL PROMPT`.

Exit status: 0; 2 when something that the user gave is wrong, told in one line; 130 when interrupted; 141
when the reader of the output has gone, as for a process that a broken pipe ends.
"""

import argparse
import difflib
import importlib.metadata
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from baton.cluster.generate_options import add_options, option_flags
from baton.config import log_level
from baton.errors import BatonError, ConfigError

USER_ERROR: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
WORKER_LIBRARIES: Final = ("numpy", "safetensors", "torch", "tqdm")  # the extra that the gateway does without


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong without the usage, which would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"baton: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what the terminal cannot show
    try:
        logging.basicConfig(level=log_level(), stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
        _generate(arguments)
        sys.stdout.flush()
    except BatonError as error:
        print(f"baton: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    return 0


def _generate(arguments: argparse.Namespace) -> None:
    try:
        from baton.cluster.generate_command import generate  # imports torch, for which --help need not wait
    except ModuleNotFoundError as error:
        if error.name not in WORKER_LIBRARIES:
            raise
        raise ConfigError(f"{error.name} is not installed: pip install 'baton[worker]'") from None
    generate(arguments)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="baton", description="Serves large language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"baton {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    generate = commands.add_parser(
        "generate", help="complete one prompt and print the text as it comes", allow_abbrev=False
    )
    add_options(generate)
    arguments, unknown = parser.parse_known_args(argv)
    if arguments.prompt is None:
        _take_prompt(arguments, unknown)
    if unknown:
        generate.error(_unknown(unknown[0]))
    return arguments


def _take_prompt(arguments: argparse.Namespace, unknown: list[str]) -> None:
    """argparse finds no optional positional behind an option: it leaves the prompt among the unknown."""
    if unknown[:1] == ["--"] and len(unknown) > 1:
        arguments.prompt = unknown[1]
        del unknown[:2]
    elif unknown and not unknown[0].startswith("-"):
        arguments.prompt = unknown.pop(0)


def _unknown(argument: str) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}: put a prompt of several words in quotes"
    nearest = difflib.get_close_matches(argument.partition("=")[0], option_flags(), n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "put -- before a prompt that starts with a dash"
    return f"unknown option {argument!r}; {hint}"


def _version() -> str:
    try:
        return importlib.metadata.version("baton")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _drop_output() -> None:
    """Point stdout at nothing, so that the interpreter does not fail once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
