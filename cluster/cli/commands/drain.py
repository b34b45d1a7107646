"""Let a worker finish what it has and take nothing new; then it ends, and stays away.

`baton undrain` calls it back; one that was started with `baton worker` is started again by hand. The last
worker of a role goes with --force only.
"""

import argparse
import asyncio

from baton.cluster.cli import output
from baton.cluster.cli.serve_options import add_router_options, routers_of, spelled
from baton.cluster.cluster_key import Keys
from baton.cluster.operator_node import connected
from baton.errors import PeerGone, WorkerLost
from baton.messages.workers import Routers


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="its name or id, as `baton status` says")
    parser.add_argument("--force", action="store_true", help="also when it is the last of its role")
    add_router_options(parser)


def run(arguments: argparse.Namespace) -> None:
    asyncio.run(_drain(arguments.worker, arguments.force, *routers_of(arguments)))
    output.write(f"{arguments.worker} drains; `baton status` shows it until it has ended\n")


async def _drain(worker: str, may_be_last: bool, routers: Routers, keys: Keys) -> None:
    try:
        async with connected(routers, keys) as operator:
            await operator.drain(worker, may_be_last=may_be_last)
    except (TimeoutError, PeerGone):
        raise WorkerLost(f"the router at {spelled(routers)} does not answer") from None
