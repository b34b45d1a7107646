"""Page keys, which name page contents the same way in every process and layout, and the layout of pages.

A key chains everything that the KV of a full page depends on: the model, the element type, the tenant's salt,
all tokens before the page and the tokens in it. Equal keys therefore mean equal contents, and without the
tenant's salt the key of a prompt cannot be computed. Python's `hash()` has none of these properties.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from hashlib import blake2b
from itertools import pairwise
from typing import Final

import msgspec

from baton.errors import ConfigError
from baton.messages.bounds import KEY_BYTES, SHORT_KEY_BYTES
from baton.request import TOKEN_ID_BYTES, pack
from baton.tenants import PUBLIC_SALT, split_salt


def short_keys(keys: Iterable[bytes]) -> bytes:
    """Join the first halves of page keys, by which routers know pages: their knowledge is a hint."""
    return b"".join([key[:SHORT_KEY_BYTES] for key in keys])


def split_keys(joined: bytes) -> list[bytes]:
    """The single keys that `short_keys` joined."""
    return [joined[at : at + SHORT_KEY_BYTES] for at in range(0, len(joined), SHORT_KEY_BYTES)]


class PageKeys:
    """BLAKE2b-128 keyed by model and dtype: root = H(salt), key = H(parent key, token ids as u32)."""

    def __init__(self, *, model_fingerprint: str, dtype: str, page_size: int) -> None:
        """dtype: `PageLayout.kv_dtype`. The keys do not depend on tp_size and byte order."""
        identity = blake2b(digest_size=32, person=b"baton-model")
        for part in (model_fingerprint.encode(), dtype.encode()):
            identity.update(len(part).to_bytes(8, "little") + part)
        self._identity = identity.digest()
        self._page_hash = blake2b(digest_size=KEY_BYTES, key=self._identity, person=b"baton-page")
        self._page_size = page_size

    def of_size(self, page_size: int) -> "PageKeys":
        """Return the keys of the same KV in pages of another size."""
        other = copy(self)
        other._page_size = page_size
        return other

    def root(self, salt: bytes) -> bytes:
        """Return the parent of a first page."""
        return blake2b(salt, digest_size=KEY_BYTES, key=self._identity, person=b"baton-salt").digest()

    def extend(self, keys: list[bytes], token_ids: Sequence[int], num_pages: int, salt: bytes) -> None:
        """Append to `keys`, which names the first len(keys) full pages, until it names `num_pages`."""
        size = self._page_size
        start, end = len(keys) * size, num_pages * size
        if start >= end:
            return
        if end > len(token_ids):
            raise ValueError(f"{len(token_ids)} tokens do not fill {num_pages} pages of {size}")
        num_public_tokens, salt = split_salt(salt)
        first_private = num_public_tokens // size
        # No tenant's salt leads to the public root: `split_salt` finds no public tokens in this salt.
        parent = keys[-1] if keys else self.root(PUBLIC_SALT + bytes(4) if first_private else salt)
        packed, page_bytes = pack(token_ids[start:end]), size * TOKEN_ID_BYTES
        for offset in range(0, len(packed), page_bytes):
            if len(keys) == first_private and keys:
                parent = self.root(parent + salt)
            page_hash = self._page_hash.copy()
            page_hash.update(parent + packed[offset : offset + page_bytes])
            parent = page_hash.digest()
            keys.append(parent)


DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
CACHE_DTYPES: Final = ("auto", "fp8", "int8")
SCALE_BYTES: Final = 2  # of the key, or the value, of one token and head in a page of codes: bf16


class PageLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of a KV pool. Of one rank it is `[num_pages, layers of its stage, num_planes, heads_per_rank,
    page_size, row_elements]`.

    A row is the key, or the value, of one token and head: `head_dim` elements of `dtype`, the model's. With
    one plane instead of two, values are a part of the keys: latent attention. With the `cache_dtype` int8 or
    fp8 (E4M3) a row is as many codes of one byte, and their scale. So the bytes of a page depend on its
    tokens alone, not on the steps that have written them. With such a `transfer_dtype` only transfers turn
    rows into codes: pages that have come from another worker are rounded.

    `num_kv_heads` counts the heads of the whole model. Where a stage has more ranks than that, neighbouring
    ranks hold copies of one head. A page is one contiguous run of bytes on every rank; heads come before
    tokens, so that the slice of a page for another tp_size is contiguous too.
    """

    tp_size: int
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    num_planes: int = 2  # keys and values
    cache_dtype: str = "auto"  # as `dtype`
    transfer_dtype: str = "auto"  # auto: transfers send the bytes of pages
    # The number of layers in each pipeline stage; empty: one stage has all layers. Rank r is in stage
    # r // tp_size.
    stage_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tp_size", "page_size", "num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"PageLayout.{name} must be at least 1, got {getattr(self, name)}")
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}")
        if self.num_planes not in (1, 2):
            raise ConfigError(f"num_planes must be 1 or 2, got {self.num_planes}")
        if self.num_kv_heads % self.tp_size and self.tp_size % self.num_kv_heads:
            raise ConfigError(f"{self.num_kv_heads} KV heads cannot be split over {self.tp_size} ranks")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.cache_dtype not in CACHE_DTYPES:
            raise ConfigError(f"cache_dtype must be one of {CACHE_DTYPES}, got {self.cache_dtype!r}")
        if self.transfer_dtype not in CACHE_DTYPES:
            raise ConfigError(f"transfer_dtype must be one of {CACHE_DTYPES}, got {self.transfer_dtype!r}")
        if self.transfer_dtype != "auto" and self.cache_dtype != "auto":
            raise ConfigError(
                f"transfer_dtype must be auto for pages of {self.cache_dtype}, got {self.transfer_dtype!r}"
            )
        if self.stage_layers and (min(self.stage_layers) < 1 or sum(self.stage_layers) != self.num_layers):
            raise ConfigError(
                f"stage_layers must be 1 or more for each stage and {self.num_layers} in all, "
                f"got {self.stage_layers}"
            )

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages of a replica."""
        return max(1, len(self.stage_layers))

    @property
    def num_ranks(self) -> int:
        """The number of ranks of a replica."""
        return self.num_stages * self.tp_size

    def layers_of(self, rank: int) -> range:
        """Return the layers of a rank's stage."""
        stage = rank // self.tp_size
        sizes = self.stage_layers or (self.num_layers,)
        first = sum(sizes[:stage])
        return range(first, first + sizes[stage])

    def of_stage(self, rank: int) -> "PageLayout":
        """Return the layout of the pages in a rank's stage, as if the model had only the stage's layers."""
        if not self.stage_layers:
            return self
        return msgspec.structs.replace(self, num_layers=len(self.layers_of(rank)), stage_layers=())

    @property
    def element_type(self) -> str:
        """Name of the type of a pool's elements."""
        return self.dtype if self.cache_dtype == "auto" else self.cache_dtype

    @property
    def kv_dtype(self) -> str:
        """Name of how pages store keys and values.

        Equal tokens have equal pages only under an equal name; where transfers round, pages may differ by
        that rounding.
        """
        if self.transfer_dtype != "auto":
            return f"{self.dtype} sent as {self.transfer_dtype}"
        return self.dtype if self.cache_dtype == "auto" else f"{self.dtype} as {self.cache_dtype}"

    @property
    def row_elements(self) -> int:
        """Elements of one token's key, or value, of one head and layer."""
        return self.head_dim if self.cache_dtype == "auto" else self.head_dim + SCALE_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key, or value, of one head and layer."""
        return self.row_elements * DTYPE_BYTES.get(self.element_type, 1)

    @property
    def sent_row_bytes(self) -> int:
        """Bytes of a row in a transfer."""
        return self.row_bytes if self.transfer_dtype == "auto" else self.head_dim + SCALE_BYTES

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def num_copies(self) -> int:
        """The number of ranks of a stage that hold the same heads."""
        return max(1, self.tp_size // self.num_kv_heads)

    def heads_of(self, rank: int) -> range:
        """Return the heads of a rank."""
        first = rank % self.tp_size // self.num_copies * self.heads_per_rank
        return range(first, first + self.heads_per_rank)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values of all layers, on one rank of each stage together."""
        return self.num_planes * self.num_layers * self.heads_per_rank * self.row_bytes

    @property
    def sent_token_bytes(self) -> int:
        """Bytes that a transfer moves for one token: keys and values of all layers, to all ranks together."""
        num_heads = self.heads_per_rank * self.tp_size
        return self.num_planes * self.num_layers * num_heads * self.sent_row_bytes

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    def num_pages(self, num_tokens: int) -> int:
        """Return how many pages `num_tokens` tokens occupy; the last page may be partly filled."""
        return -(-num_tokens // self.page_size)

    def layer_groups(self, num_groups: int) -> list[tuple[int, int]]:
        """Return the layers [first, stop) of each group, in groups as equal as possible.

        Raises ValueError for more groups than layers.
        """
        if not 1 <= num_groups <= self.num_layers:
            raise ValueError(f"{self.num_layers} layers cannot form {num_groups} groups")
        bounds = [group * self.num_layers // num_groups for group in range(num_groups + 1)]
        return list(pairwise(bounds))
