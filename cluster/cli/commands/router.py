"""Run a router in the foreground, for gateways and workers that are started one by one.

Its address must be known to all of them, so it needs a port: --port 7000. All need the same cluster key.
"""

import argparse
from typing import Final

from baton.cluster.cli import foreground
from baton.cluster.cli.options import Option, routing_policy
from baton.config.router import RouterConfig

OPTIONS: Final = (
    Option("--host", "host", str, "ADDRESS", "to listen on (127.0.0.1)"),
    Option("--port", "port", int, "N", "to listen on; 0: any that is free (0)"),
    Option(
        *("--router-policy", "policy", routing_policy, "NAME"),
        "round-robin, least-loaded, prefix, or package.module:Class (cost)",
    ),
    Option("--redis", "redis", str, "URL", "that routers share (none)"),
    Option("--decision-log", "decision_log", str, "FILE", "to append what the router decides to"),
    Option("--local-prefill-tokens", "local_prefill_tokens", int, "N", "prompts that need no prefill worker"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    foreground.add_options(parser, OPTIONS, needs_router=False)


def run(arguments: argparse.Namespace) -> None:
    config = foreground.settings(RouterConfig, arguments)
    foreground.serve_here("router", "router", config, arguments)
