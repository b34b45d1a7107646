"""Run one worker in the foreground; it tells the router that it is there, and waits for what is sent.

Others must reach it at the address that it listens on: give this machine's, not 0.0.0.0.
"""

import argparse
import socket
from typing import Final

from baton.cluster.cli import foreground
from baton.cluster.cli.options import Option
from baton.cluster.cli.serve_options import engine_options
from baton.config.cluster import WorkerConfig
from baton.messages.workers import WorkerRole

OPTIONS: Final = (
    Option("--name", "name", str, "NAME", "in the cluster; one that is started again has the same name"),
    Option("--served-model-name", "model_name", str, "NAME", "the model's name in the API"),
    Option("--host", "host", str, "ADDRESS", "to listen on for the cluster's processes (127.0.0.1)"),
    Option("--port", "port", int, "N", "to listen on for them; 0: any that is free (0)"),
    Option("--transport", "transport", str, "NAME", "of KV pages: auto, shm, cuda_ipc, nccl, gloo or tcp"),
    Option("--drain-timeout", "drain_timeout_s", float, "S", "seconds for requests to end when told to stop"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    roles = tuple(str(role) for role in WorkerRole)
    parser.add_argument("role", choices=roles, help="prefill or decode")
    parser.add_argument(
        "engine.model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help='a directory, or "tiny"'
    )
    foreground.add_options(parser, (*OPTIONS, *engine_options()), needs_router=True)


def run(arguments: argparse.Namespace) -> None:
    config = foreground.settings(WorkerConfig, with_names(arguments))
    foreground.serve_here("worker", config.name, config, arguments)


def with_names(arguments: argparse.Namespace) -> argparse.Namespace:
    """What is not named is called after its role and machine, a model after its directory."""
    given = vars(arguments)
    given.setdefault("name", f"{arguments.role}-{socket.gethostname()}")
    if "engine.model" in given:
        given.setdefault("model_name", given["engine.model"].rstrip("/").rpartition("/")[2])
    return arguments
