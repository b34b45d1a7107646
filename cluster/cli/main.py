"""The command line: `baton serve MODEL`, `baton generate MODEL PROMPT` and the rest of COMMANDS.

Exit status: 0, also of a cluster that was told to stop and has drained; 1 when what was asked for could not
be done, or broke later; 2 when something that the user gave is wrong; both are told in one line. 130 when
interrupted before its end; 141 when the reader of the output has gone, as of a process that a broken pipe
ends.
"""

import argparse
import importlib
import importlib.metadata
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import baton
from baton.cluster.cli import output
from baton.cluster.cli.generate_options import add_options, flags_of_settings, option_flags
from baton.cluster.cli.options import FAILED, USER_ERROR, OneLineParser, hint_for, in_flags, parser_of
from baton.cluster.installing import install
from baton.cluster.logs import set_up_logging
from baton.config.environment import set_log_format
from baton.errors import BatonError, ConfigError

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
WORKER_LIBRARIES: Final = ("numpy", "safetensors", "torch", "tqdm")  # the extra that the gateway does without


# Each is `add_options` and `run` of baton.cluster.cli.commands.<name>, imported when the command runs.
COMMANDS: Final = {
    "serve": "start a cluster that answers as the OpenAI API",
    "chat": "talk to a cluster",
    "status": "workers, their pages and queues",
    "explain": "why a request went where it went, and what it took",
    "drain": "let a worker finish what it has, and take nothing new",
    "undrain": "call a drained worker back",
    "restart": "drain a worker and start it again",
    "bench": "measure this machine, or a server: kv, serve",
    "sim": "run a whole cluster with faults in virtual time, from a seed",
    "doctor": "what this machine lacks, and how to mend it",
    "config": "settings: show, schema, validate",
    "keys": "the keys that open the API: add, revoke, list",
    "cluster-key": "the key that the cluster's processes share: rotate, retire",
    "worker": "run one worker, for a cluster that nobody else starts",
    "gateway": "run one gateway, likewise",
    "router": "run a router, likewise",
}


def main(argv: Sequence[str] | None = None) -> int:
    flags: dict[str, str] = {}
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what the terminal cannot show
    try:
        try:
            with output.told():  # argparse of an early Python 3.11 raises what it cannot write
                arguments = _parse(argv)
        except SystemExit:  # after --help, which argparse leaves to be flushed when nobody looks any more
            output.flush()
            raise
        if arguments.command in COMMANDS:
            return _run(arguments.command, arguments.options)
        else:
            set_up_logging()
            flags = flags_of_settings(arguments)
            _generate(arguments)
    except BatonError as error:
        print(f"baton: error: {in_flags(' '.join(str(error).splitlines()), flags)}", file=sys.stderr)
        return USER_ERROR if isinstance(error, ValueError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE
    return 0


def _run(name: str, options: Sequence[str]) -> int:
    command = importlib.import_module(f"baton.cluster.cli.commands.{name.replace('-', '_')}")
    parser = parser_of(name, command.__doc__)
    command.add_options(parser)
    arguments = parser.parse(options)
    if getattr(arguments, "log_format", None):
        set_log_format(arguments.log_format)
    set_up_logging()
    with _needing_workers_libraries():
        return int(command.run(arguments) or 0)


def _generate(arguments: argparse.Namespace) -> None:
    with _needing_workers_libraries():
        from baton.cluster.cli.generate import generate  # imports torch, for which --help need not wait
    generate(arguments)


@contextmanager
def _needing_workers_libraries() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in WORKER_LIBRARIES:
            raise
        raise ConfigError(f"{error.name} is not installed: {install('worker')}") from None


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="baton", description="Serves large language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"baton {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    generate = commands.add_parser(
        "generate", help="complete one prompt and print the text as it comes", allow_abbrev=False
    )
    add_options(generate)
    for name, help_ in COMMANDS.items():
        command = commands.add_parser(name, help=help_, add_help=False, prefix_chars="\0")
        command.add_argument("options", nargs="*")
    arguments, unknown = parser.parse_known_args(argv)
    if arguments.command in COMMANDS:
        return arguments
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
    return f"unknown option {argument!r}; {hint_for(argument, option_flags())}"


def _version() -> str:
    try:
        return baton.__version__
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
