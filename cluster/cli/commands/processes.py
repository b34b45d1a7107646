"""One process of a cluster in the foreground: `baton router`, `baton gateway` and `baton worker`.

Kubernetes, compose or another supervisor starts these processes and starts them again. Without --router and a
key, a worker or gateway joins the cluster that `baton serve` runs on this machine.
"""

import argparse
import logging
import signal
import socket
import threading
import time
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from setproctitle import setproctitle

from baton.clock import SystemClock
from baton.cluster.cli.connections import add_key_option, addresses, has_no_key, key_file
from baton.cluster.cli.options import CliCommand, Parser, settings_of
from baton.cluster.cli.settings import (
    GATEWAY_OPTIONS,
    NO_MODEL,
    ROUTER_OPTIONS,
    Given,
    StructT,
    add_file_options,
    settings_from,
)
from baton.cluster.cluster_key import READ_EVERY_S, Keys, KeyWatch, read_keys
from baton.cluster.cluster_record import find_record
from baton.cluster.logs import say
from baton.cluster.model_directory import served_name
from baton.cluster.process import drain_on_signals, run
from baton.cluster.runtimes.base import Assignment, ProcessStarted, generations_of
from baton.config.cluster import WorkerConfig
from baton.config.gateway import GatewayConfig
from baton.config.loader import leaves
from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.messages.bounds import Kind
from baton.messages.workers import WorkerRole
from baton.rpc.auth import KeyRing

logger = logging.getLogger(__name__)

ROUTER_KEYS: Final = ("host", "port", *ROUTER_OPTIONS)
GATEWAY_KEYS: Final = (
    *("served_model_name", "host", "port", *GATEWAY_OPTIONS, "tenants_file", "drain_timeout_s"),
)
WORKER_KEYS: Final = (
    *("name", "model_name", "host", "port", "transport", "kv_digests", "kv_streams", "drain_timeout_s"),
)
KINDS: Final = {RouterConfig: Kind.ROUTER, GatewayConfig: Kind.GATEWAY, WorkerConfig: Kind.WORKER}
# Settings without a default -> the error where a command has none of them.
MISSING: Final = {
    "routers": "--router HOST:PORT: expected where the router listens, got none",
    "model": NO_MODEL,
    "engine.model": NO_MODEL,
}


def config_of(struct_type: type[StructT], arguments: argparse.Namespace) -> StructT:
    """Read the process's settings from options, then variables, then the file, then defaults.

    Raises ConfigError.
    """
    given = settings_from(struct_type, arguments)
    if getattr(arguments, "router", None) is not None:
        given.given["routers"] = Given(arguments.router, "--router")
    if "routers" in leaves(struct_type).keys() - given.given.keys() and has_no_key(
        arguments.cluster_key_file
    ):
        given.given["routers"] = Given(find_record().routers, "the cluster on this machine")
    for key in MISSING.keys() & leaves(struct_type).keys() - given.given.keys():
        raise ConfigError(MISSING[key])
    return given.build()


def worker_config(arguments: argparse.Namespace) -> WorkerConfig:
    """Read a worker's settings. The default name consists of the worker's role and the host's name."""
    given = vars(arguments)
    given.setdefault("name", f"{arguments.role}-{socket.gethostname()}")
    if "engine.model" in given:
        given.setdefault("model_name", served_name(given["engine.model"]))
    return config_of(WorkerConfig, arguments)


def serve_here(config: RouterConfig | GatewayConfig | WorkerConfig, key_option: str | None) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once. Raises BatonError."""
    kind = KINDS[type(config)]
    name = config.name if isinstance(config, WorkerConfig) else kind.value
    stop = threading.Event()
    notice = f"{name} drains; once more to stop at once"
    drain_on_signals(stop, signal.SIGTERM, signal.SIGINT, on_first=lambda: say(notice, name))
    setproctitle(f"baton {name}")

    def tell(message: object) -> None:
        if isinstance(message, ProcessStarted):
            say(f"{name} serves at {message.address.host}:{message.address.port}", name)

    raw = msgspec.Raw(msgspec.json.encode(config))
    keys = KeyWatch(_key_reader(config, key_option), SystemClock())
    given = Assignment(kind=kind, name=name, generations=generations_of(kind, keys.keys), config=raw)
    ring = KeyRing(given.kind, given.generations)
    threading.Thread(target=_follow, args=(keys, ring), name="keys", daemon=True).start()
    run(given, ring, stop, tell)


def _follow(keys: KeyWatch, ring: KeyRing) -> None:
    """Replace the process's keys each time the watched keys change; never return."""
    while True:
        time.sleep(READ_EVERY_S)
        if keys.look():
            logger.info("the cluster keys have changed: %d are accepted now", len(keys.keys))
            ring.replace(generations_of(ring.kind, keys.keys))


def _key_reader(config: object, key_option: str | None) -> Callable[[], Keys]:
    """Return a function that reads the process's keys from the named file.

    Without a named file, a process that joins the cluster of this machine reads that cluster's record.
    """
    if has_no_key(key_option) and isinstance(config, WorkerConfig | GatewayConfig):
        record = find_record()
        if record.routers == config.routers:
            return lambda: find_record(record.port).keys
    path = key_file(key_option)
    return lambda: read_keys(path)


def _add_process_options(parser: Parser, struct_type: type[msgspec.Struct], keys: Sequence[str]) -> None:
    settings = settings_of(struct_type)
    add_file_options(parser)
    if "routers" in settings:
        parser.add_argument(
            "--router",
            type=addresses,
            metavar="HOST:PORT",
            help="the routers, with commas between them (default: the cluster of this machine)",
        )
    add_key_option(parser)
    parser.add_settings("settings", [settings[key] for key in keys])
    engine = [settings[key] for key in settings if key.startswith("engine.") and key != "engine.model"]
    if engine:
        parser.add_settings("engine", engine)


def _add_gateway_options(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default=SUPPRESS, help="the workers' model")
    _add_process_options(parser, GatewayConfig, GATEWAY_KEYS)


def _add_worker_options(parser: Parser) -> None:
    parser.add_argument("role", choices=[str(role) for role in WorkerRole])
    parser.add_argument(
        "engine.model",
        metavar="MODEL",
        nargs="?",
        default=SUPPRESS,
        help='a directory, a repository, or "tiny"',
    )
    _add_process_options(parser, WorkerConfig, WORKER_KEYS)


router = CliCommand(
    """Run one router in the foreground, for gateways and workers that are started one by one.

Gateways and workers are told its address, so give it a port: --port 7000. All need the same cluster key.
""",
    lambda parser: _add_process_options(parser, RouterConfig, ROUTER_KEYS),
    lambda arguments: serve_here(config_of(RouterConfig, arguments), arguments.cluster_key_file),
)
gateway = CliCommand(
    "Run one gateway in the foreground: the APIs of OpenAI and Anthropic, for the workers of a router.",
    _add_gateway_options,
    lambda arguments: serve_here(config_of(GatewayConfig, arguments), arguments.cluster_key_file),
)
worker = CliCommand(
    """Run one worker in the foreground. The worker connects to the routers and waits for requests.

Other processes connect to the address that it listens on: give this machine's, not 0.0.0.0.
""",
    _add_worker_options,
    lambda arguments: serve_here(worker_config(arguments), arguments.cluster_key_file),
)
