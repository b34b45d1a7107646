from baton.engine.cache.page_pool import PagePool
from baton.kvtransfer.protocol.handoff import PageLedger, holds_lease, release_lease


def test_engines_pool_is_a_ledger() -> None:
    ledger: PageLedger = PagePool(1, 16)  # the type checker's test
    assert ledger.num_free == 1


def test_lease_is_released_unless_time_was_faster() -> None:
    pool = PagePool(4, 16)
    for ended_by_time in (False, True):
        pages = pool.reserve(2, "transfer", deadline_s=10)
        assert holds_lease(pool, pages, "transfer")
        if ended_by_time:
            pool.expire(10)
            pool.allocate(4, "others")  # has the pages by now
        release_lease(pool, pages, "transfer")
        assert not holds_lease(pool, pages, "transfer")
    assert pool.num_free == 0


def test_nothing_is_always_held() -> None:
    assert holds_lease(PagePool(1, 16), [], "transfer")
