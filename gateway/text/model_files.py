"""The model's sampling defaults and its vocabulary size.

`config.json` has the vocabulary size. `generation_config.json` is applied as in vLLM (`--generation-config`):

    auto    temperature, top_p, top_k, min_p and repetition_penalty are the defaults of requests without
            them; max_new_tokens caps every answer
    vllm    nothing of the file: the defaults are vLLM's own

The engine reads end tokens with either setting, as in vLLM.
"""

from pathlib import Path
from typing import Final

import msgspec

from baton.errors import InvalidRequest, ModelError
from baton.request import SamplingParams
from baton.tokenizer_file import read_text

GENERATION_FILE: Final = "generation_config.json"
CONFIG_FILE: Final = "config.json"


class _GenerationFile(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = msgspec.field(name="max_new_tokens", default=None)


def read_sampling_defaults(
    directory: Path, generation_config: str = "auto", *, max_tokens: int | None = None
) -> SamplingParams:
    """Return the parameters of a request without any; vLLM's, where `generation_config.json` names none.

    generation_config: "auto", or "vllm" to ignore the file. max_tokens: for a model that caps no answer.
    Raises ModelError that names the file and the key.
    """
    path = directory / GENERATION_FILE
    text = None if generation_config == "vllm" else read_text(path)
    if text is None:
        return SamplingParams(max_tokens=max_tokens)
    try:
        fields = msgspec.structs.asdict(msgspec.json.decode(text, type=_GenerationFile))
        given = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(**{"max_tokens": max_tokens, **given})
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
