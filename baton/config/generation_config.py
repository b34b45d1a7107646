"""The sampling defaults of a model, from its `generation_config.json` and the settings.

The file is applied as in vLLM (`--generation-config`):

    auto    temperature, top_p, top_k, min_p and repetition_penalty are the defaults of requests without
            them; max_new_tokens caps every answer
    vllm    nothing of the file: the defaults are vLLM's own

`--override-generation-config` has precedence over both. The engine reads end tokens with either setting, as
in vLLM.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from baton.errors import InvalidRequest, ModelError
from baton.request import SamplingParams
from baton.tokenizer_file import read_text

GENERATION_FILE: Final = "generation_config.json"


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of requests that give none of their own, by the keys of generation_config.json."""

    temperature: float | None = None  # of requests without one; so are all but max_new_tokens
    top_p: float | None = None  # 1: tokens of any probability
    top_k: int | None = None  # -1: all tokens
    min_p: float | None = None  # 0: tokens of any probability
    repetition_penalty: float | None = None  # 1: none
    max_new_tokens: int | None = None  # of every answer, at most

    def sampling(self, **defaults: Any) -> SamplingParams:
        """Return the parameters. defaults: those of keys without a value. Raises InvalidRequest."""
        fields = msgspec.structs.asdict(self)
        fields["max_tokens"] = fields.pop("max_new_tokens")
        given = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(**{**defaults, **given})

    def overridden(self, by: "GenerationConfig | None") -> "GenerationConfig":
        """Return the values of `by`, and those of this one that `by` lacks."""
        fields = {} if by is None else msgspec.structs.asdict(by)
        return msgspec.structs.replace(self, **{n: value for n, value in fields.items() if value is not None})


def read_sampling_defaults(
    directory: Path,
    generation_config: str = "auto",
    override: GenerationConfig | None = None,
    *,
    max_tokens: int | None = None,
) -> SamplingParams:
    """Return the parameters of a request without any; vLLM's, where `generation_config.json` names none.

    generation_config: "auto", or "vllm" to ignore the file. override: has precedence. max_tokens: for a
    model that caps no answer. Raises ModelError that names the file and the key.
    """
    path = directory / GENERATION_FILE
    text = None if generation_config == "vllm" else read_text(path)
    try:
        found = GenerationConfig() if text is None else msgspec.json.decode(text, type=GenerationConfig)
        return found.overridden(override).sampling(max_tokens=max_tokens)
    except (msgspec.DecodeError, InvalidRequest, RecursionError) as error:
        raise ModelError(f"{path}: {error}; start with generation_config=vllm to serve without it") from None
