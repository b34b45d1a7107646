"""Which cluster a command is about: the one of this machine, or that of a router."""

import argparse
from argparse import ArgumentTypeError
from pathlib import Path

from baton.cluster.cluster_key import Keys, read_keys
from baton.cluster.cluster_record import find_record
from baton.config import cluster_key_file
from baton.errors import ConfigError
from baton.wire_types import MAX_ROUTERS
from baton.worker import Address, Routers


def add_router_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, metavar="N", help="of the API of the cluster on this machine")
    parser.add_argument(
        "--router", type=addresses, metavar="HOST:PORT", help="of another cluster; several with commas"
    )
    add_key_option(parser)


def add_key_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster-key-file", metavar="FILE", help="that cluster's key (what BATON_CLUSTER_KEY_FILE names)"
    )


def routers_of(arguments: argparse.Namespace) -> tuple[Routers, Keys]:
    """Where the routers listen, and the cluster's keys."""
    if arguments.router is None:
        record = find_record(arguments.port)
        return record.routers, record.keys
    return arguments.router, read_keys(key_file(arguments.cluster_key_file))


def has_no_key(arguments: argparse.Namespace) -> bool:
    """Return whether neither the command line nor the environment names a cluster's key."""
    return arguments.cluster_key_file is None and cluster_key_file() is None


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
    """HOST:PORT, or several with commas between them."""
    found = tuple(map(_address, text.split(",")))
    if len(found) > MAX_ROUTERS:
        raise ArgumentTypeError(f"expected {MAX_ROUTERS} routers at most, got {len(found)}")
    return found


def spelled(routers: Routers) -> str:
    return ", ".join(f"{router.host}:{router.port}" for router in routers)


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ArgumentTypeError(f"expected HOST:PORT such as 10.0.0.1:7000, got {text!r}")
    return Address(host.strip("[]"), int(port))
