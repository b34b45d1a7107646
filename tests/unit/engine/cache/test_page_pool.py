import pytest

from baton.engine.cache.page_pool import PagePool, PageState
from baton.errors import IntegrityError


def test_fresh_pool_is_all_free() -> None:
    pool = PagePool(3, 16)
    assert (pool.num_free, pool.num_available, pool.count(PageState.FREE)) == (3, 3, 3)


def test_released_page_is_free_and_comes_back_with_a_new_generation() -> None:
    pool = PagePool(1, 16)
    (page,) = pool.allocate(1, "a")
    before = pool.generation(page)
    pool.release([page], "a")
    assert pool.state(page) is PageState.FREE
    assert pool.allocate(1, "b") == [page]
    assert pool.generation(page) == before + 1


def test_shared_page_waits_for_its_last_owner() -> None:
    pool = PagePool(1, 16)
    pages = pool.allocate(1, "a")
    pool.share(pages, "b")
    pool.release(pages, "a")
    assert pool.state(pages[0]) is PageState.ACTIVE
    assert pool.owners(pages[0]) == {"b"}
    pool.release(pages, "b")
    assert pool.num_free == 1


def test_more_pages_than_free_are_refused() -> None:
    pool = PagePool(2, 16)
    with pytest.raises(IntegrityError, match="3 pages were requested, 2 are free"):
        pool.allocate(3, "a")


def test_release_by_a_stranger_is_refused() -> None:
    pool = PagePool(1, 16)
    pages = pool.allocate(1, "a")
    with pytest.raises(IntegrityError, match="released by b"):
        pool.release(pages, "b")


def test_known_page_is_cached_after_its_owner_and_can_be_shared_again() -> None:
    pool = PagePool(1, 16)
    pages = pool.allocate(1, "a")
    pool.mark_known(pages[0])
    pool.release(pages, "a")
    assert pool.state(pages[0]) is PageState.CACHED
    assert (pool.num_free, pool.num_available) == (0, 1)
    pool.share(pages, "b")
    assert pool.state(pages[0]) is PageState.ACTIVE
    assert pool.num_available == 0


def test_last_page_of_a_released_table_is_evicted_first() -> None:
    pool = PagePool(3, 16)
    pages = pool.allocate(3, "a")
    for page in pages:
        pool.mark_known(page)
    pool.release(pages, "a")
    evicted = []
    while (oldest := pool.oldest_cached()) is not None:
        evicted.append(oldest)
        pool.forget(oldest)
    assert evicted == pages[::-1]
    assert pool.num_free == 3


def test_free_page_cannot_be_shared_leased_or_known() -> None:
    pool = PagePool(1, 16)
    with pytest.raises(IntegrityError, match="cannot be shared"):
        pool.share([0], "a")
    with pytest.raises(IntegrityError, match="cannot be leased"):
        pool.lease([0], "a", 1.0)
    with pytest.raises(IntegrityError, match="no settled contents"):
        pool.mark_known(0)
    with pytest.raises(IntegrityError, match="cannot be written"):
        pool.quarantine([0], "a")


def test_lease_keeps_pages_of_a_finished_sequence_until_its_deadline() -> None:
    pool = PagePool(2, 16)
    pages = pool.allocate(2, "sequence")
    pool.lease(pages, "transfer", deadline_s=10.0)
    assert pool.state(pages[0]) is PageState.ACTIVE
    pool.release(pages, "sequence")
    assert [pool.state(page) for page in pages] == [PageState.LEASED] * 2
    assert pool.deadline_s(pages[0]) == 10.0
    assert pool.expire(9.9) == []
    assert pool.expire(10.0) == ["transfer"]
    assert pool.num_free == 2


def test_extended_lease_outlives_its_first_deadline_and_never_shrinks() -> None:
    pool = PagePool(1, 16)
    pages = pool.reserve(1, "transfer", deadline_s=10.0)
    pool.extend("transfer", 20.0)
    pool.extend("transfer", 15.0)
    assert pool.deadline_s(pages[0]) == 20.0
    assert pool.expire(19.0) == []


def test_extending_an_ended_lease_fails() -> None:
    pool = PagePool(1, 16)
    pool.reserve(1, "transfer", deadline_s=1.0)
    pool.expire(1.0)
    with pytest.raises(KeyError):
        pool.extend("transfer", 20.0)


