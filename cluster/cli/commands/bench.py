"""Measure, on this machine: each suite prints a table and keeps it as JSON.

baton bench kv [options]     KV pages between two processes, beside memcpy and raw sockets
baton bench serve [options]  an OpenAI server over HTTP, beside others; or gateway and router alone

`baton bench SUITE --help` says more. docs/benchmarks.md lists the others, which run as `python -m`.
"""

import argparse
import importlib
from typing import Final

from baton.cluster.cli.options import CliCommand, Parser
from baton.errors import ConfigError

SUITES: Final = ("kv", "serve")


def _add_options(parser: Parser) -> None:
    parser.add_argument("suite", metavar="SUITE", nargs="?", help=" or ".join(SUITES))
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _run(arguments: argparse.Namespace) -> None:
    if arguments.suite not in SUITES:
        got = "none" if arguments.suite is None else repr(arguments.suite)
        raise ConfigError(f"baton bench SUITE: expected {', '.join(SUITES)}, got {got}")
    module = importlib.import_module(f"baton.bench.{arguments.suite}.suite")
    parser = Parser(f"bench {arguments.suite}", module.__doc__)
    module.measure.add_options(parser)
    module.measure.run(parser.parse(arguments.rest))


bench = CliCommand(__doc__, _add_options, _run)
