"""One process of a cluster that nobody supervises: `baton router`, `baton gateway` and `baton worker`.

Without --router and a key, a worker or gateway joins the cluster that `baton serve` runs on this machine.

What starts them, such as Kubernetes or compose, is what starts them again.
"""

import argparse
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from setproctitle import setproctitle

from baton.clock import SystemClock
from baton.cluster.cli.options import AnyOption, add_to, part_of
from baton.cluster.cli.serve_options import add_key_option, addresses, has_no_key, key_file
from baton.cluster.cli.settings import Given, Settings, flags_given
from baton.cluster.cluster_key import READ_EVERY_S, Keys, KeyWatch, read_keys
from baton.cluster.cluster_record import find_record
from baton.cluster.logs import add_format_option, say
from baton.cluster.process import STOPPED_TWICE, ring_of, run
from baton.cluster.process_spec import Assignment, ProcessKind, generations_of
from baton.config.cluster import WorkerConfig
from baton.config.environment import environment_settings
from baton.config.gateway import GatewayConfig
from baton.config.loader import leaves
from baton.errors import ConfigError
from baton.messages.workers import Address, Routers
from baton.rpc.auth import KeyRing

logger = logging.getLogger(__name__)

StructT = TypeVar("StructT", bound=msgspec.Struct)

# What to say where nobody has given one of these.
MISSING: Final = {
    "routers": "--router HOST:PORT: expected where the router listens, got none",
    "model": 'MODEL: expected a directory, or "tiny", got none',
    "engine.model": 'MODEL: expected a directory, or "tiny", got none',
}


def add_options(parser: argparse.ArgumentParser, options: Iterable[AnyOption], *, needs_router: bool) -> None:
    groups: dict[str, Any] = {}
    for option in options:
        title = "engine" if part_of(option.key) == "engine" else "settings"
        groups.setdefault(title, parser.add_argument_group(title))
        groups[part_of(option.key)] = groups[title]
    add_to(groups, options)
    parser.add_argument("--config", metavar="FILE", type=Path, help="settings as YAML; options go first")
    add_format_option(parser)
    if needs_router:
        parser.add_argument(
            "--router",
            type=addresses,
            metavar="HOST:PORT",
            help="where it listens; several with commas (the cluster that runs on this machine)",
        )
    add_key_option(parser)


def settings(struct_type: type[StructT], arguments: argparse.Namespace) -> StructT:
    """Options, then variables, then the file, then defaults. Raises ConfigError."""
    flags = flags_given(struct_type, arguments)
    routers: Routers | None = getattr(arguments, "router", None)
    if routers is not None:
        flags["routers"] = Given(routers, "--router")
    given = Settings(struct_type, flags=flags, file=arguments.config, environment=environment_settings())
    if "routers" in leaves(struct_type).keys() - given.given.keys() and has_no_key(arguments):
        given.given["routers"] = Given(find_record().routers, "the cluster on this machine")
    for key in MISSING.keys() & leaves(struct_type).keys() - given.given.keys():
        raise ConfigError(MISSING[key])
    return given.build()


def serve_here(kind: ProcessKind, name: str, config: msgspec.Struct, arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM or an interrupt; the second ends it at once. Raises BatonError when it cannot."""
    stop = threading.Event()

    def drain(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(STOPPED_TWICE)
        say(f"{name} drains; once more to stop at once", name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)

    setproctitle(f"baton {name}")

    def ready(where: Address) -> None:
        say(f"{name} serves at {where.host}:{where.port}", name)

    raw = msgspec.Raw(msgspec.json.encode(config))
    keys = KeyWatch(_key_reader(config, arguments), SystemClock())
    given = Assignment(kind=kind, name=name, generations=generations_of(kind, keys.keys), config=raw)
    ring = ring_of(given)
    threading.Thread(target=_follow, args=(keys, ring), name="keys", daemon=True).start()
    run(given, ring, ready, stop)


def _follow(keys: KeyWatch, ring: KeyRing) -> None:
    """Never return."""
    while True:
        time.sleep(READ_EVERY_S)
        if keys.look():
            logger.info("the cluster keys have changed: %d are accepted now", len(keys.keys))
            ring.replace(generations_of(ring.kind, keys.keys))


def _key_reader(config: msgspec.Struct, arguments: argparse.Namespace) -> Callable[[], Keys]:
    """Read the file that was named, or what the cluster on this machine has left if its routers are meant."""
    if has_no_key(arguments) and isinstance(config, WorkerConfig | GatewayConfig):
        record = find_record()
        if record.routers == config.routers:
            return lambda: find_record(record.port).keys
    path = key_file(arguments.cluster_key_file)
    return lambda: read_keys(path)
