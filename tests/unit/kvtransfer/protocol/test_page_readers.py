import pytest

from baton.engine.cache.page_pool import PagePool
from baton.errors import IntegrityError
from baton.kvtransfer.protocol.source import PageReaders


def test_page_is_let_go_with_its_last_reader() -> None:
    pool = PagePool(3, 16)
    pages = pool.allocate(3, "sequence")
    readers = PageReaders(pool, "reader")
    readers.enter(pages[:2])
    readers.enter(pages[1:])
    pool.release(pages, "sequence")
    assert pool.num_free == 0
    readers.leave(pages[:2])
    assert pool.num_free == 1
    readers.leave_all()
    assert pool.num_free == 3


def test_nobody_may_begin_to_read_what_nobody_holds() -> None:
    pool = PagePool(1, 16)
    with pytest.raises(IntegrityError):
        PageReaders(pool, "reader").enter([0])
