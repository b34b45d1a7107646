"""Checks of pulls: the holder lends only pages that still contain the KV that the peer wants.

A pull identifies each wanted page by page id, generation and key. The page id and the generation come from
the router's hint, and show that the page was not written since. The key identifies the tokens of the page,
and the peer derives the key from its own tokens. A wrong hint therefore never transfers the KV of other
tokens.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from baton.kvtransfer.protocol.handoff import HandoffTimeouts, Owner, TransferSize
from baton.kvtransfer.protocol.messages import (
    MAX_DIGESTS,
    MAX_DURATION_MS,
    MAX_PAGES,
    MAX_PARTS,
    MAX_PULLED_PAGES,
    PullRequest,
)
from baton.pages import KEY_BYTES

ON_HOST: Final = 0  # as a generation: the page is in host memory, and only its key finds it

# Returns device pages with the contents of these keys and makes the owner a user of the pages. Pages that are
# only in host memory are copied to the device. Returns None, with no page held, when a key is not found or
# when no room is left on the device.
Lend: TypeAlias = Callable[[Sequence[bytes], Owner], Sequence[int] | None]


class WantedPage(NamedTuple):
    """One page of the holder that a pull requests."""

    page: int
    generation: int
    key: bytes


def lend_nothing(keys: Sequence[bytes], borrower: Owner) -> Sequence[int] | None:
    """Refuse every pull: the `lend` of a replica without a prefix cache for peers."""
    return None


def borrow(
    pull: PullRequest, incarnation: bytes, timeouts: HandoffTimeouts, lend: Lend, borrower: Owner
) -> Sequence[int] | str:
    """Return the pages to send, or the reason why the pull is refused.

    incarnation: the incarnation of this process. The borrower becomes a user of the pages; after a refusal,
    the borrower holds no page.
    """
    complaint = _complaint(pull, incarnation, timeouts)
    if complaint is not None:
        return complaint
    keys = pull.wanted_keys
    pages = lend([keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)], borrower)
    if pages is None:
        return "a wanted page is not cached here, or there is no room to copy it from the host"
    for page, wanted, generation in zip(pages, pull.wanted_pages, pull.wanted_generations, strict=True):
        if generation != ON_HOST and page != wanted:
            timeouts.ledger.release(pages, borrower)
            return f"the contents of the wanted page {wanted} are in page {page}"
    return pages


def _complaint(pull: PullRequest, incarnation: bytes, timeouts: HandoffTimeouts) -> str | None:
    if pull.holder != incarnation:
        return "the holder was restarted"
    ledger = timeouts.ledger
    if len(pull.pages) != timeouts.num_destination_pages(pull.num_units):
        return f"{pull.num_units} units do not fit {len(pull.pages)} destination pages"
    if len(pull.wanted_pages) != timeouts.num_source_pages(pull.num_units):
        return f"{pull.num_units} units do not match {len(pull.wanted_pages)} wanted pages"
    for page, generation in zip(pull.wanted_pages, pull.wanted_generations, strict=True):
        if generation == ON_HOST:
            continue
        if page >= ledger.num_pages or not ledger.is_known(page):
            return f"page {page} is not in the prefix cache"
        if ledger.generation(page) != generation:
            return f"page {page} has generation {ledger.generation(page)}, not {generation}"
    return None


# Checks of local requests. A peer would drop the link, and all its transfers, because of an invalid request.

ID_BYTES: Final = 16


def transfer_size(
    transfer: bytes,
    num_units: int,
    num_parts: int,
    deadline_s: float,
    position: int = 0,
    num_layer_groups: int = 1,
) -> TransferSize:
    """Return the extent of a transfer to request.

    transfer: the id, ID_BYTES bytes. deadline_s: the longest duration of the whole transfer. position: the
    token of the sequence at which the units begin. Raises ValueError for values out of range.
    """
    if not 1 <= num_units <= MAX_PAGES or num_units * num_parts > MAX_DIGESTS:
        raise ValueError(
            f"a transfer has 1 to {MAX_PAGES} units, and at most {MAX_DIGESTS} in all parts together; "
            f"got {num_units} units in {num_parts} parts"
        )
    if not 1 <= num_parts <= MAX_PARTS:
        raise ValueError(f"a transfer has 1 to {MAX_PARTS} parts, got {num_parts}")
    if not 0 < deadline_s <= MAX_DURATION_MS / 1000:
        raise ValueError(f"a transfer's deadline is in (0, {MAX_DURATION_MS // 1000}] s, got {deadline_s}")
    if len(transfer) != ID_BYTES:
        raise ValueError(f"a transfer's id has {ID_BYTES} bytes, got {len(transfer)}")
    if not 0 <= position < 2**31:
        raise ValueError(f"the position is a token from 0 to 2^31 - 1, got {position}")
    return TransferSize(
        transfer=transfer,
        num_units=num_units,
        deadline_ms=max(1, round(deadline_s * 1000)),
        position=position,
        num_parts=num_parts,
        num_layer_groups=num_layer_groups,
    )


def check_pull(wanted: Sequence[WantedPage], num_pages: int) -> None:
    """Raise ValueError when a pull of these pages into `num_pages` local pages is out of range."""
    if not 1 <= len(wanted) <= MAX_PULLED_PAGES or num_pages > MAX_PULLED_PAGES:
        raise ValueError(
            f"a pull has 1 to {MAX_PULLED_PAGES} pages on each side, got {len(wanted)} into {num_pages}"
        )
    for page, generation, key in wanted:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a page's key has {KEY_BYTES} bytes, got {len(key)}")
        if not 0 <= page < 2**31 or not 0 <= generation < 2**32:
            raise ValueError(f"page {page} of generation {generation} is out of range")
