"""Whether what a peer wants to pull is still here: it has a hint, our ledger and our keys are right.

A wanted page is named three times. Its number and generation say where the peer was told it is, and that
nothing was written there since; its key says what is in it, and is what the peer made of its own tokens. So a
hint that was wrong from the start, however it came about, never brings KV of other tokens.
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

ON_HOST: Final = 0  # for a generation: the page is not on the device, and only its key tells where it is

# Pages of the device that hold what these keys name, used by that owner from then on; those that were on the
# host alone are copies. None, and nothing is held: not all of it is here, or there is no room.
Lend: TypeAlias = Callable[[Sequence[bytes], Owner], Sequence[int] | None]


class WantedPage(NamedTuple):
    """Of the holder."""

    page: int
    generation: int
    key: bytes


def lend_nothing(keys: Sequence[bytes], borrower: Owner) -> Sequence[int] | None:
    """The `lend` of a replica that nobody pulls from."""
    return None


def borrow(
    pull: PullRequest, incarnation: bytes, timeouts: HandoffTimeouts, lend: Lend, borrower: Owner
) -> Sequence[int] | str:
    """The wanted pages, used by the borrower, or why they can't be sent: then nothing is held."""
    complaint = _complaint(pull, incarnation, timeouts)
    if complaint is not None:
        return complaint
    keys = pull.wanted_keys
    pages = lend([keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)], borrower)
    if pages is None:
        return "what the keys name is not here, or not all, or there is no room to bring it from the host"
    for page, wanted, generation in zip(pages, pull.wanted_pages, pull.wanted_generations, strict=True):
        if generation != ON_HOST and page != wanted:
            timeouts.ledger.release(pages, borrower)
            return f"page {wanted} has not what its key names, which is in page {page}"
    return pages


def _complaint(pull: PullRequest, incarnation: bytes, timeouts: HandoffTimeouts) -> str | None:
    if pull.holder != incarnation:
        return "the holder was started again since"
    ledger = timeouts.ledger
    if len(pull.pages) != timeouts.num_destination_pages(pull.num_units):
        return f"{pull.num_units} units do not lie in {len(pull.pages)} granted pages"
    if len(pull.wanted_pages) != timeouts.num_source_pages(pull.num_units):
        return f"{pull.num_units} units do not lie in {len(pull.wanted_pages)} pages"
    for page, generation in zip(pull.wanted_pages, pull.wanted_generations, strict=True):
        if generation == ON_HOST:
            continue
        if page >= ledger.num_pages or not ledger.is_known(page):
            return f"page {page} is not known"
        if ledger.generation(page) != generation:
            return f"page {page} has generation {ledger.generation(page)}, not {generation}"
    return None


# What our own side may ask a peer for. Anything else would cost us the link, and all who use it.

ID_BYTES: Final = 16


def transfer_size(
    transfer: bytes,
    num_units: int,
    num_parts: int,
    deadline_s: float,
    position: int = 0,
    num_layer_groups: int = 1,
) -> TransferSize:
    """Return a transfer to ask for. ValueError for values that no message can carry."""
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
    return TransferSize(
        transfer=transfer,
        num_units=num_units,
        deadline_ms=max(1, round(deadline_s * 1000)),
        position=position,
        num_parts=num_parts,
        num_layer_groups=num_layer_groups,
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
