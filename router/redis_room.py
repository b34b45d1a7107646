"""How much of a Redis one namespace takes, by the memory that Redis was given.

Measured with Redis 7.0: a page of one holder takes 64 to 96 bytes, the most while the table doubles; what is
in the stream, or in a snapshot, a quarter more than its length. Of a gibibyte:

    5.6 million pages       512 MiB     90 million tokens, at 16 a page
    their snapshots         107 MiB     16 bytes for each page of each holder, and a quarter
    the stream, usually      40 MiB     what is added up here is 32
    the stream, at most     270 MiB     entries of half a mebibyte, then smaller and smaller ones: see below

The stream keeps STREAM_ENTRIES, and fewer where the newest is large: as many of its size as fill the share.
Entries before a smaller one stay, so all together may be 1 + ln(largest / (share / STREAM_ENTRIES)) times the
share: 6.5 times, for the largest that there are.
"""

from typing import Final, NamedTuple, Self

STREAM_ENTRIES: Final = 16_384
MAX_STREAM_BYTES: Final = 2**26
MAX_PAGES: Final = 2**24
PAGE_BYTES: Final = 96


class Room(NamedTuple):
    num_pages: int = MAX_PAGES
    stream_bytes: int = MAX_STREAM_BYTES

    @classmethod
    def of(cls, max_memory_bytes: int) -> Self:
        """max_memory_bytes: 0 where Redis has no limit."""
        if not max_memory_bytes:
            return cls()
        num_pages = min(MAX_PAGES, max_memory_bytes // 2 // PAGE_BYTES)
        return cls(num_pages, min(MAX_STREAM_BYTES, max_memory_bytes // 32))

    def num_entries(self, num_bytes: int) -> int:
        """That the stream keeps when one of so many bytes has been added."""
        return max(1, min(STREAM_ENTRIES, self.stream_bytes // max(1, num_bytes)))
