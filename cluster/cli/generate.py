"""`baton generate MODEL PROMPT`: the answer on stdout as it comes, everything else on stderr.

A model without a tokenizer answers in token ids.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from baton.cluster.cli import output
from baton.cluster.cli.client import CompletionOutput, TextDelta
from baton.cluster.cli.generate_options import engine_settings, sampling_params
from baton.cluster.model_directory import resolve_model
from baton.cluster.offline.generation import LoadProgress
from baton.cluster.offline.llm import LLM
from baton.cluster.offline.prompts import Prompt
from baton.engine.models.registry import read_model_config
from baton.engine.scheduler.validation import check_sampling
from baton.errors import InvalidRequest

GPU_SHARE: Final = "engine.cache.gpu_memory_utilization"


def generate(arguments: argparse.Namespace) -> None:
    """Raises BatonError on what the user must change."""
    sampling = sampling_params(arguments)
    for flag, asked in (("--logprobs", sampling.logprobs), ("--prompt-logprobs", sampling.prompt_logprobs)):
        if asked is not None and not arguments.json:
            raise InvalidRequest(f"{flag}: plain text has no room for them; add --json")
    prompt = _prompt(arguments)
    output.check()
    vocab_size = read_model_config(resolve_model(arguments.model)).vocab_size
    check_sampling(sampling, vocab_size=vocab_size)  # said before minutes of loading
    with _load(arguments) as llm:
        shown = _text if llm.has_tokenizer else _token_ids
        if arguments.chat:
            prompt = llm.chat_prompt([{"role": "user", "content": prompt}])
        if sampling.n == 1 and not arguments.json:
            return _print_stream(map(shown, llm.stream([prompt], sampling, stop=arguments.stop)))
        (completion,) = llm.generate([prompt], sampling, stop=arguments.stop)
    if arguments.json:
        output.write(f"{msgspec.json.encode(completion).decode()}\n")
    else:
        output.write("\n\n".join(map(shown, completion.outputs)) + "\n")


def _load(arguments: argparse.Namespace) -> LLM:
    settings = engine_settings(arguments)
    if arguments.quiet:
        return LLM(arguments.model, **settings)
    if arguments.verbose or sys.stderr.isatty():
        with LoadProgress(sys.stderr) as progress:
            llm = LLM(arguments.model, load_progress=progress, **settings)
    else:
        llm = LLM(arguments.model, **settings)
    runner = llm.engine.runner
    if GPU_SHARE in vars(arguments) and runner.device.type != "cuda":
        print("baton: warning: --gpu-memory-utilization is ignored on a CPU", file=sys.stderr)
    print(runner.describe_pool(), file=sys.stderr)
    return llm


def _prompt(arguments: argparse.Namespace) -> Prompt:
    given: list[Prompt] = [prompt for prompt in (arguments.prompt, arguments.token_ids) if prompt is not None]
    name: str | None = arguments.prompt_file
    if len(given) + (name is not None) != 1:
        raise InvalidRequest("expected one prompt: PROMPT, --prompt-file FILE or --token-ids IDS")
    if arguments.chat and arguments.token_ids is not None:
        raise InvalidRequest("--chat: what the user says is text, got --token-ids")
    return given[0] if name is None else _read_prompt(name)


def _read_prompt(name: str) -> str:
    try:
        content = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prompt-file: {name} cannot be read: {error}") from None
    return content.removesuffix("\n")  # the one that editors add


def _print_stream(parts: Iterable[str]) -> None:
    for part in parts:
        output.write(part)
    output.write("\n")


def _text(part: TextDelta | CompletionOutput) -> str:
    return part.text


def _token_ids(part: TextDelta | CompletionOutput) -> str:
    return "".join(f"{token_id} " for token_id in part.token_ids)
