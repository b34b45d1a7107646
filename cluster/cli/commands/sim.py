"""Run a whole cluster in virtual time, with faults, from one seed: `baton sim --seed 17`."""

import argparse
import logging
from traceback import format_exception

from baton.cluster.cli import output
from baton.sim.faults import Trouble
from baton.sim.world import Violation, World


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the cluster, its load and its faults")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="run so many, from --seed on")
    parser.add_argument(
        "--trouble", type=Trouble, choices=list(Trouble), default=Trouble.ANY, help="what goes wrong"
    )
    parser.add_argument("--quiet", action="store_true", help="only say how requests ended")


def run(arguments: argparse.Namespace) -> int:
    """1 at the first seed with which something did not hold, else 0."""
    logger = logging.getLogger("baton")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # the trace says it, with the time
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
