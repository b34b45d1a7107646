"""Drain a worker and start it again, so that it loads its model and its settings anew.

Its requests end first; after `drain_timeout_s` the others are replayed on other workers. Returns when the new
process serves, or after --wait seconds. A worker that was drained before is started.
"""

import argparse
import asyncio

from baton.cluster.cli import output
from baton.cluster.cli.commands.undrain import add_wait_option, find, until_it_serves
from baton.cluster.cli.serve_options import add_router_options, routers_of, spelled
from baton.cluster.cluster_key import Keys
from baton.cluster.operator_node import connected
from baton.errors import PeerGone, WorkerLost
from baton.messages.workers import Routers


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="its name or id, as `baton status` says")
    add_wait_option(parser)
    add_router_options(parser)


def run(arguments: argparse.Namespace) -> None:
    name = asyncio.run(_restart(arguments.worker, arguments.wait, *routers_of(arguments)))
    output.write(f"{name} serves again\n")


async def _restart(worker: str, wait_s: float, routers: Routers, keys: Keys) -> str:
    """Return the worker's name."""
    try:
        async with connected(routers, keys) as operator:
            former = await find(operator, worker)
            name, former_id = (worker, "") if former is None else (former.name, former.id)
            await operator.restart(name)
            await until_it_serves(operator, name, wait_s, former_id)
            return name
    except (TimeoutError, PeerGone):
        raise WorkerLost(f"the router at {spelled(routers)} does not answer") from None
