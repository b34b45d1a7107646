"""How the KV cache of one model is cut into pages, and how many bytes that takes."""

from typing import Final

import msgspec

from baton.errors import ConfigError

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


class PageLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool of one rank is `[num_pages, num_layers, 2, num_kv_heads / tp_size, page_size, head_dim]`.

    `num_kv_heads` counts the heads of the whole model. A page is one contiguous run of bytes on every
    rank; heads come before tokens, so the slice of a page that another tp_size needs is contiguous too.
    """

    tp_size: int
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("tp_size", "page_size", "num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"PageLayout.{name} must be at least 1, got {getattr(self, name)}")
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}")
        if self.num_kv_heads % self.tp_size:
            raise ConfigError(f"{self.num_kv_heads} KV heads cannot be split over {self.tp_size} ranks")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}")

    @property
    def heads_per_rank(self) -> int:
        return self.num_kv_heads // self.tp_size

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes on one rank, all layers, keys and values."""
        return 2 * self.num_layers * self.heads_per_rank * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    def num_pages(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens occupy; the last one may be partly filled."""
        return -(-num_tokens // self.page_size)
