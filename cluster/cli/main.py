"""The command line: `baton serve MODEL`, `baton generate MODEL PROMPT` and the other commands of COMMANDS.

The exit status is 0, also after a cluster was told to stop and has drained; all others are in
baton/errors.py. One line on stderr gives the reason for 1 and 2.
"""

import argparse
import importlib
import io
import sys
from collections.abc import Sequence
from typing import Final

import baton
from baton.cluster.cli import output
from baton.cluster.cli.options import CliCommand, Parser
from baton.cluster.logs import set_up_logging
from baton.config.environment import set_log_format
from baton.errors import BROKEN_PIPE, INTERRUPTED, USER_ERROR, BatonError, how_to_install, status_of

# library -> the extra that installs it: not every machine has it
EXTRAS: Final = {"safetensors": "worker", "torch": "worker", "xxhash": "worker", "textual": "top"}

# command -> its module of cli/commands, imported when the command runs, and its help
COMMANDS: Final = {
    "serve": ("serve", "start a cluster that serves a model by the APIs of OpenAI and Anthropic"),
    "generate": ("generate", "complete one prompt and print the text as it comes"),
    "chat": ("chat", "talk to a cluster"),
    "status": ("status", "show workers, their pages and queues"),
    "top": ("top", "watch the cluster in the terminal: workers, tenants, requests"),
    "explain": ("explain", "show why a request went to its workers, and how long it took"),
    "bundle": ("bundle", "write what the cluster did lately into one file, without secrets"),
    "drain": ("workers", "stop a worker after its requests have moved or ended"),
    "undrain": ("workers", "call a drained worker back"),
    "restart": ("workers", "drain a worker and start it again"),
    "scale": ("workers", "set the number of prefill and decode workers"),
    "flip": ("workers", "change the role of a worker, without loading weights again"),
    "sleep": ("workers", "free a model's memory until `baton wake`"),
    "wake": ("workers", "load a sleeping model again"),
    "migrate": ("workers", "move running requests to another decode worker"),
    "bench": ("bench", "measure this machine, or a server, by any of its suites"),
    "sim": ("sim", "simulate a cluster with faults, or replay a bundle"),
    "calibrate": ("rehearse", "measure workers of this machine, for rehearsals"),
    "rehearse": ("rehearse", "predict what a cluster does with a load, on a virtual clock"),
    "advise": ("rehearse", "find the workers that a load needs, by rehearsals"),
    "doctor": ("doctor", "look for problems of this machine, and say how to fix them"),
    "config": ("config", "settings: show, schema, validate"),
    "keys": ("keys", "the keys that open the API: add, revoke, list"),
    "cluster-key": ("cluster_key", "the key that the cluster's processes share: new, rotate, retire"),
    "worker": ("processes", "run one worker, for a cluster without `baton serve`"),
    "gateway": ("processes", "run one gateway in the same way"),
    "router": ("processes", "run one router in the same way"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Raises SystemExit for --help and for wrong options."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write a character that the terminal lacks
    try:
        command, arguments = _parse(sys.argv[1:] if argv is None else argv)
        if getattr(arguments, "log_format", None):
            set_log_format(arguments.log_format)
        set_up_logging()
        return command.run(arguments) or 0
    except BatonError as error:
        return _fail(str(error), status_of(error))
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        install = how_to_install(EXTRAS[error.name])
        return _fail(f"{error.name} is not installed: {install}", USER_ERROR)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE


def _parse(argv: Sequence[str]) -> tuple[CliCommand, argparse.Namespace]:
    try:
        with output.stdout_errors():  # argparse of an early Python 3.11 raises an error of writing the help
            parser = Parser("", "Serves large language models.")
            parser.add_argument("--version", action="version", version=f"baton {baton.__version__}")
            parser.add_argument(
                "command", metavar="COMMAND", choices=COMMANDS, help="a command from the list below"
            )
            parser.add_argument(
                "options", metavar="...", nargs=argparse.REMAINDER, help="options of the command"
            )
            shown = (f"  {name:<12} {help_}" for name, (_, help_) in COMMANDS.items())
            parser.epilog = "\n".join(["commands, each with a --help of its own:", *shown])
            given = parser.parse(argv)
            module = importlib.import_module(f"baton.cluster.cli.commands.{COMMANDS[given.command][0]}")
            command: CliCommand = getattr(module, given.command.replace("-", "_"))
            parser = Parser(given.command, command.description)
            command.add_options(parser)
            return command, parser.parse(given.options)
    except SystemExit:  # after --help, which argparse does not flush
        output.flush()
        raise


def _fail(message: str, status: int) -> int:
    print(f"baton: error: {' '.join(message.splitlines())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
