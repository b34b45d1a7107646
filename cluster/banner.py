"""What `baton serve` prints when it serves: where, and a request to paste."""

from typing import Final

import msgspec

from baton.bench.tiny.tasks import recall_cases
from baton.cluster.model_directory import TINY, resolve_model
from baton.cluster.serve import Serving
from baton.cluster.serve_checks import speech_of
from baton.gateway_config import OPERATOR_HOST
from baton.serve_config import ServeConfig

RECALL_TOKENS: Final = 250
RECALL_SEED: Final = 11


def banner(config: ServeConfig, serving: Serving) -> str:
    plural = "s" * (config.decode.num_workers != 1)
    workers = f"{config.prefill.num_workers} prefill and {config.decode.num_workers} decode worker{plural}"
    where = "on Ray" if config.runtime == "ray" else "in processes of this machine"
    port = config.gateway.operator_port
    operators = serving.url if port is None else f"http://{OPERATOR_HOST}:{port}"
    if port is None and config.tenants is not None:
        operators = f"(an admin's key) {operators}"
    lines = [
        "",
        f"  Baton serves {config.model_name}: {workers}, {where}",
        f"  API       {serving.url}/v1",
        f"  metrics   {operators}/metrics",
        f"  workers   baton status, {operators}/ui",
        "",
        *_example(config, serving),
        "",
    ]
    return "\n".join(lines)


def _example(config: ServeConfig, serving: Serving) -> list[str]:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.tenants else ""
    if config.model != TINY:
        return ["  Try it:", "", _curl(config, serving, *_question(config), key)]
    (case,) = recall_cases(1, RECALL_TOKENS, seed=RECALL_SEED)
    question = case.prompt.rpartition("\n")[2]
    body: dict[str, object] = {"prompt": case.prompt, "max_tokens": 4, "temperature": 0}
    return [
        f"  Try it. The answer to {question} is{case.answer}, as the prompt says:",
        "",
        _curl(config, serving, "completions", body, key),
    ]


def _question(config: ServeConfig) -> tuple[str, dict[str, object]]:
    """A route, and a body that the model can answer there."""
    match speech_of(resolve_model(config.model), config.gateway.chat_template):
        case "chat":
            return "chat/completions", {"messages": [{"role": "user", "content": "What is a baton?"}]}
        case "text":
            return "completions", {"prompt": "A baton is", "max_tokens": 32}
        case "token ids":
            return "completions", {"prompt": [1, 2, 3], "max_tokens": 8, "return_token_ids": True}


def _curl(config: ServeConfig, serving: Serving, route: str, body: dict[str, object], key: str) -> str:
    text = msgspec.json.encode({"model": config.model_name, **body}).decode().replace("'", r"'\''")
    return f"curl -s {serving.url}/v1/{route}{key} -H 'Content-Type: application/json' -d '{text}'"
