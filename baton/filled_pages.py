"""KV that a request brings along, instead of having it computed."""

from collections.abc import Hashable
from typing import NamedTuple


class FilledPages(NamedTuple):
    """The KV of the first `num_tokens` tokens of a request, in pages that `owner` uses in the ledger.

    The last page may be filled in part.
    """

    pages: tuple[int, ...]
    num_tokens: int
    owner: Hashable
