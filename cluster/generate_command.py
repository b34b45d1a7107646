"""`baton generate MODEL PROMPT`: the answer on stdout as it comes, everything else on stderr."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from baton.cluster.completion import TextDelta
from baton.cluster.generate_options import engine_settings, sampling_params
from baton.cluster.llm import LLM
from baton.cluster.progress import LoadProgress
from baton.errors import InvalidRequest


def generate(arguments: argparse.Namespace) -> None:
    """Raises BatonError on what the user must change."""
    sampling = sampling_params(arguments)
    if sampling.logprobs is not None and not arguments.json:
        raise InvalidRequest("--logprobs: plain text has no room for them; add --json")
    text = _prompt(arguments)
    with _load(arguments) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": text}]) if arguments.chat else text
        if sampling.n == 1 and not arguments.json:
            return _print_stream(llm.stream([prompt], sampling, stop=arguments.stop))
        (completion,) = llm.generate([prompt], sampling, stop=arguments.stop)
    if arguments.json:
        print(msgspec.json.encode(completion).decode())
    else:
        print("\n\n".join(output.text for output in completion.outputs))


def _load(arguments: argparse.Namespace) -> LLM:
    settings = engine_settings(arguments)
    if not (arguments.verbose or sys.stderr.isatty()):
        return LLM(arguments.model, **settings)
    with LoadProgress(sys.stderr) as progress:
        llm = LLM(arguments.model, load_progress=progress, **settings)
    print(llm.engine.runner.describe_pool(), file=sys.stderr)
    return llm


def _prompt(arguments: argparse.Namespace) -> str:
    prompt: str | None = arguments.prompt
    name: str | None = arguments.prompt_file
    if (prompt is None) == (name is None):
        raise InvalidRequest("expected one prompt, either PROMPT or --prompt-file FILE")
    if prompt is not None:
        return prompt
    try:
        content = sys.stdin.read() if name == "-" else Path(str(name)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prompt-file: {name} cannot be read: {error}") from None
    return content.removesuffix("\n")  # the one that editors add


def _print_stream(deltas: Iterable[TextDelta]) -> None:
    for delta in deltas:
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    print()
