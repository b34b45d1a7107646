"""The states of a KV page; pages.py tells its life."""

from enum import IntEnum


class PageState(IntEnum):
    FREE = 0
    ACTIVE = 1
    CACHED = 2
    LEASED = 3
    QUARANTINED = 4