def test_leased_known_page_returns_to_the_cache() -> None:
    pool = PagePool(1, 16)
    pages = pool.allocate(1, "a")
    pool.mark_known(pages[0])
    pool.release(pages, "a")
    pool.lease(pages, "reader", 5.0)
    assert pool.num_available == 0
    pool.release(pages, "reader")
    assert pool.state(pages[0]) is PageState.CACHED


def test_adopted_reservation_belongs_to_the_sequence_alone() -> None:
    pool = PagePool(2, 16)
    pages = pool.reserve(2, "transfer", 5.0)
    assert pool.count(PageState.LEASED) == 2
    pool.adopt(pages, "transfer", "sequence")
    assert pool.owners(pages[0]) == {"sequence"}
    assert pool.expire(100.0) == []
    assert pool.count(PageState.ACTIVE) == 2


def test_adopting_what_is_not_leased_is_refused() -> None:
    pool = PagePool(2, 16)
    pages = pool.reserve(2, "transfer", 5.0)
    with pytest.raises(IntegrityError, match="not leased to other"):
        pool.adopt(pages, "other", "sequence")


def test_expired_reservation_stays_quarantined_until_its_writer_lets_go() -> None:
    pool = PagePool(1, 16)
    pages = pool.reserve(1, "request", 5.0)
    pool.quarantine(pages, "writer")
    assert pool.state(pages[0]) is PageState.LEASED
    pool.expire(5.0)
    assert pool.state(pages[0]) is PageState.QUARANTINED
    assert pool.num_available == 0
    pool.release(pages, "writer")
    assert pool.state(pages[0]) is PageState.FREE


def test_page_whose_writer_lets_go_first_stays_with_its_request() -> None:
    pool = PagePool(1, 16)
    pages = pool.reserve(1, "request", 5.0)
    pool.quarantine(pages, "writer")
    pool.release(pages, "writer")
    assert pool.state(pages[0]) is PageState.LEASED
    pool.release(pages, "request")
    assert pool.state(pages[0]) is PageState.FREE


def test_page_with_a_writer_is_not_adopted_shared_or_known() -> None:
    pool = PagePool(1, 16)
    pages = pool.reserve(1, "request", 5.0)
    pool.quarantine(pages, "writer")
    with pytest.raises(IntegrityError, match="still has writers"):
        pool.adopt(pages, "request", "sequence")
    with pytest.raises(IntegrityError, match="cannot be shared"):
        pool.share(pages, "sequence")
    with pytest.raises(IntegrityError, match="no settled contents"):
        pool.mark_known(pages[0])


def test_known_page_takes_no_writer() -> None:
    pool = PagePool(1, 16)
    pages = pool.allocate(1, "a")
    pool.mark_known(pages[0])
    with pytest.raises(IntegrityError, match="cannot be written"):
        pool.quarantine(pages, "writer")


@pytest.mark.parametrize("trouble", ["another's", "leased", "written"])
def test_a_page_that_the_owner_does_not_use_alone_with_readers_is_named(trouble: str) -> None:
    pool = PagePool(2, 16)
    used = pool.allocate(1, "a")
    other = pool.reserve(1, "a", 5.0) if trouble == "leased" else pool.allocate(1, "b")
    if trouble == "written":
        pool.share(other, "a")
        pool.quarantine(other, "writer")
    pool.check_used_by(used, "a")
    with pytest.raises(IntegrityError, match=f"page {other[0]} is held by .* not used by a"):
        pool.check_used_by([*used, *other], "a")


def test_integrity_check_finds_a_page_freed_behind_its_owner() -> None:
    pool = PagePool(2, 16)
    pages = pool.allocate(1, "a")
    pool._free.append(pages[0])
    with pytest.raises(IntegrityError, match="list disagrees"):
        pool.check_integrity()


def test_known_page_is_settled_until_it_is_forgotten() -> None:
    pool = PagePool(2, 4)
    (page,) = pool.allocate(1, "a")
    assert not pool.is_known(page)
    pool.mark_known(page)
    pool.release([page], "a")
    assert pool.is_known(page)
    pool.forget(page)
    assert not pool.is_known(page)
