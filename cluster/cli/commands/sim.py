"""Run a whole cluster in virtual time, with faults, from one seed: `baton sim --seed 17`."""

import argparse
import logging
from traceback import format_exception

from baton.cluster.cli import output
from baton.cluster.cli.options import CliCommand, Parser
from baton.sim.faults import Trouble
from baton.sim.world import Violation, World


def _add_options(parser: Parser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="seed of the cluster, its load and its faults")
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="number of seeds to run, from --seed on"
    )
    parser.add_argument(
        "--trouble", type=Trouble, choices=list(Trouble), default=Trouble.ANY, help="kind of faults"
    )
    parser.add_argument("--quiet", action="store_true", help="print only how requests ended")


def _run(arguments: argparse.Namespace) -> int:
    """Return 1 at the first seed with a violation, else 0."""
    logger = logging.getLogger("baton")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # the trace has these messages, with their times
    try:
        return _run_all(arguments)
    finally:
        logger.setLevel(level)


def _run_all(arguments: argparse.Namespace) -> int:
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        world = World(seed, None if arguments.quiet else _write, arguments.trouble)
        try:
            fates = world.run()
        except Exception as error:
            told = [str(error), *error.__notes__] if isinstance(error, Violation) else format_exception(error)
            _write("\n".join([f"seed {seed}: {world.summary}", *(line.rstrip() for line in told)]))
            return 1
        ends = ", ".join(f"{number} {fate}" for fate, number in sorted(fates.items()))
        _write(f"seed {seed}: {world.summary}, {world.events.now_s:.1f} s: {ends}")
    return 0


def _write(line: str) -> None:
    output.write(f"{line}\n")


sim = CliCommand(__doc__, _add_options, _run)
