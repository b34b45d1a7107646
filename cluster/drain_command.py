"""Let a worker finish what it has and take nothing new; then it ends, and stays away."""

import argparse
import asyncio

from baton.cluster import standard_output
from baton.cluster.operator_node import connected
from baton.cluster.router_options import add_router_options, router_of
from baton.control import Address
from baton.errors import PeerGone, WorkerLost


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="its name or id, as `baton status` says")
    add_router_options(parser)


def run(arguments: argparse.Namespace) -> None:
    asyncio.run(_drain(arguments.worker, *router_of(arguments)))
    standard_output.write(f"{arguments.worker} drains; `baton status` shows it until it has ended\n")


async def _drain(worker: str, router: Address, key: bytes) -> None:
    try:
        async with connected(router, key) as operator:
            await operator.drain(worker)
    except (TimeoutError, PeerGone):
        raise WorkerLost(f"the router at {router.host}:{router.port} does not answer") from None
