"""Start a cluster and serve a model through it, until interrupted.

Settings come from options, then BATON_* variables, then --config FILE, then defaults; `baton config show
--origin` shows the origin of each. The gateways have the APIs of OpenAI and Anthropic. Messages go to stderr,
the banner to stdout.
"""

import argparse
import asyncio
import signal
from pathlib import Path
from typing import Final

import msgspec

from baton.clock import SystemClock
from baton.cluster.cli.connections import has_no_key, key_file
from baton.cluster.cli.options import CliCommand
from baton.cluster.cli.settings import add_serve_options, serve_settings
from baton.cluster.cluster_key import Keys, KeyWatch, new_key, read_keys
from baton.cluster.cluster_record import recorded
from baton.cluster.logs import say
from baton.cluster.model_directory import TINY, is_repository, pin_revision, resolve_model
from baton.cluster.runtimes.base import Runtime
from baton.config.cluster import ServeConfig
from baton.config.gateway import OPERATOR_HOST
from baton.errors import ConfigError

RECALL_TOKENS: Final = 250
RECALL_SEED: Final = 11


def banner(config: ServeConfig, url: str) -> str:
    """Return the text that `baton serve` prints when it serves: the addresses, and a request to paste."""
    where = "on Ray" if config.runtime == "ray" else "in processes of this machine"
    port = config.gateway.operator_port
    operators = url if port is None else f"http://{OPERATOR_HOST}:{port}"
    if port is None and config.tenants is not None:
        operators = f"(an admin's key) {operators}"
    lines = [
        "",
        *(f"  Baton serves {each.model_name}: {_workers(each)}, {where}" for each in config.models),
        f"  API       {url}/v1",
        f"  metrics   {operators}/metrics",
        f"  workers   baton status, {operators}/ui",
        "",
        *_example(config, url),
        "",
    ]
    return "\n".join(lines)


def _workers(config: ServeConfig) -> str:
    plural = "s" * (config.decode.num_workers != 1)
    return f"{config.prefill.num_workers} prefill and {config.decode.num_workers} decode worker{plural}"


def _example(config: ServeConfig, url: str) -> list[str]:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.tenants else ""
    if config.model != TINY:
        return ["  Try it:", "", _curl(config, url, *_question(config), key)]
    from baton.bench.tiny.tasks import recall_cases

    (case,) = recall_cases(1, RECALL_TOKENS, seed=RECALL_SEED)
    question = case.prompt.rpartition("\n")[2]
    body: dict[str, object] = {"prompt": case.prompt, "max_tokens": 4, "temperature": 0}
    return [
        f"  Try it. The answer to {question} is{case.answer}, as the prompt says:",
        "",
        _curl(config, url, "completions", body, key),
    ]


def _question(config: ServeConfig) -> tuple[str, dict[str, object]]:
    """Return a route, and a body that the model can answer there."""
    from baton.cluster.serve_plan import speech_of

    match speech_of(resolve_model(config.model), config.gateway):
        case "chat":
            return "chat/completions", {"messages": [{"role": "user", "content": "What is a baton?"}]}
        case "text":
            return "completions", {"prompt": "A baton is", "max_tokens": 32}
        case "token ids":
            return "completions", {"prompt": [1, 2, 3], "max_tokens": 8, "return_token_ids": True}


def _curl(config: ServeConfig, url: str, route: str, body: dict[str, object], key: str) -> str:
    text = msgspec.json.encode({"model": config.model_name, **body}).decode().replace("'", r"'\''")
    return f"curl -s {url}/v1/{route}{key} -H 'Content-Type: application/json' -d '{text}'"


def _run(arguments: argparse.Namespace) -> None:
    """Serve until a signal. Raises KeyboardInterrupt when the cluster has not served, or has not drained."""
    given = serve_settings(arguments)
    config = pin_revision(given.build())
    try:
        _check(config)
    except ConfigError as error:
        raise ConfigError(given.in_words_of_origin(str(error))) from None
    try:
        has_served = asyncio.run(_serve(config, _keys(config)))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    if not has_served:
        raise KeyboardInterrupt


def _check(config: ServeConfig) -> None:
    """Raise a BatonError for wrong settings before any process starts.

    The model is not checked when this machine lacks it, as it may on a Ray cluster.
    """
    from baton.cluster.serve_plan import check_model, check_settings, speech_of  # --help does not wait for it

    check_settings(config)
    for each in config.models:
        if each.ray_address is None or Path(each.model).is_dir() or is_repository(each.model):
            directory = check_model(each)
            if speech_of(directory, each.gateway) == "token ids":
                say(f"warning: {directory} has no tokenizer: prompts are token ids, and so are answers")


def _keys(config: ServeConfig) -> KeyWatch:
    """Return a watch of the key file; without a key file, a watch of one new key."""
    if has_no_key(config.cluster_key_file):
        keys = (new_key(),)
        return KeyWatch(lambda: keys, SystemClock())
    path = key_file(config.cluster_key_file)
    return KeyWatch(lambda: read_keys(path), SystemClock())


async def _serve(config: ServeConfig, keys: KeyWatch) -> bool:
    from baton.cluster.serve import serve as serve_cluster

    stop = asyncio.Event()
    _stop_on_signals(stop)
    runtime = _make_runtime(config, keys.keys)
    names = ", ".join(each.model_name for each in config.models)
    say(f"starting {names} on {'Ray' if config.runtime == 'ray' else 'this machine'} ...")
    with recorded() as record:
        return await serve_cluster(
            config,
            runtime,
            keys,
            stop=stop,
            say=say,
            record=record,
            on_ready=lambda serving: print(banner(config, serving.url), flush=True),
        )


def _make_runtime(config: ServeConfig, keys: Keys) -> Runtime:
    from baton.cluster.runtimes.local import LocalRuntime
    from baton.cluster.runtimes.ray import RayRuntime

    if config.runtime == "local":
        return LocalRuntime(keys)
    return RayRuntime(
        keys, address=config.ray_address, num_cpus=config.num_ranks, place_timeout_s=config.start_timeout_s
    )


def _stop_on_signals(stop: asyncio.Event) -> None:
    """Let the first signal drain the cluster, and another end it at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


serve = CliCommand(__doc__, add_serve_options, _run)
