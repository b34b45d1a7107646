"""Whether what a peer wants to pull is still here: it has a hint, our ledger and our keys are right.

A wanted page is named three times. Its number and generation say where the peer was told it is, and that
nothing was written there since; its key says what is in it, and is what the peer made of its own tokens. So a
hint that was wrong from the start, however it came about, never brings KV of other tokens.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from baton.kvtransfer.handoff import Terms
from baton.kvtransfer.ledger import Owner
from baton.kvtransfer.messages import Pull
from baton.page_keys import KEY_BYTES

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


def borrow(pull: Pull, incarnation: bytes, terms: Terms, lend: Lend, borrower: Owner) -> Sequence[int] | str:
    """The wanted pages, used by the borrower, or why they can't be sent: then nothing is held."""
    complaint = _complaint(pull, incarnation, terms)
    if complaint is not None:
        return complaint
    keys = pull.wanted_keys
    pages = lend([keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)], borrower)
    if pages is None:
        return "what the keys name is not here, or not all, or there is no room to bring it from the host"
    for page, wanted, generation in zip(pages, pull.wanted_pages, pull.wanted_generations, strict=True):
        if generation != ON_HOST and page != wanted:
            terms.ledger.release(pages, borrower)
            return f"page {wanted} has not what its key names, which is in page {page}"
    return pages


def _complaint(pull: Pull, incarnation: bytes, terms: Terms) -> str | None:
    if pull.holder != incarnation:
        return "the holder was started again since"
    ledger = terms.ledger
    if len(pull.pages) != terms.num_destination_pages(pull.num_units):
        return f"{pull.num_units} units do not lie in {len(pull.pages)} granted pages"
    if len(pull.wanted_pages) != terms.num_source_pages(pull.num_units):
        return f"{pull.num_units} units do not lie in {len(pull.wanted_pages)} pages"
    for page, generation in zip(pull.wanted_pages, pull.wanted_generations, strict=True):
        if generation == ON_HOST:
            continue
        if page >= ledger.num_pages or not ledger.is_known(page):
            return f"page {page} is not known"
        if ledger.generation(page) != generation:
            return f"page {page} has generation {ledger.generation(page)}, not {generation}"
    return None
