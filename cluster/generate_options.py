"""The options of `baton generate`, spelled as vLLM spells them, and the settings that they stand for.

Each fills one key: `sampling.<field>` of SamplingParams or `engine.<key>` of EngineConfig. Options that are
not given stay absent, so that defaults and limits live with those structs alone.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from baton.cluster.flag_names import SPELLED, StoreSpelled
from baton.cluster.option_kinds import biases, count, dtype, integers, load_format, stop_string
from baton.request import SamplingParams


class Option(NamedTuple):
    flags: str  # with spaces between them
    key: str
    kind: Callable[[str], object]
    metavar: str
    help: str


class Switch(NamedTuple):
    flag: str
    key: str
    value: bool
    help: str


DEFAULT_MAX_TOKENS: Final = 256  # that of SamplingParams, as in vLLM, is 16: half a sentence

OPTIONS: Final = (
    Option("--max-tokens", "sampling.max_tokens", int, "N", f"new tokens at most ({DEFAULT_MAX_TOKENS})"),
    Option("--min-tokens", "sampling.min_tokens", int, "N", "new tokens at least (0)"),
    Option("--temperature", "sampling.temperature", float, "T", "0: always the likeliest token (1.0)"),
    Option("--top-p", "sampling.top_p", float, "P", "sample the likeliest tokens that add up to P (1.0)"),
    Option("--top-k", "sampling.top_k", int, "K", "sample the K likeliest tokens; 0: all (0)"),
    Option("--min-p", "sampling.min_p", float, "P", "sample tokens P times as likely as the likeliest (0)"),
    Option("--repetition-penalty", "sampling.repetition_penalty", float, "X", "over 1: fewer repeats (1.0)"),
    Option("--presence-penalty", "sampling.presence_penalty", float, "X", "off the logit of used tokens (0)"),
    Option(
        "--frequency-penalty", "sampling.frequency_penalty", float, "X", "off the logit for every use (0)"
    ),
    Option("--logit-bias", "sampling.logit_bias", biases, "ID:X", "added to tokens' logits, as 5:-1.5,17:2"),
    Option("--stop-token-ids", "sampling.stop_token_ids", integers, "IDS", "end at any of these, as 5,17"),
    Option("--seed", "sampling.seed", int, "N", "the same seed gives the same text"),
    Option("--n", "sampling.n", int, "N", "number of answers (1)"),
    Option("--logprobs", "sampling.logprobs", int, "N", "with --json: the N likeliest at every token"),
    Option(
        "--prompt-logprobs",
        "sampling.prompt_logprobs",
        int,
        "N",
        "with --json: the N likeliest, of the prompt",
    ),
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
SWITCHES: Final = (
    Switch("--ignore-eos", "sampling.ignore_eos", True, "go on past the model's end token"),
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
TEXT_FLAGS: Final = ("--prompt-file", "--token-ids", "--chat", "--stop", "--json", "--quiet", "--verbose")


def add_options(parser: argparse.ArgumentParser) -> None:
    _add_text_options(parser)
    groups = {name: parser.add_argument_group(name) for name in ("sampling", "engine")}
    for option in OPTIONS:
        groups[_part(option.key)].add_argument(
            *option.flags.split(),
            dest=option.key,
            action=StoreSpelled,
            type=option.kind,
            metavar=option.metavar,
            default=argparse.SUPPRESS,
            help=option.help,
        )
    for switch in SWITCHES:
        groups[_part(switch.key)].add_argument(
            switch.flag,
            dest=switch.key,
            action=StoreSpelled,
            nargs=0,
            const=switch.value,
            default=argparse.SUPPRESS,
            help=switch.help,
        )


def option_flags() -> list[str]:
    flags = [flag for option in OPTIONS for flag in option.flags.split()]
    return [*flags, *(switch.flag for switch in SWITCHES), *TEXT_FLAGS]


def flags_of_settings(arguments: argparse.Namespace) -> dict[str, str]:
    """setting -> its flag, as it was typed where it was."""
    flags = {option.key: option.flags.split()[0] for option in OPTIONS}
    return flags | getattr(arguments, SPELLED, {})


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Raises InvalidRequest on a value that is out of range."""
    return SamplingParams(**({"max_tokens": DEFAULT_MAX_TOKENS} | dict(_given(arguments, "sampling"))))


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The nested mapping that `engine_config` reads, less the model."""
    settings: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for key, value in _given(arguments, "engine"):
        part, _, leaf = key.rpartition(".")
        (parts.setdefault(part, {}) if part else settings)[leaf] = value
    return settings | parts


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help='a model directory, or "tiny", which comes with Baton')
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to complete")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from FILE; -: from stdin")
    parser.add_argument("--token-ids", metavar="IDS", type=integers, help="the prompt as token ids: 1,2,3")
    parser.add_argument("--chat", action="store_true", help="PROMPT is what the user says in a chat")
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        type=stop_string,
        default=[],
        help="end before TEXT; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object when all is done")
    said = parser.add_mutually_exclusive_group()
    said.add_argument("-q", "--quiet", action="store_true", help="nothing but errors on stderr")
    said.add_argument(
        "-v", "--verbose", action="store_true", help="show loading even if stderr is no terminal"
    )


def _given(arguments: argparse.Namespace, struct: str) -> Iterator[tuple[str, Any]]:
    for dest, value in vars(arguments).items():
        if _part(dest) == struct and dest != struct:
            yield dest.removeprefix(f"{struct}."), value


def _part(key: str) -> str:
    return key.partition(".")[0]
