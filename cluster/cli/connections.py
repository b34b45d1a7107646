"""Commands that ask the routers of a cluster: the options that name the cluster, and the connection to it."""

import argparse
import asyncio
from argparse import ArgumentTypeError
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from baton.cluster.cli.options import Parser
from baton.cluster.cluster_key import Keys, read_keys
from baton.cluster.cluster_record import find_record
from baton.cluster.operator_node import Operator, connected
from baton.config.environment import cluster_key_file
from baton.errors import ConfigError, PeerGone, WorkerLost
from baton.messages.bounds import MAX_ROUTERS
from baton.messages.workers import Address, Routers

AnswerT = TypeVar("AnswerT")


def add_router_options(parser: Parser) -> None:
    """Add --port, --router and --cluster-key-file, which name a cluster."""
    parser.add_argument("--port", type=int, metavar="N", help="port of the API of a cluster on this machine")
    parser.add_argument(
        "--router", type=addresses, metavar="HOST:PORT", help="router of another cluster; several with commas"
    )
    add_key_option(parser)


def add_key_option(parser: Parser) -> None:
    """Add --cluster-key-file."""
    parser.add_argument(
        "--cluster-key-file", metavar="FILE", help="the cluster's key (default: BATON_CLUSTER_KEY_FILE)"
    )


def ask(arguments: argparse.Namespace, question: Callable[[Operator], Awaitable[AnswerT]]) -> AnswerT:
    """Connect to the routers that the arguments name, and return the answer to `question`.

    Raises ConfigError when no cluster is found, and WorkerLost when no router answers.
    """
    routers, keys = routers_of(arguments)

    async def connect_and_ask() -> AnswerT:
        async with connected(routers, keys) as operator:
            return await question(operator)

    try:
        return asyncio.run(connect_and_ask())
    except (TimeoutError, PeerGone):
        raise WorkerLost(f"the router at {spelled(routers)} does not answer; is the key right?") from None


def has_no_key(file: str | None) -> bool:
    """Return whether neither the command line (`file`) nor the environment names a cluster's key."""
    return file is None and cluster_key_file() is None


def key_file(file: str | None) -> Path:
    """Return `file`, or the one that BATON_CLUSTER_KEY_FILE names. ConfigError: there is neither."""
    name = file or cluster_key_file()
    if name is None:
        raise ConfigError(
            "--cluster-key-file: expected the file with the cluster's key, got none: give the file that the "
            "cluster was started with; `baton cluster-key new` makes one for a new cluster"
        )
    return Path(name)


def addresses(text: str) -> Routers:
    """Read HOST:PORT, or several with commas between them."""
    found = tuple(map(_address, text.split(",")))
    if len(found) > MAX_ROUTERS:
        raise ArgumentTypeError(f"expected {MAX_ROUTERS} routers at most, got {len(found)}")
    return found


def spelled(routers: Routers) -> str:
    """Write addresses as `addresses` reads them."""
    return ", ".join(f"{router.host}:{router.port}" for router in routers)


def routers_of(arguments: argparse.Namespace) -> tuple[Routers, Keys]:
    """Return the routers that the arguments name, and their keys. ConfigError when no cluster is found."""
    if arguments.router is None:
        record = find_record(arguments.port)
        return record.routers, record.keys
    return arguments.router, read_keys(key_file(arguments.cluster_key_file))


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ArgumentTypeError(f"expected HOST:PORT such as 10.0.0.1:7000, got {text!r}")
    return Address(host.strip("[]"), int(port))
