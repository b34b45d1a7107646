"""Measure, on this machine: each suite prints a table, and writes it as JSON and as HTML.

baton bench kv [options]     KV pages between two processes, beside memcpy and raw sockets
baton bench serve [options]  an OpenAI server over HTTP, beside others; or gateway and router alone

The names of the files begin with the suite's. `baton bench SUITE --help` says more.
docs/benchmarks.md says what every suite measures.
"""

import argparse
import importlib
from typing import Final

from baton.cluster.cli.options import CliCommand, Parser
from baton.errors import ConfigError

# suite -> its module in bench/
SUITES: Final = {
    "batching": "engine.batching",
    "black_holes": "faults.black_holes",
    "dashboard": "serve.dashboard",
    "decode": "engine.decode",
    "disk_tier": "engine.disk_tier",
    "engine": "engine.throughput",
    "gateway_loop": "serve.gateway_loop",
    "gpu": "gpu.suite",
    "gpu-tiles": "gpu.tiles",
    "kv": "kv.suite",
    "kv_dtype": "serve.kv_dtype",
    "migration": "serve.migration",
    "planner": "planner",
    "prefix": "serve.prefix",
    "prefix_index": "router.prefix_index",
    "ray_faults": "faults.ray_faults",
    "router": "router.suite",
    "router_faults": "router.faults",
    "scheduler": "engine.scheduler",
    "serve": "serve.suite",
    "sim": "sim.suite",
    "soak": "faults.soak",
    "speculative": "speculative",
    "structured": "structured.suite",
    "tenants": "tenants.suite",
    "waterfall": "serve.waterfall",
}


def _add_options(parser: Parser) -> None:
    parser.add_argument("suite", metavar="SUITE", nargs="?", help=", ".join(SUITES))
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.suite not in SUITES:
        got = "none" if arguments.suite is None else repr(arguments.suite)
        raise ConfigError(f"baton bench SUITE: expected {', '.join(SUITES)}, got {got}")
    module = importlib.import_module(f"baton.bench.{SUITES[arguments.suite]}")
    parser = Parser(f"bench {arguments.suite}", module.__doc__)
    module.measure.add_options(parser)
    status: int = module.measure.run(parser.parse(arguments.rest))
    return status


bench = CliCommand(__doc__, _add_options, _run)
