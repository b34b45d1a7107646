"""The options of `baton serve`: keys of ServeConfig. Those of engines are spelled as vLLM spells them."""

import argparse
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Final

from baton.cluster.cli.options import (
    AnyOption,
    Option,
    Switch,
    add_to,
    count,
    dtype,
    integers,
    load_format,
    part_of,
    routing_policy,
)
from baton.cluster.cli.settings import Settings, flags_given
from baton.cluster.cluster_key import Keys, read_keys
from baton.cluster.cluster_record import find_record
from baton.cluster.logs import add_format_option
from baton.config.cluster import ServeConfig
from baton.config.environment import cluster_key_file, environment_settings
from baton.errors import ConfigError
from baton.messages.bounds import MAX_ROUTERS
from baton.messages.workers import Address, Routers

# The options of an engine, spelled as vLLM spells them: `engine.<key>` of EngineSettings.

ENGINE_OPTIONS: Final = (
    Option("--dtype", "engine.dtype", dtype, "NAME", "auto, float32, bfloat16 or float16 (auto)"),
    Option(
        "--load-format", "engine.load_format", load_format, "NAME", "auto, or dummy: random weights (auto)"
    ),
    Option("--device", "engine.device", str, "NAME", "auto, cpu or cuda (auto)"),
    Option("--tensor-parallel-size -tp", "engine.tensor_parallel_size", int, "N", "ranks of the model (1)"),
    Option("--engine-seed", "engine.seed", int, "N", "of dummy weights and of answers without --seed (0)"),
    Option(
        "--max-model-len", "engine.max_model_len", count, "N", "tokens of prompt and answer, as 4096 or 4k"
    ),
    Option("--max-num-seqs", "engine.scheduler.max_num_seqs", int, "N", "sequences in one step (64)"),
    Option(
        "--max-num-batched-tokens",
        "engine.scheduler.max_num_batched_tokens",
        count,
        "N",
        "tokens computed in one step, prompts in chunks (2048)",
    ),
    Option(
        "--scheduler-policy",
        "engine.scheduler.policy",
        str,
        "NAME",
        "how requests are batched: continuous, static or dynamic (continuous)",
    ),
    Option(
        "--max-queue-delay-ms",
        "engine.scheduler.max_queue_delay_ms",
        float,
        "X",
        "milliseconds that a prompt may wait for others to share its step (0)",
    ),
    Option(
        "--preferred-batch-sizes",
        "engine.scheduler.preferred_batch_sizes",
        integers,
        "SIZES",
        "numbers of waiting prompts, as 4,8, at which the wait ends early",
    ),
    Option("--block-size --page-size", "engine.cache.page_size", int, "N", "tokens in one KV page (16)"),
    Option(
        "--kv-cache-memory --kv-cache-memory-bytes",
        "engine.cache.kv_cache_memory_bytes",
        str,
        "SIZE",
        "memory of the KV cache on each rank, as 4GiB (what is free)",
    ),
    Option(
        "--gpu-memory-utilization",
        "engine.cache.gpu_memory_utilization",
        float,
        "X",
        "share of a GPU's memory to use, weights included (0.9); a CPU ignores it",
    ),
    Option(
        "--host-cache-memory",
        "engine.cache.host_cache_memory_bytes",
        str,
        "SIZE",
        "host memory that KV pages are swapped to, as 4GiB (0)",
    ),
)
ENGINE_SWITCHES: Final = (
    Switch(
        "--enable-prefix-caching",
        "engine.cache.enable_prefix_caching",
        True,
        "reuse the KV of known prefixes (the default)",
    ),
    Switch(
        "--no-enable-prefix-caching",
        "engine.cache.enable_prefix_caching",
        False,
        "compute every prompt from its first token",
    ),
)

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
    Option(
        *("--router-policy", "router.policy", routing_policy, "NAME"),
        "round-robin, least-loaded, prefix, or package.module:Class (cost)",
    ),
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


# Which cluster a command is about: the one of this machine, or that of a router.


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
