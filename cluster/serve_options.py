"""The options of `baton serve`: keys of ServeConfig. Those of engines are spelled as vLLM spells them."""

import argparse
from pathlib import Path
from typing import Final

from baton.cluster.engine_options import ENGINE_OPTIONS, ENGINE_SWITCHES
from baton.cluster.logs import add_format_option
from baton.cluster.options import AnyOption, Option, add_to, part_of
from baton.cluster.settings import Settings, flags_given
from baton.config import environment_settings
from baton.serve_config import ServeConfig

SERVE_OPTIONS: Final = (
    Option("--served-model-name", "served_model_name", str, "NAME", "the model's name in the API"),
    Option("--runtime", "runtime", str, "NAME", "ray, or local: processes of this machine alone (ray)"),
    Option("--ray-address", "ray_address", str, "ADDRESS", "of a Ray cluster to join; auto: the one here"),
    Option("--host", "host", str, "ADDRESS", "to listen on for clients (127.0.0.1)"),
    Option("--port", "port", int, "N", "to listen on for clients; 0: any that is free (8000)"),
    Option("--gateways", "gateways", int, "N", "processes behind that port (1)"),
    Option("--routers", "routers", int, "N", "that choose workers: one goes on when another dies (1)"),
    Option("--prefill", "prefill.num_workers", int, "N", "prefill workers; 0: decode workers do it all (1)"),
    Option("--decode", "decode.num_workers", int, "N", "decode workers (1)"),
    Option("--prefill-tp", "prefill.tensor_parallel_size", int, "N", "ranks of a prefill worker"),
    Option("--decode-tp", "decode.tensor_parallel_size", int, "N", "ranks of a decode worker"),
    Option("--prefill-block-size --prefill-page-size", "prefill.page_size", int, "N", "of prefill workers"),
    Option("--decode-block-size --decode-page-size", "decode.page_size", int, "N", "of decode workers"),
    Option("--transport", "transport", str, "NAME", "of KV pages: auto, shm, cuda_ipc, nccl, gloo or tcp"),
    Option("--router-policy", "router.policy", str, "NAME", "round-robin, least-loaded, prefix (cost)"),
    Option("--redis", "router.redis", str, "URL", "of what workers hold; auto: one of its own; none (auto)"),
    Option("--decision-log", "router.decision_log", str, "FILE", "to append what the router decides to"),
    Option(
        "--local-prefill-tokens",
        "router.local_prefill_tokens",
        int,
        "N",
        "prompts up to here are computed where they are decoded (16)",
    ),
    Option("--chat-template", "gateway.chat_template", str, "FILE", "in place of the model's own"),
    Option("--operator-port", "gateway.operator_port", int, "N", "of 127.0.0.1: /metrics, /ui without a key"),
    Option("--tenants", "tenants", str, "FILE", "tenants and their keys; without it nobody needs a key"),
    Option("--cluster-key-file", "cluster_key_file", str, "FILE", "that every process of the cluster has"),
    Option("--start-timeout", "start_timeout_s", float, "S", "seconds for workers to load the model (600)"),
    Option("--link-timeout", "link_timeout_s", float, "S", "seconds of silence that end a connection (8)"),
    Option("--step-timeout", "step_timeout_s", float, "S", "seconds that a step of a worker may take (30)"),
    Option("--drain-timeout", "drain_timeout_s", float, "S", "seconds for requests to end when told to stop"),
)
# vLLM's --seed is the engine's here: requests bring their own.
ALIASES: Final = {"--engine-seed": "--engine-seed --seed"}


def engine_options() -> tuple[AnyOption, ...]:
    renamed = (option._replace(flags=ALIASES.get(option.flags, option.flags)) for option in ENGINE_OPTIONS)
    return (*renamed, *ENGINE_SWITCHES)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help='a model directory, the same on every machine, or "tiny", which comes with Baton',
        default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="settings as YAML; options go first")
    add_format_option(parser)
    cluster = parser.add_argument_group("cluster")
    engine = parser.add_argument_group("engine (of all workers)")
    parts = {part_of(option.key): cluster for option in SERVE_OPTIONS}
    add_to(parts | {"engine": engine}, (*SERVE_OPTIONS, *engine_options()))


def settings(arguments: argparse.Namespace) -> Settings[ServeConfig]:
    """ConfigError for what is wrong in the file or the environment."""
    flags = flags_given(ServeConfig, arguments)
    return Settings(ServeConfig, flags=flags, file=arguments.config, environment=environment_settings())
