"""Run a whole cluster in virtual time, with faults, from one seed: `baton sim --seed 17`.

With --replay BUNDLE, run the routers of a bundle (`baton bundle`) again: every decision must be the recorded
one. With --policy, ask that policy for each decision as well, in the recorded state of the cluster.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, quantiles
from string import ascii_lowercase
from traceback import format_exception
from typing import TYPE_CHECKING, Final

import msgspec

from baton.cluster.cli import output
from baton.cluster.cli.options import CliCommand, Parser
from baton.errors import ConfigError
from baton.messages.bounds import short_id
from baton.sim.trouble import Trouble

if TYPE_CHECKING:
    from baton.sim.replay import Compared, Replayed, ReplayedPair

COLUMNS: Final = ("policy", "hit tokens", "predicted TTFT: mean s", "p50 s", "p90 s", "p99 s")


def _add_options(parser: Parser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="seed of the cluster, its load and its faults")
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="number of seeds to run, from --seed on"
    )
    parser.add_argument(
        "--trouble", type=Trouble, choices=list(Trouble), default=Trouble.ANY, help="kind of faults"
    )
    parser.add_argument(
        "--models", type=int, default=1, metavar="N", help="number of models, each with workers of its own"
    )
    parser.add_argument("--quiet", action="store_true", help="print only how requests ended")
    parser.add_argument("--replay", type=Path, metavar="BUNDLE", help="file of `baton bundle` to run again")
    parser.add_argument("--policy", metavar="NAME", help="with --replay: a policy to compare with")
    parser.add_argument(
        "--own-policy",
        default="",
        metavar="MODULE:CLASS",
        help="with --replay: a policy of your own, which the bundle may name",
    )


def _run(arguments: argparse.Namespace) -> int:
    """Return 1 at the first seed with a violation, or for a replay that differs; else 0."""
    for name in ("policy", "own_policy"):
        if getattr(arguments, name) and arguments.replay is None:
            raise ConfigError(f"--{name.replace('_', '-')}: expected --replay BUNDLE with it")
    logger = logging.getLogger("baton")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # the trace has these messages, with their times
    try:
        return _run_all(arguments) if arguments.replay is None else _replay(arguments)
    finally:
        logger.setLevel(level)


def _run_all(arguments: argparse.Namespace) -> int:
    if arguments.seeds < 1 or not 1 <= arguments.models <= len(ascii_lowercase):
        raise ConfigError(
            f"expected --seeds of 1 or more, and --models of 1 to {len(ascii_lowercase)}, got "
            f"{arguments.seeds} and {arguments.models}"
        )
    from baton.sim.world import Violation, World  # torch, which --help and wrong options do not wait for

    models = ("",) if arguments.models == 1 else ascii_lowercase[: arguments.models]
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        world = World(seed, None if arguments.quiet else _write, arguments.trouble, models=models)
        try:
            fates = world.run()
        except Exception as error:
            told = [str(error), *error.__notes__] if isinstance(error, Violation) else format_exception(error)
            _write("\n".join([f"seed {seed}: {world.summary}", *(line.rstrip() for line in told)]))
            return 1
        ends = ", ".join(f"{number} {fate}" for fate, number in sorted(fates.items()))
        _write(f"seed {seed}: {world.summary}, {world.events.now_s:.1f} s: {ends}")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from baton.sim.replay import read_bundle

    has_differed, policy = False, arguments.policy
    for replay in read_bundle(arguments.replay, arguments.own_policy):
        replayed = replay.run(policy)
        has_differed |= replayed.difference is not None
        recorded = replay.checkpoint.config.policy
        output.show(
            f"router {short_id(replay.checkpoint.router)}, policy {recorded}: {replayed.seconds:.1f} s, "
            f"{replayed.num_inputs} inputs, {len(replayed.outcomes)} decisions",
            *_verdict(replayed),
            *([] if policy is None else comparison(replayed.compared, recorded, policy)),
        )
    return 1 if has_differed else 0


def _verdict(replayed: "Replayed") -> list[str]:
    found = replayed.difference
    if found is None:
        return ["every decision is the recorded one, bit for bit"]
    sides = {"recorded": found.recorded, "replayed": found.replayed}
    told = (f"  {side}: {msgspec.json.encode(each).decode()}" for side, each in sides.items())
    return [f"decision {found.number} differs, and perhaps later ones:", *told]


def comparison(compared: "Sequence[Compared]", recorded: str, policy: str) -> list[output.Part]:
    """Return the lines and the table of two policies. recorded: name of the one that decided."""
    both = [(each.recorded, each.other) for each in compared if each.other is not None]
    num_elsewhere = sum(each.is_elsewhere for each in compared)
    num_later = len(compared) - len(both)
    head = f"{policy} sends {num_elsewhere} of {len(compared)} attempts elsewhere, {num_later} of them later"
    if not both:
        return [head]
    sides = {recorded: [one for one, _ in both], policy: [other for _, other in both]}
    return [head, output.table(COLUMNS, [_row(name, choices) for name, choices in sides.items()])]


def _row(name: str, choices: "Sequence[ReplayedPair]") -> tuple[str, ...]:
    ttfts_s = [choice.ttft_s for choice in choices]
    cuts = quantiles(ttfts_s, n=100, method="inclusive") if len(ttfts_s) > 1 else ttfts_s * 99
    figures = (fmean(ttfts_s), cuts[49], cuts[89], cuts[98])
    return name, str(sum(choice.num_held_tokens for choice in choices)), *(f"{each:.4f}" for each in figures)


def _write(line: str) -> None:
    output.write(f"{line}\n")


sim = CliCommand(__doc__, _add_options, _run)
