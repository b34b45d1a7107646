"""The ways models stretch rotary embeddings to longer contexts, as numbers; rope_table.py computes them.

No torch here: a model's `config.json` is read where there is none.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES: Final[tuple[RopeType, ...]] = get_args(RopeType)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the frequencies of a model differ from the plain ones; names as in its `config.json`.

    `original_max_positions` is the context the model was trained on before it was stretched; llama3 and
    yarn need it. Fields that the type does not use are ignored.
    """

    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: from factor and mscale
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whole dimensions bound the ramp

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {self.rope_type!r}")
        if self.factor <= 0:
            raise ValueError(f"rope factor must be positive, got {self.factor}")
        if self.rope_type in ("llama3", "yarn") and self.original_max_positions < 1:
            raise ValueError(f"{self.rope_type} rope needs original_max_positions of at least 1")
        if not 0 < attention_factor(self) < math.inf:
            raise ValueError(
                f"mscale {self.mscale} and mscale_all_dim {self.mscale_all_dim} make the attention factor "
                f"{attention_factor(self)}, which must be positive and finite"
            )


def attention_factor(scaling: RopeScaling) -> float:
    """What cosines and sines are multiplied by: 1 except for yarn."""
    if scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        divisor = _mscale(scaling.factor, scaling.mscale_all_dim)
        return _mscale(scaling.factor, scaling.mscale) / divisor if divisor else math.inf
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
