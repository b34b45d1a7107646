"""What our own side may ask a peer for. Anything else would cost us the link, and all who use it."""

from collections.abc import Sequence
from typing import Final

from baton.kvtransfer.messages import (
    MAX_DIGESTS,
    MAX_DURATION_MS,
    MAX_PAGES,
    MAX_PARTS,
    MAX_PULLED_PAGES,
    Reserve,
)
from baton.kvtransfer.pull import WantedPage
from baton.page_keys import KEY_BYTES

ID_BYTES: Final = 16


def reservation(
    transfer: bytes, num_units: int, num_parts: int, deadline_s: float, position: int = 0
) -> Reserve:
    """A new transfer of this id. ValueError for what no message can ask for."""
    if not 1 <= num_units <= MAX_PAGES or num_units * num_parts > MAX_DIGESTS:
        raise ValueError(
            f"{num_units} units in {num_parts} parts are no transfer, 1 to {MAX_PAGES} units are, "
            f"{MAX_DIGESTS} in all parts"
        )
    if not 1 <= num_parts <= MAX_PARTS:
        raise ValueError(f"a transfer of {num_parts} parts, {MAX_PARTS} are most")
    if not 0 < deadline_s <= MAX_DURATION_MS / 1000:
        raise ValueError(f"a transfer within {deadline_s} s, {MAX_DURATION_MS // 1000} are most")
    if len(transfer) != ID_BYTES:
        raise ValueError(f"a transfer's id has {ID_BYTES} bytes, got {len(transfer)}")
    if not 0 <= position < 2**31:
        raise ValueError(f"no sequence has a token {position}")
    return Reserve(
        transfer=transfer,
        num_units=num_units,
        deadline_ms=max(1, round(deadline_s * 1000)),
        position=position,
        num_parts=num_parts,
    )


def check_pull(wanted: Sequence[WantedPage], num_pages: int) -> None:
    """wanted: pages of the holder. num_pages: of ours. ValueError as above."""
    if not 1 <= len(wanted) <= MAX_PULLED_PAGES or num_pages > MAX_PULLED_PAGES:
        raise ValueError(f"{len(wanted)} pages into {num_pages}, {MAX_PULLED_PAGES} of each are most")
    for page, generation, key in wanted:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a page's key has {KEY_BYTES} bytes, got {len(key)}")
        if not 0 <= page < 2**31 or not 0 <= generation < 2**32:
            raise ValueError(f"there is no page {page} of generation {generation}")
