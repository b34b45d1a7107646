"""Pages whose keys are their numbers, for transfers that no engine is behind."""

from collections.abc import Iterable, Sequence

from baton.engine.cache.page_pool import PagePool
from baton.kvtransfer.protocol.handoff import Owner
from baton.kvtransfer.protocol.messages import WantedPage
from baton.pages import KEY_BYTES


def key_of(page: int) -> bytes:
    return page.to_bytes(KEY_BYTES, "big")


def wanted_pages(hints: Iterable[Sequence[int]]) -> list[WantedPage]:
    """hints: (page, generation) each."""
    return [WantedPage(page, generation, key_of(page)) for page, generation in hints]


class NumberedPages:
    """The `lend` of a ledger's known pages."""

    def __init__(self, ledger: PagePool) -> None:
        self._ledger = ledger

    def __call__(self, keys: Sequence[bytes], borrower: Owner) -> Sequence[int] | None:
        pages = [int.from_bytes(key, "big") for key in keys]
        is_here = all(page < self._ledger.num_pages and self._ledger.is_known(page) for page in pages)
        if not is_here or len(set(pages)) != len(pages):
            return None
        self._ledger.share(pages, borrower)
        return pages
