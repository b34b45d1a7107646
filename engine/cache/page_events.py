"""What has changed in what a prefix cache knows, for whoever tells others of it.

1. Nothing is kept until somebody has asked for the first time, as all is to be told then anyway.
2. From then on the keys of pages that become known, move to another tier or are forgotten are noted, once.
   Where such a page is, is looked up when the changes are taken: what came and went between is never told.
3. Too many keys, or an engine that trusts nothing any more: everything is to be told again.
"""

from typing import Final, NamedTuple

MAX_CHANGED_KEYS: Final = 1 << 16  # some eight megabytes
NOWHERE: Final = -1


class PageChange(NamedTuple):
    """A page is there now; `page` NOWHERE: no longer. Pages of the host have no generations: 0."""

    key: bytes
    page: int
    generation: int


class PageChanges(NamedTuple):
    """Of each tier, of different keys. What has moved is nowhere in the tier that it has left."""

    is_afresh: bool  # and what is not in it is not known
    device: list[PageChange]
    host: list[PageChange]


class ChangedKeys:
    def __init__(self, limit: int = MAX_CHANGED_KEYS) -> None:
        self._limit = limit
        self._keys: dict[bytes, None] | None = None  # in order; None: all may have changed

    def __len__(self) -> int:
        return len(self._keys or ())

    def note(self, key: bytes) -> None:
        if self._keys is None:
            return
        self._keys[key] = None
        if len(self._keys) > self._limit:
            self._keys = None

    def note_all(self) -> None:
        self._keys = None

    def take(self) -> list[bytes] | None:
        """Those since the last call; None: all may have changed."""
        keys, self._keys = self._keys, {}
        return None if keys is None else list(keys)
