"""Orders about workers of a running cluster: `baton drain`, `undrain`, `restart` and `migrate`."""

import argparse
import asyncio
from typing import Final

from baton.cluster.cli import output
from baton.cluster.cli.options import CliCommand, Parser
from baton.cluster.cli.routers import add_router_options, ask
from baton.cluster.operator_node import Operator
from baton.errors import ConfigError, WorkerLost
from baton.messages.workers import Worker

LOOK_EVERY_S: Final = 0.2


def _drain(arguments: argparse.Namespace) -> None:
    ask(arguments, lambda operator: operator.drain(arguments.worker, may_be_last=arguments.force))
    output.write(f"{arguments.worker} drains; `baton status` shows it until it has ended\n")


def _undrain(arguments: argparse.Namespace) -> None:
    async def undrain(operator: Operator) -> None:
        await operator.undrain(arguments.worker)
        await _until_it_serves(operator, arguments.worker, arguments.wait)

    ask(arguments, undrain)
    output.write(f"{arguments.worker} serves again\n")


def _restart(arguments: argparse.Namespace) -> None:
    async def restart(operator: Operator) -> str:
        former = await _find(operator, arguments.worker)
        name, former_id = (arguments.worker, "") if former is None else (former.name, former.id)
        await operator.restart(name)
        await _until_it_serves(operator, name, arguments.wait, former_id)
        return name

    output.write(f"{ask(arguments, restart)} serves again\n")


def _migrate(arguments: argparse.Namespace) -> None:
    if bool(arguments.request) == bool(arguments.worker):
        raise ConfigError("give one of REQUEST and --from WORKER")
    moved = ask(
        arguments,
        lambda operator: operator.migrate(
            request_id=arguments.request, worker=arguments.worker, to=arguments.to
        ),
    )
    if not moved.num_moved and moved.reason:
        raise ConfigError(f"no request has moved: {moved.reason}")
    stay = f"; {moved.num_left} stay: {moved.reason}" if moved.num_left else ""
    output.write(f"{moved.num_moved} requests have moved{stay}\n")


async def _until_it_serves(operator: Operator, name: str, wait_s: float, former: str = "") -> None:
    """Wait for a worker of this name that does not drain, other than `former`, an id.

    Raises WorkerLost after `wait_s`.
    """
    deadline_s = asyncio.get_running_loop().time() + wait_s
    while (found := await _find(operator, name)) is None or found.id == former:
        if asyncio.get_running_loop().time() >= deadline_s:
            raise WorkerLost(
                f"{name} does not serve after {wait_s:g} s: is that its name? See the log of `baton serve`"
            )
        await asyncio.sleep(LOOK_EVERY_S)


async def _find(operator: Operator, name: str) -> Worker | None:
    """Return the worker of this name or id, unless it drains."""
    for entry in (await operator.status()).workers:
        if name in (entry.worker.name, entry.worker.id) and not entry.is_draining:
            return entry.worker
    return None


def _add_drain_options(parser: Parser) -> None:
    _add_worker(parser)
    parser.add_argument("--force", action="store_true", help="also when it is the last of its role")
    add_router_options(parser)


def _add_wait_options(parser: Parser) -> None:
    _add_worker(parser)
    parser.add_argument(
        "--wait", type=float, default=600.0, metavar="S", help="seconds for the worker to serve again (600)"
    )
    add_router_options(parser)


def _add_migrate_options(parser: Parser) -> None:
    parser.add_argument(
        "request", metavar="REQUEST", nargs="?", default="", help="as `baton explain` takes it"
    )
    parser.add_argument(
        "--from", dest="worker", metavar="WORKER", default="", help="all requests of this one"
    )
    parser.add_argument(
        "--to", metavar="WORKER", default="", help="the decode worker; else the router chooses"
    )
    add_router_options(parser)


def _add_worker(parser: Parser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="name or id, as `baton status` shows")


drain = CliCommand(
    """Let a worker finish its requests and take nothing new; then the worker ends and stays away.

`baton undrain` calls it back; a worker of `baton worker` is started again by hand. The last worker of a role
goes with --force only.
""",
    _add_drain_options,
    _drain,
)
undrain = CliCommand(
    """Call a drained worker back: `baton serve` starts it again under its name.

A worker that still drains comes back when it has ended. The command returns when the worker serves, and fails
after --wait seconds.
""",
    _add_wait_options,
    _undrain,
)
restart = CliCommand(
    """Drain a worker and start it again, so that it loads its model and its settings anew.

Its requests end first; after `drain_timeout_s` the others are replayed on other workers. The command returns
when the new process serves, and fails after --wait seconds. A worker that was drained before is started.
""",
    _add_wait_options,
    _restart,
)
migrate = CliCommand(
    """Move a running request, or all requests of a decode worker, to another decode worker.

Its KV pages are copied while it goes on, then the other worker takes over with the next token: the client
sees no replay. A request that cannot move stays where it is. The command returns when all have moved or stay.
""",
    _add_migrate_options,
    _migrate,
)
