"""The model's sampling defaults and its vocabulary size.

`config.json` has the vocabulary size. `generation_config.json` is applied as in vLLM (`--generation-config`):

    auto    temperature, top_p, top_k, min_p and repetition_penalty are the defaults of requests without
            them; max_new_tokens caps every answer
    vllm    nothing of the file: the defaults are vLLM's own

The engine reads end tokens with either setting, as in vLLM.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from baton.errors import InvalidRequest, ModelError
from baton.gateway.text.tokenizer import read_text
from baton.request import SamplingParams

GENERATION_FILE: Final = "generation_config.json"
CONFIG_FILE: Final = "config.json"


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The model's own sampling defaults. None: vLLM's default holds."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = msgspec.field(name="max_new_tokens", default=None)  # caps every answer

    def given(self) -> dict[str, Any]:
        """Return the defaults that the model names, as fields of SamplingParams."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def sampling(self) -> SamplingParams:
        """Return the parameters of a request without any, as vLLM's `LLM.generate(prompt)`."""
        return SamplingParams(**self.given())


def read_sampling_defaults(directory: Path, generation_config: str = "auto") -> SamplingDefaults:
    """Return the defaults of `generation_config.json`.

    generation_config: "auto", or "vllm" to ignore the file. Raises ModelError that names the file and the
    key.
    """
    path = directory / GENERATION_FILE
    text = None if generation_config == "vllm" else read_text(path)
    if text is None:
        return SamplingDefaults()
    try:
        defaults = msgspec.json.decode(text, type=SamplingDefaults)
        defaults.sampling()
    except (msgspec.DecodeError, InvalidRequest, RecursionError) as error:
        raise ModelError(f"{path}: {error}; start with generation_config=vllm to serve without it") from None
    return defaults


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
