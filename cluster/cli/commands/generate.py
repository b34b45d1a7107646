"""Complete one prompt and print the text as it comes: the answer on stdout, everything else on stderr.

A model without a tokenizer answers in token ids.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from baton.cluster.cli import output
from baton.cluster.cli.options import CliCommand, Parser, Setting, in_flags, integers, settings_of
from baton.cluster.model_directory import resolve_model
from baton.config.engine import EngineSettings
from baton.config.loader import nest
from baton.errors import BatonError, InvalidRequest, reason_of
from baton.request import SamplingParams

if TYPE_CHECKING:
    from baton.cluster.offline.generation import CompletionOutput, Prompt, TextDelta
    from baton.cluster.offline.llm import LLM

DEFAULT_MAX_TOKENS: Final = 256  # that of SamplingParams, as in vLLM, is 16: half a sentence
LISTS: Final = {"stop": "end before", "bad_words": "never complete"}  # fields of SamplingParams
GPU_SHARE: Final = "engine.cache.gpu_memory_utilization"


def _add_options(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help='a model directory, or "tiny", which comes with Baton')
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to complete")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from FILE; -: from stdin")
    parser.add_argument("--token-ids", metavar="IDS", type=integers, help="the prompt as token ids: 1,2,3")
    parser.add_argument("--chat", action="store_true", help="PROMPT is the user's message in a chat")
    for field, effect in LISTS.items():
        parser.add_argument(
            "--" + field.replace("_", "-"),
            dest=f"sampling.{field}",
            metavar="TEXT",
            action="append",
            help=f"{effect} TEXT; may be repeated",
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    verbosity = parser.add_mutually_exclusive_group()
    verbosity.add_argument("-q", "--quiet", action="store_true", help="nothing but errors on stderr")
    verbosity.add_argument(
        "-v", "--verbose", action="store_true", help="show loading even if stderr is no terminal"
    )
    parser.add_settings("sampling", _sampling_settings())
    parser.add_settings("engine", _engine_settings())


def _run(arguments: argparse.Namespace) -> None:
    try:
        _generate(arguments)
    except BatonError as error:
        error.args = (in_flags(str(error), [*_sampling_settings(), *_engine_settings()], arguments),)
        raise


def _sampling_settings() -> list[Setting]:
    settings = settings_of(SamplingParams, "sampling.")
    own = settings["sampling.max_tokens"]
    field = msgspec.structs.replace(own.field, default=DEFAULT_MAX_TOKENS)
    settings[own.key] = own._replace(field=field)
    return [setting for setting in settings.values() if setting.field.name not in LISTS]


def _engine_settings() -> list[Setting]:
    return list(settings_of(EngineSettings, "engine.").values())


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters of the options. Raises InvalidRequest."""
    return SamplingParams(**({"max_tokens": DEFAULT_MAX_TOKENS} | _given(arguments, "sampling.")))


def engine_settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the options as the nested mapping that LLM takes."""
    return nest(_given(arguments, "engine."))


def _given(arguments: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """Return key -> value of the options under `prefix`, without the prefix."""
    given = vars(arguments).items()
    return {key.removeprefix(prefix): value for key, value in given if key.startswith(prefix)}


def _generate(arguments: argparse.Namespace) -> None:
    from baton.engine.models.registry import read_model_config
    from baton.engine.scheduler.sequence import check_sampling

    sampling = sampling_of(arguments)
    for flag, asked in (("--logprobs", sampling.logprobs), ("--prompt-logprobs", sampling.prompt_logprobs)):
        if asked is not None and not arguments.json:
            raise InvalidRequest(f"{flag}: plain text has no room for them; add --json")
    prompt = _prompt(arguments)
    output.check()
    vocab_size = read_model_config(resolve_model(arguments.model)).vocab_size
    check_sampling(sampling, vocab_size=vocab_size)  # before minutes of loading
    with _load(arguments) as llm:
        shown = _text if llm.has_tokenizer else _token_ids
        if arguments.chat:
            prompt = llm.chat_prompt([{"role": "user", "content": prompt}])
        if sampling.n == 1 and not arguments.json:
            return _print_stream(map(shown, llm.stream([prompt], sampling)))
        (completion,) = llm.generate([prompt], sampling)
    if arguments.json:
        output.write(f"{msgspec.json.encode(completion).decode()}\n")
    else:
        output.write("\n\n".join(map(shown, completion.outputs)) + "\n")


def _load(arguments: argparse.Namespace) -> "LLM":
    from baton.cluster.offline.llm import LLM  # torch, which --help does not wait for
    from baton.cluster.offline.progress import ProgressBar

    settings = engine_settings_of(arguments)
    if arguments.quiet:
        return LLM(arguments.model, **settings)
    if arguments.verbose or sys.stderr.isatty():
        with ProgressBar("Loading weights", "bytes") as progress:
            llm = LLM(arguments.model, load_progress=progress, **settings)
    else:
        llm = LLM(arguments.model, **settings)
    runner = llm.engine.runner
    if GPU_SHARE in vars(arguments) and runner.device.type != "cuda":
        print("baton: warning: --gpu-memory-utilization is ignored on a CPU", file=sys.stderr)
    print(runner.describe_pool(), file=sys.stderr)
    return llm


def _prompt(arguments: argparse.Namespace) -> "Prompt":
    given: list[Prompt] = [prompt for prompt in (arguments.prompt, arguments.token_ids) if prompt is not None]
    name: str | None = arguments.prompt_file
    if len(given) + (name is not None) != 1:
        raise InvalidRequest("expected one prompt: PROMPT, --prompt-file FILE or --token-ids IDS")
    if arguments.chat and arguments.token_ids is not None:
        raise InvalidRequest("--chat: the user's message is text, got --token-ids")
    return given[0] if name is None else _read_prompt(name)


def _read_prompt(name: str) -> str:
    try:
        content = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prompt-file: {name} cannot be read: {reason_of(error)}") from None
    return content.removesuffix("\n")  # the one that editors add


def _print_stream(parts: Iterable[str]) -> None:
    for part in parts:
        output.write(part)
    output.write("\n")


def _text(part: "TextDelta | CompletionOutput") -> str:
    return part.text


def _token_ids(part: "TextDelta | CompletionOutput") -> str:
    return "".join(f"{token_id} " for token_id in part.token_ids)


generate = CliCommand(__doc__, _add_options, _run)
