"""Call a drained worker back: `baton serve` starts it again under its name.

A worker that still drains comes back when it has ended. The command returns when the worker serves, and fails
after --wait seconds.
"""

import argparse
import asyncio
from typing import Final

from baton.cluster.cli import output
from baton.cluster.cli.serve_options import add_router_options, routers_of, spelled
from baton.cluster.cluster_key import Keys
from baton.cluster.operator_node import Operator, connected
from baton.errors import PeerGone, WorkerLost
from baton.messages.workers import Routers, Worker

LOOK_EVERY_S: Final = 0.2


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="its name, such as decode-0")
    add_wait_option(parser)
    add_router_options(parser)


def add_wait_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait", type=float, default=600.0, metavar="S", help="seconds for the worker to serve again (600)"
    )


def run(arguments: argparse.Namespace) -> None:
    asyncio.run(_undrain(arguments.worker, arguments.wait, *routers_of(arguments)))
    output.write(f"{arguments.worker} serves again\n")


async def _undrain(name: str, wait_s: float, routers: Routers, keys: Keys) -> None:
    try:
        async with connected(routers, keys) as operator:
            await operator.undrain(name)
            await until_it_serves(operator, name, wait_s)
    except (TimeoutError, PeerGone):
        raise WorkerLost(f"the router at {spelled(routers)} does not answer") from None


async def until_it_serves(operator: Operator, name: str, wait_s: float, former: str = "") -> None:
    """Wait for a worker of this name that does not drain, another than `former`, an id.

    Raises WorkerLost after `wait_s`.
    """
    deadline_s = asyncio.get_running_loop().time() + wait_s
    while (found := await find(operator, name)) is None or found.id == former:
        if asyncio.get_running_loop().time() >= deadline_s:
            raise WorkerLost(
                f"{name} does not serve after {wait_s:g} s: is that its name? See the log of `baton serve`"
            )
        await asyncio.sleep(LOOK_EVERY_S)


async def find(operator: Operator, name: str) -> Worker | None:
    """Return the worker of this name or id, unless it drains."""
    for entry in (await operator.status()).workers:
        if name in (entry.worker.name, entry.worker.id) and not entry.is_draining:
            return entry.worker
    return None
