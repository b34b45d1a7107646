"""The model's sampling defaults and its vocabulary size.

`config.json` has the vocabulary size. `generation_config.json` is applied as in vLLM (`--generation-config`):

    auto    temperature, top_p, top_k, min_p and repetition_penalty are the defaults of requests without
            them; max_new_tokens caps every answer
    vllm    nothing of the file: the defaults are vLLM's own

`--override-generation-config` goes before both. The engine reads end tokens with either setting, as in vLLM.
"""

from pathlib import Path
from typing import Final

import msgspec

from baton.config.gateway import GenerationConfig
from baton.errors import InvalidRequest, ModelError
from baton.request import SamplingParams
from baton.tokenizer_file import read_text

GENERATION_FILE: Final = "generation_config.json"
CONFIG_FILE: Final = "config.json"


def read_sampling_defaults(
    directory: Path,
    generation_config: str = "auto",
    override: GenerationConfig | None = None,
    *,
    max_tokens: int | None = None,
) -> SamplingParams:
    """Return the parameters of a request without any; vLLM's, where `generation_config.json` names none.

    generation_config: "auto", or "vllm" to ignore the file. override: goes before the file. max_tokens: for a
    model that caps no answer. Raises ModelError that names the file and the key.
    """
    path = directory / GENERATION_FILE
    text = None if generation_config == "vllm" else read_text(path)
    try:
        found = GenerationConfig() if text is None else msgspec.json.decode(text, type=GenerationConfig)
        return found.overridden(override).sampling(max_tokens=max_tokens)
    except (msgspec.DecodeError, InvalidRequest, RecursionError) as error:
        raise ModelError(f"{path}: {error}; start with generation_config=vllm to serve without it") from None


class _Vocabulary(msgspec.Struct, frozen=True):
    vocab_size: int | None = None


def read_vocab_size(directory: Path) -> int | None:
    """Return the model's vocabulary size from `config.json`, or None when the file does not say."""
    text = read_text(directory / CONFIG_FILE)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=_Vocabulary).vocab_size
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{directory / CONFIG_FILE}: {error}") from None
