"""The options of `baton generate`, spelled as vLLM spells them, and the settings that they stand for.

Each fills one key: `sampling.<field>` of SamplingParams or `engine.<key>` of EngineConfig. Options that are
not given stay absent, so that defaults and limits live with those structs alone.
"""

import argparse
from collections.abc import Iterator
from typing import Any, Final

from baton.cluster.cli.options import (
    SPELLED,
    Option,
    Switch,
    add_to,
    biases,
    flags_of,
    integers,
    part_of,
    stop_string,
)
from baton.cluster.cli.serve_options import ENGINE_OPTIONS, ENGINE_SWITCHES
from baton.request import SamplingParams

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
    *ENGINE_OPTIONS,
)
SWITCHES: Final = (
    Switch("--ignore-eos", "sampling.ignore_eos", True, "go on past the model's end token"),
    *ENGINE_SWITCHES,
)
TEXT_FLAGS: Final = ("--prompt-file", "--token-ids", "--chat", "--stop", "--json", "--quiet", "--verbose")


def add_options(parser: argparse.ArgumentParser) -> None:
    _add_text_options(parser)
    groups = {name: parser.add_argument_group(name) for name in ("sampling", "engine")}
    add_to(groups, (*OPTIONS, *SWITCHES))


def option_flags() -> list[str]:
    return [*flags_of((*OPTIONS, *SWITCHES)), *TEXT_FLAGS]


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
        if part_of(dest) == struct and dest != struct:
            yield dest.removeprefix(f"{struct}."), value
