"""Run one gateway in the foreground: the OpenAI API, for clients of a router's workers."""

import argparse
from typing import Final

from baton.cluster.cli import foreground
from baton.cluster.cli.options import Option
from baton.config.gateway import GatewayConfig

OPTIONS: Final = (
    Option("--served-model-name", "served_model_name", str, "NAME", "the model's name in the API"),
    Option("--host", "host", str, "ADDRESS", "to listen on for clients (127.0.0.1)"),
    Option("--port", "port", int, "N", "to listen on for clients; 0: any that is free (8000)"),
    Option("--chat-template", "chat_template", str, "FILE", "in place of the model's own"),
    Option("--operator-port", "operator_port", int, "N", "of 127.0.0.1: /metrics, /ui without a key"),
    Option("--tenants", "tenants_file", str, "FILE", "tenants and their keys"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="as of the workers"
    )
    foreground.add_options(parser, OPTIONS, needs_router=True)


def run(arguments: argparse.Namespace) -> None:
    config = foreground.settings(GatewayConfig, arguments)
    foreground.serve_here("gateway", "gateway", config, arguments)
